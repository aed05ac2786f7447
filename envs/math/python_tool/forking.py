"""How a warm interpreter is forked for little. Linux only.

What a fork costs grows with the memory of the process: the kernel copies its page tables, and copies each page that
one of the two writes to. CPython's `os.fork` then runs its hooks in the child, which write to more pages than all that
a small cell does.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
_HUGE = 2 << 20  # bytes of a huge page; where it is larger, the kernel refuses some of the pieces

# With the lock of the interpreter held throughout: parent and child go on as if nothing was.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def fork() -> int:
    """Fork without CPython's hooks: no locks are mended, and `random` goes on in the child as in the parent.

    Only for a process of one thread, whose locks are free.

    Returns:
        The child's pid; 0 in the child.

    Raises:
        OSError: If the kernel refuses.
    """
    pid = int(_libc.fork())
    if pid < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return pid


def use_huge_pages() -> None:
    """Move this process' memory into huge pages as far as the kernel does that, so that forks copy shorter tables."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_, inode = line.split()[:5]
        if not access.startswith("rw") or inode != "0":
            continue
        start, end = (int(bound, 16) for bound in span.split("-"))
        for piece in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            _libc.madvise(piece, _HUGE, _COLLAPSE)
