"""Landlock: which files a session may read, and that its signals stay inside (any architecture)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract sockets, signals

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), "landlock failed")
    return result


def _file_rights(version: int) -> int:
    rights = 13  # bits 0 to 12
    for bit, since in ((13, 2), (14, 3), (15, 5)):  # refer, truncate, ioctl of devices
        if version >= since:
            rights = bit + 1
    return (1 << rights) - 1


def abi() -> int:
    """Return the version of the kernel's Landlock, 0 where there is none."""
    try:
        return _call(_CREATE_RULESET, None, 0, _GET_VERSION)
    except OSError:
        return 0


def prepare(readable: Iterable[str], hidden: Path) -> tuple[int | None, bool]:
    """Make a set of rules to enter later.

    Args:
        readable: Files and folders that may be read, with all that lies below; those missing are
            skipped.
        hidden: A folder left out of them.

    Returns:
        A descriptor of the rules, or None where the kernel has no Landlock; and whether the rules
        keep signals inside.
    """
    version = abi()
    if not version:
        return None, False
    scoped = version >= 6
    rules = struct.pack("<QQQ", _file_rights(version), _TCP if version >= 4 else 0, _SCOPES if scoped else 0)
    ruleset = _call(_CREATE_RULESET, rules, len(rules), 0)
    os.set_inheritable(ruleset, False)
    for path in dict.fromkeys(Path(name).resolve() for name in readable):
        _grant(ruleset, path, hidden)
    _add(ruleset, Path(os.devnull), _READ_FILE | _WRITE_FILE)
    return ruleset, scoped


def _grant(ruleset: int, path: Path, hidden: Path) -> None:
    if path == hidden or not path.exists():
        return
    if not hidden.is_relative_to(path):
        _add(ruleset, path, _READ_FILE | (_READ_DIR if path.is_dir() else 0))
        return
    _add(ruleset, path, _READ_DIR)  # rules only add, so the folder is opened piece by piece
    for entry in path.iterdir():
        _grant(ruleset, entry, hidden)


def _add(ruleset: int, path: Path, rights: int) -> None:
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("<Qi", rights, fd)
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(fd)


def enter(ruleset: int) -> None:
    """Put the rules on this process and all that it forks, for ever; needs no_new_privs."""
    _call(_RESTRICT_SELF, ruleset, 0)
