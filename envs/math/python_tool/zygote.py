"""The processes that run model code: a warm interpreter (the zygote) and sessions forked from it.

`new`, `snapshot` and `clone` are one primitive, `fork`: the process forks onto the fresh socket that came with the
request. A session serves `fork {id, seed?}` and `run {id, code, number, cpu_s, seed?}`, is stopped by the driver in
between, and ends itself when its socket closes. The zygote itself runs no cell. Output goes into shared memory that
came with the request, so what was printed survives the death of the process; the reply carries only how the cell ended.

Started by exec in a clean environment (see supervisor.py and boot.py). Nothing in this file is a secret or a boundary:
model code shares the interpreter with it. What must hold against a hostile cell is held by the kernel and the driver.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Any, NoReturn

from trace_gym.envs.math.python_tool import confine, forking, prelude, wire
from trace_gym.envs.math.python_tool.interpreter import Interpreter

FIRST_FD = 3  # below are the standard streams; of what is above, only the socket outlives a fork


class Session:
    """Serves one socket; after a fork, the child serves another."""

    def __init__(self, limits: dict[str, Any], sock: socket.socket) -> None:
        """Prepare to serve `sock` as the zygote."""
        self._limits = limits
        self._sock = sock
        self._fd = sock.fileno()
        self._is_zygote = True
        self._is_isolated = False
        self._pid = os.getpid()
        self._fork = forking.fork
        self._getpid = os.getpid
        self._interpreter = Interpreter(4 * limits["output_chars"] // 2)
        self.domain = confine.Domain(limits, Path(__file__).resolve().parents[3])
        self._fds = range(FIRST_FD, confine.MAX_FILES)
        self._poll = select.poll()
        for fd in self._fds:
            self._poll.register(fd, 0)
        # A fork that nobody asked for would be a second server on one socket.
        os.register_at_fork(after_in_child=lambda leave=os._exit: leave(1))
        for module in (sys.modules["posix"], os):  # such a hook of a cell would run in every later state
            module.register_at_fork = lambda **_: None  # type: ignore[attr-defined]

    def serve(self) -> NoReturn:
        """Answer requests until the socket closes."""
        code = 4  # the session's own machinery is damaged; there is no way on
        try:
            while True:
                message, fds, _ = wire.receive(self._sock, alone=True)
                reply = self._answer(message, fds)
                if self._getpid() != self._pid:  # a raw fork inside the cell came out here
                    break
                wire.send(self._sock, reply)
        except wire.PeerGoneError:
            code = 0
        finally:
            os._exit(code)

    def _answer(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if message["op"] == "fork":
            return self._answer_fork(message, fds[0])
        if self._is_zygote:
            os._exit(3)
        if "seed" in message:
            prelude.seed(message["seed"])
        _limit_cpu(message["cpu_s"])
        status = self._interpreter.run(message["code"], message["number"], fds[0])
        return {"id": message["id"], "status": status}

    def _own_files(self) -> None:
        """Keep no descriptor in common with the parent but the own socket."""
        closed = [fd for fd, event in self._poll.poll(0) if event & select.POLLNVAL]
        if len(closed) < len(self._fds) - 1:
            for fd in {*self._fds} - {self._fd, *closed}:
                _reopen(fd)

    def _answer_fork(self, message: dict[str, Any], fd: int) -> dict[str, Any]:
        try:
            pid = self._fork()
        except OSError as error:
            os.close(fd)
            return {"id": message["id"], "error": str(error)}
        if pid:
            os.close(fd)
            return {"id": message["id"], "pid": pid}
        self._sock.close()
        self._fd = fd
        if self._is_zygote:
            self._is_zygote = False
            os.closerange(max(fd + 1, confine.MAX_FILES), 1 << 20)
            try:
                self._is_isolated = self.domain.enter()
            except OSError as error:
                wire.send(socket.socket(fileno=fd), {"id": message["id"], "error": str(error)})
                os._exit(1)
        self._own_files()
        # With all three named, it is made without system calls that the filter refuses.
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
        self._pid = self._getpid()
        if "seed" in message:
            prelude.seed(message["seed"])
        return {"id": message["id"], "hello": self._pid, "isolated": self._is_isolated}


def _reopen(fd: int) -> None:
    """Give a file that a cell opened an offset of its own, and close what is no file; handles are shared by forks."""
    new = -1
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            new = os.open(f"/proc/self/fd/{fd}", fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_CLOEXEC)
            os.lseek(new, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
    except OSError:
        pass
    os.close(fd)
    if new >= 0:
        fcntl.fcntl(new, fcntl.F_DUPFD_CLOEXEC, fd)
        os.close(new)


def _limit_cpu(seconds: float) -> None:
    """Let the kernel end this process after so much more CPU time; a backstop."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 1
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def main(argv: list[str]) -> NoReturn:
    """Warm up, say hello and serve.

    Args:
        argv: The descriptors of the driver's and of the supervisor's socket, the supervisor's pid,
            and the limits as JSON: ``memory_mb``, ``output_chars``, ``max_processes``.
    """
    socket_fd, door_fd = int(argv[0]), int(argv[1])
    os.set_inheritable(socket_fd, False)
    sock = socket.socket(fileno=socket_fd)
    confine.die_with_parent(int(argv[2]))
    prelude.warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it ends stopped sessions; under nohup it would be ignored
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
    forking.use_huge_pages()
    wire.send(sock, {"hello": os.getpid()})
    session.serve()
