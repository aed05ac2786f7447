"""A stateful Python tool: each state can be kept, branched and restored.

States are immutable. ``obs, after = state.step(code)`` leaves `state` unchanged whatever the cell
did, so every prefix of a session is a snapshot, and the death of a cell costs nothing. The durable
form of a state is its history: the cells and a hash of what each showed.

    with PythonTool(cell_timeout_s=5) as tool:
        start = tool.new(seed=0)
        seen, after = start.step("x = 3")

Who runs the cells is a matter of the backend (choice.py); how a state gets its process is in
sessions.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from trace_gym.envs.math.python_tool.backend import Limits
from trace_gym.envs.math.python_tool.choice import choose_backend, make_backend, most_live, snapshot_kind
from trace_gym.envs.math.python_tool.history import Lineage, Node, decode
from trace_gym.envs.math.python_tool.memory import MEBIBYTE
from trace_gym.envs.math.python_tool.sessions import Sessions
from trace_gym.envs.math.python_tool.state import State, new_state
from trace_gym.errors import BadInputError


class PythonTool:
    """The tool: starts its processes on first use, and ends every one of them on `close`.

    Attributes:
        backend: Name of the backend: ``fork``, ``replay`` or ``monty``.
        snapshot: ``"exact"`` if a kept state is all that was in memory, ``"replay"`` if it is made
            again from its cells when it goes on a second time.
        limits: The limits of a cell.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        allow_weak_isolation: bool = False,
        cell_timeout_s: float = 5.0,
        memory_mb: int = 2048,
        max_live: int = 512,
        memory_budget_mb: int = 4096,
        output_chars: int = 4000,
        max_running: int | None = None,
    ) -> None:
        """Set the limits; no process is started yet.

        Args:
            backend: ``fork`` (Linux, CPython, exact states in milliseconds), ``replay`` (CPython
                everywhere; a state that branches is rebuilt from its cells), ``monty`` (everywhere,
                exact states, a subset of Python without numpy and sympy; needs the extra
                ``monty``), or ``auto``, the best of them that isolates on this machine.
            allow_weak_isolation: Run the code even where this machine offers no confinement but
                resource limits or none: it can read your files and use your network then.
            cell_timeout_s: Seconds for one cell: in which it runs or sleeps, not those in which it
                waits for a CPU; wall-clock seconds where the system cannot tell, and with monty.
            memory_mb: Memory of a session, in MiB; the warm interpreter itself needs about 200.
            max_live: How many states keep a process; the least recently used beyond are rebuilt
                when needed. Lowered where the limit of open files asks for it.
            memory_budget_mb: How much memory these processes may take together, in MiB, by
                estimate; beyond it, too, the least recently used are rebuilt when needed.
            output_chars: Longest observation, in characters; the middle is left out.
            max_running: How many cells run at once; default one per CPU. More make them wait for
                each other.

        Raises:
            BadInputError: If an argument is out of range, or no backend fits.
            MissingExtraError: If monty is asked for and not installed.
        """
        for name, value, least in (
            ("cell_timeout_s", cell_timeout_s, 0.001),
            ("memory_mb", memory_mb, 256),
            ("max_live", max_live, 1),
            ("memory_budget_mb", memory_budget_mb, 1),
            ("output_chars", output_chars, 100),
            ("max_running", 1 if max_running is None else max_running, 1),
        ):
            if not value >= least:
                raise BadInputError(f"{name} must be at least {least}. Received {value}.")
        self.backend = choose_backend(backend, allow_weak_isolation)
        max_live = min(max_live, most_live(self.backend))
        self.limits = Limits(float(cell_timeout_s), int(memory_mb), int(output_chars), max_live)
        running = max_running or max(2, os.cpu_count() or 1)
        made = make_backend(self.backend, self.limits, running, allow_weak_isolation)
        self.snapshot = snapshot_kind(self.backend)
        self._settings = (self.backend, allow_weak_isolation, self.limits, memory_budget_mb, running)
        self._sessions = Sessions(made, self.limits, memory_budget_mb, running)

    def __enter__(self) -> PythonTool:
        """Return the tool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the tool."""
        self.close()

    @property
    def num_live(self) -> int:
        """How many states keep a process."""
        return len(self._sessions.live)

    @property
    def memory_mb(self) -> float:
        """How much memory these processes take together, in MiB, by estimate."""
        return self._sessions.live.weight / MEBIBYTE

    def new(self, seed: int = 0) -> State:
        """Return the start of a session; its process comes with the first cell.

        Args:
            seed: Seeds `random` and numpy; equal seeds give equal sessions.
        """
        return self._start(Node(Lineage(int(seed))), None)

    @contextmanager
    def tree(self, seed: int = 0) -> Iterator[State]:
        """Start a session as `new` does, and end every process that came of it on leaving the block."""
        state = self.new(seed)
        try:
            yield state
        finally:
            state.close_tree()

    def load(self, data: bytes) -> State:
        """Restore a state from its durable form by running its cells again.

        Args:
            data: What `State.to_bytes` returned, here or elsewhere, from a tool with the same
                ``output_chars``. Other versions of Python, numpy or sympy, or another backend, are
                fine as long as every cell shows the same.

        Raises:
            StateError: If the data is not a state of a known format.
            ReplayDivergenceError: If a cell showed something else than when the state was saved.
        """
        return self._start(*decode(data))

    def owns(self, state: State) -> bool:
        """Whether the state is one of this tool's, and the tool is open."""
        return state._sessions is self._sessions and not self._sessions.is_closed

    def close(self) -> None:
        """End every process of the tool; closing again does nothing."""
        self._sessions.close()

    def _start(self, node: Node, reseed: int | None) -> State:
        self._sessions.check_open()
        state = new_state(self._sessions, node, reseed)
        self._sessions.start(node)
        return state
