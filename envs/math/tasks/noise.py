r"""Which questions are the same, and which of the same ones contradict each other.

Two questions are the same if their texts agree in all but spaces, LaTeX spacing, grouping braces, dollar signs, case
and the punctuation of sentences, and their options do too. Of the same questions with answers that the grader finds
equal, the first is kept. Where it does not (another value, or nothing that it can compare), none is: a label that two
records disagree about teaches nothing.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from trace_gym.envs.math.grading import grade
from trace_gym.envs.math.tasks.task import Task

# What changes the look of a formula and not its meaning; every alternative begins with the backslash, for speed.
_LOOK = re.compile(
    r"\\(?:(?:left|right|displaystyle|textstyle|quad|qquad)(?![A-Za-z])|[,;:!>() \[\]]|(?=[$%])"
    r"|[dtc]?(?=frac(?![a-z])))"
)
_STOP = re.compile(r"[.:;?](?!\d)|(?:\\?_){2,}")  # of a sentence, not of a number; a blank to fill in
_IDLE = str.maketrans("", "", " \t\n\r$~{},")
_MARKUP = frozenset(("$", "~", "{", "}", ",", "&", "\\", "\\begin", "\\end", "align", "aligned"))
_WORD = re.compile(r"\\?[^\W\d_]+|\d+|[^\w\s]|_")
_MARKS = str.maketrans({"−": "-", "–": "-", "—": "-", "‘": "'", "’": "'", "“": '"', "”": '"', "\u2028": " "})


def normalized(text: str) -> str:
    """Return a text in one spelling and without spaces: equal results mean the same question."""
    return _plain(text).translate(_IDLE)


def words(text: str) -> list[str]:
    """Return the words, numbers and signs of a text in one spelling."""
    return [word for word in _WORD.findall(_plain(text)) if word not in _MARKUP]


def _plain(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).translate(_MARKS)
    return _STOP.sub(" ", _LOOK.sub(" ", text)).lower()


def identity(task: Task) -> bytes:
    """Return a digest of a question and its options in any order; equal for the same question."""
    parts = [normalized(task.question), *sorted(map(normalized, task.options))]
    return hashlib.sha256("\n".join(parts).encode()).digest()[:16]


@dataclass
class Noise:
    """What was left out of a data set.

    Attributes:
        records: Records that could be used.
        unusable: Records without a question or an answer.
        repeated: Records whose question and answer stand in an earlier one.
        contradictory: Records of questions whose answers contradict each other.
        contradictions: Such questions.
    """

    records: int = 0
    unusable: int = 0
    repeated: int = 0
    contradictory: int = 0
    contradictions: int = 0

    def __str__(self) -> str:
        """Say it in one line."""
        kept = self.records - self.repeated - self.contradictory
        return (
            f"{kept:,} tasks of {self.records + self.unusable:,} records; left out: {self.repeated} repeated, "
            f"{self.contradictory} with contradictory answers (to {self.contradictions} questions), "
            f"{self.unusable} without a question or an answer"
        )


def without_noise(tasks: Iterable[tuple[int, Task]], noise: Noise) -> list[int]:
    """Return the numbers of the tasks to keep, in order; count the others.

    Args:
        tasks: Numbers and tasks.
        noise: Takes the counts.
    """
    groups: dict[bytes, list[tuple[int, str]]] = {}
    for number, task in tasks:
        noise.records += 1
        groups.setdefault(identity(task), []).append((number, stated_answer(task)))
    kept = []
    for (first, answer), *others in groups.values():
        if all(same_answer(other, answer) for _, other in others):
            kept.append(first)
            noise.repeated += len(others)
        else:
            noise.contradictions += 1
            noise.contradictory += 1 + len(others)
    return kept


def same_answer(one: str, other: str) -> bool:
    """Whether the grader finds two answers equal, whichever of them it takes for the right one."""
    return one == other or any(grade(*pair, patient=True).outcome == "correct" for pair in ((one, other), (other, one)))


def stated_answer(task: Task) -> str:
    """Return the answer; of a multiple-choice question its text, as the letter depends on the order."""
    return task.options[ord(task.answer) - ord("A")] if task.options else task.answer
