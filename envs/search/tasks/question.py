"""A question with its answers, and a table of questions: what the bundled set, files and data sets all come down to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trace_gym.envs.search.scoring import title_key
from trace_gym.envs.task_table import IdTable, side_of_text
from trace_gym.errors import BadInputError


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


class QuestionTable(IdTable):
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
        super().__init__(self._questions)

    def questions(self) -> Iterator[Question]:
        """Iterate over the questions in order."""
        return iter(self._questions.values())

    def get(self, task_id: str) -> Question:
        """Return the question of an id.

        Raises:
            BadInputError: If there is none; the message has the nearest id or the first and last.
        """
        if task_id not in self._questions:
            raise self.unknown(task_id)
        return self._questions[task_id]


def side_of(question: Question, fold: int = 0) -> str:
    """Return the split that a question belongs to: ``"eval"`` for one in five, others in each fold from 0 to 4.

    By a digest of its supporting passages, so that no pair of facts is asked about on both sides; of its text, where
    the passages are not known.
    """
    titles = sorted(map(title_key, question.supporting_titles)) or [" ".join(question.question.lower().split())]
    return side_of_text("\n".join(titles), fold)
