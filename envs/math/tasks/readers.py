r"""From a record of any of the usual data sets to a question and its answer, recognised by the columns.

| what | columns, in upper or lower case |
|---|---|
| question | ``question``, ``problem`` or ``prompt``; ``prompt`` and ``messages`` may be a chat, whose last user message counts; ``Body`` stands before ``Question`` (SVAMP) |
| answer | ``answer``, ``final_answer``, ``ground_truth``, ``expected_answer``, ``answers``, ``reward_model.ground_truth``, else the last box of ``solution`` |
| options | ``choices`` or ``options``: a list of texts, a mapping from letters, or lists ``text`` and ``label`` |
| right option | ``answer_index`` or ``label`` (from 0), ``answerKey`` or ``answer``: a label, an index or the text |
| GPQA | ``Question``, ``Correct Answer``, ``Incorrect Answer 1`` to ``3`` |

Of a worked answer only the result is kept: what follows ``####`` (GSM8K), what follows ``A:`` in the last line, or the
last ``\boxed{…}``. A list of answers is one answer of several parts. Records are other people's input: a text is
never evaluated, and what does not fit is an error that says what was expected.
"""  # noqa: E501

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trace_gym.envs.math.grading import extract_answer
from trace_gym.envs.math.tasks.task import DIFFICULTIES, LETTERS
from trace_gym.errors import BadInputError

QUESTIONS = ("question", "problem", "prompt", "messages")
ANSWERS = ("answer", "final_answer", "ground_truth", "expected_answer", "answers")
KEYS = ("answer_index", "answerkey", "answer", "label")
SUBJECTS = ("subject", "category", "type", "subfield", "subdomain")

_LAST_LINE = re.compile(r"\nA:([^\n]*)\s*\Z")
_LEVEL = re.compile(r"(?:Level )?([1-5])")

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Reading:
    """What a record says: the fields of a `Task` without its name."""

    question: str
    answer: str
    options: tuple[str, ...] = ()
    difficulty: int = 0
    subject: str = ""


def read_record(record: Mapping[Any, Any]) -> Reading:
    """Read one record.

    Raises:
        BadInputError: If it is not of a known form; the message says what was expected.
    """
    fields = {key.lower(): value for key, value in record.items() if isinstance(key, str)}
    question = _question(fields)
    options, answer = _options(fields, question) or ((), _answer(fields))
    level = _LEVEL.fullmatch(str(fields.get("level", "")))
    difficulty = int(level[1]) if level else 0
    subject = next((fields[name] for name in SUBJECTS if isinstance(fields.get(name), str)), "")
    return Reading(question, answer, options, difficulty if difficulty in DIFFICULTIES else 0, _text(subject))


def _question(fields: Fields) -> str:
    name = next((name for name in QUESTIONS if fields.get(name) is not None), None)
    if name is None:
        raise BadInputError(f"expected a question in one of {', '.join(QUESTIONS)}; {_columns(fields)}.")
    value = fields[name]
    if isinstance(value, list):
        value = _last_user_message(value)
    if not isinstance(value, str) or not value.strip():
        raise BadInputError(f"{name!r} must be a text that is not empty, or a chat with a message of the user.")
    body = fields.get("body")
    if not isinstance(body, str) or not body.strip():
        return _text(value)
    body = _text(body)
    return f"{body} {_text(value)}" if body[-1] in ".!?:,;" else f"{body}. {_text(value)}"


def _last_user_message(chat: Sequence[Any]) -> Any:
    said = [turn.get("content") for turn in chat if isinstance(turn, Mapping) and turn.get("role") == "user"]
    return said[-1] if said else None


def _answer(fields: Fields) -> str:
    given = [fields.get(name) for name in ANSWERS]
    reward = fields.get("reward_model")
    given.append(reward.get("ground_truth") if isinstance(reward, Mapping) else None)
    for value in given:
        answer = _result(value)
        if answer:
            return answer
    solution = fields.get("solution")
    if isinstance(solution, list) and solution:
        solution = solution[-1]
    boxed = extract_answer(solution) if isinstance(solution, str) else None
    if not boxed:
        raise BadInputError(
            f"expected a text or number in 'answer', or a \\boxed{{...}} answer in 'solution'; {_columns(fields)}."
        )
    return _text(boxed)


def _result(value: Any) -> str:
    """Return the result that an answer states; an empty text if it states none."""
    if isinstance(value, list):
        parts = [_bare(_result(part)) for part in value]
        return ", ".join(parts) if all(parts) else ""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        value = str(value)
    if not isinstance(value, str):
        return ""
    if "####" in value:
        value = value.rpartition("####")[2]
    elif last := _LAST_LINE.search(value):
        value = last[1]
    elif "\\boxed" in value:
        value = extract_answer(value) or value
    return _text(value)


def _bare(text: str) -> str:
    """Return a formula without the dollar signs around it; those inside a sentence stay."""
    return text[1:-1].strip() if text.count("$") == 2 and text[0] == text[-1] == "$" else text


def _options(fields: Fields, question: str) -> tuple[tuple[str, ...], str] | None:
    """Return the texts of the options and the letter of the right one; None if there are no options."""
    if "correct answer" in fields:
        wrong = [fields.get(f"incorrect answer {number}") for number in (1, 2, 3)]
        return _shuffled(question, fields["correct answer"], wrong)
    given = next((fields[name] for name in ("choices", "options") if fields.get(name)), None)
    if isinstance(given, str) and given.startswith(("[", "{")):  # as CSV writes it
        try:
            given = json.loads(given)
        except ValueError as error:
            raise BadInputError(f"the options are neither a list nor JSON: {error}.") from None
    if given is None:
        return None
    texts, labels = _listed(given)
    if not 2 <= len(texts) <= len(LETTERS) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadInputError(f"expected from 2 to {len(LETTERS)} options, each a text; got {len(texts)}.")
    options = tuple(map(_text, texts))
    return options, LETTERS[_right(fields, options, labels)]


def _listed(given: Any) -> tuple[list[Any], list[str]]:
    """Return the texts of the options and their labels."""
    if isinstance(given, Mapping) and "text" in given:
        texts, labels = given["text"], given.get("label")
    elif isinstance(given, Mapping):
        texts, labels = list(given.values()), list(given)
    elif isinstance(given, list) and given and all(isinstance(item, Mapping) for item in given):
        texts, labels = [item.get("text") for item in given], [item.get("label") for item in given]
    else:
        texts, labels = given, None
    if not isinstance(texts, list):
        raise BadInputError(f"expected a list of options, got {type(texts).__name__}.")
    if not isinstance(labels, list) or len(labels) != len(texts):
        labels = list(LETTERS[: len(texts)])
    return texts, [str(label).strip().upper() for label in labels]


def _right(fields: Fields, options: Sequence[str], labels: Sequence[str]) -> int:
    """Return the place of the right option; a label goes before an index, an index before a text."""
    for name in KEYS:
        key = fields.get(name)
        text = str(key).strip()
        if key is None or isinstance(key, bool) or not text:
            continue
        if name != "answer_index" and text.upper() in labels:
            return labels.index(text.upper())
        if isinstance(key, str) and len(text) == 1 and text.upper() in LETTERS[: len(options)]:
            return LETTERS.index(text.upper())
        if text.isdecimal() and text.isascii() and int(text) < len(options):
            return int(text)
        if options.count(text) == 1:
            return options.index(text)
    raise BadInputError(
        f"expected the right one of {len(options)} options in 'answer', 'answerKey' or 'answer_index', as its label, "
        f"its index from 0 or its text; {_columns(fields)}."
    )


def _shuffled(question: str, right: Any, wrong: Sequence[Any]) -> tuple[tuple[str, ...], str]:
    """Order the options by a digest: stable, and the right one stands anywhere."""
    if not all(isinstance(text, str) and text.strip() for text in (right, *wrong)):
        raise BadInputError("expected texts in 'Correct Answer' and 'Incorrect Answer 1' to 'Incorrect Answer 3'.")
    right, *others = map(_text, (right, *wrong))
    options = tuple(sorted([right, *others], key=lambda text: hashlib.sha256(f"{question}\n{text}".encode()).digest()))
    return options, LETTERS[options.index(right)]


def _text(value: str) -> str:
    """Strip a text; half a surrogate pair becomes a question mark, as it cannot be encoded."""
    return value.encode(errors="replace").decode().strip()


def _columns(fields: Fields) -> str:
    return f"the columns are {', '.join(fields) or 'none'}"
