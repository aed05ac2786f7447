"""A warm process that forks a worker for each socket it is handed. Linux only.

It imports math-verify once, so a worker costs milliseconds. It computes nothing itself: it waits, and when the driver
goes (the socket closes, or the driver's pidfd says so while a forked child of it still holds the socket) it leaves,
and the kernel ends its workers with it.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
from pathlib import Path
from typing import NoReturn

from trace_gym.envs.math.grading import worker
from trace_gym.envs.math.python_tool import confine, forking, wire

_LIMITS = {"memory_mb": 1024, "max_processes": 512}


def main(argv: list[str]) -> NoReturn:
    """Warm up and fork on request.

    Args:
        argv: The descriptor of the socket, and the driver's pid.
    """
    sock, driver = socket.socket(fileno=int(argv[0])), int(argv[1])
    driver_fd = os.pidfd_open(driver)
    if os.getppid() != driver:  # it died before we looked, and the pid may be another's by now
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps for us
    worker.prepare()
    domain = confine.Domain(_LIMITS, Path(__file__).resolve().parents[3])
    gc.collect()
    gc.freeze()
    forking.use_huge_pages()
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(driver_fd, select.POLLIN)
    while True:
        if any(fd == driver_fd for fd, _ in poll.poll()):
            os._exit(0)
        try:
            _, fds, _ = wire.receive(sock)
        except wire.PeerGoneError:
            os._exit(0)
        if forking.fork() == 0:
            _serve(fds[0], domain)
        os.close(fds[0])


def _serve(fd: int, domain: confine.Domain) -> NoReturn:
    """Be a worker."""
    status = 1
    try:
        domain.enter(os.getppid())
        os.closerange(3, fd)
        os.closerange(fd + 1, 1 << 16)
        # With all three named, it is made without system calls that the filter refuses.
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
        wire.send(sock, {"hello": os.getpid()})
        while True:
            message, _, _ = wire.receive(sock)
            worker.answer_request(message, lambda reply: wire.send(sock, reply))
    except wire.PeerGoneError:
        status = 0
    except OSError as problem:
        os.write(2, f"A worker of the grader cannot go on: {problem}\n".encode())
    finally:
        os._exit(status)
