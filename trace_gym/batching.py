"""Calls side by side: one batch for all live branches, environment calls in threads, and clean ends.

Nothing here waits for ever: a call of an agent has a deadline, and a thread that hangs does not keep the program from
ending.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Agent, Completion, Request

T = TypeVar("T")
_Waiting = tuple[tuple[int, ...], Request, asyncio.Future[Completion]]


class Batch:
    """Gathers the requests of all live branches into one call of a batched agent.

    Args:
        agent: Who answers; one that is not batched gets every request as it comes.
        timeout_s: Deadline of one call.

    Attributes:
        live: Branches that are being played; a batch is sent once all of them wait for an answer.
        seconds: Wall-clock seconds during which the agent was working.
    """

    def __init__(self, agent: Agent, timeout_s: float) -> None:
        """Start with no branch."""
        self.agent = agent
        self.timeout_s = timeout_s
        self.seconds = 0.0
        self.live = 0
        self._waiting: list[_Waiting] = []
        self._flushing: set[asyncio.Task[None]] = set()
        self._since = 0.0

    async def complete(self, key: tuple[int, ...], request: Request) -> Completion:
        """Answer one branch; ``key`` is its place, which orders the batch.

        Raises:
            InfrastructureError: If the agent failed or missed its deadline.
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, request, future))
        self._flush_if_ready()
        return await future

    def leave(self) -> None:
        """Say that a branch has ended."""
        self.live -= 1
        self._flush_if_ready()

    async def close(self) -> None:
        """Cancel the calls that nobody waits for any more."""
        for task in self._flushing:
            task.cancel()
        await asyncio.gather(*self._flushing, return_exceptions=True)

    def _flush_if_ready(self) -> None:
        if self._waiting and (not self.agent.batched or len(self._waiting) == self.live):
            batch, self._waiting = sorted(self._waiting, key=lambda item: item[0]), []
            if not self._flushing:
                self._since = time.perf_counter()
            task = asyncio.get_running_loop().create_task(self._flush(batch))
            self._flushing.add(task)
            task.add_done_callback(self._flushed)

    def _flushed(self, task: asyncio.Task[None]) -> None:
        self._flushing.discard(task)
        if not self._flushing:
            self.seconds += time.perf_counter() - self._since

    async def _flush(self, batch: list[_Waiting]) -> None:
        try:
            completions = await self._ask([request for _, request, _ in batch])
        except Exception as error:  # reaches every branch that waits for it
            self._fail(batch, error)
        else:
            for (_, _, future), completion in zip(batch, completions, strict=True):
                if not future.done():
                    future.set_result(completion)
        finally:
            for _, _, future in batch:
                future.cancel()  # does nothing unless this task was cancelled

    async def _ask(self, requests: list[Request]) -> list[Completion]:
        try:
            async with asyncio.timeout(self.timeout_s) as clock:
                completions = await self.agent.complete(requests)
        except TimeoutError:
            if not clock.expired():  # the agent's own
                raise
            raise InfrastructureError("deadline", f"the agent took longer than {self.timeout_s} s") from None
        if len(completions) != len(requests):
            raise BadInputError(
                f"{type(self.agent).__name__} gave {len(completions)} completions for {len(requests)} requests; "
                "an agent answers every request, in order."
            )
        return completions

    @staticmethod
    def _fail(batch: list[_Waiting], error: Exception) -> None:
        for _, _, future in batch:
            if not future.done():
                future.set_exception(error)


def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """Run a call in a thread of its own that does not keep the program from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def work() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="trace_gym_env", daemon=True).start()
    return future


async def gather(calls: Sequence[Awaitable[T]]) -> list[T]:
    """Await all; the first programming error cancels the rest."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
