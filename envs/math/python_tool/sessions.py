"""How a state gets its process: stepping, rebuilding and evicting, for every backend.

With a backend that can fork, a step forks the parked process of the state, runs the cell in the
child and parks that as the new state; the first one is unchanged whatever the cell did. With one
that cannot, a step takes the process along to the new state, and the first state is rebuilt if
anyone comes back to it. Rebuilding runs the missing cells again from the nearest live ancestor and
compares what each showed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from trace_gym.envs.math.python_tool.backend import (
    Backend,
    Ending,
    Limits,
    Process,
    ProcessDiedError,
    SessionBrokenError,
)
from trace_gym.envs.math.python_tool.history import Cell, CellResult, Lineage, Node, Status, differences
from trace_gym.envs.math.python_tool.live import LiveSet
from trace_gym.envs.math.python_tool.memory import MEBIBYTE, Gauge
from trace_gym.errors import BadInputError, InfrastructureError, ReplayDivergenceError, StateError

_MAX_CODE_CHARS = 200_000
_DIED = "the Python tool's own process died; it is started anew on the next use"
_DAMAGED = "The cell was not run: an earlier cell damaged the session's interpreter for good."
_UNDONE = ("timeout", "memory", "killed")
_REPLAY_PATIENCE = 4.0  # a cell that once ended in time may need longer on a busy machine


class Sessions:
    """The sessions of a tool, each a tree of nodes, and the processes parked at some of them."""

    def __init__(self, backend: Backend, limits: Limits, memory_budget_mb: int, max_running: int) -> None:
        """Run cells on a backend; its first process starts with the first session."""
        self.backend = backend
        self.limits = limits
        self.live = LiveSet(limits.max_live, memory_budget_mb * MEBIBYTE, Gauge(backend))
        self.is_closed = False
        self.made_with = {**backend.versions(), "output_chars": str(limits.output_chars)}
        self._max_running = max_running
        self._new_locks()
        _all.add(self)
        weakref.finalize(self, _close, self.live, backend)

    def _new_locks(self) -> None:
        self._lock = threading.Lock()
        self._running = threading.BoundedSemaphore(self._max_running)
        self._rebuilding: weakref.WeakKeyDictionary[Node, threading.Lock]
        self._rebuilding = weakref.WeakKeyDictionary()

    def start(self, node: Node) -> None:
        """Give the node a process, by running its cells; without any it is given one with the first.

        Raises:
            InfrastructureError: If the backend's processes cannot be started.
            ReplayDivergenceError: If a cell shows something else than the node's history says.
            StateError: If the tool is closed.
        """
        if node.cell is None:
            return
        try:
            with self.live.pinned(node):
                self._ensure_live(node)
        except SessionBrokenError as error:
            reason = f"a session did not start: {error}"
            raise InfrastructureError("sandbox_fork", reason) from error

    def step(self, node: Node, code: str, reseed: int | None) -> tuple[CellResult, Node]:
        """Run a cell after a node; return what it showed and where that leads: the node itself if it was undone."""
        self.check_open(node.lineage)
        if not isinstance(code, str):
            raise BadInputError(f"code must be a str. Received {type(code).__name__}.")
        if len(code) > _MAX_CODE_CHARS:
            text = f"The cell was not run: it has more than {_MAX_CODE_CHARS} characters."
            return CellResult(text, "error"), node
        with self.live.pinned(node):
            try:
                process = self._process_for_step(node)
            except SessionBrokenError:
                return CellResult(_DAMAGED, "killed"), node
            try:
                result = self._run(process, node, code, self.limits.cell_timeout_s, reseed)
                if result.status in _UNDONE:
                    return result, node
                after = Node(node.lineage, node, Cell(code, result.digest, reseed))
                self.live.hold(after)  # for the handle that the caller makes of it
                self._park(after, process)
            except BaseException:
                process.kill()
                raise
        return result, after

    def end(self, lineage: Lineage) -> None:
        """End every process of a tree, those with a running cell too; its states are closed then."""
        lineage.is_closed = True
        self.live.end(lineage)
        for process in list(lineage.running):
            process.kill()

    def close(self) -> None:
        """End every process."""
        self.is_closed = True
        _close(self.live, self.backend)

    def check_open(self, lineage: Lineage | None = None) -> None:
        """Raise if the tool or the tree is closed.

        Raises:
            StateError: If so.
        """
        if self.is_closed:
            raise StateError("The Python tool is closed. Make a new PythonTool.")
        if lineage is not None and lineage.is_closed:
            raise StateError("The tree of this state is closed. Start another session.")

    def reset_after_fork(self) -> None:
        """In a forked copy of the driver: forget the original's processes; own ones start later."""
        self._new_locks()
        self.live.reset_after_fork()
        self.live.end()  # only our copies of the descriptors
        if not self.is_closed:
            self.backend.forget()

    # Running.

    def _run(self, process: Process, node: Node, code: str, timeout_s: float, reseed: int | None) -> CellResult:
        """Run a cell in the process of a node."""
        running = node.lineage.running
        running.add(process)
        try:
            self.check_open(node.lineage)  # whoever closes it from here on sees the process
            with self._running:
                ending = process.run(code, node.depth + 1, self.limits, timeout_s, reseed)
        finally:
            running.discard(process)
        if ending.status == "killed":
            self.check_open(node.lineage)
            if self.backend.is_to_blame(process):
                self._raise_if_backend_died(None)
                raise InfrastructureError("sandbox_died", _DIED)
        return _result(ending, self.limits)

    def _park(self, node: Node, process: Process) -> None:
        self.check_open(node.lineage)
        self.live.park(node, process)
        if self.is_closed or node.lineage.is_closed:  # since the line before last; the closer did not see it
            self.live.end(node.lineage)

    # Processes.

    def _process_for_step(self, node: Node) -> Process:
        """Return a process of the caller's own in the state of a pinned node."""
        if not self.backend.can_fork or node.cell is None:  # of a start there are copies enough
            return self.live.take(node) or self._twice(lambda: self._rebuilt(node), node)

        def fork() -> Process:
            process = self._ensure_live(node)
            child = self.backend.fork(process)
            self.live.touch(node)
            return child

        return self._twice(fork, node)

    def _ensure_live(self, node: Node) -> Process:
        """Return the process parked at a pinned node, rebuilding it if needed."""
        with self._lock:
            lock = self._rebuilding.setdefault(node, threading.Lock())
        with lock:
            process = node.process
            if process is not None and process.is_alive:
                return process
            process = self._twice(lambda: self._rebuilt(node), node)
            try:
                self._park(node, process)
            except BaseException:
                process.kill()
                raise
            return process

    def _twice(self, attempt: Callable[[], Process], node: Node) -> Process:
        """Try again where a process turned out to be dead, or too many stand in the way."""
        try:
            return attempt()
        except ProcessDiedError as error:
            self._raise_if_backend_died(error)
            if not isinstance(error, SessionBrokenError):  # one broken session costs the others nothing
                self.live.halve(node)
        try:
            return attempt()
        except SessionBrokenError as error:
            self._raise_if_backend_died(error)
            raise
        except ProcessDiedError as error:
            self._raise_if_backend_died(error)
            reason = f"a session could not be started: {error}"
            raise InfrastructureError("sandbox_fork", reason) from error

    def _rebuilt(self, node: Node) -> Process:
        """Return a new process for a node, by running the cells that lead to it from the nearest live ancestor."""
        path = node.path()
        self.check_open(node.lineage)
        process, done = self._from_ancestor(path)
        if process is None:
            process = self.backend.start(node.lineage.seed)
        try:
            for step in path[done + 1 :]:
                self._repeat(process, step)
        except BaseException:
            process.kill()
            raise
        return process

    def _from_ancestor(self, path: list[Node]) -> tuple[Process | None, int]:
        """Return a process of the caller's own in the last state of a path where one stands, and its place."""
        for place in range(len(path) - 1, -1, -1):
            node = path[place]
            if not self.backend.can_fork:
                process = self.live.take(node)
                if process is not None:
                    return process, place
            elif node.stands:
                with self.live.pinned(node):
                    parked = node.process
                    if parked is None:
                        raise ProcessDiedError("it was evicted just now")
                    return self.backend.fork(parked), place
        return None, 0

    def _repeat(self, process: Process, step: Node) -> None:
        """Run the cell of a node again, in a process that stands before it."""
        if step.cell is None or step.parent is None:
            return
        patience = _REPLAY_PATIENCE * self.limits.cell_timeout_s
        result = self._run(process, step.parent, step.cell.code, patience, step.cell.reseed)
        if result.status in _UNDONE:
            raise InfrastructureError(
                "sandbox_replay",
                f"cell {step.depth} of a session did not end well again: {result.text}",
            )
        if result.digest != step.cell.digest:
            raise ReplayDivergenceError(
                f"Cell {step.depth} showed something else when it was run again: expected a hash "
                f"{step.cell.digest[:12]}, got {result.digest[:12]} ({result.text[:200]!r}). Cells "
                "that depend on time, addresses or unseeded randomness cannot be run again."
                + differences(step.lineage.made_with, self.made_with)
            )

    def _raise_if_backend_died(self, cause: Exception | None) -> None:
        """Say so once; the backend starts anew on the next use."""
        if self.backend.recover():
            self.live.end()
            raise InfrastructureError("sandbox_died", _DIED) from cause


def _result(ending: Ending, limits: Limits) -> CellResult:
    text, status = ending.text.rstrip("\n"), ending.status
    note = {
        "timeout": f"TimeoutError: the cell ran longer than {limits.cell_timeout_s:g} s",
        "memory": f"MemoryError: the cell needed more than {limits.memory_mb} MB",
        "killed": f"The cell was killed: {ending.reason}",
    }.get(status)
    if note:
        text += ("\n" if text else "") + f"{note}. The session is as before this cell."
    if status == "ok" and ending.is_cut:
        status = "truncated"
    kind: Status = status  # type: ignore[assignment]  # one of the names above
    return CellResult(text or "(no output)", kind)


def _close(live: LiveSet, backend: Backend) -> None:
    live.end()
    backend.close()


_all: weakref.WeakSet[Sessions] = weakref.WeakSet()


def _reset_all() -> None:
    for sessions in list(_all):
        sessions.reset_after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_all)
