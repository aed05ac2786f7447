"""`grade`: from an agent's text and the right answer to a verdict."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trace_gym.envs.math.grading.decide import Verdict, decide
from trace_gym.envs.math.grading.expression import MAX_CHARACTERS
from trace_gym.envs.math.grading.extract import answer_in, explicit_answer
from trace_gym.envs.math.grading.judge import Judge, UndecidedError
from trace_gym.envs.math.grading.notation import to_notation, to_plain
from trace_gym.envs.math.grading.pool import compare_thoroughly
from trace_gym.envs.math.grading.words import canonical_words, choose, letter_of

_MAX_RIGHT = 4000  # characters of a right answer
_PERCENT = re.compile(r"\b(?:what|which|as a|in|how many|the) (?:\w+ )?percent(?:age)?\b", re.IGNORECASE)


def grade(
    prediction: str, gold: str, *, options: Sequence[str] = (), question: str = "", patient: bool = False
) -> Verdict:
    r"""Compare an answer with the right one; no text makes it raise or takes longer than two seconds.

    Args:
        prediction: The agent's answer, alone or inside a text with a ``\boxed{...}``.
        gold: The right answer, boxed or bare; with options the letter or the text of one.
        options: The texts of options A, B, ... of a multiple-choice question.
        question: What was asked; says whether ``20`` and ``20%`` are one answer.
        patient: Wait for the worker processes however long they take to start, about a second; without patience, what
            needs them while they start may be ungradable. A `GraderLease` starts them ahead.

    Returns:
        The verdict; the package's docstring says what is equal.

    Raises:
        InfrastructureError: If the processes for the harder comparisons do not work.
    """
    answer, right = answer_in(prediction), answer_in(gold)
    if answer is None:
        return Verdict("wrong", "the last box is not closed")
    if right is None or not right or len(right) > _MAX_RIGHT:
        return Verdict("ungradable", "the right answer is empty or too long to read")
    if options:
        return _grade_choice(prediction, answer, right, options)
    if not answer:
        return Verdict("wrong", "the answer is empty")
    if letter_of(to_notation(right)) is not None and letter_of(to_notation(answer[:MAX_CHARACTERS])) is None:
        outside = explicit_answer(prediction)  # the letter stands outside the box
        answer = outside if outside is not None and letter_of(outside) is not None else answer
    return _compare(answer, right, bool(question) and _PERCENT.search(question) is not None, patient)


def _compare(answer: str, right: str, percent_asked: bool, patient: bool) -> Verdict:
    allowed = max(MAX_CHARACTERS, 2 * len(right))
    if len(answer) > allowed:
        return Verdict("wrong", f"guard: the answer has more than {allowed} characters")
    try:
        return decide(answer, right, Judge(), percent_asked=percent_asked)
    except UndecidedError:
        pass
    return compare_thoroughly(answer, right, percent_asked, patient)


def _grade_choice(prediction: str, answer: str, right: str, options: Sequence[str]) -> Verdict:
    """Compare which options are meant, by their letters or their own texts."""
    wanted = _option(right, options)
    if wanted is None:
        return Verdict("ungradable", "the right answer is none of the options")
    chosen = _option(answer, options)
    if chosen is None:
        chosen = _option(explicit_answer(prediction) or "", options)
    if chosen is None:
        return Verdict("wrong", "the answer is none of the options")
    return Verdict("correct" if chosen == wanted else "wrong", "compared as options")


def _option(text: str, options: Sequence[str]) -> int | None:
    """Return which option a text means; a letter wins over a text that happens to be one."""
    if not text or len(text) > MAX_CHARACTERS + max(map(len, options)):
        return None
    named = choose(to_notation(text), options)
    if named is not None:
        return named
    plain = canonical_words(to_plain(to_notation(text)))
    own = [place for place, option in enumerate(options) if canonical_words(to_plain(to_notation(option))) == plain]
    if len(own) == 1:
        return own[0]
    equal = [place for place, option in enumerate(options) if _is_equal(text, option)]
    return equal[0] if len(equal) == 1 else None


def _is_equal(text: str, option: str) -> bool:
    try:
        return decide(text, option, Judge()).outcome == "correct"
    except UndecidedError:
        return False
