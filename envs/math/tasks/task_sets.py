"""Math tasks: generated from an id, or loaded from a file.

Invariants of generated tasks: a task is a function of its id and the set's seed (and of NumPy's bit stream);
the question of a task with ``eval`` in its id never occurs with ``train``, for any seed, because the split is
a digest of the task's mathematics (its cells, so that a second wording stays on the same side).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from trace_gym.envs.math.grading import extract_answer
from trace_gym.envs.math.tasks.families import FAMILIES, Draft, Step
from trace_gym.errors import BadInputError, unknown_name

__all__ = ["DIFFICULTIES", "SPLITS", "Step", "Task", "TaskSet", "load_tasks", "make_task"]

SPLITS = ("train", "eval")
DIFFICULTIES = (1, 2, 3, 4, 5)
EVAL_SHARE = 5  # one question in five belongs to the eval split
MAX_DRAWS = 500  # 0.8**500 is nothing: only a family that is too small gets there
MAX_REPEATS = 30  # indices to try before a set accepts a question twice
MAX_SIZE = 1_000_000  # six digits of index

_ID = re.compile(r"([a-z_]+)-([0-9]+)-([a-z]+)-([0-9]{6})")
_QUESTION_FIELDS = ("question", "problem", "prompt")


@dataclass(frozen=True)
class Task:
    """One question with its exact answer.

    Attributes:
        task_id: Unique name; for generated tasks ``family-difficulty-split-index``.
        question: What the agent is asked.
        answer: The right answer, as text.
        family: Name of the generator, or ``"file"``.
        difficulty: 1 (easiest) to 5; 0 where a file does not say.
        steps: The demonstrator's cells in order, the last one showing the answer; empty for loaded tasks.
    """

    task_id: str
    question: str
    answer: str
    family: str
    difficulty: int
    steps: tuple[Step, ...] = ()


class TaskTable(Sequence[str]):
    """A fixed sequence of task ids that gives the task of each."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        """Keep the tasks in the order given."""
        self._tasks = {task.task_id: task for task in tasks}
        self.ids = tuple(self._tasks)

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

    def get(self, task_id: str) -> Task:
        """Return the task of an id.

        Raises:
            BadInputError: If there is no such task; the message has the nearest id.
        """
        if task_id not in self._tasks:
            raise unknown_name("task id", task_id, self.ids)
        return self._tasks[task_id]


class TaskSet(TaskTable):
    """Generated tasks, balanced over families and difficulties.

    The ids go round the families at difficulty 1, then 2, and so on, and begin again: every prefix of the
    sequence is as balanced as it can be. Questions are distinct as long as a family has new ones.
    """

    def __init__(
        self,
        split: str = "train",
        families: Sequence[str] | None = None,
        difficulties: Sequence[int] | None = None,
        size: int = 1500,
        seed: int = 0,
    ) -> None:
        """Generate the tasks.

        Args:
            split: ``"train"`` or ``"eval"``.
            families: Names from `FAMILIES`; all of them by default.
            difficulties: Some of 1 to 5; all of them by default.
            size: Number of tasks.
            seed: Seed of the generator; another seed is another set of the same families.

        Raises:
            BadInputError: For an unknown name or a value out of range.
        """
        _check_split(split)
        names = tuple(dict.fromkeys(FAMILIES if families is None else families))
        levels = tuple(dict.fromkeys(DIFFICULTIES if difficulties is None else difficulties))
        for name in names:
            _check_family(name)
        for level in levels:
            _check_difficulty(level)
        if not names or not levels:
            raise BadInputError("A task set needs at least one family and one difficulty.")
        if not 1 <= size <= MAX_SIZE:
            raise BadInputError(f"size must be from 1 to {MAX_SIZE}, got {size}.")
        _check_seed(seed)
        self.seed = seed
        super().__init__(_balanced(split, names, levels, size, seed))

    def get(self, task_id: str) -> Task:
        """Return the task of any id that the generator knows, inside this set or not.

        An id says all about its task, so a state saved by a larger set can be restored here.

        Raises:
            BadInputError: If the id names no task; the message says what exists.
        """
        found = self._tasks.get(task_id)
        return make_task(task_id, self.seed) if found is None else found


def _balanced(split: str, names: Sequence[str], levels: Sequence[int], size: int, seed: int) -> Iterator[Task]:
    cells = [(name, level) for level in levels for name in names]
    following = dict.fromkeys(cells, 0)
    seen: set[str] = set()
    for place in range(size):
        name, level = cells[place % len(cells)]
        first = following[name, level]
        for index in range(first, first + MAX_REPEATS):
            task = make_task(f"{name}-{level}-{split}-{index:06d}", seed)
            if task.question not in seen:
                break
        seen.add(task.question)
        following[name, level] = index + 1
        yield task


def make_task(task_id: str, seed: int = 0) -> Task:
    """Generate the task of an id.

    Args:
        task_id: ``"{family}-{difficulty}-{split}-{index:06d}"``, such as ``"chain-2-train-000007"``.
        seed: Seed of the generator.

    Raises:
        BadInputError: If the id is malformed or names something that does not exist.
    """
    match = _ID.fullmatch(task_id)
    if match is None:
        raise BadInputError(
            f"Task id {task_id!r} does not have the form family-difficulty-split-index, such as 'chain-2-train-000007'."
        )
    family, level, split, index = match[1], int(match[2]), match[3], int(match[4])
    _check_family(family)
    _check_difficulty(level)
    _check_split(split)
    _check_seed(seed)
    # The family enters by a digest of its name: adding another family changes no existing task.
    key = int.from_bytes(hashlib.sha256(family.encode()).digest()[:4], "big")
    entropy = (int(seed), key, level, SPLITS.index(split), index)
    rng = np.random.default_rng(np.random.SeedSequence(entropy))
    for _ in range(MAX_DRAWS):
        draft = FAMILIES[family](rng, level)
        if split_of(draft) == split and all(len(step.slips) > 1 for step in draft.steps):
            return Task(task_id, draft.question, draft.answer, family, level, draft.steps)
    raise BadInputError(
        f"Family {family!r} at difficulty {level} has no {split} question in {MAX_DRAWS} draws: "
        "it has too few different questions. Use another difficulty or widen the family."
    )


def split_of(draft: Draft) -> str:
    """Return the split a draft belongs to: ``"eval"`` for one in five, by a digest of its cells."""
    return _split_of_text("\n\n".join(step.code for step in draft.steps))


def _split_of_text(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") % EVAL_SHARE == 0 else "train"


def _check_family(name: str) -> None:
    if name not in FAMILIES:
        raise unknown_name("family of tasks", name, FAMILIES)


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)


def _check_difficulty(level: int) -> None:
    if level not in DIFFICULTIES:
        raise BadInputError(f"difficulty must be one of 1, 2, 3, 4, 5, got {level!r}.")


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise BadInputError(f"seed must be an integer of at least 0, got {seed!r}.")


def load_tasks(path: str | Path, split: str | None = None) -> TaskTable:
    """Read tasks from a JSON Lines file or a JSON array of objects.

    The question stands in ``question``, ``problem`` or ``prompt``; the answer in ``answer`` (the part
    after ``####`` where there is one, as in GSM8K), else in the last box of ``solution``. A ``level`` from
    1 to 5 becomes the difficulty. Ids are the file's stem and the record's number, from 1.

    Args:
        path: The file.
        split: ``"eval"`` for the one question in five that is held out, by a digest of its text; ``"train"`` for the
            others; None for all.

    Raises:
        BadInputError: If the file cannot be read or a record does not have what is needed; the message
            names the file, the line (or the record of an array) and what was expected.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"Cannot read tasks from {file}: {error}.") from error
    tasks = []
    for where, number, record in _records(file, text):
        question, answer = _read_record(where, record)
        level = record.get("level")
        difficulty = level if isinstance(level, int) and level in DIFFICULTIES else 0
        name = f"{file.stem}-{number:06d}"
        tasks.append(Task(name, question, answer, "file", difficulty))
    if not tasks:
        raise BadInputError(f"{file} holds no tasks; expected one JSON object per line, or an array.")
    if split is not None:
        _check_split(split)
        tasks = [task for task in tasks if _split_of_text(task.question) == split]
        if not tasks:
            raise BadInputError(f"{file} has no task in the {split} split; one question in {EVAL_SHARE} is held out.")
    return TaskTable(tasks)


def _records(file: Path, text: str) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except ValueError as error:
            raise BadInputError(f"{file}: not a JSON array: {error}.") from error
        places = [(f"{file}, record {number}", number, item) for number, item in enumerate(items, 1)]
    else:
        places = []
        # Only "\n" ends a line: str.splitlines would also cut at U+2028 inside a text.
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                places.append((f"{file}, line {number}", number, json.loads(line)))
            except ValueError as error:
                raise BadInputError(f"{file}, line {number}: expected one JSON object per line; {error}.") from error
    for where, number, item in places:
        if not isinstance(item, Mapping):
            raise BadInputError(f"{where}: expected a JSON object, got {type(item).__name__}.")
        yield where, number, item


def _read_record(where: str, record: Mapping[str, Any]) -> tuple[str, str]:
    field = next((name for name in _QUESTION_FIELDS if name in record), None)
    if field is None:
        raise BadInputError(
            f"{where}: expected a question in one of {', '.join(_QUESTION_FIELDS)}; "
            f"the fields are {', '.join(map(str, record)) or 'none'}."
        )
    question = record[field]
    if not isinstance(question, str) or not question.strip():
        raise BadInputError(f"{where}: {field!r} must be a text that is not empty.")
    return question.strip(), _read_answer(where, record)


def _read_answer(where: str, record: Mapping[str, Any]) -> str:
    answer = record.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(int(answer)) if answer == answer and answer % 1 == 0 else str(answer)
    if isinstance(answer, str) and "####" in answer:
        answer = answer.rsplit("####", 1)[1]
    if answer in (None, "") and isinstance(record.get("solution"), str):
        answer = extract_answer(record["solution"])
    if not isinstance(answer, str) or not answer.strip():
        raise BadInputError(
            f"{where}: expected a text or number in 'answer', or a \\boxed{{...}} answer in 'solution'; "
            f"the fields are {', '.join(map(str, record)) or 'none'}."
        )
    return answer.strip()
