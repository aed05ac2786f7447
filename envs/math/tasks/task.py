"""A task, and a table of tasks: what generators, files and data sets all come down to."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from trace_gym.envs.math.tasks.families_plan import Step
from trace_gym.errors import BadInputError, unknown_name

SPLITS = ("train", "eval")
DIFFICULTIES = (1, 2, 3, 4, 5)
EVAL_SHARE = 5  # one question in five belongs to the eval split
LETTERS = "ABCDEFGHIJ"  # names of the options of a multiple-choice question
MAX_NAMED = 10_000  # ids among which a near miss is looked for


@dataclass(frozen=True)
class Task:
    """One question with its exact answer.

    Attributes:
        task_id: Unique name: ``family-difficulty-split-index`` of generated tasks, ``set-number`` of loaded ones.
        question: What is asked, without the options.
        answer: The right answer, as text; of a multiple-choice question the letter.
        family: Name of the generator, or of the data set.
        difficulty: 1 (easiest) to 5; 0 where a data set does not say.
        steps: The demonstrator's cells in order, the last one showing the answer; empty for loaded tasks.
        options: The texts of options A, B, … of a multiple-choice question; empty for other questions.
        subject: The field of mathematics or knowledge, where a data set says; else empty.
    """

    task_id: str
    question: str
    answer: str
    family: str
    difficulty: int
    steps: tuple[Step, ...] = ()
    options: tuple[str, ...] = ()
    subject: str = ""

    @property
    def prompt(self) -> str:
        """The question as the agent reads it: with its lettered options, if it has any."""
        if not self.options:
            return self.question
        listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, self.options, strict=False))
        return f"{self.question}\n\n{listed}\n\nAnswer with the letter of the right option."


class TaskTable(Sequence[str]):
    """A fixed sequence of task ids that gives the task of each.

    Args:
        ids: The ids in order, each once.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        """Keep the ids."""
        self.ids = tuple(ids)

    def __len__(self) -> int:
        """Return the number of tasks."""
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

    def tasks(self) -> Iterator[Task]:
        """Iterate over the tasks in order."""
        return map(self.get, self.ids)

    @abstractmethod
    def get(self, task_id: str) -> Task:
        """Return the task of an id.

        Raises:
            BadInputError: If there is no such task; the message says what there is.
        """

    def _unknown(self, task_id: str) -> BadInputError:
        if len(self.ids) <= MAX_NAMED:
            return unknown_name("task id", task_id, self.ids)
        return BadInputError(
            f"Unknown task id {task_id!r}. There are {len(self.ids)}, from {self.ids[0]!r} to {self.ids[-1]!r}."
        )


def side_of(text: str) -> str:
    """Return the split that a text belongs to: ``"eval"`` for one in five, by its digest."""
    digest = hashlib.sha256(text.encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") % EVAL_SHARE == 0 else "train"


def check_split(split: str) -> None:
    """Raise `BadInputError` unless the name is that of a split."""
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
