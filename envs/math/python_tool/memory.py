"""How much memory parked processes take, without measuring each after every step.

A fork shares its pages with its relatives until one of them writes, so only the proportional set
size of smaps_rollup can be summed up. Reading it costs about a millisecond, as much as half a step.
It is read of one process in sixteen; the others are taken to be like those. A process whose own
memory grew much, which can be seen for almost nothing, is always measured.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_gym.envs.math.python_tool.backend import Backend

MEBIBYTE = 1 << 20
DIRTIED_BYTES = 8 * MEBIBYTE  # that a cell of sympy writes to, of what a process has in common with the zygote
KERNEL_BYTES = 300 << 10  # page tables and the like of a parked process, which show in no process' size
_EVERY = 16


def anonymous_bytes(pid: int) -> int:
    """Return the resident memory of a process that is no file's, shared or not; 0 if unknown."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_bytes().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Footprint:
    """The memory of a process that is no file's, in bytes.

    Attributes:
        private: What nobody shares.
        shared: The rest, each page divided by the number of those who share it.
    """

    private: int
    shared: int


def footprint(pid: int) -> Footprint | None:
    """Measure a process; None if that is not possible."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it is gone, or another user's and root has not all its powers, or this is not Linux
        return None
    sizes = {fields[0]: 1024 * int(fields[1]) for line in lines[1:] if len(fields := line.split()) == 3}
    whole = sizes.get("Pss_Anon:", sizes.get("Pss:"))  # the first is younger
    private = sizes.get("Private_Dirty:")
    if whole is None or private is None:
        return None
    return Footprint(private, max(0, whole - private))


class Gauge:
    """Estimates the weight of processes in bytes."""

    def __init__(self, backend: Backend) -> None:
        """Weigh the processes of a backend."""
        self._backend = backend
        self._typical = 0.0
        self._turn = 0

    def weigh(self, process: Any) -> int:
        """Return the weight of a process that was just parked."""
        is_large = self._backend.growth(process) >= max(MEBIBYTE, 4 * self._typical)
        self._turn += 1
        if not is_large and self._typical and self._turn % _EVERY:
            return int(self._typical)
        weight = self._backend.memory(process)
        if not is_large:
            self._typical += ((weight - self._typical) / 4) if self._typical else weight
        return weight

    def weigh_again(self, process: Any) -> int:
        """Return the weight by measurement."""
        return self._backend.memory(process)
