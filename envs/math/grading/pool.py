"""The workers for the harder comparisons: one pool per process, shared by all its threads.

Started by whoever says that answers will come (`GraderLease`), or else by the first one that needs it, it keeps spare
workers ready, so that what follows a kill does not wait for one. A worker has a second of CPU time for a comparison
and is killed then, by the kernel's hand, whatever it is doing.
Who is to blame is clear: once the worker has read and evaluated the right answer, it is the other one. A pool that
does not work is an infrastructure failure and never a verdict.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

from trace_gym.envs.math.grading.clock import (
    BUDGET_S,
    START_S,
    WALL_S,
    Deadline,
    DeadlineError,
    GradeClock,
    WorkerDiedError,
)
from trace_gym.envs.math.grading.decide import Verdict
from trace_gym.errors import InfrastructureError

_NEEDED = ("mpmath", "sympy", "math_verify")
_SPARES = 2
_MAX_USES = 300  # comparisons of one worker: sympy's caches only grow
_MOST_AT_ONCE = max(4, 2 * (os.cpu_count() or 1))
_TRIES = 2

_numbers = itertools.count(1)


class Worker(Protocol):
    """A process that compares."""

    def meet(self, limit: Deadline) -> None:
        """Wait until it is there."""

    def clock(self, limit: Deadline) -> GradeClock:
        """Return the clock of one comparison, started now."""

    def send(self, message: dict[str, Any], clock: GradeClock) -> None:
        """Send a request."""

    def receive(self, clock: GradeClock) -> dict[str, Any]:
        """Return the next message."""

    def kill(self) -> None:
        """End it."""

    def abandon(self) -> None:
        """Close this process's ends."""


class Source(Protocol):
    """Starts workers."""

    @property
    def is_alive(self) -> bool:
        """Whether it can."""

    def start(self) -> Worker:
        """Start one without waiting for it."""

    def close(self) -> None:
        """End it."""

    def abandon(self) -> None:
        """Close this process's ends."""


def _new_source() -> Source:
    if sys.platform == "linux":
        from trace_gym.envs.math.grading.forked import Template

        return Template()
    from trace_gym.envs.math.grading.piped import Starter

    return Starter()


class Pool:
    """Workers and what starts them."""

    def __init__(self, source: Source) -> None:
        """Have the spare workers started."""
        self._source = source
        self._free = threading.Semaphore(_MOST_AT_ONCE)
        self._lock = threading.Lock()
        self._idle: deque[tuple[Worker, int]] = deque((source.start(), 0) for _ in range(_SPARES))
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        """Whether it can start workers."""
        return not self._is_closed and self._source.is_alive

    def compare(self, answer: str, right: str, percent_asked: bool, patient: bool = False) -> Verdict:
        """Have two texts compared. Once it is their turn, that takes no two seconds; patience waits for a worker first.

        Raises:
            InfrastructureError: With kind ``grader_died``, if no worker comes.
        """
        request = {"answer": answer, "right": right, "percent_asked": percent_asked}
        with self._free:
            if patient:
                self._wait()
            limit = Deadline(WALL_S)
            for _ in range(_TRIES):
                verdict, blamed, died = self._try(request, limit)
                if verdict is not None:
                    return verdict
                if not died.startswith("it"):
                    break
        if blamed:
            return Verdict("wrong", f"{died}; the answer cannot be evaluated")
        return Verdict("ungradable", died)

    def _wait(self) -> None:
        """Wait until a worker stands ready."""
        worker, uses = self._take()
        try:
            self._meet(worker, Deadline(START_S))
        except DeadlineError:
            worker.kill()
            raise InfrastructureError("grader_died", f"no worker of the grader comes up in {START_S:g} s") from None
        self._give_back(worker, uses)

    def _try(self, request: dict[str, Any], limit: Deadline) -> tuple[Verdict | None, bool, str]:
        """Return the verdict, or else whether the answer is to blame, and for what."""
        worker, uses = self._take()
        try:
            self._meet(worker, limit)
        except DeadlineError:
            self._give_back(worker, uses)  # the next one finds it ready
            return None, False, "timeout: the grader's processes are still starting"
        is_right_read = False
        try:
            clock = worker.clock(limit)
            worker.send({"id": next(_numbers), **request}, clock)
            reply = worker.receive(clock)
            while "right" in reply:
                is_right_read = True
                reply = worker.receive(clock)
        except DeadlineError:
            worker.kill()
            self._refill()
            if clock.is_spent:
                return None, is_right_read, f"timeout: the comparison took more than {BUDGET_S:g} s of CPU time"
            return None, False, "timeout: the machine is too busy to compare within two seconds"
        except WorkerDiedError:
            worker.kill()
            self._refill()
            return None, is_right_read, "it ended the process that compared"
        except BaseException:
            worker.kill()
            raise
        if "beyond" in reply:
            worker.kill()
            self._refill()
            return None, is_right_read, f"guard: {reply['beyond']} in the comparison"
        self._give_back(worker, uses + 1)
        return Verdict(reply["outcome"], reply["reason"]), False, ""

    def _take(self) -> tuple[Worker, int]:
        with self._lock:
            worker, uses = self._idle.popleft() if self._idle else (self._source.start(), 0)
        self._refill()
        return worker, uses

    @staticmethod
    def _meet(worker: Worker, limit: Deadline) -> None:
        try:
            worker.meet(limit)
        except DeadlineError:
            raise
        except WorkerDiedError as error:
            worker.kill()
            raise InfrastructureError(
                "grader_died",
                f"no worker of the grader comes up: {error}; its own message, if any, is on the standard error of "
                "this program",
            ) from error
        except BaseException:
            worker.kill()
            raise

    def _refill(self) -> None:
        """Have spare workers started; nobody waits for them."""
        with self._lock:
            if not self._is_closed and self._source.is_alive:
                while len(self._idle) < _SPARES:
                    self._idle.append((self._source.start(), 0))

    def _give_back(self, worker: Worker, uses: int) -> None:
        with self._lock:
            if not self._is_closed and uses < _MAX_USES and len(self._idle) < _MOST_AT_ONCE + _SPARES:
                self._idle.appendleft((worker, uses))
                return
        worker.kill()

    def close(self) -> None:
        """End every worker and what starts them."""
        with self._lock:
            self._is_closed = True
            idle = [worker for worker, _ in self._idle]
            self._idle.clear()
        for worker in idle:
            worker.kill()
        self._source.close()

    def abandon(self) -> None:
        """Close this process's ends: it is a fork of the pool's owner."""
        for worker, _ in self._idle:
            worker.abandon()
        self._source.abandon()


_pool: Pool | None = None
_pool_lock = threading.RLock()  # reentrant: collecting a lease may interrupt a caller that holds it
_leases = 0
_busy = 0  # comparisons that run now


def _shared_pool() -> Pool:
    global _pool
    with _pool_lock:
        if _pool is None or not _pool.is_alive:
            if _pool is not None:
                _pool.close()
            _pool = Pool(_new_source())
        return _pool


@contextlib.contextmanager
def _in_use() -> Iterator[Pool]:
    """Lend the pool, so that a lease that ends meanwhile does not end it."""
    global _busy
    with _pool_lock:
        pool = _shared_pool()
        _busy += 1
    try:
        yield pool
    finally:
        with _pool_lock:
            _busy -= 1


@lru_cache(maxsize=1)
def _missing() -> str | None:
    return next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)


def compare_thoroughly(answer: str, right: str, percent_asked: bool, patient: bool) -> Verdict:
    """Compare two texts in a worker; see `Pool.compare`.

    Raises:
        InfrastructureError: If the workers do not work.
    """
    missing = _missing()
    if missing is not None:
        return Verdict(
            "ungradable",
            f"the comparison needs {missing!r}, which is not installed. Install it with: pip install 'trace-gym[math]'",
        )
    with _in_use() as pool:
        return pool.compare(answer, right, percent_asked, patient)


def close_grader() -> None:
    """End the grader's processes, if any run; the next grade that needs them starts them again."""
    global _pool
    with _pool_lock:
        pool, _pool = _pool, None
    if pool is not None:
        pool.close()


class GraderLease:
    """A share in the grader's processes: they end with the last share, or with the program.

    A share that is forgotten is given back when it is collected.
    """

    def __init__(self) -> None:
        """Take a share, and have the processes started; this does not wait for them.

        Raises:
            InfrastructureError: With kind ``grader_start``, if they cannot be started.
        """
        global _leases
        with _pool_lock:
            _leases += 1
        self._give_back = weakref.finalize(self, _end_lease)
        if _missing() is None:
            _shared_pool()

    def close(self) -> None:
        """Give the share back; doing so again does nothing."""
        self._give_back()


def _end_lease() -> None:
    global _leases
    with _pool_lock:
        _leases -= 1
        if _leases or _busy:
            return
    close_grader()


def _forget() -> None:
    """After a fork: the processes belong to the parent."""
    global _pool, _pool_lock, _busy
    _pool_lock = threading.RLock()
    _busy = 0
    pool, _pool = _pool, None
    if pool is not None:
        with contextlib.suppress(OSError):
            pool.abandon()


atexit.register(close_grader)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)
