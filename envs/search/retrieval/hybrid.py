"""Reciprocal rank fusion of two rankings (Cormack, Clarke and Büttcher, SIGIR 2009).

A passage's score is the sum over the lists of 1 / (60 + rank), ranks from 1, the first 20 of each list; equal scores by
id.
"""

from __future__ import annotations

from collections.abc import Sequence

from trace_gym.envs.search.retrieval.base import Hit, Retriever, check_search

RRF_K = 60
DEPTH = 20


def fuse(rankings: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
    """Return the best hits of several rankings of one corpus, with their fused scores."""
    scores: dict[str, float] = {}
    hits: dict[str, Hit] = {}
    for ranking in rankings:
        for rank, hit in enumerate(ranking, 1):
            scores[hit.id] = scores.get(hit.id, 0.0) + 1 / (RRF_K + rank)
            hits[hit.id] = hit
    best = sorted(scores, key=lambda id: (-scores[id], id))[:k]
    return [Hit(id, scores[id], hits[id].title, hits[id].text) for id in best]


class HybridRetriever:
    """Searches with two engines over one corpus and fuses what they find; owns both.

    Args:
        engines: Over the same corpus.
    """

    def __init__(self, *engines: Retriever) -> None:
        """Keep the engines."""
        self._engines = engines
        self.size = engines[0].size
        self.fingerprint = "hybrid(" + " + ".join(engine.fingerprint for engine in engines) + ")"

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return the best passages for each query; see `base.Retriever`."""
        queries = check_search(queries, k)
        found = [engine.search(queries, max(k, DEPTH)) for engine in self._engines]
        return [fuse(rankings, k) for rankings in zip(*found, strict=True)]

    def close(self) -> None:
        """Close both engines."""
        for engine in self._engines:
            engine.close()
