"""A task, and a table of tasks: what generators, files and data sets all come down to."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from trace_gym.envs.math.tasks.families_plan import Step
from trace_gym.envs.task_table import IdTable

DIFFICULTIES = (1, 2, 3, 4, 5)
LETTERS = "ABCDEFGHIJ"  # names of the options of a multiple-choice question


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


class TaskTable(IdTable):
    """A fixed sequence of task ids that gives the task of each."""

    def tasks(self) -> Iterator[Task]:
        """Iterate over the tasks in order."""
        return map(self.get, self.ids)

    @abstractmethod
    def get(self, task_id: str) -> Task:
        """Return the task of an id.

        Raises:
            BadInputError: If there is no such task; the message says what there is.
        """
