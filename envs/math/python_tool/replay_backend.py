"""The backend of every system: one plain Python process per session.

Such a process cannot be copied. Its state is exact as long as it goes on in one line; a state that goes on a second
time is made again by running its cells, which gives everything deterministic and is compared cell by cell. Values that
depend on time, addresses or unseeded randomness make that fail, and it says so.

On Linux the kernel confines these processes like those of the fork backend. Elsewhere nothing does: no more than a
limit of memory, where there is one, and the deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

from trace_gym.envs.math.python_tool import frames
from trace_gym.envs.math.python_tool.backend import Ending, Limits, ProcessDiedError, ending_by_signal
from trace_gym.envs.math.python_tool.clock import CellClock, Deadline, DeadlineError
from trace_gym.envs.math.python_tool.history import python_versions
from trace_gym.envs.math.python_tool.memory import MEBIBYTE, anonymous_bytes, footprint
from trace_gym.envs.math.python_tool.prelude import CLEAN_ENVIRONMENT
from trace_gym.envs.math.python_tool.screen import HEADER, memory_size, read_screen
from trace_gym.errors import InfrastructureError, StateError

_START_S = 60.0  # for a process to warm up
_EXIT_S = 2.0  # for a process whose pipe closed to be gone
_MAX_REPLY = 64 * 1024
_UNMEASURED = 64 * MEBIBYTE  # of a process, where the system does not tell
_IS_LINUX = sys.platform == "linux"

_request_numbers = itertools.count(1)


class ReplayProcess:
    """A process that runs the cells of one session."""

    def __init__(self, limits: Limits, confine: bool) -> None:
        """Start it; it warms up meanwhile."""
        self._half = 2 * limits.output_chars
        self._owner = os.getpid()
        self._lock = threading.Lock()  # held while its pipes are in use
        self._ended = threading.Lock()  # taken once, by whoever ends it
        fd, path = tempfile.mkstemp(prefix="trace_gym-")
        self._path = Path(path)
        self._output = open(fd, "r+b", buffering=0)  # noqa: PTH123 - a descriptor
        try:
            self._output.write(bytes(memory_size(self._half)))
            self._popen = _launch([path, str(os.getpid()), json.dumps({**limits.to_dict(), "confine": confine})])
        except BaseException:
            self._output.close()
            self._path.unlink()
            raise
        self._requests = cast(BinaryIO, self._popen.stdin)
        self._replies = cast(BinaryIO, self._popen.stdout)
        self.pid = self._popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs and belongs to this driver."""
        return self._owner == os.getpid() and self._popen.poll() is None and not self._ended.locked()

    def greet(self, must_isolate: bool) -> None:
        """Wait until it is warm.

        Raises:
            ProcessDiedError: If it does not come up in time.
            InfrastructureError: If it is not confined and must be.
        """
        hello = self._talk(None, Deadline(_START_S))
        if "error" in hello:
            raise ProcessDiedError(str(hello["error"]))
        with contextlib.suppress(OSError):  # Windows keeps it until the end
            self._path.unlink()
        if must_isolate and hello.get("isolated") is not True:
            raise InfrastructureError("sandbox_start", "the kernel did not confine the session as it should")

    def seed(self, seed: int) -> None:
        """Seed its random generators."""
        self._talk({"op": "seed", "seed": seed}, Deadline(_START_S))

    def run(self, code: str, number: int, limits: Limits, timeout_s: float, seed: int | None = None) -> Ending:
        """Run a cell; see `backend.Process.run`."""
        request: dict[str, Any] = {"op": "run", "code": code, "number": number}
        if seed is not None:
            request["seed"] = seed
        reason = ""
        with self._lock:
            if self._ended.locked():
                return Ending("killed", "", False, "its process was ended")
            self._output.seek(0)
            self._output.write(bytes(HEADER.size))
            # Where the CPU clock of a process cannot be read, the wall clock has to do.
            clock = CellClock(self.pid, timeout_s) if _IS_LINUX else Deadline(timeout_s)
            try:
                status = self._ask(request, clock).get("status")
                if status not in ("ok", "error", "memory"):
                    status, reason = "killed", "it broke the tool's protocol"
            except DeadlineError:
                status = "timeout"
            except frames.GarbageError as error:
                status, reason = "killed", f"it wrote on the tool's own connection ({error})"
            except (EOFError, OSError):
                status, reason = self._autopsy()
            self._output.seek(0)
            size = memory_size(self._half)
            shown = (self._output.read(size) or b"").ljust(size, b"\0")
        if status not in ("ok", "error"):
            self.kill()
        return Ending(status, *read_screen(shown, self._half, limits.output_chars), reason)

    def kill(self) -> None:
        """End the process; does nothing the second time."""
        if not self._ended.acquire(blocking=False):
            return
        is_ours = self._owner == os.getpid()
        if is_ours:
            _kill(self._popen)  # ends a wait for its reply, too
        with self._lock if is_ours else contextlib.nullcontext():
            for stream in (self._requests, self._replies, self._output):
                stream.close()
        if is_ours:
            self._popen.wait()
            self._path.unlink(missing_ok=True)
        else:
            self._popen.returncode = 0  # not ours to wait for

    def _talk(self, request: dict[str, Any] | None, deadline: Deadline) -> dict[str, Any]:
        with self._lock:
            try:
                return self._ask(request, deadline)
            except (DeadlineError, frames.GarbageError, EOFError, OSError, ValueError) as error:
                raise ProcessDiedError(f"{error or type(error).__name__}") from error

    def _ask(self, request: dict[str, Any] | None, deadline: Deadline) -> dict[str, Any]:
        """Send a request, if there is one, and read a frame; past the deadline the process is killed."""
        is_over = threading.Event()
        is_late = []

        def watch() -> None:
            try:
                while not is_over.wait(deadline.left()):
                    pass
            except DeadlineError:
                is_late.append(True)
                _kill(self._popen)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            if request is None:
                return frames.read(self._replies, _MAX_REPLY)
            request["id"] = f"{next(_request_numbers)}-{secrets.token_hex(4)}"
            frames.write(self._requests, request)
            reply = frames.read(self._replies, _MAX_REPLY)
        finally:
            is_over.set()
            watcher.join()
            if is_late:
                raise DeadlineError
        if reply.get("id") != request["id"]:
            raise frames.GarbageError("an answer to another request")
        return reply

    def _autopsy(self) -> tuple[str, str]:
        """Find out why the pipe closed: status and reason."""
        try:
            code = self._popen.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "killed", "it closed the tool's own connection"
        if code >= 0:
            return "killed", f"it ended its own process with exit code {code}"
        return ending_by_signal(-code)


def _launch(arguments: list[str]) -> subprocess.Popen[bytes]:
    kept = {name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ}  # Windows needs it
    return subprocess.Popen(
        [sys.executable, "-s", "-P", str(Path(__file__).with_name("boot.py")), "replay_session", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**CLEAN_ENVIRONMENT, **kept},
        cwd=os.path.abspath(os.sep),  # noqa: PTH100 - the root of a drive
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )


def _kill(popen: subprocess.Popen[bytes]) -> None:
    """Kill a process, with what it started if nothing confined it."""
    if popen.returncode is None and hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(popen.pid, signal.SIGKILL)
    popen.kill()


class ReplayBackend:
    """Starts the processes; one more than asked for stands by, warm, so that rebuilding does not wait for imports."""

    can_fork: ClassVar[bool] = False

    def __init__(self, limits: Limits, must_isolate: bool) -> None:
        """Start nothing yet.

        Args:
            limits: The limits of a cell.
            must_isolate: Refuse to run where the kernel does not confine.
        """
        self._limits = limits
        self._must_isolate = must_isolate
        self._is_closed = False
        self._common = 0
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[ReplayProcess] = set()
        self._spare: ReplayProcess | None = None
        # On Linux a confined process ends with the thread that started it, so one thread starts them all.
        self._starter = ThreadPoolExecutor(1, "trace_gym-replay")

    def start(self, seed: int) -> ReplayProcess:
        """Take the process that stands by, or start one."""
        with self._lock:
            process, self._spare = self._spare or self._launched(), None
        try:
            process.greet(self._must_isolate)
            process.seed(seed)
            with self._lock:
                if self._spare is None:
                    self._spare = self._launched()
        except BaseException:
            process.kill()
            raise
        self._common = self._common or anonymous_bytes(process.pid)
        return process

    def _launched(self) -> ReplayProcess:
        if self._is_closed:
            raise StateError("The Python tool is closed. Make a new PythonTool.")
        try:
            process = self._starter.submit(ReplayProcess, self._limits, _IS_LINUX).result()
        except OSError as error:
            raise ProcessDiedError(f"no process could be started: {error}") from error
        self._processes = {other for other in self._processes if other.is_alive} | {process}
        return process

    def fork(self, process: ReplayProcess) -> ReplayProcess:
        """Refuse; see `can_fork`."""
        raise NotImplementedError("A plain process cannot be forked.")

    def is_to_blame(self, process: ReplayProcess) -> bool:
        """Return False: every process stands alone."""
        return False

    def recover(self) -> bool:
        """Return False: there is nothing that could die but the sessions."""
        return False

    def growth(self, process: ReplayProcess) -> int:
        """Compare its own pages with those of a fresh process."""
        return anonymous_bytes(process.pid) - self._common

    def memory(self, process: ReplayProcess) -> int:
        """Return the proportional set size, or a guess where it cannot be read."""
        size = footprint(process.pid)
        return size.private + size.shared if size is not None else _UNMEASURED + max(0, self.growth(process))

    def versions(self) -> Mapping[str, str]:
        """Return the versions of Python and its libraries."""
        return python_versions()

    def forget(self) -> None:
        """In a forked copy of the driver: leave the original's processes alone."""
        for process in self._processes:
            process.kill()  # knows that it is not ours
        self._begin()

    def close(self) -> None:
        """End every process."""
        with self._lock:
            self._is_closed = True
            self._spare = None
            processes, self._processes = self._processes, set()
        for process in processes:
            process.kill()
        self._starter.shutdown()
