"""From two texts to a verdict, with a judge for the expressions in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Literal

from trace_gym.envs.math.grading.compare import Comparison
from trace_gym.envs.math.grading.judge import Judge, Leaf, UndecidedError, UndefinedAnswerError
from trace_gym.envs.math.grading.notation import to_notation, to_plain
from trace_gym.envs.math.grading.reading import GROUPED, read
from trace_gym.envs.math.grading.shapes import Shape, Unread, Words
from trace_gym.envs.math.grading.split import UnbalancedError, cut
from trace_gym.envs.math.grading.words import letter_of

Outcome = Literal["correct", "wrong", "ungradable"]
_MAX_WORDS = 3  # of a right answer in words, for other words to be wrong rather than unknown
_UNEVALUATED = re.compile(r"\\(?:int|iint|oint|sum|prod|lim|det)(?![a-z])|\\frac ?\{ ?d ?\}")
_COMMAND = re.compile(r"\\[A-Za-z]{2}")
_OTHERWISE = '"OR"'


@dataclass(frozen=True)
class Verdict:
    """What the grader decided, and why.

    Attributes:
        outcome: ``"correct"``, ``"wrong"`` or ``"ungradable"``.
        reason: One short sentence.
    """

    outcome: Outcome
    reason: str


class UnreadError(UndecidedError):
    """One side is nothing this grader reads; another reader may try.

    Attributes:
        is_right: Whether it is the right answer.
    """

    def __init__(self, text: str, is_right: bool) -> None:
        """Name the text."""
        side = "right answer" if is_right else "answer"
        super().__init__(f"the {side} cannot be read: {text[:60]}")
        self.is_right = is_right


def decide(answer: str, right: str, judge: Judge, *, percent_asked: bool = False) -> Verdict:
    """Compare an answer with the right one.

    Args:
        answer: What was found in the box.
        right: The right answer.
        judge: Compares expressions.
        percent_asked: Whether the question asks for a percentage.

    Raises:
        UndecidedError: If the judge cannot tell.
        UnreadError: If a side cannot be read.
    """
    ours, wanted = to_notation(answer), to_notation(right)
    if to_plain(ours) == to_plain(wanted):
        return Verdict("correct", "the same text")
    if not set(_UNEVALUATED.findall(ours)) <= set(_UNEVALUATED.findall(wanted)):
        return Verdict("wrong", "the answer is not worked out")
    letter = _same_letter(answer, ours, wanted)
    if letter is not None:
        return letter
    comparison = Comparison(judge, percent_asked=percent_asked)
    rights = [shape for text in wanted.split(_OTHERWISE) for shape in _readings(text)]
    answers = _readings(ours)
    if all(isinstance(shape, Unread) for shape in rights):
        raise UnreadError(wanted, True)
    if all(isinstance(shape, Unread) for shape in answers):
        if not is_worth_asking(ours):
            return Verdict("wrong", "parse: the answer cannot be read")
        raise UnreadError(ours, False)
    return _compare(comparison, answers, [shape for shape in rights if not isinstance(shape, Unread)])


def is_worth_asking(text: str) -> bool:
    """Whether another reader may know what this one does not: LaTeX whose brackets match."""
    try:
        cut(text, frozenset())
    except UnbalancedError:
        return False
    return _COMMAND.search(text) is not None


def leaves_of(text: str) -> list[Leaf] | None:
    """Return all expressions in an answer, or None if this grader does not read it."""
    shapes = _readings(to_notation(text))
    if all(isinstance(shape, Unread) for shape in shapes):
        return None
    found: list[Leaf] = []
    waiting: list[object] = list(shapes)
    while waiting:
        part = waiting.pop()
        if isinstance(part, Leaf):
            found.append(part)
        elif isinstance(part, tuple):
            waiting.extend(part)
        elif is_dataclass(part) and not isinstance(part, type):
            waiting.extend(getattr(part, field.name) for field in fields(part))
    return found


@lru_cache(maxsize=1024)
def _readings(notation: str) -> list[Shape]:
    """Return what a text may mean: ``1,200`` is a number or a list of two."""
    shapes = [read(notation)]
    if GROUPED.search(notation):
        shapes.append(read(notation, thousands=False))
    return shapes


def _compare(comparison: Comparison, answers: Sequence[Shape], rights: Sequence[Shape]) -> Verdict:
    undecided: UndecidedError | None = None
    reason = "another value"
    for answer in answers:
        for right in rights:
            try:
                if comparison.same(answer, right):
                    return Verdict("correct", "the same value")
            except UndecidedError as problem:
                undecided = problem
            except UndefinedAnswerError as problem:
                reason = f"the answer has no value: {problem}"
            if isinstance(answer, Words) and isinstance(right, Words):
                reason = "other words"
                if len(right.text.split()) > _MAX_WORDS:
                    undecided = UndecidedError("the right answer is a sentence, and the answer another one")
    if undecided is not None:
        raise undecided
    return Verdict("wrong", reason)


def _same_letter(answer: str, ours: str, wanted: str) -> Verdict | None:
    """Compare as letters of a choice where the right answer is a capital letter: ``B``, ``(B)``, ``B: both``."""
    letter = letter_of(wanted)
    if letter is None or letter[0] not in "ABCDEFGHIJ":
        return None
    chosen = letter_of(ours) or letter_of(answer)
    if chosen is None and (letter[1] or letter[0] not in wanted):  # it may be a value as well
        return None
    same = chosen is not None and chosen[0] == letter[0]
    return Verdict("correct" if same else "wrong", "compared as a letter of a choice")
