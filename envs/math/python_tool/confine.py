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

_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_READ_SEARCH = 1 << 2
_SYSTEM_FOLDERS = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom"),
)
_MEBIBYTE = 1024 * 1024

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


def _keep_only(capabilities: int) -> None:
    """Give up every capability but those in the bit set."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(capabilities, capabilities, 0, 0, 0, 0)
    if _libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset failed")


def _is_public(path: str) -> bool:
    """Whether another user may reach the files below the folder."""
    folder = Path(path).resolve()
    return all(step.stat().st_mode & 0o001 for step in (folder, *folder.parents))


class Domain:
    """What a session enters right after it leaves the zygote; its clones inherit it.

    Every layer that the system offers is used: limits and no_new_privs always; a uid of its own as
    root; Landlock (files read-only, and only those of Python; no TCP; signals and abstract sockets
    only inside the session) and seccomp where the kernel has them.
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
        self._capabilities = 0 if all(map(_is_public, folders)) else _CAP_DAC_READ_SEARCH
        self._ruleset, self._scoped = landlock.prepare([*folders, *_SYSTEM_FOLDERS], hidden)
        self._filter = seccomp.session_filter() if seccomp.is_possible() else b""

    def listen(self) -> int | None:
        """Hand the forks of this process and all that it forks over to a listener, if possible."""
        prctl(_PR_SET_NO_NEW_PRIVS, 1)
        if not self._filter:
            return None
        try:
            return seccomp.install(seccomp.fork_filter(), listen=True)
        except OSError:  # there is a listener above us already, and there can be one only
            return None

    def enter(self) -> bool:
        """Confine the calling process for ever.

        Returns:
            Whether it is unable to signal processes outside its session.

        Raises:
            OSError: If the kernel refuses what it offered before; the process must not go on then.
        """
        memory = self._limits["memory_mb"] * _MEBIBYTE
        for limit, value in (
            (resource.RLIMIT_AS, memory),
            (resource.RLIMIT_FSIZE, 0),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        alone = False
        if os.geteuid() == 0:
            alone = self._become_nobody()
            _keep_only(self._capabilities)
        if self._ruleset is not None:
            landlock.enter(self._ruleset)
        if self._filter:
            seccomp.install(self._filter)
        return alone or self._scoped or bool(self._filter)

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
