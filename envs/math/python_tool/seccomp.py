"""System call filters of the sessions, and forks by permission (x86-64 only).

Two filters. The zygote's hands every fork to the supervisor (user notification), which lets it
happen only if the driver announced it; the sessions' own, stacked on top right after the fork,
allows what computing needs and refuses the rest with EPERM. Of several answers the kernel takes the
strictest: an allowed fork is still handed over.

The filters judge numbers only, never memory behind a pointer, so there is nothing to race with.
Imports only the standard library, as the zygote and the supervisor load it too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import platform
import struct
import sys

_PERMITTED = {
    **{"read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7},
    **{"lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13},
    **{"rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "readv": 19, "writev": 20},
    **{"access": 21, "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28, "dup": 32},
    **{"nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39},
    **{"sendfile": 40, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "exit": 60},
    **{"wait4": 61, "uname": 63, "getcwd": 79, "readlink": 89, "gettimeofday": 96},
    **{"getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102},
    **{"getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111},
    **{"rt_sigpending": 127, "sigaltstack": 131, "gettid": 186, "futex": 202},
    **{"sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218},
    **{"clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231},
    **{"waitid": 247, "openat": 257, "newfstatat": 262, "readlinkat": 267, "faccessat": 269},
    **{"pselect6": 270, "ppoll": 271, "set_robust_list": 273, "get_robust_list": 274},
    **{"getrandom": 318, "membarrier": 324, "statx": 332, "rseq": 334, "close_range": 436},
    **{"faccessat2": 439},
}
_IOCTL, _CLONE, _FORK, _FCNTL, _PRLIMIT64, _SECCOMP, _CLONE3 = 16, 56, 57, 72, 302, 317, 435
_TCGETS = 0x5401
_FCNTL_COMMANDS = (
    fcntl.F_DUPFD,
    fcntl.F_GETFD,
    fcntl.F_SETFD,
    fcntl.F_GETFL,
    1030,
)  # F_DUPFD_CLOEXEC
_CLONE_THREAD = 0x00010000
# CLONE_VM, CLONE_PARENT, every CLONE_NEW* that fits into clone's flags
_CLONE_REFUSED = 0x00000100 | 0x00008000 | 0x00020000 | 0x02000000 | 0x7C000000

_ARCH_X86_64 = 0xC000003E
_X32 = 0x40000000
_ALLOW, _NOTIFY, _KILL, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_NEW_LISTENER = 1 << 3
_RECEIVE = 0xC0502100  # ioctl(SECCOMP_IOCTL_NOTIF_RECV)
_SEND = 0xC0182101  # ioctl(SECCOMP_IOCTL_NOTIF_SEND)
_CONTINUE = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _load(offset: int) -> bytes:
    return struct.pack("<HBBI", 0x20, 0, 0, offset)


def _return(value: int) -> bytes:
    return struct.pack("<HBBI", 0x06, 0, 0, value)


def _unless_equal(value: int, skip: int) -> bytes:
    return struct.pack("<HBBI", 0x15, 0, skip, value)


def _unless_any_bit(bits: int, skip: int) -> bytes:
    return struct.pack("<HBBI", 0x45, 0, skip, bits)


def _unless_at_least(value: int, skip: int) -> bytes:
    return struct.pack("<HBBI", 0x35, 0, skip, value)


def _fail(code: int) -> bytes:
    return _return(_ERRNO | code)


def _case(number: int, *body: bytes) -> list[bytes]:
    """What is done for one system call; the body must end in a return."""
    return [_unless_equal(number, len(body)), *body]


def _argument_in(index: int, values: tuple[int, ...], otherwise: int) -> list[bytes]:
    body = [_load(_ARGUMENTS + 8 * index)]
    for value in values:
        body += [_unless_equal(value, 1), _return(_ALLOW)]
    return [*body, _fail(otherwise)]


def _program(*cases: list[bytes], default: bytes) -> bytes:
    check = [_load(_ARCH), struct.pack("<HBBI", 0x15, 1, 0, _ARCH_X86_64), _return(_KILL)]
    check += [_load(_NUMBER), _unless_at_least(_X32, 1), _return(_KILL)]
    return b"".join([*check, *(line for case in cases for line in case), default])


def fork_filter() -> bytes:
    """The zygote's: forks are handed over, everything else is left to the sessions' own filter."""
    return _program(
        _case(_CLONE3, _fail(errno.ENOSYS)),  # its flags lie behind a pointer; libc falls back to clone
        _case(_CLONE, _return(_NOTIFY)),
        _case(_FORK, _return(_NOTIFY)),
        default=_return(_ALLOW),
    )


def session_filter() -> bytes:
    """A session's: computing and reading; no processes, threads, new sockets or signals."""
    return _program(
        *(_case(number, _return(_ALLOW)) for number in _PERMITTED.values()),
        _case(_PRLIMIT64, *_argument_in(0, (0,), errno.EPERM)),
        _case(_FCNTL, *_argument_in(1, _FCNTL_COMMANDS, errno.EPERM)),
        _case(_IOCTL, *_argument_in(1, (_TCGETS,), errno.ENOTTY)),
        _case(
            _CLONE,
            _load(_ARGUMENTS),
            _unless_any_bit(_CLONE_THREAD, 1),
            _fail(errno.EAGAIN),
            _unless_any_bit(_CLONE_REFUSED, 1),
            _fail(errno.EPERM),
            _return(_ALLOW),
        ),
        _case(_FORK, _return(_ALLOW)),
        _case(_CLONE3, _fail(errno.ENOSYS)),
        default=_fail(errno.EPERM),
    )


def is_possible() -> bool:
    """Whether the system call numbers are this machine's and the kernel takes filters."""
    if platform.machine() != "x86_64" or sys.maxsize < 2**32:
        return False
    return _libc.syscall(_SECCOMP, _GET_ACTION_AVAIL, 0, struct.pack("<I", _ERRNO)) == 0


def install(program: bytes, listen: bool = False) -> int:
    """Put a filter on this process and all that it forks, for ever; needs no_new_privs.

    Args:
        program: From `fork_filter` or `session_filter`.
        listen: Whether to open a descriptor that answers notifications.

    Returns:
        That descriptor, or 0.

    Raises:
        OSError: If the kernel refuses.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    flags = _NEW_LISTENER if listen else 0
    result = int(_libc.syscall(_SECCOMP, _SET_MODE_FILTER, flags, header))
    if result < 0:
        raise OSError(ctypes.get_errno(), "seccomp failed")
    return result


def next_fork(listener: int) -> tuple[int, int] | None:
    """Take the next waiting fork.

    Returns:
        An id for `answer_fork` and the pid of the process that wants to fork; None if it died
        meanwhile.
    """
    notification = bytearray(80)
    try:
        fcntl.ioctl(listener, _RECEIVE, notification)
    except OSError:
        return None
    cookie, pid = struct.unpack_from("<QI", notification)
    return cookie, pid


def answer_fork(listener: int, cookie: int, allowed: bool) -> None:
    """Let a fork happen or fail with EPERM."""
    error, flags = (0, _CONTINUE) if allowed else (-errno.EPERM, 0)
    try:
        fcntl.ioctl(listener, _SEND, struct.pack("<QqiI", cookie, 0, error, flags))
    except OSError:
        return  # it died meanwhile
