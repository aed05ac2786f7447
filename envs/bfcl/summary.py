"""What was fetched, from where, and what is in it: the text of ``trace-gym data bfcl``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from trace_gym.envs.bfcl.backend import SUBSETS, WHEEL, load_backend
from trace_gym.envs.bfcl.tasks import DOMAINS, load_tasks, suspects
from trace_gym.envs.task_table import SPLITS


def summary() -> str:
    """Return the summary; fetches the wheel if it was never used before.

    Raises:
        InfrastructureError: If the wheel cannot be had.
    """
    backend = load_backend()
    lines = [
        ("wheel", WHEEL.filename),
        ("sha256", WHEEL.sha256),
        ("from", WHEEL.origin),
        ("folder", str(backend.folder)),
        ("fingerprint", f"{backend.fingerprint} (of simulators, questions and answers, checked at each start)"),
        ("functions", f"{len(backend.functions)} of {len(backend.docs)} simulators"),
    ]
    heads = ("subset", "split", "tasks", *DOMAINS, "turns", "calls")
    rows = [_row(subset, split) for subset in SUBSETS for split in SPLITS]
    rows.append(("all", "", *(sum(row[i] for row in rows) for i in range(2, len(heads)))))
    table = "\n".join("".join(_cell(i, cell) for i, cell in enumerate(row)) for row in (heads, *rows))
    left_out = "\n".join(f"{base_id}: {reason}" for base_id, reason in sorted(suspects().items()))
    head = "\n".join(f"{name:12} {value}" for name, value in lines)
    return f"{head}\n\n{table}\n\nScenarios that exclude_suspect leaves out:\n{left_out}"


def _row(subset: str, split: str) -> tuple[Any, ...]:
    tasks = list(load_tasks(subset, split).tasks())
    domains = Counter(task.domain for task in tasks)
    turns = [calls for task in tasks for calls in task.ground_truth]
    return (subset, split, len(tasks), *(domains[name] for name in DOMAINS), len(turns), sum(map(len, turns)))


def _cell(place: int, cell: Any) -> str:
    return f"{cell:14}" if place < 2 else f"{cell:>13}"
