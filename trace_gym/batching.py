"""Answers side by side: live branches share an agent's batch, leave it one by one, and come back without a clock.

A batched agent works in bursts. For each of them some branches are *due*; it starts once every one of these has asked
or has ended, however long its environment takes, and those that asked early wait for their turn. So what the agent gets
in a burst depends on what was said and played before, never on how fast: equal seeds give equal batches, and with them
equal rounding. While an environment plays, the agent works on the other branches, since a branch is due again only
``slack`` bursts after the burst that follows its answer.

Nothing here waits for ever: a burst has a deadline.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Agent, Completion, Request

T = TypeVar("T")
Key = tuple[int, ...]


class Generation(Protocol):
    """What a batched agent may offer, as ``agent.generation()``, to answer continuously.

    It lives as long as the trees of a round grow; what it keeps of their prefixes goes with it.

    Attributes:
        slack: Bursts that a branch may miss while its environment plays.
    """

    slack: int

    async def burst(
        self,
        requests: Sequence[tuple[Key, Request]],
        finished: Callable[[Key, Completion], None],
        closed: Sequence[int] = (),
    ) -> None:
        """Take in requests, work for a while, and return; what is not finished goes on in the next burst.

        Args:
            requests: What to continue, by the branch's key (its tree first), in canonical order.
            finished: To be called, in the thread of the event loop, with each answer as soon as it is there.
            closed: Trees for which nothing needs to be kept any more.

        Raises:
            InfrastructureError: If the backend failed; all unfinished requests are then lost.
        """
        ...


class _WholeAnswers:
    """Bursts of an agent that answers all requests at once."""

    slack = 0

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def burst(
        self,
        requests: Sequence[tuple[Key, Request]],
        finished: Callable[[Key, Completion], None],
        closed: Sequence[int] = (),
    ) -> None:
        completions = await _ask(self._agent, [request for _, request in requests])
        for (key, _), completion in zip(requests, completions, strict=True):
            finished(key, completion)


class Batch:
    """Gathers the requests of all live branches for one agent.

    A branch is known by its key, of which the first number names its tree.

    Args:
        agent: Who answers; one that is not batched gets every request as it comes.
        timeout_s: Deadline of one burst, or of one call of an agent that is not batched.

    Attributes:
        seconds: Wall-clock seconds during which the agent was working.
    """

    def __init__(self, agent: Agent, timeout_s: float) -> None:
        """Start with no branch."""
        self.agent = agent
        self.timeout_s = timeout_s
        self.seconds = 0.0
        self._generation = self._begin()
        self._now = 0  # number of the next burst
        self._due: dict[Key, int] = {}  # for each branch that is not being answered: the burst that waits for it
        self._waiting: dict[Key, Request] = {}
        self._answers: dict[Key, asyncio.Future[Completion]] = {}  # to branches that wait or are being answered
        self._live: dict[int, set[Key]] = {}  # branches by tree
        self._over: dict[int, int] = {}  # by tree: the burst before which its last branch ended
        self._task: asyncio.Task[None] | None = None
        self._is_broken = False
        self._num_working = 0
        self._since = 0.0

    def enter(self, keys: Iterable[Key], after: Key | None = None) -> None:
        """Announce branches, before any of them asks; ``after`` is the live branch that they continue."""
        due = self._now if after is None else self._due[after] + self._generation.slack
        for key in keys:
            self._due[key] = due
            self._live.setdefault(key[0], set()).add(key)

    def leave(self, key: Key) -> None:
        """Say that a branch has ended."""
        tree, due = key[0], self._due.pop(key)
        self._live[tree].remove(key)
        self._over[tree] = max(due, self._over.get(tree, 0))
        self._go_on()

    async def complete(self, key: Key, request: Request) -> Completion:
        """Answer one branch.

        Raises:
            InfrastructureError: If the agent failed or missed its deadline.
        """
        if not self.agent.batched:
            with self._working():
                return (await self._in_time(_ask(self.agent, [request])))[0]
        self._waiting[key] = request
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        self._go_on()
        return await answer

    async def close(self) -> None:
        """Cancel what nobody waits for any more."""
        self._is_broken = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> Generation:
        begin: Callable[[], Generation] | None = getattr(self.agent, "generation", None)
        return begin() if begin is not None else _WholeAnswers(self.agent)

    def _go_on(self) -> None:
        """Start a burst if there is something to do and nobody is missing."""
        if self._task is not None or self._is_broken or not self._answers:
            return
        if len(self._waiting) == len(self._answers):  # nothing to go on with: the next burst is for those due first
            self._now = max(self._now, min(self._due.values()))
        if all(key in self._waiting for key, due in self._due.items() if due <= self._now):
            self._task = asyncio.get_running_loop().create_task(self._burst())
            self._task.add_done_callback(self._burst_ended)

    async def _burst(self) -> None:
        keys = sorted(key for key in self._waiting if self._due[key] <= self._now)
        requests = [(key, self._waiting.pop(key)) for key in keys]
        for key in keys:
            del self._due[key]
        closed = [tree for tree, due in self._over.items() if due <= self._now and not self._live[tree]]
        for tree in closed:
            del self._over[tree]
        try:
            with self._working():
                await self._in_time(self._generation.burst(requests, self._finished, closed))
        except Exception as error:  # reaches every branch that is being answered
            self._generation = self._begin()
            for key in [key for key in self._answers if key not in self._waiting]:
                self._answered(key).set_exception(error)
        self._now += 1

    def _burst_ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            self._is_broken = True
            for answer in self._answers.values():
                answer.cancel()
        self._go_on()

    def _finished(self, key: Key, completion: Completion) -> None:
        if key in self._answers:  # else the burst was given up
            self._answered(key).set_result(completion)

    def _answered(self, key: Key) -> asyncio.Future[Completion]:
        """Let a branch play; return the answer to be given, or some other future if nobody waits for it any more."""
        self._due[key] = self._now + 1 + self._generation.slack
        answer = self._answers.pop(key)
        return answer if not answer.done() else asyncio.get_running_loop().create_future()

    async def _in_time(self, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self.timeout_s) as clock:
                return await call
        except TimeoutError:
            if not clock.expired():  # the agent's own
                raise
            raise InfrastructureError("deadline", f"the agent took longer than {self.timeout_s} s") from None

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count the time in which the agent works, once however many calls run."""
        if not self._num_working:
            self._since = time.perf_counter()
        self._num_working += 1
        try:
            yield
        finally:
            self._num_working -= 1
            if not self._num_working:
                self.seconds += time.perf_counter() - self._since


async def _ask(agent: Agent, requests: list[Request]) -> list[Completion]:
    completions = await agent.complete(requests)
    if len(completions) != len(requests):
        raise BadInputError(
            f"{type(agent).__name__} gave {len(completions)} completions for {len(requests)} requests; "
            "an agent answers every request, in order."
        )
    return completions


def run_to_end(call: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, also inside a notebook, where a loop already runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_wakeful(call))
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


async def _wakeful(call: Coroutine[Any, Any, T]) -> T:
    """Let signals wake the event loop: asyncio misses one that comes just before it waits for events."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        return await call
    loop = asyncio.get_running_loop()
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        before = signal.set_wakeup_fd(far.fileno(), warn_on_full_buffer=False)
        loop.add_reader(near, near.recv, 4096)
        try:
            return await call
        finally:
            loop.remove_reader(near)
            signal.set_wakeup_fd(before)


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
