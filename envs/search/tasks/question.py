"""A question with its answers, and a table of questions: what the bundled set, files and data sets all come down to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from trace_gym.envs.search.scoring import title_key
from trace_gym.errors import BadInputError, unknown_name

SPLITS = ("train", "eval")
EVAL_SHARE = 5  # one question in five belongs to the eval split
MAX_NAMED = 10_000  # ids among which a near miss is looked for


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what is known of it.

    Attributes:
        task_id: Unique name.
        question: What the agent is asked.
        golden_answers: Right answers, the usual one first; at least one.
        supporting_titles: Titles of the passages that are needed, in the order of the steps; empty if unknown.
        type: Such as ``"bridge"`` or ``"comparison"``; empty if unknown.
        difficulty: 1 (easiest) to 3; 0 where a data set does not say.
    """

    task_id: str
    question: str
    golden_answers: tuple[str, ...]
    supporting_titles: tuple[str, ...] = ()
    type: str = ""
    difficulty: int = 0


class QuestionTable(Sequence[str]):
    """A fixed sequence of question ids that gives the question of each.

    Args:
        questions: In order; ids are unique.

    Raises:
        BadInputError: If two questions have the same id.
    """

    def __init__(self, questions: Iterable[Question]) -> None:
        """Keep the questions."""
        self._questions: dict[str, Question] = {}
        for question in questions:
            if question.task_id in self._questions:
                raise BadInputError(f"Two questions have the id {question.task_id!r}; ids must be unique.")
            self._questions[question.task_id] = question
        self.ids = tuple(self._questions)

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        """Return the id at a place, or the ids of a slice."""
        return self.ids[index]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids in order."""
        return iter(self.ids)

    def questions(self) -> Iterator[Question]:
        """Iterate over the questions in order."""
        return iter(self._questions.values())

    def get(self, task_id: str) -> Question:
        """Return the question of an id.

        Raises:
            BadInputError: If there is none; the message has the nearest id or the first and last.
        """
        if task_id in self._questions:
            return self._questions[task_id]
        if len(self.ids) <= MAX_NAMED:
            raise unknown_name("task id", task_id, self.ids)
        raise BadInputError(
            f"Unknown task id {task_id!r}. There are {len(self.ids)}, from {self.ids[0]!r} to {self.ids[-1]!r}."
        )


def side_of(question: Question) -> str:
    """Return the split that a question belongs to: ``"eval"`` for one in five.

    By a digest of its supporting passages, so that no pair of facts is asked about on both sides; of its text, where
    the passages are not known.
    """
    titles = sorted(map(title_key, question.supporting_titles)) or [" ".join(question.question.lower().split())]
    digest = hashlib.sha256("\n".join(titles).encode(errors="replace")).digest()
    return "eval" if int.from_bytes(digest[:8], "big") % EVAL_SHARE == 0 else "train"


def check_split(split: str | None) -> None:
    """Raise `BadInputError` unless the name is that of a split, or None."""
    if split is not None and split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
