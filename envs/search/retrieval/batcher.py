"""Searches of many threads, gathered into batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trace_gym.envs.search.retrieval.base import Hit

_MAX_BATCH = 1024  # queries, unless one caller has more


def _taken() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class _Asked:
    queries: Sequence[str]
    k: int
    wake: threading.Lock = field(default_factory=_taken)  # free: answered, or next; a fifth of the cost of an Event
    is_next: bool = False  # to answer those who wait
    found: list[list[Hit]] | None = None
    error: BaseException | None = None


class Batcher:
    """Asks for everything that waits in one call; nothing is held back to wait for more.

    It has no thread of its own: a caller asks for all who came while others were asking, then wakes the next.

    Args:
        search: Answers queries, as `base.Retriever.search` does.
        at_once: Most calls of it under way.
    """

    def __init__(self, search: Callable[[Sequence[str], int], list[list[Hit]]], at_once: int = 1) -> None:
        """Keep the arguments."""
        self._search = search
        self._lock = threading.Lock()
        self._free = at_once
        self._waiting: deque[_Asked] = deque()  # empty while there is a free one

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Return the answers to these queries; raise what the search raised, for every caller of the batch."""
        asked = _Asked(queries, k)
        with self._lock:
            is_free = self._free > 0
            if is_free:
                self._free -= 1
            else:
                self._waiting.append(asked)
        if not is_free:
            self._wait(asked)
        if asked.found is None and asked.error is None:
            self._work(asked)
        if asked.error is not None:
            raise asked.error
        return asked.found or []

    def _wait(self, asked: _Asked) -> None:
        try:
            asked.wake.acquire()
        except BaseException:  # interrupted: nobody may be left waiting for this caller
            with self._lock:
                if asked in self._waiting:
                    self._waiting.remove(asked)
                elif asked.is_next:
                    self._pass_on()
            raise

    def _work(self, first: _Asked) -> None:
        """Answer the first and those who wait, then pass the place on."""
        with self._lock:
            batch, size = [first], len(first.queries)
            while self._waiting and size + len(self._waiting[0].queries) <= _MAX_BATCH:
                batch.append(self._waiting.popleft())
                size += len(batch[-1].queries)
        for k in {asked.k for asked in batch}:
            self._answer([asked for asked in batch if asked.k == k], k)
        with self._lock:
            self._pass_on()

    def _pass_on(self) -> None:
        """Let the next caller answer, if one waits; the lock is held."""
        if self._waiting:
            following = self._waiting.popleft()
            following.is_next = True
            following.wake.release()
        else:
            self._free += 1

    def _answer(self, batch: Sequence[_Asked], k: int) -> None:
        try:
            found = iter(self._search([query for asked in batch for query in asked.queries], k))
            for asked in batch:
                asked.found = [next(found) for _ in asked.queries]
        except BaseException as error:  # an interrupt as well: nobody may be left waiting
            for asked in batch:
                asked.error = error
        for asked in batch:
            asked.wake.release()
