"""The 800 tasks: 200 scenarios, each in four variants, with the project's split of them.

A scenario and its variants stand on one side of the split, as do scenarios that share a first message, an initial state
or an answer; ``assets/bfcl_tasks.json`` has the list and says how it was made, and names the scenarios that no
trajectory can win.
"""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trace_gym.envs.bfcl.backend import SUBSETS, data_file, load_backend
from trace_gym.envs.task_table import IdTable, check_split
from trace_gym.errors import unknown_name

DOMAINS = ("file_system", "vehicle", "trading", "travel")  # fifty scenarios each, in this order
_PER_DOMAIN = 50


@dataclass(frozen=True, eq=False)
class BFCLTask:
    """One task. Its containers are shared and not to be changed.

    Attributes:
        id: Upstream's name, such as ``"multi_turn_base_0"``.
        subset: One of `SUBSETS`.
        base_id: Number of the scenario, 0 to 199; the four variants share it.
        domain: One of `DOMAINS`.
        turns: What the user says in each turn; None where functions are added and nothing is said.
        initial_config: Initial state by class, as upstream writes it.
        involved_classes: The simulators, in order.
        missed_functions: Turn to the names that are on offer from that turn on only.
        ground_truth: The calls of each turn, as text; empty where the turn is not checked.
    """

    id: str
    subset: str
    base_id: int
    domain: str
    turns: tuple[str | None, ...]
    initial_config: Mapping[str, Any]
    involved_classes: tuple[str, ...]
    missed_functions: Mapping[int, tuple[str, ...]]
    ground_truth: tuple[tuple[str, ...], ...]

    @property
    def is_long_context(self) -> bool:
        """Whether the simulators pad their state and answers."""
        return self.subset == "long_context"

    def held_out(self, turn: int) -> frozenset[str]:
        """Return the names of the functions that are not yet on offer in a turn."""
        return frozenset(name for start, names in self.missed_functions.items() if turn < start for name in names)

    def offered(self, turn: int) -> tuple[str, ...]:
        """Return the names of the functions on offer in a turn, in the order of their documents."""
        docs, held_out = load_backend().docs, self.held_out(turn)
        names = (str(doc["name"]) for class_name in self.involved_classes for doc in docs[class_name])
        return tuple(name for name in names if name not in held_out)


class TaskTable(IdTable):
    """A fixed sequence of task ids that gives the task of each."""

    def __init__(self, tasks: Iterable[BFCLTask]) -> None:
        """Keep the tasks."""
        self._tasks = {task.id: task for task in tasks}
        super().__init__(self._tasks)

    def tasks(self) -> Iterator[BFCLTask]:
        """Iterate over the tasks in order."""
        return iter(self._tasks.values())

    def get(self, task_id: str) -> BFCLTask:
        """Return the task of an id.

        Raises:
            BadInputError: If there is none; the message has the nearest id.
        """
        if task_id not in self._tasks:
            raise self.unknown(task_id)
        return self._tasks[task_id]


def load_tasks(subset: str = "all", split: str | None = None, exclude_suspect: bool = False) -> TaskTable:
    """Return tasks of the pinned wheel.

    Args:
        subset: One of `SUBSETS`, or ``"all"``.
        split: ``"train"`` (160 scenarios) or ``"eval"`` (40); None or ``"all"`` for both.
        exclude_suspect: Leave out the scenarios whose ground truth no trajectory can know.

    Raises:
        BadInputError: If a name is unknown.
        InfrastructureError: If the wheel cannot be had.
    """
    if subset not in (*SUBSETS, "all"):
        raise unknown_name("subset", subset, (*SUBSETS, "all"))
    split = None if split == "all" else split
    check_split(split)
    left_out = suspects() if exclude_suspect else {}
    return TaskTable(
        task
        for name in (SUBSETS if subset == "all" else (subset,))
        for task in _read(load_backend().folder, name)
        if split in (None, side_of(task.base_id)) and task.base_id not in left_out
    )


def side_of(base_id: int) -> str:
    """Return the split that a scenario belongs to."""
    return "eval" if base_id in _asset()["eval"] else "train"


def suspects() -> Mapping[int, str]:
    """Return the scenarios whose ground truth no trajectory can know, with the reason."""
    return {int(base_id): str(reason) for base_id, reason in _asset()["suspect"].items()}


@lru_cache(maxsize=1)
def _asset() -> dict[str, Any]:
    text = (importlib.resources.files("trace_gym.assets") / "bfcl_tasks.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


@lru_cache(maxsize=len(SUBSETS))  # a task is known by its identity: what is made of it once is kept with it
def _read(folder: Path, subset: str) -> tuple[BFCLTask, ...]:
    questions = _records(data_file(folder, subset))
    answers = {record["id"]: record["ground_truth"] for record in _records(data_file(folder, subset, answers=True))}
    return tuple(_task(subset, record, answers[record["id"]]) for record in questions)


def _records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]


def _task(subset: str, record: Mapping[str, Any], answer: list[list[str]]) -> BFCLTask:
    base_id = int(record["id"].rpartition("_")[2])
    return BFCLTask(
        id=record["id"],
        subset=subset,
        base_id=base_id,
        domain=DOMAINS[base_id // _PER_DOMAIN],
        turns=tuple(messages[0]["content"] if messages else None for messages in record["question"]),
        initial_config=record["initial_config"],
        involved_classes=tuple(record["involved_classes"]),
        missed_functions={int(turn): tuple(names) for turn, names in record.get("missed_function", {}).items()},
        ground_truth=tuple(map(tuple, answer)),
    )
