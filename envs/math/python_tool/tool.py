"""A stateful, forkable Python tool (Linux): each state can be kept, branched and restored.

States are immutable. ``obs, after = state.step(code)`` forks the parked process of `state`, runs
the cell in the child and parks that as `after`; `state` is unchanged whatever the cell did, so
every prefix of a session is a snapshot for free and the death of a cell costs nothing. The durable
form of a state is its history: the cells and a hash of what each showed. A state whose process is
gone (evicted, or restored from bytes) is rebuilt by running the missing cells again in a clone of
its nearest live ancestor, and every hash is compared.

    with PythonTool(cell_timeout_s=5) as tool:
        start = tool.new(seed=0)
        seen, after = start.step("x = 3")

Processes are handled in sandbox.py, and what confines them is in confine.py.
"""

from __future__ import annotations

import hashlib
import os
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from trace_gym.envs.math.python_tool.history import Cell, CellResult, Node, Status, decode, encode
from trace_gym.envs.math.python_tool.live import LiveSet
from trace_gym.envs.math.python_tool.sandbox import (
    Ending,
    Limits,
    Process,
    ProcessDiedError,
    Sandbox,
    SessionBrokenError,
)
from trace_gym.errors import BadInputError, InfrastructureError, ReplayDivergenceError, StateError

_MAX_CODE_CHARS = 200_000
_DIED = "the Python tool's own process died; it is started anew on the next use"
_DAMAGED = "The cell was not run: an earlier cell damaged the session's interpreter for good."
_UNDONE = ("timeout", "memory", "killed")
_REPLAY_PATIENCE = 4.0  # a cell that once ended in time may need longer on a busy machine


class State:
    """An immutable state of a session; made by `PythonTool.new` and `load`, `step` and `clone`.

    It may be stepped from several threads at once. Its process ends when the last handle to the
    state is closed or collected; states made from it live on.
    """

    def __init__(self, tool: PythonTool, node: Node, reseed: int | None) -> None:
        """Make a handle; not for users."""
        self._tool = tool
        self._node = node
        self._reseed = reseed
        self._release = weakref.finalize(self, tool._live.let_go, node)
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
        process = self._node.process
        return process is not None and process.is_alive

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
            StateError: If the state or the tool is closed.
        """
        if not self._release.alive:
            raise StateError("This state is closed. Step a clone of it that is open.")
        return self._tool._step(self, code, self._reseed if reseed is None else reseed)

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
        return [self._tool._handle(self._node, seed) for seed in seeds]

    def to_bytes(self) -> bytes:
        """Return the durable form for `PythonTool.load`: the seed, cells and hashes as JSON."""
        return encode(self._node, self._reseed)

    def close(self) -> None:
        """Let go of the process; closing again does nothing."""
        self._release()
        self._tool._live.sweep()

    def __reduce__(self) -> Any:
        """Refuse: a state belongs to a tool."""
        raise TypeError("A State cannot be pickled. Use to_bytes() and PythonTool.load().")

    def __repr__(self) -> str:
        """Show the key and the number of cells."""
        return f"State({self.key[:12]}, {self._node.depth} cells)"


class PythonTool:
    """The tool: starts its processes on first use, and ends every one of them on `close`."""

    def __init__(
        self,
        *,
        cell_timeout_s: float = 5.0,
        memory_mb: int = 2048,
        max_live: int = 512,
        output_chars: int = 4000,
        max_running: int | None = None,
    ) -> None:
        """Set the limits; no process is started yet.

        Args:
            cell_timeout_s: Wall-clock seconds for one cell.
            memory_mb: Address space of a session, in MiB; the warm interpreter itself needs about
                200.
            max_live: How many states keep a process; the least recently used beyond are rebuilt
                when needed. Lowered where the limit of open files asks for it, as each needs two.
            output_chars: Longest observation, in characters; the middle is left out.
            max_running: How many cells run at once; default one per CPU. More make wall-clock
                limits unfair.
        """
        for name, value, least in (
            ("cell_timeout_s", cell_timeout_s, 0.001),
            ("memory_mb", memory_mb, 256),
            ("max_live", max_live, 1),
            ("output_chars", output_chars, 100),
            ("max_running", 1 if max_running is None else max_running, 1),
        ):
            if not value >= least:
                raise BadInputError(f"{name} must be at least {least}. Received {value}.")
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if files != resource.RLIM_INFINITY:
            max_live = max(1, min(max_live, (files - 64) // 3))
        self.limits = Limits(float(cell_timeout_s), int(memory_mb), int(output_chars), max_live)
        self._max_running = max_running or max(2, os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._start_lock = threading.Lock()
        self._running = threading.BoundedSemaphore(self._max_running)
        self._rebuilding: weakref.WeakKeyDictionary[Node, threading.Lock]
        self._rebuilding = weakref.WeakKeyDictionary()
        self._live = LiveSet(max_live)
        self._sandbox: Sandbox | None = None
        self._closed = False
        _tools.add(self)
        self._sandboxes: list[Sandbox] = []
        weakref.finalize(self, _close_all, self._live, self._sandboxes)

    def __enter__(self) -> PythonTool:
        """Return the tool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the tool."""
        self.close()

    def new(self, seed: int = 0) -> State:
        """Start a session.

        Args:
            seed: Seeds `random` and numpy; equal seeds give equal sessions.

        Raises:
            InfrastructureError: If the tool's processes cannot be started.
        """
        self._check_open()
        return self._start(Node(None, None, int(seed)), None)

    def load(self, data: bytes) -> State:
        """Restore a state from its durable form by running its cells again.

        Args:
            data: What `State.to_bytes` returned, here or in another process, from a tool with the same
                ``output_chars``.

        Raises:
            StateError: If the data is not a state of a known version.
            ReplayDivergenceError: If a cell showed something else than when the state was saved.
        """
        self._check_open()
        return self._start(*decode(data))

    def owns(self, state: State) -> bool:
        """Whether the state is one of this tool's, and the tool is open."""
        return state._tool is self and not self._closed

    def close(self) -> None:
        """End every process of the tool; closing again does nothing."""
        with self._start_lock:
            self._closed = True
            self._sandbox = None
            _close_all(self._live, self._sandboxes)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("The Python tool is closed. Make a new PythonTool.")

    def _start(self, node: Node, reseed: int | None) -> State:
        state = self._handle(node, reseed)
        try:
            with self._live.pinned(node):
                self._ensure_live(node)
        except SessionBrokenError as error:
            reason = f"a session did not start: {error}"
            raise InfrastructureError("sandbox_fork", reason) from error
        return state

    def _handle(self, node: Node, reseed: int | None) -> State:
        self._live.hold(node)
        return State(self, node, reseed)

    def _step(self, state: State, code: str, reseed: int | None) -> tuple[CellResult, State]:
        self._check_open()
        node = state._node
        if not isinstance(code, str):
            raise BadInputError(f"code must be a str. Received {type(code).__name__}.")
        if len(code) > _MAX_CODE_CHARS:
            text = f"The cell was not run: it has more than {_MAX_CODE_CHARS} characters."
            return CellResult(text, "error"), state
        with self._live.pinned(node):
            try:
                child = self._fork(node)
            except SessionBrokenError:
                return CellResult(_DAMAGED, "killed"), state
            try:
                result = self._run(child, code, node.depth + 1, self.limits.cell_timeout_s, reseed)
                if result.status in _UNDONE:
                    self._blame(child, result.status)
                    return result, state
                after = Node(node, Cell(code, result.digest, reseed), node.seed)
                following = self._handle(after, None)
                self._park(after, child)
            except BaseException:
                child.kill()
                raise
        return result, following

    def _run(self, process: Process, code: str, number: int, timeout_s: float, reseed: int | None) -> CellResult:
        with self._running:
            ending = process.run(code, number, self.limits, timeout_s, reseed)
        return self._result(ending)

    def _result(self, ending: Ending) -> CellResult:
        limits = self.limits
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

    def _park(self, node: Node, process: Process) -> None:
        self._check_open()
        self._live.park(node, process)
        if self._closed:  # since the line before; whoever closed did not see the process
            self._live.clear()

    def _blame(self, child: Process, status: str) -> None:
        """Raise if a cell died of the death of the tool, unless it could have caused that."""
        if status != "killed" or child.zygote.is_alive:
            return
        self._check_open()
        if child.is_isolated:
            self._raise_if_sandbox_died(None)
            raise InfrastructureError("sandbox_died", _DIED)

    def _fork(self, node: Node) -> Process:
        """Fork the process of a pinned node, rebuilding it first where it is gone."""

        def fork() -> Process:
            process = self._ensure_live(node)
            child = process.fork()
            self._live.touch(node)
            return child

        return self._twice(fork, node)

    def _ensure_live(self, node: Node) -> Process:
        """Return the process of a pinned node, rebuilding it if needed."""
        with self._lock:
            lock = self._rebuilding.setdefault(node, threading.Lock())
        with lock:
            process = node.process
            if process is not None and process.is_alive:
                return process
            return self._twice(lambda: self._rebuild(node), node)

    def _twice(self, attempt: Callable[[], Process], node: Node) -> Process:
        """Try again where a process turned out to be dead, or too many stand in the way."""
        try:
            return attempt()
        except ProcessDiedError as error:
            self._raise_if_sandbox_died(error)
            self._live.halve(node)
        try:
            return attempt()
        except SessionBrokenError as error:
            self._raise_if_sandbox_died(error)
            raise
        except ProcessDiedError as error:
            self._raise_if_sandbox_died(error)
            reason = f"a session could not be forked: {error}"
            raise InfrastructureError("sandbox_fork", reason) from error

    def _rebuild(self, node: Node) -> Process:
        """Run the cells from the nearest live ancestor to the node, in one clone of it."""
        path = node.path()
        start = len(path) - 1
        zygote = self._ready_sandbox().zygote
        while start >= 0 and not _stands(path[start]):
            start -= 1
        if start < 0:
            process = zygote.fork(seed=node.seed)
        else:
            with self._live.pinned(path[start]):
                ancestor = path[start].process
                if ancestor is None:
                    raise ProcessDiedError("it was evicted just now")
                process = ancestor.fork()
        try:
            for step in path[max(start, 0) + 1 :]:
                self._repeat(process, step)
            self._park(node, process)
        except BaseException:
            process.kill()
            raise
        return process

    def _repeat(self, process: Process, step: Node) -> None:
        if step.cell is None:
            return
        patience = _REPLAY_PATIENCE * self.limits.cell_timeout_s
        result = self._run(process, step.cell.code, step.depth, patience, step.cell.reseed)
        self._blame(process, result.status)
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
            )

    def _ready_sandbox(self) -> Sandbox:
        """Return the processes everything is forked from; start them if there are none."""
        with self._start_lock:
            self._check_open()
            if self._sandbox is None:
                self._sandbox = Sandbox(self.limits)
                self._sandboxes.append(self._sandbox)
            return self._sandbox

    def _raise_if_sandbox_died(self, cause: Exception | None) -> None:
        """Say so once, and forget the dead sandbox, so that the next use starts another."""
        with self._start_lock:
            sandbox = self._sandbox
            if sandbox is None or sandbox.is_alive:
                return
            self._sandbox = None
            _close_all(self._live, self._sandboxes)
        raise InfrastructureError("sandbox_died", _DIED) from cause

    def _reset_after_fork(self) -> None:
        """In a forked copy of the driver: forget the parent's processes; own ones start later."""
        self._lock = threading.Lock()
        self._start_lock = threading.Lock()
        self._running = threading.BoundedSemaphore(self._max_running)
        self._rebuilding = weakref.WeakKeyDictionary()
        self._sandbox = None
        self._live.reset_after_fork()
        _close_all(self._live, self._sandboxes)  # only our copies of the descriptors


def _stands(node: Node) -> bool:
    return node.process is not None and node.process.is_alive


def _close_all(live: LiveSet, sandboxes: list[Sandbox]) -> None:
    live.clear()
    while sandboxes:
        sandboxes.pop().close()


_tools: weakref.WeakSet[PythonTool] = weakref.WeakSet()


def _reset_tools() -> None:
    for tool in list(_tools):
        tool._reset_after_fork()


os.register_at_fork(after_in_child=_reset_tools)
