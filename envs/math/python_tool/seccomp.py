"""System call filters of the sessions, and forks by permission (x86-64 and aarch64).

Two filters. The zygote's hands every fork to the supervisor (user notification), which lets it happen only if the
driver announced it; the sessions' own, stacked on top right after the fork, allows what computing needs and refuses
the rest with EPERM. Of several answers the kernel takes the strictest: an allowed fork is still handed over.

The filters judge numbers only, never memory behind a pointer, so there is nothing to race with. Imports only the
standard library, as the zygote and the supervisor load it too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import signal
import struct

from trace_gym.envs.math.python_tool.syscalls import Architecture, this_architecture

_TCGETS = 0x5401
_FCNTL_COMMANDS = (fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, 1030)  # F_DUPFD_CLOEXEC
_CLONE_THREAD = 0x00010000
_CLONE_BY_FORK = 0x01200000  # CHILD_SETTID and CHILD_CLEARTID, beside the signal at exit
_OPEN_TO_WRITE = 0o20001103  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, and the bit of O_TMPFILE
_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20

_ALLOW, _NOTIFY, _KILL, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data

_SET_MODE_FILTER, _GET_ACTION_AVAIL = 1, 2
_NEW_LISTENER = 1 << 3
_RECEIVE = 0xC0502100  # ioctl(SECCOMP_IOCTL_NOTIF_RECV)
_SEND = 0xC0182101  # ioctl(SECCOMP_IOCTL_NOTIF_SEND)
_CONTINUE = 1

_libc = ctypes.CDLL(None, use_errno=True)

Case = tuple[int, list[bytes]]  # a system call and what is done for it; must end in a return


def _line(code: int, value: int, skip_if: int = 0, skip_unless: int = 0) -> bytes:
    return struct.pack("<HBBI", code, skip_if, skip_unless, value)


def _load(offset: int) -> bytes:
    return _line(0x20, offset)


def _keep_bits(bits: int) -> bytes:
    return _line(0x54, bits)


def _return(value: int) -> bytes:
    return _line(0x06, value)


def _unless_equal(value: int, skip: int) -> bytes:
    return _line(0x15, value, 0, skip)


def _unless_any_bit(bits: int, skip: int) -> bytes:
    return _line(0x45, bits, 0, skip)


def _unless_at_least(value: int, skip: int) -> bytes:
    return _line(0x35, value, 0, skip)


def _fail(code: int) -> bytes:
    return _return(_ERRNO | code)


def _argument(index: int) -> bytes:
    return _load(_ARGUMENTS + 8 * index)  # its low 32 bits


def _if_argument_in(number: int, index: int, values: tuple[int, ...], otherwise: int) -> Case:
    body = [_argument(index)]
    for value in values:
        body += [_unless_equal(value, 1), _return(_ALLOW)]
    return number, [*body, _fail(otherwise)]


def _program(machine: Architecture, *cases: Case, default: bytes) -> bytes:
    check = [_load(_ARCH), _line(0x15, machine.audit, 1), _return(_KILL), _load(_NUMBER)]
    if machine.end is not None:
        check += [_unless_at_least(machine.end, 1), _return(_KILL)]
    chain = (line for number, body in cases for line in (_unless_equal(number, len(body)), *body))
    return b"".join([*check, *chain, default])


def fork_filter(machine: Architecture) -> bytes:
    """Return the zygote's filter: forks are handed over, everything else is left to the sessions' own filter."""
    numbers = machine.checked
    return _program(
        machine,
        (numbers["clone3"], [_fail(errno.ENOSYS)]),  # its flags lie behind a pointer; libc falls back to clone
        *((numbers[name], [_return(_NOTIFY)]) for name in ("clone", "fork") if name in numbers),
        default=_return(_ALLOW),
    )


def session_filter(machine: Architecture, read_only: bool) -> bytes:
    """Return a session's filter: computing and reading; no processes, threads, new sockets or signals.

    Args:
        machine: Whose numbers.
        read_only: Whether to refuse opening files to write; needed where Landlock does not see to it.
    """
    numbers = machine.checked
    write_denied = [_unless_any_bit(_OPEN_TO_WRITE, 1), _fail(errno.EACCES)] if read_only else []
    no_common_memory = [
        *(_argument(3), _keep_bits(_MAP_SHARED | _MAP_ANONYMOUS)),
        *(_unless_equal(_MAP_SHARED | _MAP_ANONYMOUS, 1), _fail(errno.EPERM), _return(_ALLOW)),
    ]
    no_threads = [
        *(_argument(0), _unless_any_bit(_CLONE_THREAD, 1), _fail(errno.EAGAIN)),
        *(_keep_bits(~_CLONE_BY_FORK & 0xFFFFFFFF), _unless_equal(signal.SIGCHLD, 1), _return(_ALLOW)),
        _fail(errno.EPERM),
    ]
    cases = [
        # Memory that is shared and no file's would be common to all states that come after.
        (numbers["mmap"], no_common_memory),
        (numbers["openat"], [_argument(2), *write_denied, _return(_ALLOW)]),
        _if_argument_in(numbers["prlimit64"], 0, (0,), errno.EPERM),
        _if_argument_in(numbers["fcntl"], 1, _FCNTL_COMMANDS, errno.EPERM),
        _if_argument_in(numbers["ioctl"], 1, (_TCGETS,), errno.ENOTTY),
        (numbers["clone"], no_threads),
        (numbers["clone3"], [_fail(errno.ENOSYS)]),
    ]
    if "open" in numbers:
        cases.append((numbers["open"], [_argument(1), *write_denied, _return(_ALLOW)]))
    if "fork" in numbers:
        cases.append((numbers["fork"], [_return(_ALLOW)]))
    permitted = ((number, [_return(_ALLOW)]) for number in machine.permitted.values())
    return _program(machine, *cases, *permitted, default=_fail(errno.EPERM))


def is_possible() -> bool:
    """Whether the system call numbers of this machine are known and the kernel takes filters."""
    machine = this_architecture()
    if machine is None:
        return False
    return _libc.syscall(machine.seccomp, _GET_ACTION_AVAIL, 0, struct.pack("<I", _ERRNO)) == 0


def install(program: bytes, listen: bool = False) -> int:
    """Put a filter on this process and all that it forks, for ever; needs no_new_privs.

    Args:
        program: From `fork_filter` or `session_filter`.
        listen: Whether to open a descriptor that answers notifications.

    Returns:
        That descriptor, or 0.

    Raises:
        OSError: If the kernel refuses, or this machine's numbers are not known.
    """
    machine = this_architecture()
    if machine is None:
        raise OSError(errno.ENOSYS, "seccomp is not known on this machine")
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    flags = _NEW_LISTENER if listen else 0
    result = int(_libc.syscall(machine.seccomp, _SET_MODE_FILTER, flags, header))
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


def answer_fork(listener: int, cookie: int, allowed: bool) -> bool:
    """Let a fork happen or fail with EPERM.

    Returns:
        Whether the answer arrived; if not, a signal came first, and a process that lives will ask again.
    """
    error, flags = (0, _CONTINUE) if allowed else (-errno.EPERM, 0)
    try:
        fcntl.ioctl(listener, _SEND, struct.pack("<QqiI", cookie, 0, error, flags))
    except OSError:
        return False
    return True
