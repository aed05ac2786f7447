"""What the ground truth of a task leads to, turn by turn: computed once per task in this process, never shipped.

The last digit of a number can differ between versions of Python, so that the gold of another process is none here.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from trace_gym.envs.bfcl.executor import Instances
from trace_gym.envs.bfcl.tasks import BFCLTask


@dataclass(frozen=True, slots=True)
class GoldTurn:
    """State and results after a turn of the ground truth.

    Attributes:
        blob: The simulators, as `Instances.dumps` writes them.
        results: The texts of this turn's calls, in order.
    """

    blob: bytes
    results: tuple[str, ...]


_cache: WeakKeyDictionary[BFCLTask, tuple[GoldTurn, ...]] = WeakKeyDictionary()
_lock = threading.Lock()


def gold(task: BFCLTask) -> tuple[GoldTurn, ...]:
    """Return the gold of every turn of a task."""
    with _lock:
        known = _cache.get(task)
    if known is None:
        known = _play(task)
        with _lock:
            _cache[task] = known
    return known


def _play(task: BFCLTask) -> tuple[GoldTurn, ...]:
    instances = Instances.fresh(task)
    turns = []
    for calls in task.ground_truth:
        results = tuple(instances.call_text(call) for call in calls)
        turns.append(GoldTurn(instances.dumps(), results))
    return tuple(turns)
