"""How long one comparison may take: a second of CPU time, so that the machine's load decides nothing.

The backstop is wall-clock time, which begins with the wait for a worker: nobody waits for a verdict for two seconds.
"""

from __future__ import annotations

import time

from trace_gym.envs.math.python_tool.clock import Deadline, DeadlineError, cpu_seconds

__all__ = ["BUDGET_S", "SEND_S", "START_S", "WALL_S", "Deadline", "DeadlineError", "GradeClock", "WorkerDiedError"]

START_S = 120.0  # for a process to import what it needs, if there is time to wait for that
SEND_S = 30.0  # for the warm process to take a request
BUDGET_S = 1.0  # of CPU time
WALL_S = 1.8  # the backstop
_LOOK_S = 0.05  # between looks at the CPU time once it could be used up
_SHORTEST_LOOK_S = 0.005


class WorkerDiedError(Exception):
    """A worker ended by itself, or never came."""


class GradeClock:
    """The deadline of one comparison.

    Attributes:
        is_spent: Whether the worker used up its CPU time, or may have: not every system tells.
    """

    def __init__(self, pid: int, limit: Deadline) -> None:
        """Start now.

        Args:
            pid: The worker's process.
            limit: The backstop.
        """
        self._limit = limit
        self._pid = pid
        self._sure_until = time.monotonic() + BUDGET_S  # not even a CPU of its own makes it too long before
        self._used_before = cpu_seconds(pid)
        self.is_spent = self._used_before is None

    def left(self) -> float:
        """Return for how many seconds one may wait before asking again.

        Raises:
            DeadlineError: If the CPU time is used up, or the backstop is reached.
        """
        backstop = self._limit.left()
        sure = self._sure_until - time.monotonic()
        if sure > 0:
            return min(sure, backstop)
        used = cpu_seconds(self._pid)
        if used is None or self._used_before is None:
            return min(_LOOK_S, backstop)
        rest = BUDGET_S - (used - self._used_before)
        if rest <= 0:
            self.is_spent = True
            raise DeadlineError
        return min(max(rest, _SHORTEST_LOOK_S), _LOOK_S, backstop)
