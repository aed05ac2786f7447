"""What the state tree needs of whoever runs the cells: a backend makes processes, a process runs cells.

Three backends implement it: `ForkBackend` (Linux), `ReplayBackend` (everywhere) and `MontyBackend`
(everywhere, another interpreter). Sessions that descend from one `start` are a lineage; whatever a
cell does harms its own lineage at most.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


class ProcessDiedError(Exception):
    """A session is gone, or was killed for breaking the protocol; the message says how."""


class SessionBrokenError(ProcessDiedError):
    """The same, where the session itself is at fault: it ended or garbled the conversation."""


@dataclass(frozen=True)
class Limits:
    """What a cell and a tool may use.

    Attributes:
        cell_timeout_s: Seconds for one cell.
        memory_mb: Memory of a session, in MiB.
        output_chars: Longest observation, in characters.
        max_live: How many states keep a process.
    """

    cell_timeout_s: float
    memory_mb: int
    output_chars: int
    max_live: int

    def to_dict(self) -> dict[str, int]:
        """Return what the processes need to know."""
        return {
            "memory_mb": self.memory_mb,
            "output_chars": self.output_chars,
            "max_processes": self.max_live + 256,
        }

    def to_json(self) -> str:
        """Return the same as JSON."""
        return json.dumps(self.to_dict())


@dataclass(frozen=True)
class Ending:
    """How a cell ended and what it printed.

    Attributes:
        status: ``ok``, ``error``, ``memory``, ``timeout`` or ``killed``.
        text: The output, capped.
        is_cut: Whether output was left out of the text.
        reason: For a killed cell: how it died.
    """

    status: str
    text: str
    is_cut: bool
    reason: str = ""


class Process(Protocol):
    """Holds the state of a session; belongs to whoever got it, and is used by one thread at a time."""

    @property
    def is_alive(self) -> bool:
        """Whether it still holds its state."""
        ...

    def run(self, code: str, number: int, limits: Limits, timeout_s: float, seed: int | None = None) -> Ending:
        """Run a cell; on every status but ``ok`` and ``error`` the process is dead afterwards.

        Args:
            code: The source.
            number: Which cell of its session this is, from 1.
            limits: The cap of the output.
            timeout_s: Seconds for the cell.
            seed: Reseeds the random generators before the cell.
        """
        ...

    def kill(self) -> None:
        """End it; does nothing the second time. May be called while another thread waits in `run`."""
        ...


class Backend(Protocol):
    """Makes processes.

    Attributes:
        can_fork: Whether `fork` works; if not, a process can only go on to its next state.
    """

    can_fork: ClassVar[bool]

    def start(self, seed: int) -> Process:
        """Return a process at the start of a session.

        Args:
            seed: Seeds the random generators.

        Raises:
            ProcessDiedError: If it did not come up.
            InfrastructureError: If the backend's own processes do not.
            StateError: If the backend is closed.
        """
        ...

    def fork(self, process: Any) -> Process:
        """Return another process in the same state; several threads may ask for one at once.

        Raises:
            ProcessDiedError: If the process or its copy is gone.
        """
        ...

    def is_to_blame(self, process: Any) -> bool:
        """Whether a process died because the backend did, and its cell cannot have caused that."""
        ...

    def recover(self) -> bool:
        """Forget the backend's own processes if they died, so that the next use starts others.

        Returns:
            Whether they had died since the last call.
        """
        ...

    def growth(self, process: Any) -> int:
        """Return quickly at most how many bytes a process needs beyond those all have in common."""
        ...

    def memory(self, process: Any) -> int:
        """Return how many bytes a process needs, shared ones split among those who share them."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Return what decides how a cell behaves: versions by name."""
        ...

    def forget(self) -> None:
        """In a forked copy of the driver: leave the original's processes alone; own ones start later."""
        ...

    def close(self) -> None:
        """End every process it made, those with a running cell too."""
        ...


def ending_by_signal(number: int) -> tuple[str, str]:
    """Return the status and the reason of a cell whose process a signal ended."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # not every number has a name
        name = f"signal {number}"
    if name == "SIGXCPU":
        return "timeout", ""
    hint = " (too deep a recursion, or a fault in C code)" if name == "SIGSEGV" else ""
    return "killed", f"its process died of {name}{hint}"
