"""How long a cell may run: its own time, so that the load of the machine decides nothing.

A cell's own time is the CPU time of its process, and the time that the process slept. Not its own is the time for which
it was kept waiting for a CPU. The driver looks every now and then; cells shorter than a twentieth of a second cost no
look. The backstop, for a process that gets almost no CPU or hangs in the kernel, is wall-clock time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

WALL_FACTOR = 10.0  # the backstop is this many budgets of wall-clock time,
WALL_EXTRA_S = 1.0  # and this much more
_LOOKS = 50  # in a cell that uses up its budget undisturbed,
_LOOK_S, _SHORTEST_LOOK_S = 0.05, 0.005  # but not too often


class DeadlineError(Exception):
    """The deadline passed before what was waited for was there."""


class Deadline:
    """A moment of wall-clock time after which nobody waits any more."""

    def __init__(self, seconds: float) -> None:
        """End `seconds` from now."""
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return for how many seconds one may wait before asking again.

        Raises:
            DeadlineError: If it is over.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineError
        return left


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time that a process has used, or None where that cannot be known."""
    if sys.platform != "linux":
        return None
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the kernel's id for the CPU clock of another process
    except OSError:
        return None


def _is_asleep(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat[stat.rindex(b")") + 2 :][:1] == b"S"


class CellClock(Deadline):
    """The deadline of one cell."""

    def __init__(self, pid: int, budget_s: float) -> None:
        """Start now.

        Args:
            pid: The process that runs the cell.
            budget_s: Seconds of its own.
        """
        super().__init__(WALL_FACTOR * budget_s + WALL_EXTRA_S)
        used = cpu_seconds(pid)
        self._pid = pid
        self._budget = budget_s
        self._used = used or 0.0
        self._own = 0.0
        self._is_told = used is not None
        self._is_gone = False
        self._interval = max(_LOOK_S, budget_s / _LOOKS)
        self._last_look = time.monotonic()
        self._next_look = self._last_look + min(self._interval, budget_s)

    def left(self) -> float:
        """Return for how many seconds the cell may be left alone.

        Raises:
            DeadlineError: If its own time is used up, or the backstop is reached.
        """
        backstop = super().left()
        now = time.monotonic()
        if now >= self._next_look:
            self._look(now)
            if self._own >= self._budget:
                raise DeadlineError
            self._next_look = now + min(max(self._budget - self._own, _SHORTEST_LOOK_S), self._interval)
        return min(self._next_look - now, backstop)

    def _look(self, now: float) -> None:
        used = cpu_seconds(self._pid)
        if used is not None:
            self._own += now - self._last_look if _is_asleep(self._pid) else used - self._used
            self._used = used
        elif not self._is_told:  # this system does not tell: the wall clock has to do
            self._own += now - self._last_look
        elif self._is_gone:  # and whoever holds its socket is not asked
            self._own = self._budget
        else:
            self._is_gone = True
        self._last_look = now
