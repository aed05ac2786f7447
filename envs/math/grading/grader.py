r"""Decides whether an answer equals the right one: exact, three-valued, quick on any input.

What is compared, in this order:

1. The answer is the last ``\boxed{...}`` of the text, or the whole text where there is no box. A last box
   that is not closed is no answer; an earlier box never takes its place.
2. Both sides are brought to one notation (dollars, ``\left``, spacing, ``\text``, ``\dfrac``, a final full
   stop). Equal texts are correct.
3. Numbers are compared exactly: integers, fractions, finite decimals and expressions of them with
   ``+ - * / ^``, roots and pi (see `trace_gym.envs.math.grading.exact`). Nothing is rounded, with one exception: a
   decimal of at least 12 significant digits counts as a double and may differ by ``1e-12`` of the value.

Percent, degrees and other units belong to the text: ``50%`` equals ``50\%`` and nothing else. Tuples, sets
and lists are compared as texts, in order.

``ungradable`` means that the grader cannot tell, and is never to be counted as wrong: the right answer is not
a number it reads, or the given one needs symbolic comparison (a logarithm, say). An answer that is empty, not
an expression, or beyond the caps (512 characters, 40 levels of nesting, numbers of some 1,200 digits) is
wrong when the right answer is readable: the caps are part of what an answer is, and no text is a way out of
being graded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from trace_gym.envs.math.grading.exact import Exact, TooLargeError, UndefinedError, UnsupportedError
from trace_gym.envs.math.grading.expression import MAX_CHARACTERS, SyntaxProblem, parse_exact

Outcome = Literal["correct", "wrong", "ungradable"]

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_WRAPPERS = ("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}")
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=[0-9])(?:\{,\}|,\\!|\\[,!])(?=[0-9]{3}(?![0-9]))", ","),
        (r"\\(?:left|right|displaystyle)(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<!\\)\\(?:[,;:!> ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))|~", " "),
        (r"\\%", "%"),
        (r"\\\$", ""),
        (r"\^\s*\{\s*\\circ\s*\}|°", r"^\\circ"),
        (r"[\u2212\u2013]", "-"),
        (r"\u00d7|\u00b7|\u22c5", "*"),
        (r"\u00f7", "/"),
        (r"\u03c0", r"\\pi "),
        (r"\u221a", r"\\sqrt"),
        (r"\s+units?\s*$", ""),
    )
)
_SPACE = re.compile(r"\s+")
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_ASSIGNED = re.compile(r"([A-Za-z]) ?= ?([^=<>]+)")
_LETTER = re.compile(r"\(?([A-J])\)?(?:\s*[:.)].*)?", re.DOTALL)
_DECIMAL = re.compile(r"[-+]?([0-9]*\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")
MAX_SEARCHED = 20_000  # characters at the end of a text in which a box is looked for
_DOUBLE_DIGITS = 12
_DOUBLE_TOLERANCE = Fraction(1, 10**12)
_INTEGER_TOLERANCE = Fraction(1, 10**6)


@dataclass(frozen=True)
class Verdict:
    """What the grader decided, and why.

    Attributes:
        outcome: ``"correct"``, ``"wrong"`` or ``"ungradable"``.
        reason: One short sentence.
    """

    outcome: Outcome
    reason: str


def extract_answer(text: str) -> str | None:
    r"""Return what stands in the last ``\boxed{...}``.

    Only what follows the last ``</think>`` counts. Braces must balance; ``\{`` and ``\}`` do not count.

    Returns:
        The content, without a box that wraps all of it again; None if there is no box or the last one is not
        closed.
    """
    answer = _last_box(_after_thinking(text))
    for _ in range(3):
        whole = _BOX.match(answer or "")
        if answer is None or whole is None or _matching_braces(answer).get(whole.end() - 1) != len(answer) - 1:
            break
        answer = answer[whole.end() : -1].strip()
    return answer


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


def normalize(text: str) -> str:
    """Bring an answer to one notation without idle spaces; equal results mean equal answers."""
    return _tight(_notation(text))


def _notation(text: str) -> str:
    """Bring an answer to one notation; a space stays, as ``1, 234`` is a list and ``1,234`` a number."""
    text = text.strip()
    for _ in range(4):
        before = text
        for left, right in _WRAPPERS:
            if text.startswith(left) and text.endswith(right) and len(text) > len(left + right):
                text = text[len(left) : -len(right)].strip()
        text = text.removesuffix(".").strip() if not text.endswith("..") else text
        text = _TEXT.sub(lambda match: f" {match[1]} ", text).strip()
        if text == before:
            break
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = text.removeprefix("$")  # an amount of dollars
    return _SPACE.sub(" ", text.strip())


def _tight(text: str) -> str:
    return _IDLE_SPACE.sub("", text)


def grade(prediction: str, gold: str) -> Verdict:
    r"""Compare an answer with the right one; never raises and takes milliseconds at most.

    Args:
        prediction: The agent's answer, alone or inside a text with a ``\boxed{...}``.
        gold: The right answer, boxed or bare.

    Returns:
        The verdict; the module's docstring says what is equal.
    """
    answer = _answer_of(prediction)
    right = _answer_of(gold)
    if answer is None:
        return Verdict("wrong", "the last box is not closed")
    if right is None or not right.strip() or len(right) > MAX_CHARACTERS:
        return Verdict("ungradable", "the right answer is empty or too long to read")
    if not answer.strip():
        return Verdict("wrong", "the answer is empty")
    if len(answer) > MAX_CHARACTERS:
        return Verdict("wrong", f"the answer has more than {MAX_CHARACTERS} characters")
    return _compare(*_same_name(_notation(answer), _notation(right)))


def _answer_of(text: str) -> str | None:
    if _BOX.search(_after_thinking(text)):
        return extract_answer(text)
    return re.sub(r"</?answer>", "", _after_thinking(text))


def _same_name(answer: str, right: str) -> tuple[str, str]:
    """Drop ``x =`` unless the two sides name different unknowns."""
    named, wanted = _ASSIGNED.fullmatch(answer), _ASSIGNED.fullmatch(right)
    if named and wanted:
        return (named[2], wanted[2]) if named[1] == wanted[1] else (answer, right)
    return (named[2] if named else answer), (wanted[2] if wanted else right)


def _compare(answer: str, right: str) -> Verdict:
    if _tight(answer) == _tight(right):
        return Verdict("correct", "the same text")
    if len(right) == 1 and (wanted := _LETTER.fullmatch(right)):
        chosen = _LETTER.fullmatch(answer)
        same = chosen is not None and chosen[1] == wanted[1]
        return Verdict("correct" if same else "wrong", "compared as a letter of a choice")
    try:
        gold = parse_exact(right)
    except (SyntaxProblem, UnsupportedError, TooLargeError, UndefinedError) as problem:
        return Verdict("ungradable", f"the right answer is not a number this grader reads: {problem}")
    try:
        value = parse_exact(answer)
    except UnsupportedError as problem:
        return Verdict("ungradable", f"the answer needs more than exact arithmetic: {problem}")
    except (SyntaxProblem, TooLargeError, UndefinedError) as problem:
        return Verdict("wrong", f"the answer is not a number this grader reads: {problem}")
    if value == gold:
        return Verdict("correct", "the same number")
    if _is_double_of(answer, gold) or _is_double_of(right, value):
        return Verdict("correct", "equal to the precision of a double")
    return Verdict("wrong", "another number")


def _is_double_of(text: str, value: Exact) -> bool:
    """Whether a text is a decimal long enough to be a double, and this value rounds to it."""
    match = _DECIMAL.fullmatch(text)
    if match is None or len(match[1].replace(".", "").strip("0")) < _DOUBLE_DIGITS:
        return False
    near = Fraction(value.approximate())
    difference = abs(Fraction(text) - near)
    exact = value.rational
    if exact is not None and exact.denominator == 1 and difference > _INTEGER_TOLERANCE:
        return False
    return difference <= _DOUBLE_TOLERANCE * abs(near)
