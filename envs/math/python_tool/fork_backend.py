"""The backend of Linux: sessions forked from a warm interpreter.

Keeps exactly everything a session has in memory; a fork costs a few milliseconds. What is lost when
a state goes on: open files and sockets, of which sessions have none, and its own process id.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import ClassVar

from trace_gym.envs.math.python_tool.backend import Limits
from trace_gym.envs.math.python_tool.history import python_versions
from trace_gym.envs.math.python_tool.memory import DIRTIED_BYTES, KERNEL_BYTES, anonymous_bytes, footprint
from trace_gym.envs.math.python_tool.sandbox import Process, Sandbox
from trace_gym.errors import StateError


class ForkBackend:
    """Forks sessions from the zygote of a `Sandbox`, which starts with the first session."""

    can_fork: ClassVar[bool] = True

    def __init__(self, limits: Limits) -> None:
        """Start nothing yet."""
        self._limits = limits
        self._is_closed = False
        self.sandbox: Sandbox | None = None
        self._new_lock()

    def _new_lock(self) -> None:
        self._lock = threading.Lock()

    def start(self, seed: int) -> Process:
        """Fork a session from the zygote."""
        return self._ready().zygote.fork(seed=seed)

    def fork(self, process: Process) -> Process:
        """Fork a session, seeds and all."""
        return process.fork()

    def is_to_blame(self, process: Process) -> bool:
        """Whether the zygote is dead, and the process could not reach it."""
        return not process.zygote.is_alive and process.is_isolated

    def recover(self) -> bool:
        """Clear away a sandbox that died."""
        with self._lock:
            if self.sandbox is None or self.sandbox.is_alive:
                return False
            sandbox, self.sandbox = self.sandbox, None
        sandbox.close()
        return True

    def growth(self, process: Process) -> int:
        """Compare its own pages with the zygote's; those written since do not show in this."""
        return anonymous_bytes(process.pid) - self._common

    def memory(self, process: Process) -> int:
        """Return the proportional set size, without what it has in common with the zygote."""
        own, zygote = footprint(process.pid), footprint(process.zygote.pid)
        if own is None or zygote is None:
            return max(0, self.growth(process)) + DIRTIED_BYTES
        return own.private + max(0, own.shared - zygote.shared) + KERNEL_BYTES

    def versions(self) -> Mapping[str, str]:
        """Return the versions of Python and its libraries."""
        return python_versions()

    def forget(self) -> None:
        """In a forked copy of the driver: leave the original's sandbox alone."""
        self._new_lock()
        sandbox, self.sandbox = self.sandbox, None
        if sandbox is not None:
            sandbox.close()  # knows that it is not ours

    def close(self) -> None:
        """End everything that came of the zygote."""
        with self._lock:
            self._is_closed = True
            sandbox, self.sandbox = self.sandbox, None
            if sandbox is not None:
                sandbox.close()

    def _ready(self) -> Sandbox:
        with self._lock:
            if self._is_closed:
                raise StateError("The Python tool is closed. Make a new PythonTool.")
            if self.sandbox is None:
                self.sandbox = Sandbox(self._limits)
                self._common = anonymous_bytes(self.sandbox.zygote.pid)
            return self.sandbox
