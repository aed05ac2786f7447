"""The backend whose interpreter is a sandbox: pydantic-monty, on every system.

A state is monty's own dump of the interpreter, so it is kept exactly, a copy costs nothing, and no process waits
anywhere: a cell is run by a worker that loads the dump before and dumps after. The language is a subset of Python
(no classes that inherit, no generators, no `with`, no `del`; few modules, neither numpy nor sympy) and has no way to
files, processes or the network. Dumps are never stored: what outlives the driver is the history, as everywhere.

A cell is given its time by monty, by the wall clock; also when it is run again to rebuild a state. Sleeping takes no
time.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any, ClassVar

from trace_gym.envs.math.python_tool.backend import Ending, Limits, ProcessDiedError
from trace_gym.envs.math.python_tool.explain import explain
from trace_gym.envs.math.python_tool.memory import MEBIBYTE
from trace_gym.envs.math.python_tool.refusals import NO_INPUT
from trace_gym.envs.math.python_tool.screen import Screen, memory_size, read_screen
from trace_gym.envs.math.python_tool.source import parse, plain
from trace_gym.errors import InfrastructureError, StateError, require

_PRELUDE = f"""
def exit(code=None):
    if code is None or code == 0:
        raise SystemExit
    raise SystemExit(str(code))
quit = exit
def input(prompt=''):
    raise RuntimeError({NO_INPUT!r})
def display(*values):
    for value in values:
        print(repr(value))
def __show__(value):
    if value is not None:
        print(repr(value))
    return value
def __reseed__(seed):
    import random
    random.seed(seed)
"""
_SHOW = "_ = __show__(("
_FEED = re.compile(r"<python-input-(\d+)>")
_MAX_FRAMES = 4
_LINE_CHARS = 200

Feeds = tuple[tuple[int, int], ...]  # for each text given to the interpreter: number of its cell, lines put before it


def _program(tree: ast.Module, last: ast.Expr | None, text: list[str]) -> tuple[str, int]:
    """Return a text that also shows the value of the last expression, and how many lines were put before it."""
    lines = [line.encode() for line in text]
    if last is not None:
        first, end = last.lineno - 1, last.end_lineno or last.lineno
        expression = lines[first:end]
        expression[-1] = expression[-1][: last.end_col_offset]
        before = lines[first][: last.col_offset]
        expression[0] = expression[0][last.col_offset :]
        lines[first:] = [before + _SHOW.encode() + b"\n".join(expression) + b"\n))"]
    statements = [*tree.body, *([last] if last is not None else [])]
    shift = int(bool(statements) and statements[0].col_offset > 0)  # an indented cell
    head = [b"if True:"] if shift else []
    # Without a statement, monty would not count the text.
    return b"\n".join([*head, *lines, b"None"]).decode(), shift


class MontyProcess:
    """A state as a dump, and the running of a cell from it."""

    def __init__(self, backend: MontyBackend, dump: bytes, feeds: Feeds) -> None:
        """Hold a dump."""
        self._backend = backend
        self._feeds = feeds
        self._lock = threading.Lock()  # of the two below
        self._worker = 0
        self.dump: bytes | None = dump

    @property
    def is_alive(self) -> bool:
        """Whether it holds a state."""
        return self.dump is not None

    def copy(self) -> MontyProcess:
        """Return another in the same state."""
        dump = self.dump
        if dump is None:
            raise ProcessDiedError("the state was let go of")
        return MontyProcess(self._backend, dump, self._feeds)

    def run(self, code: str, number: int, limits: Limits, timeout_s: float, seed: int | None = None) -> Ending:
        """Run a cell; see `backend.Process.run`."""
        half = 2 * limits.output_chars
        memory = bytearray(memory_size(half))
        screen = Screen(half)
        screen.open(memory)
        status, message = self._run(code, number, screen, seed)
        reason = message if status == "killed" else ""
        if message and not reason:
            screen.write(message.encode("utf-8", "backslashreplace"))
        if status not in ("ok", "error"):
            self.kill()
        return Ending(status, *read_screen(bytes(memory), half, limits.output_chars), reason)

    def _run(self, code: str, number: int, screen: Screen, seed: int | None) -> tuple[str, str]:
        """Return the status and what is to be said of it."""
        name = f"<cell {number}>"
        text = plain(code)
        lines = text.split("\n")
        unreadable: BaseException | None = None
        program, shift = "None", 0
        try:
            tree, last, lines = parse(text, name)
            program, shift = _program(tree, last, lines)
        except (MemoryError, RecursionError):
            unreadable = SyntaxError("the code is nested too deeply")
        except (SyntaxError, ValueError) as error:
            unreadable = error
        monty = self._backend.monty
        try:
            with self._session() as session:
                if seed is not None:
                    session.feed_run(f"__reseed__({seed})\nNone")
                    self._feeds += ((number, 0),)
                status, message = "ok", ""
                self._feeds += ((number, shift),)
                try:
                    session.feed_run(program, print_callback=lambda _, text: screen.write(text.encode()))
                except (monty.MontyRuntimeError, monty.MontySyntaxError) as error:
                    status, message = self._explain(error, name, lines)
                if unreadable is not None:
                    status, message = explain(unreadable, name, lines, {})
                if status in ("ok", "error"):
                    self.dump = session.dump()
                return status, message
        except monty.MontyCrashedError as error:
            return ("timeout", "") if error.timed_out else ("killed", "its interpreter crashed")
        except (monty.MontyError, ProcessDiedError) as error:
            return "killed", f"its state could not be kept ({error})"

    @contextlib.contextmanager
    def _session(self) -> Iterator[Any]:
        """Load the state into a worker, which `kill` can reach meanwhile."""
        dump = self.dump
        if dump is None:
            raise ProcessDiedError("it was let go of")
        with self._backend.checkout(seed=0) as session:
            session.load_session(dump)
            with self._lock:
                self._worker = session.worker_pid or 0
            self._backend.running.add(self)
            try:
                yield session
            finally:
                self._backend.running.discard(self)
                with self._lock:
                    self._worker = 0

    def _explain(self, error: Any, name: str, lines: list[str]) -> tuple[str, str]:
        """Say how a cell was stopped, as the other backends do."""
        frames = error.traceback()
        cause = error.exception()
        if isinstance(cause, TimeoutError) and not frames:
            return "timeout", ""
        if isinstance(cause, SystemExit):
            return explain(SystemExit(cause.code or None), name, lines, {})
        status, message = explain(cause, name, lines, {})
        if status != "error":
            return status, message
        shown = [line for line in map(self._frame, frames) if line]
        if len(shown) > _MAX_FRAMES:
            shown[1 : 1 - _MAX_FRAMES] = []
        return status, "\n".join([*shown, message])

    def _frame(self, frame: Any) -> str:
        """Describe a frame in a cell; empty for one that is not."""
        feed = _FEED.fullmatch(frame.filename)
        number, shift = self._feeds[int(feed[1])] if feed and int(feed[1]) < len(self._feeds) else (0, 0)
        if not number:
            return ""
        cell = "" if number == self._feeds[-1][0] else f"cell {number}, "
        function = frame.function_name
        where = "" if function in (None, "<module>") else f", in {function}"
        source = (frame.source_line or "").strip().removeprefix(_SHOW)
        return f"{cell}line {frame.line - shift}{where}: {source[:_LINE_CHARS]}"

    def kill(self) -> None:
        """Let go of the state, and end the worker that runs a cell from it."""
        with self._lock:
            self.dump = None
            if self._worker:
                with contextlib.suppress(OSError):
                    os.kill(self._worker, getattr(signal, "SIGKILL", signal.SIGTERM))


class MontyBackend:
    """A pool of monty's workers, one for each cell that runs at the same time."""

    can_fork: ClassVar[bool] = True

    def __init__(self, limits: Limits, max_running: int) -> None:
        """Start nothing yet.

        Raises:
            MissingExtraError: If monty is not installed.
        """
        self.monty: Any = require("pydantic_monty", "monty")
        self._limits = {"max_feed_duration_secs": limits.cell_timeout_s, "max_memory": limits.memory_mb * MEBIBYTE}
        self._max_running = max_running
        self._is_closed = False
        self._lock = threading.Lock()
        self._pool: Any = None
        self.running: set[MontyProcess] = set()

    def checkout(self, seed: int) -> Any:
        """Return a fresh session of the pool, to be used in a ``with`` block.

        Raises:
            InfrastructureError: If the pool does not start.
            StateError: If the backend is closed.
        """
        with self._lock:
            if self._is_closed:
                raise StateError("The Python tool is closed. Make a new PythonTool.")
            if self._pool is None:
                self._pool = self._started()
            pool = self._pool
        policy = {"sleep": "zero", "random_start": {"seed": seed}}
        return pool.checkout(limits=self._limits, os_policy=policy)

    def _started(self) -> Any:
        _users.add(os.getpid())
        if len(_users) > 1:
            reason = "monty does not work in a forked copy of a process that used it; start the copy by 'spawn'"
            raise InfrastructureError("sandbox_start", reason)
        try:
            pool = self.monty.Monty(max_processes=self._max_running)
            pool.__enter__()
        except (OSError, self.monty.MontyError) as error:
            raise InfrastructureError("sandbox_start", f"monty's workers did not start: {error}") from error
        return pool

    def start(self, seed: int) -> MontyProcess:
        """Dump a fresh interpreter."""
        try:
            with self.checkout(seed) as session:
                session.feed_run(_PRELUDE)
                return MontyProcess(self, session.dump(), ((0, 0),))
        except self.monty.MontyError as error:
            raise ProcessDiedError(f"{error}") from error

    def fork(self, process: MontyProcess) -> MontyProcess:
        """Share the dump."""
        return process.copy()

    def is_to_blame(self, process: MontyProcess) -> bool:
        """Return False: the pool replaces a worker that died."""
        return False

    def recover(self) -> bool:
        """Return False; see `is_to_blame`."""
        return False

    def growth(self, process: MontyProcess) -> int:
        """Return the size of the dump."""
        return self.memory(process)

    def memory(self, process: MontyProcess) -> int:
        """Return the size of the dump."""
        return len(process.dump or b"")

    def versions(self) -> Mapping[str, str]:
        """Return the version of monty, which is another Python."""
        return {"monty": metadata.version("pydantic-monty")}

    def forget(self) -> None:
        """In a forked copy of the driver: leave the original's workers alone."""
        self._lock = threading.Lock()
        if self._pool is not None:
            _foreign.append(self._pool)  # collecting it would end them
            self._pool = None

    def close(self) -> None:
        """End the pool and the cells that run."""
        with self._lock:
            self._is_closed = True
            pool, self._pool = self._pool, None
        for process in list(self.running):
            process.kill()
        if pool is not None:
            pool.__exit__(None, None, None)


_foreign: list[Any] = []  # pools of the process that this one is a copy of
_users: set[int] = set()  # processes that use monty: its threads are not in a copy, which would wait for them for ever
