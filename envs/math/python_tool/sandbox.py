"""The driver's side of the processes: a supervisor, its zygote, and the sessions forked from it.

The driver talks to every session directly, over a socket of its own. What a session says is data of one lineage of
model code: it is capped, read under a deadline, must come from the session's own pid by the kernel's word and carry
the id of the request. Anything else, and the process is killed.

A session runs only while it is asked something: between requests it is stopped (SIGSTOP), so that nothing a cell left
behind uses the CPU or changes the state.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from trace_gym.envs.math.python_tool import wire
from trace_gym.envs.math.python_tool.backend import (
    Ending,
    Limits,
    ProcessDiedError,
    SessionBrokenError,
)
from trace_gym.envs.math.python_tool.clock import CellClock
from trace_gym.envs.math.python_tool.processes import children, has_ended, how_it_ended, kill_child
from trace_gym.envs.math.python_tool.screen import memory_size, read_screen
from trace_gym.errors import InfrastructureError

_START_S = 60.0  # for the zygote to warm up
_ZYGOTE_FORK_S = 30.0  # for a fork to be answered
_FORK_CPU_S = 1.0  # the same by a session, which may be out to waste time, and for its child to say hello (clock.py)
_MOST_PIDS = 1 << 22  # the kernel's own limit
_MAX_REPLY = 1 << 16  # bytes of a frame from a session
_PERMIT = struct.Struct("<i")

_FAULTS = (wire.PeerGoneError, wire.ProtocolError, wire.DeadlineError)

_request_numbers = itertools.count(1)


def _new_id() -> str:
    return f"{next(_request_numbers)}-{secrets.token_hex(4)}"


class Family:
    """All that descends from one zygote: who is known, and who may fork next (no other forks happen: seccomp.py)."""

    def __init__(self, line: socket.socket, supervisor: int) -> None:
        """Speak to the process `supervisor` over its life-line."""
        self._line = line
        self._supervisor = supervisor
        self._known: weakref.WeakValueDictionary[int, Process] = weakref.WeakValueDictionary()

    def permit(self, pid: int) -> None:
        """Allow one fork. What is sent before the request to fork is there before the fork asks."""
        self._tell(pid)

    def revoke(self, pid: int) -> None:
        """Take a permit back, used or not."""
        self._tell(-pid)

    def _tell(self, number: int) -> None:
        try:
            self._line.sendall(_PERMIT.pack(number))
        except OSError as error:
            raise ProcessDiedError("the supervisor is gone") from error

    def add(self, process: Process) -> None:
        """Know a process from now on."""
        self._known[process.pid] = process

    def knows(self, pid: int) -> bool:
        """Whether a live process has the pid already."""
        process = self._known.get(pid)
        return process is not None and process.exists

    def kill_strays(self) -> None:
        """Kill what a session forked and kept to itself; its parent is dead, so the supervisor adopted it."""
        for pid in children(self._supervisor):
            if not self.knows(pid):
                kill_child(self._supervisor, pid)


class Process:
    """A parked or running process of model code (or the zygote), owned by this object."""

    def __init__(self, sock: socket.socket, pid: int, family: Family, zygote: Process | None = None) -> None:
        """Take over the socket of process `pid`, which descends from `zygote`, or is one."""
        self._family = family
        self._sock = sock
        self.pid = pid
        self.zygote = zygote or self
        self.is_isolated = False  # known to be unable to harm the zygote and its likes
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self._ended = threading.Lock()  # taken once, by whoever ends it
        self._owner = os.getpid()
        family.add(self)

    @property
    def exists(self) -> bool:
        """Whether it has not ended, and belongs to this driver."""
        pidfd = self._pidfd  # read once: another thread may end the process meanwhile
        return pidfd >= 0 and self._owner == os.getpid() and not has_ended(pidfd)

    @property
    def is_alive(self) -> bool:
        """Whether it and its zygote exist and belong to this driver."""
        return self.exists and (self.zygote is self or self.zygote.exists)

    def fork(self, seed: int | None = None) -> Process:
        """Fork the process.

        Args:
            seed: Reseeds `random` and numpy in the child; without it the child's equal the
                parent's.

        Returns:
            The child, parked.

        Raises:
            SessionBrokenError: If this process is at fault; it is killed then.
            ProcessDiedError: If nothing can be forked now.
        """
        request: dict[str, Any] = {"id": _new_id(), "op": "fork"}
        if seed is not None:
            request["seed"] = seed
        try:
            near, far = socket.socketpair()
        except OSError as error:  # too many open files
            raise ProcessDiedError(str(error)) from error
        reply: dict[str, Any] = {}
        try:
            # Before the far end is given away: the first frame must already carry the kernel's
            # word.
            near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with far, self._lock:
                self._family.permit(self.pid)
                reply = self._ask(request, [far.fileno()], self._fork_deadline(self.pid))
            child = self._meet(near, request["id"], reply)
        except (*_FAULTS, OSError) as error:
            near.close()
            raise self._blame(error, reply) from error
        except BaseException:
            near.close()
            raise
        child._park()
        return child

    def _meet(self, near: socket.socket, request_id: str, reply: dict[str, Any]) -> Process:
        """Take the first frame of a new child, which tells its pid by the kernel's word."""
        if "error" in reply:
            raise wire.ProtocolError(f"the process could not be forked: {reply['error']}")
        claimed = reply.get("pid")
        if not isinstance(claimed, int) or not 0 < claimed < _MOST_PIDS or self._family.knows(claimed):
            raise wire.ProtocolError("a fork was answered by the wrong process")
        hello, fds, pid = wire.receive(near, self._fork_deadline(claimed), max_bytes=_MAX_REPLY)
        for fd in fds:
            os.close(fd)
        if "error" in hello:
            raise wire.ProtocolError(f"a session could not be confined: {hello['error']}")
        if hello.get("id") != request_id or pid != claimed:
            raise wire.ProtocolError("a fork was answered by the wrong process")
        child = Process(near, pid, self._family, self.zygote)
        # Only what leaves the zygote is believed: it says this before it runs a cell.
        is_root = self is self.zygote
        child.is_isolated = hello.get("isolated") is True if is_root else self.is_isolated
        return child

    def _fork_deadline(self, pid: int) -> wire.Deadline:
        return wire.Deadline(_ZYGOTE_FORK_S) if self.zygote is self else CellClock(pid, _FORK_CPU_S)

    def _blame(self, error: Exception, reply: dict[str, Any]) -> ProcessDiedError:
        """End a session that did not fork as it should, with all that it forked; say whose fault it was."""
        message = str(error) or type(error).__name__
        if self._owner != os.getpid():
            return ProcessDiedError(message)
        self._family.revoke(self.pid)
        if self.zygote is self:
            if "pid" in reply:
                kill_child(self.pid, reply["pid"])
            return ProcessDiedError(message)
        try:
            self.zygote.fork().kill()
        except ProcessDiedError:
            if "error" in reply:  # it may well be right that nothing can be forked
                return ProcessDiedError(message)
            kind = ProcessDiedError
        else:
            kind = SessionBrokenError
        self.kill(wait_s=1.0)
        self._family.kill_strays()
        return kind(message)

    def run(self, code: str, number: int, limits: Limits, timeout_s: float, seed: int | None = None) -> Ending:
        """Run a cell; on every status but ``ok`` and ``error`` the process is dead afterwards.

        Args:
            code: The source.
            number: Which cell of its session this is, from 1.
            limits: The cap of the output.
            timeout_s: CPU seconds; see clock.py.
            seed: Reseeds `random` and numpy before the cell.
        """
        half = 2 * limits.output_chars
        size = memory_size(half)
        memory = os.memfd_create("output", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, size)
            request: dict[str, Any] = {"id": _new_id(), "op": "run", "code": code}
            request |= {"number": number, "cpu_s": timeout_s}
            if seed is not None:
                request["seed"] = seed
            with self._lock:
                status, reason = self._await(request, memory, timeout_s)
            if status not in ("ok", "error"):
                self.kill()
            shown = os.pread(memory, size, 0).ljust(size, b"\0")
            os.ftruncate(memory, 0)  # a session that kept hold of it could share it with all states that come after
        finally:
            os.close(memory)
        return Ending(status, *read_screen(shown, half, limits.output_chars), reason)

    def _await(self, request: dict[str, Any], memory: int, budget_s: float) -> tuple[str, str]:
        try:
            status = self._ask(request, [memory], CellClock(self.pid, budget_s)).get("status")
        except wire.DeadlineError:
            return how_it_ended(self._pidfd) if has_ended(self._pidfd) else ("timeout", "")
        except wire.ProtocolError as error:
            return "killed", f"it wrote on the tool's own connection ({error})"
        except wire.PeerGoneError:
            return how_it_ended(self._pidfd) if self._pidfd >= 0 else ("killed", "its process was ended")
        if status not in ("ok", "error", "memory"):
            return "killed", "it broke the tool's protocol"
        return str(status), ""

    def _ask(self, request: dict[str, Any], fds: list[int], deadline: wire.Deadline) -> dict[str, Any]:
        if self._pidfd < 0:
            raise wire.PeerGoneError("the process was ended")
        if not wire.is_silent(self._sock):
            raise wire.ProtocolError("unasked bytes on the connection")
        self._signal(signal.SIGCONT)
        wire.send(self._sock, request, fds, deadline)
        reply, handed, _ = wire.receive(self._sock, deadline, self.pid, _MAX_REPLY, alone=True)
        for fd in handed:
            os.close(fd)
        if reply.get("id") != request["id"]:
            raise wire.ProtocolError("an answer to another request")
        self._park()
        return reply

    def _park(self) -> None:
        if self.zygote is not self:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except OSError:  # it is gone
            pass

    def kill(self, wait_s: float = 0.0) -> None:
        """End the process; does nothing the second time.

        Args:
            wait_s: For how long to wait until it is gone.
        """
        if not self._ended.acquire(blocking=False):
            return
        is_ours = self._owner == os.getpid()
        if is_ours:
            self._signal(signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply
            if wait_s:
                has_ended(self._pidfd, wait_s)
        # That thread finishes before the descriptors go; one that comes later finds them gone.
        with self._lock if is_ours else contextlib.nullcontext():
            pidfd, self._pidfd = self._pidfd, -1
            os.close(pidfd)
            self._sock.close()


class Sandbox:
    """One supervisor and its zygote; everything forked from it dies with it."""

    def __init__(self, limits: Limits) -> None:
        """Start both and wait until the zygote is warm.

        Raises:
            InfrastructureError: With kind ``sandbox_start``, if they do not come up.
        """
        self._owner = os.getpid()
        self._lifeline, theirs = socket.socketpair()
        near, far = socket.socketpair()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        script = str(Path(__file__).with_name("boot.py"))
        arguments = [
            "supervisor",
            str(theirs.fileno()),
            str(far.fileno()),
            str(os.getpid()),
            limits.to_json(),
        ]
        with theirs, far:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-s", "-P", script, *arguments],
                pass_fds=(theirs.fileno(), far.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # what kills the driver's process group must not reach it
            )
        try:
            hello, _, pid = wire.receive(near, wire.Deadline(_START_S))
            if hello.get("hello") != pid:
                raise wire.ProtocolError("not the zygote")
            self.zygote = Process(near, pid, Family(self._lifeline, self._supervisor.pid))
        except (wire.PeerGoneError, wire.ProtocolError, wire.DeadlineError, OSError) as error:
            near.close()
            self._stop_supervisor()
            raise InfrastructureError(
                "sandbox_start",
                f"the Python tool's process did not start ({type(error).__name__} {error}); "
                "its own message, if any, is on the standard error of this program",
            ) from error

    @property
    def pids(self) -> tuple[int, int]:
        """The supervisor's and the zygote's pid."""
        return self._supervisor.pid, self.zygote.pid

    @property
    def is_alive(self) -> bool:
        """Whether both processes run and belong to this driver."""
        if self._owner != os.getpid():
            return False
        return self.zygote.is_alive and self._supervisor.poll() is None

    def close(self) -> None:
        """End everything that was ever forked from the zygote, and wait for it."""
        self.zygote.kill()
        self._stop_supervisor()

    def _stop_supervisor(self) -> None:
        self._lifeline.close()
        if self._owner != os.getpid():
            return
        try:
            self._supervisor.wait(_START_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
