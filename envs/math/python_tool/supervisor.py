"""The trusted process between the driver and the code of the model; it runs none of that code.

It starts the zygote in a process group of its own, and adopts every process whose parent dies (sub-reaper), so all
that ever descends from the zygote stays in reach. When the driver goes (the life-line closes, or the driver's pidfd
says so while a forked data loader still holds a copy of the line) or the zygote dies, it kills all of it and leaves.
Started by exec in a session of its own; imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from trace_gym.envs.math.python_tool import seccomp, wire
from trace_gym.envs.math.python_tool.prelude import CLEAN_ENVIRONMENT
from trace_gym.envs.math.python_tool.processes import children

_PR_SET_CHILD_SUBREAPER = 36
_PERMIT = struct.Struct("<i")


def kill_descendants(group: int) -> None:
    """Kill the process group, then whatever left it, until no child is left.

    The children of a killed process become ours, so looking at direct children again and again
    finds everything.
    """
    while True:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass
        found = False
        for pid in children(os.getpid()):
            found = True
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if not found:
            return
        time.sleep(0.002)


class Door:
    """Lets forks of the zygote and the sessions happen for which the driver gave a permit."""

    def __init__(self, lifeline: socket.socket, listener: int) -> None:
        """Answer on the listener what the life-line permits."""
        self._lifeline = lifeline
        self._listener = listener
        self._permits: set[int] = set()
        self._unread = b""

    def read_permits(self) -> bool:
        """Take what the driver sent; return whether the driver is there."""
        while True:
            try:
                data = self._lifeline.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            data = self._unread + data
            whole = len(data) - len(data) % _PERMIT.size
            self._unread = data[whole:]
            for (number,) in _PERMIT.iter_unpack(data[:whole]):
                if number > 0:
                    self._permits.add(number)
                else:
                    self._permits.discard(-number)

    def answer_fork(self) -> None:
        """Decide on one waiting fork."""
        waiting = seccomp.next_fork(self._listener)
        if waiting is None:
            return
        self.read_permits()  # a permit is sent before the request, so it is here by now
        cookie, pid = waiting
        allowed = pid in self._permits
        if seccomp.answer_fork(self._listener, cookie, allowed):
            self._permits.discard(pid)


def _watch(lifeline: socket.socket, deaths: list[int], listener: int | None) -> None:
    """Return when the life-line closes or one of the pidfds says that its process is dead."""
    door = Door(lifeline, -1 if listener is None else listener)
    poll = select.poll()
    for fd in (lifeline.fileno(), *deaths, *([] if listener is None else [listener])):
        poll.register(fd, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if any(fd in ready for fd in deaths):
            return
        if lifeline.fileno() in ready and not door.read_permits():
            return
        if listener in ready:
            if not ready[listener] & select.POLLIN:
                poll.unregister(listener)
            else:
                door.answer_fork()


def main(argv: list[str]) -> None:
    """Start the zygote, serve until an end comes, and leave nothing behind.

    Args:
        argv: The descriptor of the life-line, the descriptor of the zygote's socket, the driver's
            pid, and the limits as JSON, which the zygote reads.
    """
    lifeline, zygote_fd, driver = socket.socket(fileno=int(argv[0])), int(argv[1]), int(argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps for us
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    driver_fd = os.pidfd_open(driver)
    if os.getppid() != driver:  # it died before we looked, and the pid may be another's by now
        os._exit(0)
    door, zygotes_door = socket.socketpair()
    boot = str(Path(__file__).with_name("boot.py"))
    command = [sys.executable, "-s", "-P", boot, "zygote", str(zygote_fd)]
    zygote = subprocess.Popen(
        [*command, str(zygotes_door.fileno()), str(os.getpid()), argv[3]],
        pass_fds=(zygote_fd, zygotes_door.fileno()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=CLEAN_ENVIRONMENT,
        cwd="/",
        # A group of its own in our session: its stopped members wake to a hang-up when we are gone.
        process_group=0,
    )
    os.close(zygote_fd)
    zygotes_door.close()
    try:
        deaths = [driver_fd, os.pidfd_open(zygote.pid)]
        poll = select.poll()
        for fd in (lifeline.fileno(), door.fileno(), *deaths):
            poll.register(fd, select.POLLIN)
        if [fd for fd, _ in poll.poll()] == [door.fileno()]:
            _, fds, _ = wire.receive(door)
            _watch(lifeline, deaths, fds[0] if fds else None)
    except wire.PeerGoneError:
        pass
    finally:
        kill_descendants(zygote.pid)
    os._exit(0)
