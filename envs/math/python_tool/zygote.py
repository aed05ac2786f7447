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
import contextlib
import errno
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from trace_gym.envs.math.python_tool import confine, wire
from trace_gym.envs.math.python_tool.interpreter import Interpreter

PRELOADED = "collections decimal fractions functools heapq itertools math operator statistics string"
SOCKET_FD = 3  # where every session has its socket; all other descriptors are closed after a fork


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
        self.domain = confine.Domain(limits, Path(__file__).resolve().parents[3])
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
