"""Hostile cells on a real tool, as root and as an ordinary user.

Each cell tries one thing and prints ESCAPED if it worked. Whatever it does: it is contained, the state before it is as
usable as before, a sibling session lives unchanged, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trace_gym.envs.math.python_tool.capabilities import capabilities

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the confinement is Linux's"),
    pytest.mark.slow,
]

ORDINARY_UID = 54_321  # of nobody
SECRET = "the-answer-is-3141"


@dataclass(frozen=True)
class Attack:
    """A hostile cell, the statuses it may end with, and what its text must match."""

    code: str
    status: str = "ok error"
    text: str = ""


def refused(code: str) -> Attack:
    """An attack that the kernel answers with an error, which the cell shows."""
    return Attack(code, "ok", "refused")


TIME_AND_MEMORY = {
    "endless loop": Attack("while True: pass", "timeout"),
    "swallows every exception": Attack(
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass", "timeout"
    ),
    "sleeps": Attack("import time\ntime.sleep(1000)", "timeout"),
    "factors a hard number": Attack(
        "import sympy\nsympy.factorint((2**89 - 1) * (2**107 - 1) * (2**61 - 1))", "timeout"
    ),
    "huge power in C": Attack("10 ** 10 ** 10", "timeout memory"),
    "catastrophic regex in C": Attack("import re\nre.match('(a+)+$', 'a' * 60 + 'b')", "timeout"),
    "CPU hog that raises its limit": Attack(
        "import resource, signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
        "_, most = resource.getrlimit(resource.RLIMIT_CPU)\nresource.setrlimit(resource.RLIMIT_CPU, (most, most))\n"
        "while True: pass",
        "timeout",
    ),
    "string of a terabyte": Attack("'a' * 10**12", "memory"),
    "list of six gigabytes": Attack("x = []\nwhile True: x.append(bytearray(6 * 10**7))", "memory"),
    "numpy array of four gigabytes": Attack("import numpy\nnumpy.ones(5 * 10**8)", "memory"),
    "file in memory of three gigabytes": refused("attempt(libc.memfd_create(b'm', 0))"),
}
PROCESSES = {
    "three hundred forks": Attack(
        "made = sum(libc.fork() > 0 for _ in range(300))\nprint('ESCAPED' if made else 'refused')", "ok", "refused"
    ),
    "one fork that returns twice": refused("attempt(libc.fork())"),
    "fifty threads": Attack(
        "import threading\ncount = 0\n"
        "def hold():\n    global count\n    count += 1\n"
        "for _ in range(50):\n    try:\n        threading.Thread(target=hold).start()\n"
        "    except RuntimeError: pass\n"
        "t = ctypes.c_ulong()\npause = ctypes.cast(libc.pause, ctypes.c_void_p)\n"
        "made = sum(libc.pthread_create(ctypes.byref(t), None, pause, None) == 0 for _ in range(50))\n"
        "print('ESCAPED' if count or made else 'refused')",
        "ok",
        "refused",
    ),
    "another program": refused(
        "argv = (ctypes.c_char_p * 2)(b'/bin/true', None)\nattempt(libc.execve(b'/bin/true', argv, None))\n"
        "pid = ctypes.c_int()\nattempt(-libc.posix_spawn(ctypes.byref(pid), b'/bin/true', None, None, argv, None))\n"
        "attempt(libc.vfork())\nattempt(-1 if libc.system(b'true') else 0)"
    ),
    "user namespace": refused("attempt(libc.unshare(0x10000000))"),
    "io_uring": refused("attempt(libc.syscall(425, 8, (ctypes.c_char * 120)()))"),
}
OUTPUT = {
    "prints 200 MB": Attack("for _ in range(20): print('y' * 10_000_000)", "truncated", "about 199"),
    "shows 50 MB": Attack("'z' * 50_000_000", "truncated", "omitted"),
    "floods descriptor 1": Attack("for _ in range(50): os.write(1, b'w' * 1_000_000)", "ok truncated"),
}
FILES = {
    "password file": refused("reads('/etc/passwd')"),
    "file with answers": refused("reads(SECRET_FILE)"),
    "environment of the driver": refused("reads(f'/proc/{DRIVER}/environ')"),
    "memory of the driver": Attack(
        "reads(f'/proc/{DRIVER}/mem')\nbuffer = ctypes.create_string_buffer(64)\n"
        "spot = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)\n"
        "attempt(libc.process_vm_readv(DRIVER, spot, 1, spot, 1, 0))",
        "ok",
        "refused",
    ),
    "writes the temporary folder": refused(
        "writes(FOLDER + '/trace_gym_attack')\nwrites('/tmp/trace_gym_attack')\nwrites(SECRET_FILE)"
    ),
    "poisons the libraries": refused(
        "import numpy\nwrites(PACKAGES + '/trace_gym_attack.pth')\nwrites(numpy.__file__)\n"
        "attempt(libc.rename(numpy.__file__.encode(), b'/tmp/trace_gym_attack'))"
    ),
    "fills shared memory": refused(
        "writes('/dev/shm/trace_gym_attack')\nattempt(libc.shmget(0x7ACE, 1 << 20, 0o1600))"
    ),
}
NETWORK = {
    "connects to this machine": refused(
        "attempt(s := libc.socket(2, 1, 0))\nattempt(libc.connect(s, inet(TCP), 16))\nattempt(libc.socket(10, 1, 0))"
    ),
    "abstract socket": refused(
        "attempt(s := libc.socket(1, 1, 0))\nattempt(libc.connect(s, address(1, ABSTRACT), 2 + len(ABSTRACT)))\n"
        "attempt(libc.connect(3, address(1, ABSTRACT), 2 + len(ABSTRACT)))"
    ),
    "sends a datagram": refused(
        "attempt(s := libc.socket(2, 2, 0))\nattempt(libc.sendto(s, b'x', 1, 0, inet(UDP), 16))\n"
        "attempt(libc.socketpair(1, 1, 0, (ctypes.c_int * 2)()))"
    ),
}
OTHERS = {
    "signals the driver": refused("attempt(libc.kill(DRIVER, 0))\nattempt(libc.kill(DRIVER, 15))"),
    "signals everyone": refused("attempt(libc.kill(-1, 9))\nattempt(libc.kill(0, 9))"),
    "kills its parent": refused("attempt(libc.kill(os.getppid(), 9))\nattempt(libc.kill(ZYGOTE, 9))"),
    "traces its parent": refused("attempt(libc.ptrace(16, os.getppid(), 0, 0))"),
    "limits its parent": refused(
        "pair = (ctypes.c_ulong * 2)(1, 1)\nattempt(libc.prlimit(os.getppid(), 0, pair, None))\n"
        "attempt(libc.prlimit(ZYGOTE, 7, pair, None))"
    ),
    "limits a sibling": refused("attempt(libc.prlimit(SIBLING, 9, (ctypes.c_ulong * 2)(1, 1), None))"),
}
DEATHS = {
    "leaves by os._exit": Attack("os._exit(3)", "killed", "exit code 3"),
    "aborts": Attack("os.abort()", "killed", "SIG"),
    "segfault": Attack("ctypes.string_at(0)", "killed", "SIGSEGV"),
    "closes every descriptor": Attack("os.closerange(0, 256)", "killed", "connection|exit code"),
    "overflows the C stack": Attack(
        "import sys\nsys.setrecursionlimit(10**9)\ndeep = None\nfor _ in range(10**6): deep = (deep,)\nrepr(deep)",
        "killed memory error timeout",
    ),
    "leaves by sys.exit": Attack("import sys\nsys.exit(2)", "error", r"exit\(\)"),
    "closes its output": Attack("import sys\nsys.stdout.close()\nsys.stdout = None\nprint('x')", "ok error"),
    "asks for input": Attack("input('password: ')", "error", "EOFError"),
}
PROTOCOL = {
    "forges a reply": Attack(
        "import json, struct\nbody = json.dumps({'id': '1-00', 'status': 'ok'}).encode()\n"
        "os.write(3, struct.pack('<I', len(body)) + body)",
        "killed",
        "another request|more came",
    ),
    "patches json": Attack(
        'import json\njson.dumps = lambda *_, **__: \'{"id": "1-00", "status": "ok"}\'\n'
        "json.encoder.c_make_encoder = lambda *_: lambda *_: json.dumps()",
        "killed",
    ),
    "announces a frame of two gigabytes": Attack(
        "os.write(3, b'\\xff\\xff\\xff\\x7f' + b'x' * 100)", "killed", "at most"
    ),
}
ATTACKS = TIME_AND_MEMORY | PROCESSES | OUTPUT | FILES | NETWORK | OTHERS | DEATHS | PROTOCOL


# Into the machinery that the interpreter shares with the cells, for attacks that last longer than one of them.
INSIDE = """
import sys
frame = sys._getframe()
while not hasattr(frame.f_locals.get('self'), '_answer_fork'): frame = frame.f_back
session = frame.f_locals['self']
wire = type(session).__init__.__globals__['wire']
fork, send = session._fork, wire.send
def spin():
    while True: pass
"""
KILLED = "killed"
FURTHER: dict[str, tuple[tuple[str, str], ...]] = {
    "handlers of every timer": (
        (
            "import signal\nfor s in (14, 26, 27): signal.signal(s, lambda *_: 1 / 0)\n"
            "for t in (0, 1, 2): n = signal.setitimer(t, 0.001, 0.001)",
            "ok error",
        ),
        ("x", "ok error killed"),
    ),
    "ignores every signal": (
        ("import signal\nfor s in set(range(1, 32)) - {9, 19}: n = signal.signal(s, signal.SIG_IGN)", "ok"),
        ("while True: pass", "timeout"),
    ),
    "writes its own memory file": (("writes('/proc/self/mem')\nreads('/proc/self/maps')", "ok"),),
    "asks prctl for all it has": (("for option in range(80): attempt(libc.prctl(option, 1, 0, 0, 0))", "ok"),),
    "calls by foreign numbers": (("attempt(libc.syscall(0x40000000 + 39))", "ok killed"),),
    "roundabout paths": (
        (
            "for path in ('/proc/self/root', '/proc/self/cwd', f'/proc/{DRIVER}/root', '/usr/lib/../..'):\n"
            "    reads(path + '/etc/passwd')\n    reads(path + SECRET_FILE)\n"
            "folder = libc.open(b'/usr/lib', os.O_PATH)\nattempt(libc.openat(folder, b'../../etc/passwd', 0))\n"
            "reads(f'/proc/self/fd/{libc.open(SECRET_FILE.encode(), os.O_PATH)}')\n"
            "for path in ('/proc/self/environ', '/proc/1/environ', '/dev/mem', '/dev/fd/3'): reads(path)",
            "ok",
        ),
    ),
    "memory shared with its copies": (
        ("attempt(libc.mmap(0, 4096, 3, 0x21, -1, 0))\nattempt(libc.mmap(0, 4096, 3, 0x23, -1, 0))", "ok"),
    ),
    "keeps its output in memory": (
        (
            INSIDE + "session._interpreter._screen.shut = lambda: None\nkept = session._interpreter._screen._memory",
            "ok",
        ),
        ("kept[:8] = b'for them'", "killed"),
    ),
    "maps its output once more": (
        ("kept = [at for n in range(4, 64) if (at := libc.mmap(0, 4096, 3, 1, n, 0)) != -1]\nlen(kept) > 0", "ok"),
        ("ctypes.memset(kept[0], 1, 9)", "killed"),
    ),
    "signals by descriptors": (
        (
            "attempt(libc.fcntl(3, 8, DRIVER))\nattempt(libc.fcntl(3, 10, 9))\n"
            "attempt(libc.ioctl(3, 0x8901, ctypes.byref(ctypes.c_int(DRIVER))))\n"
            "attempt(libc.ioctl(3, 0x5452, ctypes.byref(ctypes.c_int(1))))",
            "ok",
        ),
    ),
    "raises its limits": (
        ("for limit in (0, 1, 4, 7, 9): attempt(libc.setrlimit(limit, (ctypes.c_ulong * 2)(-1, -1)))", "ok"),
    ),
    "forks in odd ways": (
        (
            "flags = [0x100 | 17, 0x400 | 17, 0x8000 | 17, 0x4111, 9, 17, 0x2000 | 17, 0x20000 | 17, 0x10000 | 17]\n"
            "clone = {'x86_64': 56, 'aarch64': 220}[os.uname().machine]\n"
            "for flag in flags: attempt(libc.syscall(clone, flag, 0, 0, 0, 0))\n"
            "attempt(libc.syscall(435, (ctypes.c_char * 88)(), 88))",
            "ok",
        ),
    ),
    "keeps asking for forks": (("while True: libc.fork()", "timeout"),),
    "fills the connection": (("while True: os.write(3, b'\\x01\\x00\\x00\\x00{' * 1000)", KILLED),),
    "replies with three megabytes": (
        (INSIDE + "wire.send = lambda s, m: send(s, dict(m, junk='x' * 3_000_000))", KILLED),
    ),
    "hands descriptors to the driver": (
        (
            INSIDE + "files = [os.open(os.__file__, 0)] * 100\n"
            "wire.send = lambda s, m: send(s, m, files if 'status' in m else ())",
            "ok",
        ),
        ("x", "ok"),
    ),
    "drips its reply": (
        (
            INSIDE + "import json, struct, time\n"
            "def drip(s, m):\n"
            "    body = json.dumps(m).encode()\n"
            "    for byte in struct.pack('<I', len(body)) + body: s.send(bytes([byte])), time.sleep(0.1)\n"
            "wire.send = drip",
            "timeout",
        ),
    ),
    "goes on after its reply": (
        (INSIDE + "def on(s, m):\n    send(s, m)\n    spin()\nwire.send = on", "ok"),
        ("x", KILLED),
    ),
    "forks and hides the child": (
        (INSIDE + "def hide():\n    pid = fork()\n    return pid if pid else spin()\nsession._fork = hide", "ok"),
        ("x", KILLED),
    ),
    "forks and denies it": (
        (
            INSIDE + "def deny():\n    if fork() == 0: spin()\n    raise OSError(11, 'no')\nsession._fork = deny",
            "ok",
        ),
        ("x", KILLED),
    ),
    "forks and dies": (
        (INSIDE + "def die():\n    if fork() == 0: spin()\n    os._exit(0)\nsession._fork = die", "ok"),
        ("x", KILLED),
    ),
    "forks twice on one permit": (
        (INSIDE + "def twice():\n    if libc.fork() == 0: spin()\n    return fork()\nsession._fork = twice", "ok"),
        ("x", KILLED),
    ),
    "passes itself off as its child": ((INSIDE + "session._fork = os.getpid", "ok"), ("x", KILLED)),
    "passes a sibling off as its child": ((INSIDE + "session._fork = lambda: SIBLING", "ok"), ("x", KILLED)),
    "never answers": ((INSIDE + "import time\nsession._answer_fork = lambda *_: time.sleep(99)", "ok"), ("x", KILLED)),
}


class HostileDriver:
    """A process of some user that plays cells on a tool of its own."""

    def __init__(self, uid: int, seconds: float) -> None:
        script = Path(__file__).with_name("hostile_driver.py")
        command = [sys.executable, str(script), str(uid), str(seconds)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer()["uid"] == (uid or os.getuid())

    def play(self, *cells: str) -> dict[str, Any]:
        """Run the cells one after the other, and look around."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(cells) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the hostile driver died"
        return json.loads(line)

    def close(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0
        self._process.stdout.close()


@dataclass(frozen=True)
class Drivers:
    """A driver for attacks that are to end at their deadline, and one for those that a slow machine may delay."""

    hasty: HostileDriver
    patient: HostileDriver

    def play(self, cells: Sequence[str], allowed: str) -> dict[str, Any]:
        """Run cells that may end with the `allowed` statuses."""
        return (self.hasty if "timeout" in allowed else self.patient).play(*cells)


@pytest.fixture(scope="module", params=["root", "ordinary user"])
def drivers(request: pytest.FixtureRequest) -> Iterator[Drivers]:
    """Drivers of either kind, as far as the user of the tests may be both."""
    if capabilities().isolation != "full":
        pytest.skip(f"this machine confines only in part: {capabilities()}")
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("the tests run as an ordinary user, who cannot become root")
    uid = ORDINARY_UID if request.param == "ordinary user" and os.geteuid() == 0 else 0
    made = Drivers(HostileDriver(uid, 0.4), HostileDriver(uid, 30.0))
    yield made
    made.hasty.close()
    made.patient.close()


def assert_contained(report: dict[str, Any]) -> None:
    """What holds after any cell."""
    for _, text in report["results"]:
        assert "ESCAPED" not in text and SECRET not in text and "root:" not in text, text
    assert report["prefix"] == "41"
    assert report["sibling"] == "[7, 8]" and report["is_sibling_live"]
    assert report["sandbox"], "the zygote or the supervisor died"
    assert not report["touched"]
    assert (report["processes"], report["files"]) == (0, 0)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_contained(drivers: Drivers, name: str) -> None:
    """It ends as it should, and nothing but the cell's own process came to harm."""
    attack = ATTACKS[name]
    report = drivers.play([attack.code], attack.status)
    ((status, text),) = report["results"]
    assert status in attack.status.split(), (status, text)
    assert re.search(attack.text, text), text
    assert_contained(report)
    assert report["seconds"] < (20 if "timeout" in attack.status else 60)


@pytest.mark.parametrize("name", FURTHER)
def test_an_attack_on_the_machinery_is_contained(drivers: Drivers, name: str) -> None:
    """The interpreter's own side of the tool can be broken, to the harm of that lineage only."""
    steps = FURTHER[name]
    report = drivers.play([cell for cell, _ in steps], " ".join(allowed for _, allowed in steps))
    for (status, text), (_, allowed) in zip(report["results"], steps, strict=True):
        assert status in allowed.split(), (status, text)
    assert_contained(report)


def test_there_are_as_many_attacks_as_the_study_lists() -> None:
    """None got lost."""
    assert len(ATTACKS) == 47
