"""The driver's side of workers that are forked from a warm template. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from trace_gym.envs.math.grading.clock import SEND_S, Deadline, DeadlineError, GradeClock, WorkerDiedError
from trace_gym.envs.math.python_tool import wire
from trace_gym.envs.math.python_tool.prelude import CLEAN_ENVIRONMENT
from trace_gym.errors import InfrastructureError

_FAULTS = (wire.PeerGoneError, wire.ProtocolError, wire.DeadlineError, OSError)


class ForkedWorker:
    """A worker; it may still be on its way when this object is made."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over the driver's end of the worker's socket."""
        self._sock = sock
        self._pid = 0
        self._pidfd = -1

    def meet(self, limit: Deadline) -> None:
        """Wait until it is there.

        Raises:
            DeadlineError: If it is not there in time; it may yet come.
            WorkerDiedError: If it does not come.
        """
        if self._pidfd >= 0:
            return
        try:
            message, _, _ = wire.receive(self._sock, limit)
            self._pid = int(message["hello"])
            self._pidfd = os.pidfd_open(self._pid)
        except DeadlineError:
            raise
        except (*_FAULTS, KeyError, ValueError) as error:
            raise WorkerDiedError(f"a worker did not start: {type(error).__name__} {error}") from error

    def clock(self, limit: Deadline) -> GradeClock:
        """Return the clock of one comparison, started now."""
        return GradeClock(self._pid, limit)

    def send(self, message: dict[str, Any], clock: GradeClock) -> None:
        """Send a request."""
        try:
            wire.send(self._sock, message, (), clock)
        except (wire.PeerGoneError, wire.ProtocolError) as error:
            raise WorkerDiedError(str(error)) from error

    def receive(self, clock: GradeClock) -> dict[str, Any]:
        """Return the next message.

        Raises:
            DeadlineError: If the clock ran out.
            WorkerDiedError: If the worker is gone.
        """
        try:
            return wire.receive(self._sock, clock)[0]
        except (wire.PeerGoneError, wire.ProtocolError) as error:
            raise WorkerDiedError(str(error) or "it is gone") from error

    def kill(self) -> None:
        """End it."""
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.abandon()

    def abandon(self) -> None:
        """Close this process's ends; a worker that waits for work leaves when all ends are closed."""
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
        self._pidfd = -1


class Template:
    """Starts workers by having a warm process fork; nobody waits, neither for a worker nor for the process to be warm.

    What it is asked for before waits in its socket.
    """

    def __init__(self) -> None:
        """Start the process.

        Raises:
            InfrastructureError: With kind ``grader_start``, if it cannot be started.
        """
        self._sock, theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            with theirs:
                self._process = self._launch(theirs.fileno())
        except OSError as error:
            self.close()
            raise InfrastructureError("grader_start", f"the grader's process did not start ({error})") from error

    @staticmethod
    def _launch(fd: int) -> subprocess.Popen[bytes]:
        script = str(Path(__file__).with_name("boot.py"))
        return subprocess.Popen(
            [sys.executable, "-s", "-P", script, "template", str(fd), str(os.getpid())],
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=CLEAN_ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )

    @property
    def is_alive(self) -> bool:
        """Whether it can fork."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> ForkedWorker:
        """Have a worker forked.

        Raises:
            InfrastructureError: With kind ``grader_died``, if there is nobody to fork.
        """
        near, far = socket.socketpair()
        try:
            with far:
                wire.send(self._sock, {"op": "fork"}, [far.fileno()], Deadline(SEND_S))
        except _FAULTS as error:
            near.close()
            raise InfrastructureError("grader_died", f"the grader's process is gone ({error})") from error
        return ForkedWorker(near)

    def close(self) -> None:
        """End it, and with it every worker."""
        self._sock.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def abandon(self) -> None:
        """Close this process's end of the socket: another process owns the template."""
        self._sock.close()
