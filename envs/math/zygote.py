"""The processes that run model code: a warm interpreter (the zygote) and sessions forked from it.

`new`, `snapshot` and `clone` are one primitive, `fork`: the process forks onto the fresh socket
that came with the request. A session parks between requests; it serves `fork {id, seed?}` and `run
{id, code, number, seed?}` and ends itself when its socket closes. The zygote itself runs no cell.
Output goes into shared memory that came with the request, so what was printed survives the death of
the process; the reply carries only how the cell ended.

Started by exec in a clean environment (see supervisor.py and boot.py). Nothing in this file is a
secret or a
boundary: model code shares the interpreter with it. What must hold against a hostile cell is held
    by the driver.
"""

from __future__ import annotations

import _thread
import ast
import builtins
import contextlib
import errno
import fcntl
import gc
import importlib
import io
import json
import linecache
import mmap
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from trace_gym.envs.math import confine, wire

PRELOADED = "collections decimal fractions functools heapq itertools math operator statistics string"
SOCKET_FD = 3  # where every session has its socket; all other descriptors are closed after a fork
HEADER = struct.Struct("<Q")  # of the shared memory: how many bytes were printed
_REPR_CHARS = 65_536
_MESSAGE_CHARS = 1_000
_MAX_FRAMES = 4


class Screen(io.RawIOBase):
    """What a cell prints: the first and the last bytes, in memory shared with the driver.

    Layout: HEADER, then `half` bytes of head, then a ring of `half` bytes with the latest of the
        rest.
    """

    def __init__(self, half: int) -> None:
        """Make a screen that keeps `half` bytes at each end."""
        self._half = half
        self._memory: mmap.mmap | None = None
        self._total = 0

    def open(self, fd: int) -> None:
        """Show a new cell on the shared memory `fd`."""
        self._memory = mmap.mmap(fd, HEADER.size + 2 * self._half)
        self._total = 0

    def shut(self) -> None:
        """Let go of the memory; what is printed now is lost."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def close(self) -> None:
        """Do nothing: `sys.stdout.close()` in a cell must not silence the later ones."""

    def writable(self) -> bool:
        """Say that this stream takes output."""
        return True

    def write(self, data: Any) -> int:
        """Take bytes; never fails and never grows."""
        view = memoryview(data).cast("B")
        size, memory, half, total = len(view), self._memory, self._half, self._total
        if memory is None:
            return size
        kept = 0
        if total < half:
            kept = min(size, half - total)
            memory[HEADER.size + total : HEADER.size + total + kept] = view[:kept].tobytes()
        skipped = max(kept, size - half)  # of a huge write only the end can stay
        position = total + skipped - half
        while skipped < size:
            at = position % half
            part = min(size - skipped, half - at)
            start = HEADER.size + half + at
            memory[start : start + part] = view[skipped : skipped + part].tobytes()
            skipped += part
            position += part
        self._total = total + size
        memory[: HEADER.size] = HEADER.pack(self._total)
        return size


class Interpreter:
    """The namespace of a session, and how a cell runs in it."""

    def __init__(self, half: int) -> None:
        """Take over `__main__`, the standard streams and the built-in functions."""
        self._screen = Screen(half)
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module
        self._new_stream()
        builtins.input = _no_input
        self._builtins = dict(vars(builtins))

    def _new_stream(self) -> None:
        self._stream = io.TextIOWrapper(
            self._screen, "utf-8", errors="backslashreplace", newline="\n", write_through=True
        )

    def run(self, code: str, number: int, memory_fd: int) -> str:
        """Run one cell.

        Args:
            code: Python source, as the model wrote it.
            number: Which cell of the session this is, from 1; shown in tracebacks of later cells.
            memory_fd: The shared memory for its output; closed here.

        Returns:
            How it ended: ``ok``, ``error``, or ``memory``.
        """
        self._screen.open(memory_fd)
        os.close(memory_fd)
        if self._stream.closed:
            self._new_stream()
        sys.stdout = sys.stderr = self._stream
        sys.stdin = io.StringIO()
        namespace = vars(self._module)
        namespace["__builtins__"] = builtins
        name = f"<cell {number}>"
        try:
            try:
                status = self._execute(code, name, namespace)
            finally:
                vars(builtins).update(self._builtins)
                sys.settrace(None)
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # whatever a cell raises is its result
            status, text = _explain(error, name)
            if self._stream.closed:
                self._new_stream()
            self._stream.write(text)
        self._screen.shut()
        return status

    def _execute(self, code: str, name: str, namespace: dict[str, Any]) -> str:
        code = tidy(code)
        tree = ast.parse(code, name)
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                namespace["_"] = value
                self._stream.write(repr(value)[:_REPR_CHARS] + "\n")
        return "ok"


def tidy(code: str) -> str:
    """Undo what models do to a cell: a markdown fence around all of it, an indent before all of it.

    A fence is taken off only where it wraps the whole cell and no other fence stands inside;
    backticks in a string are left alone. An indent is taken off only where the cell does not parse
    as it is.
    """
    fenced = re.fullmatch(r"\s*```[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```\s*", code, re.DOTALL)
    if fenced and not re.search(r"^[ \t]*```", fenced[1], re.MULTILINE):
        code = fenced[1]
    try:
        ast.parse(code)
    except IndentationError:
        return textwrap.dedent(code)
    except (SyntaxError, ValueError):
        pass
    return code


def _explain(error: BaseException, name: str) -> tuple[str, str]:
    """Describe in few lines how a cell was stopped: its lines that led there, and the error."""
    if isinstance(error, SystemExit):
        failed = error.code not in (None, 0)
        code = f" with {str(error.code)[:200]!r}" if failed else ""
        return (
            "error" if failed else "ok",
            f"exit() was called{code}: the cell ended here, the session goes on.\n",
        )
    if isinstance(error, MemoryError):
        return "memory", ""
    lines = []
    if isinstance(error, SyntaxError) and error.filename == name:
        if error.text:
            lines.append(f"line {error.lineno}: {error.text.strip()[:200]}")
        lines.append(f"{type(error).__name__}: {error.msg}")
        return "error", "\n".join(lines) + "\n"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<cell ")]
    if len(frames) > _MAX_FRAMES:
        frames = frames[:1] + frames[1 - _MAX_FRAMES :]
    for frame in frames:
        cell = "" if frame.filename == name else f"{frame.filename.strip('<>')}, "
        function = "" if frame.name == "<module>" else f", in {frame.name}"
        lines.append(f"{cell}line {frame.lineno}{function}: {(frame.line or '')[:200]}")
    message = "".join(traceback.format_exception_only(error)).rstrip()
    if len(message) > _MESSAGE_CHARS:
        message = message[:_MESSAGE_CHARS] + " …"
    lines.append(message)
    return "error", "\n".join(lines) + "\n"


def _no_input(*_: object) -> NoReturn:
    raise EOFError("input() does not work here, as no one can type: put the value into the code")


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EPERM, f"{name}: new processes are not allowed here")

    return refused


def _no_threads(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("can't start new thread: threads are not allowed here")


class Session:
    """Serves one socket; after a fork, the child serves another."""

    def __init__(self, limits: dict[str, Any], sock: socket.socket) -> None:
        """Prepare to serve `sock` as the zygote."""
        self._limits = limits
        self._sock = sock
        self._is_zygote = True
        self._is_isolated = False
        self._forking = False
        self._pid = os.getpid()
        self._fork = os.fork
        self._getpid = os.getpid
        self._getstate, self._setstate = random.getstate, random.setstate
        self._interpreter = Interpreter(4 * limits["output_chars"] // 2)
        self.domain = confine.Domain(limits, Path(__file__).resolve().parents[2])
        os.register_at_fork(after_in_child=self._after_fork)
        self._forbid()

    def _after_fork(self) -> None:
        # A fork that nobody asked for would be a second server on one socket.
        if not self._forking:
            os._exit(1)

    def _forbid(self) -> None:
        """Answer attempts to start processes and threads with an error a model can read."""
        modules = [sys.modules["posix"], os]
        names = ["fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "execv", "execve"]
        for name in names:
            for module in modules:
                setattr(module, name, _refuse(f"os.{name}"))
        for module in modules:  # such a hook of a cell would run in every later state, before its time
            module.register_at_fork = lambda **_: None
        subprocess.Popen.__init__ = _refuse("subprocess")  # type: ignore[method-assign]
        _thread.start_new_thread = _no_threads
        threading._start_new_thread = _no_threads  # type: ignore[attr-defined]

    def serve(self) -> NoReturn:
        """Answer requests until the socket closes."""
        while True:
            try:
                message, fds, _ = wire.receive(self._sock)
            except wire.PeerGoneError:
                os._exit(0)
            except wire.ProtocolError:
                os._exit(3)
            try:
                reply = self._answer(message, fds)
                if self._getpid() != self._pid:  # a raw fork inside the cell came out here
                    os._exit(1)
                wire.send(self._sock, reply)
            except BaseException:  # the session's own machinery is damaged; there is no way on
                os._exit(4)

    def _answer(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if message["op"] == "fork":
            return self._answer_fork(message, fds[0])
        if self._is_zygote:
            os._exit(3)
        if "seed" in message:
            _seed(message["seed"])
        _limit_cpu(message["cpu_s"])
        status = self._interpreter.run(message["code"], message["number"], fds[0])
        return {"id": message["id"], "status": status}

    def _answer_fork(self, message: dict[str, Any], fd: int) -> dict[str, Any]:
        state = self._getstate()  # CPython reseeds it in every child
        self._forking = True
        try:
            pid = self._fork()
        except OSError as error:
            os.close(fd)
            return {"id": message["id"], "error": str(error)}
        finally:
            self._forking = False
        if pid:
            os.close(fd)
            return {"id": message["id"], "pid": pid}
        if self._is_zygote:
            self._is_zygote = False
            try:
                self._is_isolated = self.domain.enter()
            except OSError as error:
                wire.send(socket.socket(fileno=fd), {"id": message["id"], "error": str(error)})
                os._exit(1)
        self._sock.detach()
        os.close(SOCKET_FD)
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, SOCKET_FD)
        os.closerange(SOCKET_FD + 1, 1 << 20)
        # With all three named, it is made without system calls that the filter refuses.
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, SOCKET_FD)
        self._pid = self._getpid()
        self._setstate(state)
        if "seed" in message:
            _seed(message["seed"])
        return {"id": message["id"], "hello": self._pid, "isolated": self._is_isolated}


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so much more CPU time; a backstop."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _warm() -> None:
    """Load what mathematics needs, and let lazy parts of it load too, once for all sessions."""
    for name in PRELOADED.split():
        importlib.import_module(name)
    with contextlib.suppress(ImportError):
        import numpy as np

        np.linalg.solve(np.eye(2), np.ones(2))
        generator = np.random.default_rng

        def default_rng(seed: Any = None) -> Any:
            # Without a seed it would differ between clones and break every replay.
            return generator(random.getrandbits(64) if seed is None else seed)

        np.random.default_rng = default_rng
    with contextlib.suppress(ImportError):
        import sympy

        x = sympy.Symbol("x")
        sympy.integrate(x * sympy.sin(x), x)
        sympy.solve(x**2 - 2, x)


def main(argv: list[str]) -> NoReturn:
    """Warm up, say hello and serve.

    Args:
        argv: The descriptors of the driver's and of the supervisor's socket, the supervisor's pid,
            and the limits as JSON: ``memory_mb``, ``output_chars``, ``max_processes``.
    """
    socket_fd, door_fd = int(argv[0]), int(argv[1])
    if socket_fd != SOCKET_FD:
        if door_fd == SOCKET_FD:
            door_fd = os.dup(door_fd)
        os.dup2(socket_fd, SOCKET_FD, inheritable=False)
        os.close(socket_fd)
    os.set_inheritable(SOCKET_FD, False)
    sock = socket.socket(fileno=SOCKET_FD)
    confine.die_with_parent(int(argv[2]))
    _warm()
    sys.argv = [""]
    # Needs threads and a folder to write to. Refused like this, sympy and people do without.
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")
    session = Session(json.loads(argv[3]), sock)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
    with socket.socket(fileno=door_fd) as door:
        listener = session.domain.listen()
        wire.send(door, {}, [] if listener is None else [listener])
    if listener is not None:
        os.close(listener)
    gc.collect()
    gc.freeze()
    wire.send(sock, {"hello": os.getpid()})
    session.serve()
