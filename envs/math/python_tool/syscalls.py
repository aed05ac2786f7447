"""The system calls that sessions may use, by name, with their numbers on x86-64 and on aarch64.

Numbers are those of the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
None: aarch64 never had the call, its libc uses a younger one that stands here too.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass

# Computing, memory, time, reading files, waiting, and the socket a session has.
_PERMITTED: dict[str, tuple[int, int | None]] = {
    **{"read": (0, 63), "write": (1, 64), "close": (3, 57), "stat": (4, None), "fstat": (5, 80), "lstat": (6, None)},
    **{"poll": (7, None), "lseek": (8, 62), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214)},
    **{"rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67)},
    **{"readv": (19, 65), "writev": (20, 66), "access": (21, None), "select": (23, None), "sched_yield": (24, 124)},
    **{"mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23), "nanosleep": (35, 101), "getitimer": (36, 102)},
    **{"alarm": (37, None), "setitimer": (38, 103), "getpid": (39, 172), "sendfile": (40, 71), "sendto": (44, 206)},
    **{"recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "exit": (60, 93), "wait4": (61, 260)},
    **{"uname": (63, 160), "getcwd": (79, 17), "readlink": (89, None), "gettimeofday": (96, 169)},
    **{"getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153)},
    **{"getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177)},
    **{"getppid": (110, 173), "getpgrp": (111, None), "rt_sigpending": (127, 136), "sigaltstack": (131, 132)},
    **{"gettid": (186, 178), "futex": (202, 98), "sched_getaffinity": (204, 123), "getdents64": (217, 61)},
    **{"set_tid_address": (218, 96), "restart_syscall": (219, 128), "clock_gettime": (228, 113)},
    **{"clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "waitid": (247, 95)},
    **{"newfstatat": (262, 79), "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72)},
    **{"ppoll": (271, 73), "set_robust_list": (273, 99), "getrandom": (318, 278), "membarrier": (324, 283)},
    **{"statx": (332, 291), "rseq": (334, 293), "close_range": (436, 436), "faccessat2": (439, 439)},
}

# Judged by their arguments, or refused in a way of their own.
_CHECKED: dict[str, tuple[int, int | None]] = {
    **{"open": (2, None), "openat": (257, 56), "mmap": (9, 222), "ioctl": (16, 29), "fcntl": (72, 25)},
    **{"clone": (56, 220), "fork": (57, None), "clone3": (435, 435), "prlimit64": (302, 261)},
}

_SECCOMP = (317, 277)


@dataclass(frozen=True)
class Architecture:
    """A machine's side of the tables.

    Attributes:
        audit: The kernel's name for it in `struct seccomp_data`.
        permitted: Numbers by name of calls that are allowed as they are.
        checked: Numbers by name of calls that are judged.
        seccomp: The number of `seccomp` itself.
        end: Numbers from here on belong to another calling convention, or None.
    """

    audit: int
    permitted: dict[str, int]
    checked: dict[str, int]
    seccomp: int
    end: int | None


def _column(table: dict[str, tuple[int, int | None]], index: int) -> dict[str, int]:
    return {name: number for name, numbers in table.items() if (number := numbers[index]) is not None}


ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, _column(_PERMITTED, 0), _column(_CHECKED, 0), _SECCOMP[0], 0x40000000),  # x32
    "aarch64": Architecture(0xC00000B7, _column(_PERMITTED, 1), _column(_CHECKED, 1), _SECCOMP[1], None),
}


def this_architecture() -> Architecture | None:
    """Return the tables of this machine, or None where there are none."""
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    return ARCHITECTURES.get(platform.machine())
