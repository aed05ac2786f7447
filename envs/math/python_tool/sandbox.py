"""The driver's side of the processes: a supervisor, its zygote, and the sessions forked from it.

The driver talks to every session directly, over a socket of its own. What a session says is data of
one lineage of model code: it is capped, read under an absolute deadline, must come from the
session's own pid by the kernel's word and carry the id of the request. Anything else, and the
process is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_gym.envs.math.python_tool import wire
from trace_gym.errors import InfrastructureError

_START_S = 60.0  # for the zygote to warm up
_FORK_S = 30.0  # for a fork to be answered
_EXIT_S = 2.0  # for a process whose socket closed to be gone
_PERMIT = struct.Struct("<i")
_HEADER = struct.Struct("<Q")
_PIDFD_GET_INFO = 0xC040FF0B  # ioctl(_IOWR(0xFF, 11, 64 bytes)); knows of exits since Linux 6.15
_PIDFD_INFO_EXIT = 1 << 3
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,16}\b")

_FAULTS = (wire.PeerGoneError, wire.ProtocolError, wire.DeadlineError)

_request_numbers = itertools.count(1)


class ProcessDiedError(Exception):
    """A session is gone, or was killed for breaking the protocol; the message says how."""


class SessionBrokenError(ProcessDiedError):
    """The same, where the session itself is at fault: it ended or garbled the conversation."""


@dataclass(frozen=True)
class Limits:
    """What a cell and a tool may use.

    Attributes:
        cell_timeout_s: Wall-clock seconds for one cell.
        memory_mb: Address space of a session, in MiB.
        output_chars: Longest observation, in characters.
        max_live: How many states keep a process.
    """

    cell_timeout_s: float
    memory_mb: int
    output_chars: int
    max_live: int

    def to_json(self) -> str:
        """Return what the zygote needs to know."""
        return json.dumps(
            {
                "memory_mb": self.memory_mb,
                "output_chars": self.output_chars,
                "max_processes": self.max_live + 256,
            }
        )


@dataclass(frozen=True)
class Ending:
    """How a cell ended and what it printed.

    Attributes:
        status: ``ok``, ``error``, ``memory``, ``timeout`` or ``killed``.
        text: The output, capped.
        is_cut: Whether output was left out of the text.
        reason: For a killed cell: how it died.
    """

    status: str
    text: str
    is_cut: bool
    reason: str = ""


def _new_id() -> str:
    return f"{next(_request_numbers)}-{secrets.token_hex(4)}"


class Permits:
    """Tells the supervisor which process may fork next; no other forks happen (seccomp.py)."""

    def __init__(self, line: socket.socket) -> None:
        """Speak over the supervisor's life-line."""
        self._line = line

    def grant(self, pid: int) -> None:
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


class Process:
    """A parked or running process of model code (or the zygote), owned by this object."""

    def __init__(self, sock: socket.socket, pid: int, permits: Permits, zygote: Process | None = None) -> None:
        """Take over the socket of process `pid`, which descends from `zygote`, or is one."""
        self._permits = permits
        self._sock = sock
        self.pid = pid
        self.zygote = zygote or self
        self.is_isolated = False  # known to be unable to harm the zygote and its likes
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self._ended = threading.Lock()  # taken once, by whoever ends it
        self._owner = os.getpid()

    @property
    def is_alive(self) -> bool:
        """Whether it and its zygote exist and belong to this driver."""
        pidfd = self._pidfd  # read once: another thread may end the process meanwhile
        if pidfd < 0 or self._owner != os.getpid() or _is_readable(pidfd, 0):
            return False
        return self.zygote is self or self.zygote.is_alive

    def fork(self, seed: int | None = None) -> Process:
        """Fork the process.

        Args:
            seed: Reseeds `random` and numpy in the child; without it the child's equal the
                parent's.

        Returns:
            The child, parked.

        Raises:
            ProcessDiedError: If this process or the child did not answer as it should; this one is
                killed then.
        """
        deadline = time.monotonic() + _FORK_S
        near, far = socket.socketpair()
        try:
            # Before the far end is given away: the first frame must already carry the kernel's
            # word.
            near.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            request: dict[str, Any] = {"id": _new_id(), "op": "fork"}
            if seed is not None:
                request["seed"] = seed
            try:
                with far, self._lock:
                    self._permits.grant(self.pid)
                    reply = self._ask(request, [far.fileno()], deadline)
            except _FAULTS as error:
                self._permits.revoke(self.pid)
                self.kill()
                raise _died(error) from error
            return self._meet(near, request["id"], reply, deadline)
        except BaseException:
            near.close()
            raise

    def _meet(self, near: socket.socket, request_id: str, reply: dict[str, Any], deadline: float) -> Process:
        """Take the first frame of a new child, which tells its pid by the kernel's word."""
        if "error" in reply:
            raise ProcessDiedError(f"the process could not be forked: {reply['error']}")
        try:
            hello, fds, pid = wire.receive(near, deadline)
            for fd in fds:
                os.close(fd)
            if "error" in hello:
                raise wire.ProtocolError(f"a session could not be confined: {hello['error']}")
            if hello.get("id") != request_id or pid in (0, self.pid) or pid != reply.get("pid"):
                raise wire.ProtocolError("a fork was answered by the wrong process")
            child = Process(near, pid, self._permits, self.zygote)
            # Only what leaves the zygote is believed: it says this before it runs a cell.
            is_root = self is self.zygote
            child.is_isolated = hello.get("isolated") is True if is_root else self.is_isolated
            return child
        except (*_FAULTS, OSError) as error:
            raise _died(error) from error

    def run(self, code: str, number: int, limits: Limits, timeout_s: float, seed: int | None = None) -> Ending:
        """Run a cell; on every status but ``ok`` and ``error`` the process is dead afterwards.

        Args:
            code: The source.
            number: Which cell of its session this is, from 1.
            limits: The cap of the output.
            timeout_s: Wall-clock seconds.
            seed: Reseeds `random` and numpy before the cell.
        """
        half = 2 * limits.output_chars
        memory = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memory, _HEADER.size + 2 * half)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            request: dict[str, Any] = {"id": _new_id(), "op": "run", "code": code}
            request |= {"number": number, "cpu_s": timeout_s}
            if seed is not None:
                request["seed"] = seed
            status, reason = self._await(request, memory, time.monotonic() + timeout_s)
            text, is_cut = _read_output(memory, half, limits.output_chars)
        finally:
            os.close(memory)
        return Ending(status, text, is_cut, reason)

    def _await(self, request: dict[str, Any], memory: int, deadline: float) -> tuple[str, str]:
        with self._lock:
            try:
                reply = self._ask(request, [memory], deadline)
            except wire.DeadlineError:
                ending = "timeout", ""
            except wire.ProtocolError as error:
                ending = "killed", f"it wrote on the tool's own connection ({error})"
            except wire.PeerGoneError:
                ending = self._autopsy()
            else:
                ending = _judge(reply, self.pid)
        if ending[0] not in ("ok", "error"):
            self.kill()
        return ending

    def _ask(self, request: dict[str, Any], fds: list[int], deadline: float) -> dict[str, Any]:
        if self._pidfd < 0:
            raise wire.PeerGoneError("the process was ended")
        if not wire.is_silent(self._sock):
            raise wire.ProtocolError("unasked bytes on the connection")
        wire.send(self._sock, request, fds, deadline)
        reply, handed, _ = wire.receive(self._sock, deadline, sender=self.pid)
        for fd in handed:
            os.close(fd)
        if reply.get("id") != request["id"]:
            raise wire.ProtocolError("an answer to another request")
        return reply

    def _autopsy(self) -> tuple[str, str]:
        """Find out why the socket closed: status and reason."""
        if not _is_readable(self._pidfd, _EXIT_S):
            return "killed", "it closed the tool's own connection"
        info = bytearray(64)
        struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._pidfd, _PIDFD_GET_INFO, info)
        if not struct.unpack_from("<Q", info, 0)[0] & _PIDFD_INFO_EXIT:
            return "killed", "it ended its own process"
        code = struct.unpack_from("<i", info, 60)[0]
        if not code & 0x7F:
            return "killed", f"it ended its own process with exit code {code >> 8}"
        name = signal.Signals(code & 0x7F).name
        if name == "SIGXCPU":
            return "timeout", ""
        return "killed", f"its process died of {name}"

    def kill(self) -> None:
        """End the process; does nothing the second time."""
        if not self._ended.acquire(blocking=False):
            return
        is_ours = self._owner == os.getpid()
        if is_ours:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for a reply
        # That thread finishes before the descriptors go; one that comes later finds them gone.
        with self._lock if is_ours else contextlib.nullcontext():
            pidfd, self._pidfd = self._pidfd, -1
            os.close(pidfd)
            self._sock.close()


def _died(error: Exception) -> ProcessDiedError:
    by_session = isinstance(error, wire.PeerGoneError | wire.ProtocolError)
    kind = SessionBrokenError if by_session else ProcessDiedError
    return kind(f"{error or type(error).__name__}")


def _kill_child(parent: int, claimed: Any) -> None:
    """Kill the process that a session named as its child, if the kernel says that it is."""
    if not isinstance(claimed, int) or claimed <= 1:
        return
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(claimed)
        try:
            stat = Path(f"/proc/{claimed}/stat").read_bytes()
            if int(stat[stat.rindex(b")") + 2 :].split()[1]) == parent:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _judge(reply: dict[str, Any], pid: int) -> tuple[str, str]:
    status = reply.get("status")
    if status == "memory":
        return "memory", ""
    if status not in ("ok", "error"):
        return "killed", "it broke the tool's protocol"
    try:
        threads = len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208 - half the time of iterdir
    except OSError:
        return "killed", "it ended its own process"
    if threads != 1:
        return "killed", "it left threads running, which is not allowed"
    return str(status), ""


def _is_readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _read_output(memory: int, half: int, output_chars: int) -> tuple[str, bool]:
    """Read the shared screen: the text, cut in the middle to `output_chars`, and if it was cut.

    The writer is not trusted, so it is read by `pread` and any content is fine.
    """
    data = os.pread(memory, _HEADER.size + 2 * half, 0)
    (total,) = _HEADER.unpack_from(data)
    head = data[_HEADER.size : _HEADER.size + min(total, half)]
    tail = data[_HEADER.size + half :]
    if total <= 2 * half:
        text = (head + tail[: max(0, total - half)]).decode(errors="replace")
        text = _ADDRESS.sub("at 0x…", text)
        if len(text) <= output_chars:
            return text, False
        start, end = text, text
    else:
        at = (total - half) % half
        start = head.decode(errors="replace")
        end = (tail[at:] + tail[:at]).decode(errors="replace")
        start, end = _ADDRESS.sub("at 0x…", start), _ADDRESS.sub("at 0x…", end)
    keep = output_chars // 2
    start, end = start[:keep], end[len(end) - keep :]
    omitted = total - len(start.encode()) - len(end.encode())
    mark = f"\n[... output cut here: about {max(1, omitted)} bytes omitted ...]\n"
    return start + mark + end, True


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
            )
        try:
            hello, _, pid = wire.receive(near, time.monotonic() + _START_S)
            if hello.get("hello") != pid:
                raise wire.ProtocolError("not the zygote")
            self.zygote = Process(near, pid, Permits(self._lifeline))
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
