"""Searches of many threads, gathered into batches for one engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from trace_gym.envs.search.retrieval.base import KIND, Hit, Retriever
from trace_gym.errors import InfrastructureError

_MAX_BATCH = 1024  # queries


@dataclass
class _Asked:
    queries: Sequence[str]
    k: int
    future: Future[list[list[Hit]]] = field(default_factory=Future)


class Batcher:
    """Hands everything that waits to the engine in one call, from one thread; nothing is held back to wait for more.

    Args:
        engine: What searches.
        timeout_s: How long a caller waits.
    """

    def __init__(self, engine: Retriever, timeout_s: float = 120.0) -> None:
        """Start the thread."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Search as the engine does.

        Raises:
            InfrastructureError: If the engine fails or takes too long.
        """
        asked = _Asked(queries, k)
        self._asked.put(asked)
        try:
            return asked.future.result(self._timeout_s)
        except TimeoutError:
            raise InfrastructureError(KIND, f"no answer within {self._timeout_s:g} s") from None

    def _work(self) -> None:
        while (first := self._asked.get()) is not None:
            batch, size = [first], len(first.queries)
            while size < _MAX_BATCH:
                try:
                    more = self._asked.get_nowait()
                except queue.Empty:
                    break
                if more is None:
                    self._asked.put(None)
                    break
                batch.append(more)
                size += len(more.queries)
            for k in {asked.k for asked in batch}:
                self._answer([asked for asked in batch if asked.k == k], k)

    def _answer(self, batch: list[_Asked], k: int) -> None:
        try:
            found = iter(self._engine.search([query for asked in batch for query in asked.queries], k))
        except Exception as error:  # every caller gets it
            for asked in batch:
                asked.future.set_exception(error)
            return
        for asked in batch:
            asked.future.set_result([next(found) for _ in asked.queries])

    def close(self) -> None:
        """End the thread; the engine stays open."""
        self._asked.put(None)
        self._thread.join()
