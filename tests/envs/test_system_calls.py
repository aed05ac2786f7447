"""The system call filters as programs: what they answer, on both architectures, whatever machine this is."""

from __future__ import annotations

import errno
import os
import struct
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("the confinement is Linux's", allow_module_level=True)

from trace_gym.envs.math.python_tool import seccomp
from trace_gym.envs.math.python_tool.syscalls import ARCHITECTURES, Architecture

ALLOW, NOTIFY, KILL, ERRNO = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
EPERM = ERRNO | errno.EPERM
# What aarch64's libc reaches by younger calls that stand in the tables too.
LEGACY = {"access", "alarm", "fork", "getpgrp", "lstat", "open", "poll", "readlink", "select", "stat"}


def verdict(program: bytes, number: int, arguments: tuple[int, ...] = (), audit: int | None = None) -> int:
    """Run a filter on a call, as the kernel would: a few instructions of classic BPF."""
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<IIQ6Q", number, audit or 0, 0, *padded)
    lines = list(struct.iter_unpack("<HBBI", program))
    accumulator = at = 0
    while True:
        code, skip_if, skip_unless, value = lines[at]
        at += 1
        if code == 0x20:
            accumulator = int.from_bytes(data[value : value + 4], "little")
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return int(value)
        else:
            holds = {
                0x15: accumulator == value,
                0x35: accumulator >= value,
                0x45: bool(accumulator & value),
            }[code]
            at += skip_if if holds else skip_unless


@pytest.fixture(params=ARCHITECTURES)
def machine(request: pytest.FixtureRequest) -> Architecture:
    return ARCHITECTURES[request.param]


def session_verdict(machine: Architecture, number: int, *arguments: int, read_only: bool = False) -> int:
    return verdict(seccomp.session_filter(machine, read_only), number, arguments, machine.audit)


def test_both_architectures_allow_the_same_calls_by_name() -> None:
    """Except for those that the younger architecture never had; and no number stands twice."""
    x86, arm = ARCHITECTURES["x86_64"], ARCHITECTURES["aarch64"]
    for here, there in ((x86.permitted, arm.permitted), (x86.checked, arm.checked)):
        assert set(there) <= set(here) and set(here) - set(there) <= LEGACY
    assert {*x86.permitted, *x86.checked} - {*arm.permitted, *arm.checked} == LEGACY
    for machine in (x86, arm):
        numbers = [*machine.permitted.values(), *machine.checked.values(), machine.seccomp]
        assert len(numbers) == len(set(numbers))
        assert not {"socket", "kill", "execve", "ptrace", "prctl", "memfd_create"} & {
            *machine.permitted,
            *machine.checked,
        }


def test_a_session_filter_allows_what_is_listed_and_refuses_all_other_numbers(machine: Architecture) -> None:
    """Every number there may ever be has one answer, on both architectures."""
    listed = {**machine.permitted, **machine.checked}
    for number in range(1024):
        if number in machine.permitted.values():
            assert session_verdict(machine, number) == ALLOW
        elif number not in listed.values():
            assert session_verdict(machine, number) == EPERM
    program = seccomp.session_filter(machine, False)
    assert verdict(program, listed["read"], audit=0x40000003) == KILL
    if machine.end is not None:
        assert verdict(program, machine.end + listed["read"], audit=machine.audit) == KILL


def test_arguments_decide_where_a_call_has_two_faces(machine: Architecture) -> None:
    """Own limits but nobody else's; private memory but none shared with copies; forks but no threads."""
    calls = machine.checked
    assert session_verdict(machine, calls["prlimit64"], 0) == ALLOW
    assert session_verdict(machine, calls["prlimit64"], 17) == EPERM
    assert session_verdict(machine, calls["fcntl"], 3, 1) == ALLOW
    assert session_verdict(machine, calls["fcntl"], 3, 8) == EPERM  # F_SETOWN
    assert session_verdict(machine, calls["ioctl"], 1, 0x5401) == ALLOW  # TCGETS
    assert session_verdict(machine, calls["ioctl"], 1, 0x5412) == ERRNO | errno.ENOTTY  # TIOCSTI
    for flags, answer in ((0x22, ALLOW), (0x02, ALLOW), (0x01, ALLOW), (0x21, EPERM), (0x23, EPERM)):
        assert session_verdict(machine, calls["mmap"], 0, 4096, 3, flags) == answer
    for flags, answer in ((0x01200011, ALLOW), (17, ALLOW), (0x10000 | 17, ERRNO | errno.EAGAIN)):
        assert session_verdict(machine, calls["clone"], flags) == answer
    for bit in (0x100, 0x200, 0x400, 0x800, 0x4000, 0x8000, 0x20000, 0x10000000, 0x40000000, 0x80000000):
        assert session_verdict(machine, calls["clone"], bit | 17) == EPERM
    assert session_verdict(machine, calls["clone"], 9) == EPERM  # another signal at exit
    assert session_verdict(machine, calls["clone3"]) == ERRNO | errno.ENOSYS


def test_files_open_to_read_only_where_nothing_else_sees_to_it(machine: Architecture) -> None:
    """Without Landlock the filter refuses every way to open a file for writing."""
    calls = machine.checked
    shapes = [(calls["openat"], lambda flags: (0, 0, flags))]
    if "open" in calls:
        shapes.append((calls["open"], lambda flags: (0, flags)))
    for number, arguments in shapes:
        for flags in (os.O_RDONLY | os.O_CLOEXEC, os.O_PATH, os.O_DIRECTORY):
            assert session_verdict(machine, number, *arguments(flags), read_only=True) == ALLOW
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_TMPFILE):
            assert session_verdict(machine, number, *arguments(flags), read_only=True) == ERRNO | errno.EACCES
            assert session_verdict(machine, number, *arguments(flags)) == ALLOW


def test_the_fork_filter_hands_over_forks_and_nothing_else(machine: Architecture) -> None:
    """It covers the zygote too, which must be free otherwise."""
    program = seccomp.fork_filter(machine)
    forks = {machine.checked[name] for name in ("clone", "fork") if name in machine.checked}
    for number in range(1024):
        answer = verdict(program, number, (17,), machine.audit)
        if number == machine.checked["clone3"]:
            assert answer == ERRNO | errno.ENOSYS
        else:
            assert answer == (NOTIFY if number in forks else ALLOW)
