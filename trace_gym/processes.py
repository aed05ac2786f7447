"""The processes of one run: what they tell each other, and who does what.

Every process runs the same program and holds the same model, predictor and counters. What each of them found alone it
gathers from all before anything is decided, so that they decide alike, whatever their number.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Processes(Protocol):
    """The processes of a run, as one of them sees it.

    Attributes:
        rank: Number of this process; process 0 writes the files.
        size: How many there are.
    """

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Return the value of every process, in order of rank; all of them must call it."""
        ...


class SingleProcess:
    """A run of one process."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        """Return the value."""
        return [value]


ALONE = SingleProcess()


def merge(parts: Sequence[Mapping[int, T]]) -> list[T]:
    """Return what several processes hold of the items 0, 1, …, in order."""
    found = {index: item for part in parts for index, item in part.items()}
    return [found[index] for index in sorted(found)]


def deal(sizes: Sequence[float], processes: int) -> list[int]:
    """Return the process of every item: the largest goes first, each to whom has least.

    Args:
        sizes: What each item costs.
        processes: Number of processes.
    """
    loads = [(0.0, rank) for rank in range(processes)]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + sizes[index], rank))
    return owners
