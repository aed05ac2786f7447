"""Generated math tasks.

Invariants: a task is a function of its id and the set's seed (and of NumPy's bit stream);
the question of a task with ``eval`` in its id never occurs with ``train``, for any seed, because the split is
a digest of the task's mathematics (its cells, so that a second wording stays on the same side).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from trace_gym.envs.math.tasks.families import FAMILIES, Draft
from trace_gym.envs.math.tasks.task import DIFFICULTIES, Task, TaskTable
from trace_gym.envs.task_table import SPLITS, check_split, side_of_text
from trace_gym.errors import BadInputError, unknown_name

MAX_DRAWS = 500  # 0.8**500 is nothing: only a family that is too small gets there
MAX_REPEATS = 30  # indices to try before a set accepts a question twice
MAX_SIZE = 1_000_000  # six digits of index

_ID = re.compile(r"([a-z_]+)-([0-9]+)-([a-z]+)-([0-9]{6})")


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
        check_split(split)
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
        self._tasks = {task.task_id: task for task in _balanced(split, names, levels, size, seed)}
        super().__init__(self._tasks)

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
    check_split(split)
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
    return side_of_text("\n\n".join(step.code for step in draft.steps))


def _check_family(name: str) -> None:
    if name not in FAMILIES:
        raise unknown_name("family of tasks", name, FAMILIES)


def _check_difficulty(level: int) -> None:
    if level not in DIFFICULTIES:
        raise BadInputError(f"difficulty must be one of 1, 2, 3, 4, 5, got {level!r}.")


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise BadInputError(f"seed must be an integer of at least 0, got {seed!r}.")
