"""The handle of a state: what a user steps, clones and saves."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

from trace_gym.envs.math.python_tool.history import Cell, CellResult, Node, encode
from trace_gym.envs.math.python_tool.sessions import Sessions
from trace_gym.errors import BadInputError, StateError


class State:
    """An immutable state of a session; made by `PythonTool.new` and `load`, `step` and `clone`.

    It may be stepped from several threads at once. Its process ends when the last handle to the
    state is closed or collected; states made from it live on.
    """

    def __init__(self, sessions: Sessions, node: Node, reseed: int | None) -> None:
        """Make a handle of a node on which it has been counted already; not for users."""
        self._sessions = sessions
        self._node = node
        self._reseed = reseed
        self._release = weakref.finalize(self, sessions.live.let_go, node)
        self._release.atexit = False

    @property
    def history(self) -> tuple[Cell, ...]:
        """The cells that lead here, with hashes of what they showed."""
        return tuple(node.cell for node in self._node.path() if node.cell is not None)

    @property
    def key(self) -> str:
        """Content hash of the seed, the cells, and what they showed."""
        if self._reseed is None:
            return self._node.key
        return hashlib.sha256(f"{self._node.key} {self._reseed}".encode()).hexdigest()

    @property
    def is_live(self) -> bool:
        """Whether a process stands ready; if not, the next step rebuilds it."""
        return self._node.stands

    def step(self, code: str, reseed: int | None = None) -> tuple[CellResult, State]:
        """Run a cell after this state.

        Args:
            code: Python source. A markdown fence around all of it is taken off.
            reseed: Seeds `random` and numpy before the cell; without it, every step from this state
                sees the same random numbers.

        Returns:
            What the cell showed, and the state after it; this very state if the cell was undone.

        Raises:
            InfrastructureError: With kind ``sandbox_died``, if the tool's own processes are gone.
            ReplayDivergenceError: If the state had to be rebuilt and its cells showed something
                else this time.
            StateError: If the state, its tree or the tool is closed.
        """
        if not self._release.alive:
            raise StateError("This state is closed. Step a clone of it that is open.")
        result, node = self._sessions.step(self._node, code, self._reseed if reseed is None else reseed)
        return result, self if node is self._node else State(self._sessions, node, None)

    def clone(self, n: int = 1, reseed: Sequence[int | None] | None = None) -> list[State]:
        """Make `n` independent handles of this state.

        States are immutable, so the clones share the parked process until one of them steps.

        Args:
            n: How many.
            reseed: One seed per clone for its next step, where the clones should differ in random
                numbers.
        """
        if not self._release.alive:
            raise StateError("This state is closed. Clone it before closing it.")
        seeds = [self._reseed] * n if reseed is None else list(reseed)
        if len(seeds) != n:
            raise BadInputError(f"reseed needs one seed per clone: {n} clones, {len(seeds)} seeds.")
        return [new_state(self._sessions, self._node, seed) for seed in seeds]

    def to_bytes(self) -> bytes:
        """Return the durable form for `PythonTool.load`: the seed, cells and hashes as JSON."""
        return encode(self._node, self._reseed, self._sessions.made_with)

    def close(self) -> None:
        """Let go of the process; closing again does nothing."""
        self._release()
        self._sessions.live.sweep()

    def close_tree(self) -> None:
        """End the processes of all states of this session, also while cells run; they are closed then."""
        self._sessions.end(self._node.lineage)

    def __reduce__(self) -> Any:
        """Refuse: a state belongs to a tool."""
        raise TypeError("A State cannot be pickled. Use to_bytes() and PythonTool.load().")

    def __repr__(self) -> str:
        """Show the key and the number of cells."""
        return f"State({self.key[:12]}, {self._node.depth} cells)"


def new_state(sessions: Sessions, node: Node, reseed: int | None) -> State:
    """Make one more handle of a node."""
    sessions.live.hold(node)
    return State(sessions, node, reseed)
