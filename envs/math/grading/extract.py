r"""Finds the answer in an agent's text: the last box, or what is announced as the answer.

Only what follows the last ``</think>`` counts, and nothing of a thought that is not closed. Braces must balance;
``\{`` and ``\}`` do not count. A last box that is not closed is no answer, and no earlier box takes its place.
"""

from __future__ import annotations

import re

MAX_SEARCHED = 20_000  # characters at the end of a text in which an answer is looked for

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
_ANNOUNCED = re.compile(
    r"####|(?<=\n)A:|\b(?:answer|option|choice)\**(?:\s+is)?\s*:\**|\b(?:answer|option|choice) is\b:?", re.IGNORECASE
)
_LONG = 200  # characters of a line that is taken for an answer


def extract_answer(text: str) -> str | None:
    r"""Return what stands in the last ``\boxed{...}``, without a box that wraps all of it again.

    Returns:
        The content; None if there is no box or the last one is not closed.
    """
    answer = _last_box(_after_thinking(text))
    for _ in range(3):
        whole = _BOX.match(answer or "")
        if answer is None or whole is None or _matching_braces(answer).get(whole.end() - 1) != len(answer) - 1:
            break
        answer = answer[whole.end() : -1].strip()
    return answer


def answer_in(text: str) -> str | None:
    """Return the answer of a text: its last box, else what is announced, else all of it.

    Returns:
        The answer; None if the last box is not closed.
    """
    rest = _after_thinking(text)
    if _BOX.search(rest):
        return extract_answer(text)
    tags = _TAG.findall(rest)
    rest = tags[-1] if tags else rest
    return explicit_answer(rest) or rest.strip()


def explicit_answer(text: str) -> str | None:
    """Return what follows the last ``answer:``, ``the answer is``, ``####`` or (on a later line) ``A:``."""
    found = list(_ANNOUNCED.finditer(_after_thinking(text)))
    if not found:
        return None
    line = found[-1].string[found[-1].end() :].strip().partition("\n")[0]
    return line.strip().strip("*").strip() if 0 < len(line) <= _LONG else None


def _last_box(text: str) -> str | None:
    closing = _matching_braces(text)
    answer: str | None = None
    end = 0
    for match in _BOX.finditer(text):
        if match.start() < end:
            continue  # inside a box that is closed
        close = closing.get(match.end() - 1)
        answer = None if close is None else text[match.end() : close].strip()
        end = 0 if close is None else close
    return answer


def _after_thinking(text: str) -> str:
    rest = text.rpartition("</think>")[2]
    return rest.partition("<think>")[0][-MAX_SEARCHED:]


def _matching_braces(text: str) -> dict[int, int]:
    """Map the place of each opening brace to that of its closing one, in one pass."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing
