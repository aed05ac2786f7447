"""Plays hostile cells on a real tool, as root or as an ordinary user, and reports what became of everything else.

Run as a program: ``hostile_driver.py UID SECONDS`` (user 0 stays what it is; a cell may take so many seconds). Reads
one list of cells per line as JSON, writes one report per line. The cells find what they might want to reach in the
variables of `Surroundings`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from process_tree import descendants, open_files

SECRET = "the-answer-is-3141"
# All through the C library: what Python's own functions would refuse first is no boundary.
HELPERS = """
import ctypes, os, errno
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_long
def attempt(result):
    print('ESCAPED' if result >= 0 else 'refused ' + errno.errorcode.get(ctypes.get_errno(), '?'))
    return result
def reads(path):
    buffer = ctypes.create_string_buffer(10)
    if libc.read(attempt(libc.open(path.encode(), os.O_RDONLY)), buffer, 9) > 0:
        print('ESCAPED', buffer.value)
def writes(path):
    attempt(libc.write(attempt(libc.open(path.encode(), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)), b'x', 1))
def address(family, rest):
    return family.to_bytes(2, 'little') + rest
def inet(port):
    return address(2, port.to_bytes(2, 'big') + bytes([127, 0, 0, 1]) + bytes(8))
x = 41
"""


def become(uid: int) -> None:
    """Become an ordinary user for ever; keep the right to read, where Python lies in a private folder of root."""
    libc = ctypes.CDLL(None, use_errno=True)
    private = any(not step.stat().st_mode & 0o001 for step in Path(sys.base_prefix, "x").resolve().parents)
    libc.prctl(8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kept = 1 << 2 if private else 0  # CAP_DAC_READ_SEARCH
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "capset")
    if private:
        libc.prctl(47, 2, 2, 0, 0)  # PR_CAP_AMBIENT_RAISE: for the programs we start
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as it is with a user's programs


class Surroundings:
    """What a hostile cell may want to reach: a file, ports and sockets of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = folder / "answers.txt"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o644)
        os.environ["TRACE_SECRET"] = SECRET
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0trace_gym_{os.getpid()}")
        self.abstract.listen()
        for each in (self.tcp, self.udp, self.abstract):
            each.setblocking(False)

    def variables(self) -> dict[str, object]:
        return {
            "DRIVER": os.getpid(),
            "SECRET_FILE": str(self.secret),
            "FOLDER": str(self.folder),
            "TCP": self.tcp.getsockname()[1],
            "UDP": self.udp.getsockname()[1],
            "ABSTRACT": self.abstract.getsockname(),
            "PACKAGES": str(Path(ctypes.__file__).parents[1]),
        }

    def touched(self) -> list[str]:
        """Return what a cell reached or left."""
        found = []
        for name, ask in (("tcp", self.tcp.accept), ("abstract", self.abstract.accept)):
            with contextlib.suppress(BlockingIOError):
                ask()[0].close()
                found.append(name)
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(64)
            found.append("udp")
        found += [str(path) for path in self.folder.iterdir() if path != self.secret]
        for place in ("/tmp", "/dev/shm", str(Path(ctypes.__file__).parents[1])):
            found += map(str, Path(place).glob("trace_gym_attack*"))
        with contextlib.suppress(OSError):
            lines = Path("/proc/sysvipc/shm").read_text().splitlines()
            found += [line for line in lines if line.split()[0] == str(0x7ACE)]
        return found


def play(tool, base, sibling, around: Surroundings, cells: list[str]) -> dict[str, object]:
    """Run the cells one after the other from the base, and look around."""
    sandbox = tool._sessions.backend.sandbox
    before = descendants()
    files = open_files()
    pids = sandbox.pids
    state, results = base, []
    began = time.monotonic()
    for cell in cells:
        result, state = state.step(cell)
        results.append((result.status, result.text))
    seconds = time.monotonic() - began
    report = {
        "results": results,
        "seconds": seconds,
        "prefix": base.step("x")[0].text,
        "sibling": sibling.step("y")[0].text,
        "is_sibling_live": sibling.is_live,
        "touched": around.touched(),
    }
    state.close() if state is not base else None
    state = None
    end = time.monotonic() + 5
    while (left := descendants() - before) and time.monotonic() < end:
        time.sleep(0.01)
    report["processes"] = len(left)
    report["files"] = open_files() - files
    report["sandbox"] = sandbox.is_alive and sandbox is tool._sessions.backend.sandbox and sandbox.pids == pids
    return report


def main(uid: int, seconds: float) -> None:
    """Serve."""
    if uid:
        become(uid)
    from trace_gym.envs.math.python_tool import PythonTool

    with tempfile.TemporaryDirectory() as folder, PythonTool(cell_timeout_s=seconds, memory_mb=512) as tool:
        Path(folder).chmod(0o755)
        around = Surroundings(Path(folder))
        sibling = tool.new(seed=1).step("y = [7, 8]")[1]
        sibling_pid = sibling._node.process.pid
        variables = around.variables() | {"SIBLING": sibling_pid, "ZYGOTE": tool._sessions.backend.sandbox.zygote.pid}
        base = tool.new(seed=0).step(HELPERS + "".join(f"{name} = {value!r}\n" for name, value in variables.items()))[1]
        print(json.dumps({"uid": os.getuid()}), flush=True)
        for line in sys.stdin:
            print(json.dumps(play(tool, base, sibling, around, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
