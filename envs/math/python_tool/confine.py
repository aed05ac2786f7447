"""What a session may do, as far as the kernel enforces it."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from trace_gym.envs.math.python_tool import landlock, seccomp
from trace_gym.envs.math.python_tool.syscalls import this_architecture

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, of this process
_CapabilitySets = ctypes.c_uint32 * 6  # effective, permitted, inheritable; then their upper halves
_CAP_DAC_READ_SEARCH = 1 << 2
_CAP_KILL = 1 << 5
_SYSTEM_FOLDERS = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"),
)
_MEBIBYTE = 1024 * 1024
MAX_FILES = 64  # descriptors of a session
_MOST_CPU_S = 3600  # of a process, all in all; the driver ends a cell long before

# Unassigned uids (systemd's map of them leaves both ranges to nobody); the second where a user
# namespace is small.
_UID_RANGES = ((1_880_000_000, 4_000_000), (61_184, 4_000))

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """Call `prctl` with one argument."""
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option} failed")


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(0)


def _capabilities() -> int:
    """Return the capabilities that the process may use, as a bit set."""
    data = _CapabilitySets()
    if _libc.capget(_CAPABILITY_HEADER, data):
        raise OSError(ctypes.get_errno(), "capget failed")
    return data[1]  # the lower half of those permitted; the upper has none that matters here


def _keep_only(capabilities: int) -> None:
    """Give up every capability but those in the bit set."""
    if _libc.capset(_CAPABILITY_HEADER, _CapabilitySets(capabilities, capabilities)):
        raise OSError(ctypes.get_errno(), "capset failed")


def _is_public(path: str) -> bool:
    """Whether another user may reach the files below the folder."""
    folder = Path(path).resolve()
    return all(step.stat().st_mode & 0o001 for step in (folder, *folder.parents))


class Domain:
    """What a session enters right after it leaves the zygote; its clones inherit it.

    Every layer that the system offers is used: limits and no_new_privs always; a uid of its own as root; Landlock
    (files read-only, and only those of Python; no TCP; signals and abstract sockets only inside the session) and
    seccomp where the kernel has them.

    Attributes:
        landlock_abi: Version of the kernel's Landlock, 0 where there is none.
        has_filter: Whether system calls are filtered.
        has_listener: Whether forks happen by permission only; known once `listen` was called.
    """

    def __init__(self, limits: dict[str, Any], hidden: Path) -> None:
        """Prepare what can be prepared once.

        Args:
            limits: ``memory_mb`` (address space of a process) and ``max_processes`` (of one session
                and its clones; enforced where a session has a uid of its own).
            hidden: A folder that sessions must not read, though it may lie among the libraries.
        """
        self._limits = limits
        # Python installed in a private folder of root: a session could import nothing more without
        # this.
        folders = {sys.prefix, sys.base_prefix, *filter(os.path.isdir, sys.path)}
        capabilities = _capabilities()
        self._kept = 0 if all(map(_is_public, folders)) else capabilities & _CAP_DAC_READ_SEARCH
        # A root that may not signal other users could not end a session with a uid of its own.
        self._gives_uids = os.geteuid() == 0 and bool(capabilities & _CAP_KILL)
        self.landlock_abi = landlock.abi()
        self._ruleset, self._scoped = landlock.prepare([*folders, *_SYSTEM_FOLDERS], hidden)
        machine = this_architecture()
        self.has_filter = machine is not None and seccomp.is_possible()
        self.has_listener = False
        if self.has_filter:
            self._filter = seccomp.session_filter(machine, read_only=self._ruleset is None)
            self._fork_filter = seccomp.fork_filter(machine)

    def listen(self) -> int | None:
        """Hand the forks of this process and all that it forks over to a listener, if possible."""
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if not self.has_filter:
            return None
        try:
            listener = seccomp.install(self._fork_filter, listen=True)
        except OSError:  # there is a listener above us already, and there can be one only
            return None
        self.has_listener = True
        return listener

    def enter(self, parent: int | None = None) -> bool:
        """Confine the calling process for ever.

        Args:
            parent: The pid of the parent, if the process is to end with it.

        Returns:
            Whether it is unable to signal processes outside its session.

        Raises:
            OSError: If the kernel refuses what it offered before; the process must not go on then.
        """
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        memory = self._limits["memory_mb"] * _MEBIBYTE
        for limit, value in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, MAX_FILES),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        most = _MOST_CPU_S if most == resource.RLIM_INFINITY else min(most, _MOST_CPU_S)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        alone = self._gives_uids and self._become_nobody()
        _keep_only(self._kept)
        if parent is not None:  # a change of uid forgets it, the filter forbids it
            die_with_parent(parent)
        if self._ruleset is None:
            prctl(_PR_SET_DUMPABLE, 0)  # then nothing else keeps sessions of one user out of each other's memory
        else:
            landlock.enter(self._ruleset)
        if self.has_filter:
            seccomp.install(self._filter)
        return alone or self._scoped or self.has_filter

    def _become_nobody(self) -> bool:
        """Take a uid that no other session has, so that signals cannot leave the session."""
        processes = self._limits["max_processes"]
        prctl(_PR_SET_KEEPCAPS, 1)
        for start, span in _UID_RANGES:
            uid = start + os.getpid() % span
            try:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            except PermissionError:  # a root without the capability
                return False
            except OSError:  # not mapped in this user namespace
                continue
            resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
            return True
        return False
