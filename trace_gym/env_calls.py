"""Environment calls in threads, under deadlines: what hangs keeps neither its place nor the program from ending."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from trace_gym.errors import InfrastructureError
from trace_gym.executor import AnyEnv, Envs, RemoteEnv, run_in

AnEnv = AnyEnv | RemoteEnv
T = TypeVar("T")

_CLOSE_S = 2.0  # how long closing waits for environments that were given up
_IDLE_S = 5.0  # how long a thread waits for another call


class EnvPool:
    """Environments that are used again, and the closing of those that were given up.

    Args:
        envs: Makes them, where they are to live.
    """

    def __init__(self, envs: Envs) -> None:
        """Start with none."""
        self.envs = envs
        self.idle: list[AnEnv] = []
        self._closing: set[Future[None]] = set()

    def give_up(self, env: AnEnv, running: Future[Any]) -> None:
        """Close an environment in which a call still runs: now, and again in case the call opens something anew."""
        closing = in_thread(env.close)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        running.add_done_callback(lambda _: env.close())

    def close(self) -> None:
        """Close every environment that nobody has; one that hangs is not waited for."""
        while self.idle:
            self.idle.pop().close()
        wait(tuple(self._closing), _CLOSE_S)
        self.envs.close()


class EnvCalls:
    """The calls of one round, so many at the same time; calls past their deadline do not count.

    Args:
        pool: Where environments come from.
        workers: Calls that run at the same time.
        timeout_s: Deadline of one call.

    Attributes:
        env_id: Id of the environments.
        grade_seconds: Seconds that they took to grade.
    """

    def __init__(self, pool: EnvPool, workers: int, timeout_s: float) -> None:
        """Start with no call."""
        self.env_id = ""
        self.grade_seconds = 0.0
        self._pool = pool
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(workers)
        self._lent: dict[int, AnEnv] = {}

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[AnEnv]:
        """Lend an environment; unless it was given up meanwhile, somebody else can have it afterwards."""
        self._pool.idle = [env for env in self._pool.idle if getattr(env, "is_alive", True)]
        env = self._pool.idle.pop() if self._pool.idle else await self._make()
        self.env_id = env.spec.id if env.spec is not None else ""
        self._lent[id(env)] = env
        try:
            yield env
        finally:
            if self._lent.pop(id(env), None) is not None:
                timings = getattr(env.unwrapped, "timings", {})
                self.grade_seconds += timings.pop("grade", 0.0)
                if getattr(env, "is_alive", True):
                    self._pool.idle.append(env)

    async def call(self, env: AnEnv, function: Callable[..., T], *args: Any) -> T:
        """Return ``function(env, *args)`` of a lent environment, run in a thread or where the environment lives.

        If it is not waited for, the environment is given up.

        Raises:
            InfrastructureError: Kind ``deadline``, if it took too long; else whatever the call raises.
        """
        async with self._slots:
            running: Future[T] = in_thread(run_in, env, function, *args)
            try:
                return await self._wait(running, getattr(function, "__name__", "call"))
            finally:
                if not running.done():
                    del self._lent[id(env)]
                    self._pool.give_up(env, running)

    async def _make(self) -> AnEnv:
        """Make an environment in a thread; one that is ready only when nobody waits any more is closed."""
        async with self._slots:
            running = in_thread(self._pool.envs.make)
            try:
                return await self._wait(running, "making an environment")
            except BaseException:
                running.add_done_callback(lambda made: None if made.exception() else made.result().close())
                raise

    async def _wait(self, running: Future[T], name: str) -> T:
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                return await asyncio.wrap_future(running)
        except TimeoutError:
            if not clock.expired():  # the environment's own
                raise
            raise InfrastructureError("deadline", f"{name} took longer than {self._timeout_s} s") from None


def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """Run a call in a thread that does nothing else meanwhile and does not keep the program from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    try:
        thread = _Thread.free.pop()
    except IndexError:
        thread = _Thread()
    thread.calls.put(work)
    return future


class _Thread:
    """A thread that runs one call after the other and ends if there is none for a while."""

    free: list[_Thread] = []  # noqa: RUF012  # append and pop are atomic

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="trace_gym_env", daemon=True).start()

    def _run(self) -> None:
        call: Callable[[], None] | None = self.calls.get()
        while call is not None:
            call()
            del call  # what it holds must not live on in an idle thread
            call = self._next()

    def _next(self) -> Callable[[], None] | None:
        self.free.append(self)
        try:
            return self.calls.get(timeout=_IDLE_S)
        except queue.Empty:
            try:
                self.free.remove(self)
            except ValueError:  # taken at the last moment
                return self.calls.get()
            return None


if hasattr(os, "register_at_fork"):  # a forked process has none of these threads
    os.register_at_fork(after_in_child=_Thread.free.clear)
