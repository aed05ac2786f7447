"""What the kernel says of processes: who descends from whom, and how one ended. Linux only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

from trace_gym.envs.math.python_tool.backend import ending_by_signal

_EXIT_S = 0.5  # for a process whose socket closed to be gone
_PIDFD_GET_INFO = 0xC040FF0B  # ioctl(_IOWR(0xFF, 11, 64 bytes)); knows of exits since Linux 6.15
_PIDFD_INFO_EXIT = 1 << 3


def state_and_parent(pid: int) -> tuple[bytes, int] | None:
    """Return the kernel's letter for what a process does and its parent's pid; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
    return state, int(parent)


def children(pid: int) -> Iterator[int]:
    """Yield the live processes whose parent is `pid`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            found = state_and_parent(int(entry.name))
            if found is not None and found[1] == pid and found[0] != b"Z":
                yield int(entry.name)


def has_ended(pidfd: int, timeout_s: float = 0) -> bool:
    """Whether the process of a pidfd is gone, or goes within the time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def how_it_ended(pidfd: int) -> tuple[str, str]:
    """Find out why a session closed its socket.

    Returns:
        The status of its cell, ``timeout`` or ``killed``, and for the latter the reason.
    """
    if not has_ended(pidfd, _EXIT_S):
        return "killed", "it closed the tool's own connection"
    code = _wait_status(pidfd)
    if code is None:
        return "killed", "its process ended (this kernel does not tell how)"
    if not code & 0x7F:
        return "killed", f"it ended its own process with exit code {code >> 8}"
    return ending_by_signal(code & 0x7F)


def _wait_status(pidfd: int) -> int | None:
    """Return what its parent would learn of a process that ended, or None where the kernel does not tell others."""
    info = bytearray(64)
    struct.pack_into("<Q", info, 0, _PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None
    told, status = struct.unpack_from("<Q", info, 0)[0], struct.unpack_from("<i", info, 60)[0]
    return int(status) if told & _PIDFD_INFO_EXIT else None


def kill_child(parent: int, pid: int) -> None:
    """Kill a process if it is a child of `parent` (the pid may be another's by now)."""
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            found = state_and_parent(pid)
            if found is not None and found[1] == parent:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)
