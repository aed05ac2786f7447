"""BM25 with Lucene's scores and order, in numpy.

Robertson et al., "Okapi at TREC-3" (1994), in the form of Lucene's ``BM25Similarity`` since release 8: no factor
``k1 + 1``, lengths rounded to a byte, every step in float32 except the sum over terms. The operations and their order
matter: another form of the same formula gives other bits, and with them another order of near ties.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trace_gym.envs.search.retrieval.analyzer import ANALYZER_VERSION, EnglishAnalyzer
from trace_gym.envs.search.retrieval.base import Hit, check_parameters, check_search
from trace_gym.envs.search.retrieval.bm25_index import Bm25Index, decode_length
from trace_gym.envs.search.retrieval.passages import load_array
from trace_gym.envs.search.retrieval.topk import CommonTerm, RareTerm, best_documents

_COMMON_SHARE = 32  # a term is common if more than one document in so many has it
_COMMON_BYTES = 96 * 2**20  # for the rows of common terms; the rarest of those that do not fit are rare

Floats = npt.NDArray[np.float32]


class EmbeddedBm25:
    """Searches an index folder; safe in threads.

    Args:
        folder: Made by `bm25_index.build_index`.
        k1: How fast repeated occurrences saturate; Anserini's default.
        b: How much long documents are discounted; Anserini's default.
    """

    def __init__(self, folder: Path, k1: float = 0.9, b: float = 0.4) -> None:
        """Open the index and compute the impacts of all postings for these parameters."""
        check_parameters(k1, b)
        self._index = Bm25Index(folder)
        self._analyze = EnglishAnalyzer()
        meta = self._index.meta
        self.size = int(meta["size"])
        self.fingerprint = f"bm25/{meta['corpus']}/{ANALYZER_VERSION}/k1={k1:g},b={b:g}"
        frequencies = np.diff(self._index.starts)
        self._idf = np.log(1 + (meta["documents"] - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
        self._norms = _norms(meta, k1, b)
        self._impacts = self._all_impacts(frequencies)
        self._index.tfs = load_array(folder, "tfs")  # mapped afresh: what was read of it needs no memory any more
        self._most_rare = self.size // _COMMON_SHARE  # documents of a rare term
        if (rows := _COMMON_BYTES // max(self.size, 1)) < len(frequencies):
            self._most_rare = max(self._most_rare, int(np.partition(frequencies, -rows - 1)[-rows - 1]))
        self._ranks = memoryview(self._index.ranks)
        self._rare = lru_cache(maxsize=16_384)(self._find_rare)
        self._common = lru_cache(maxsize=None)(self._find_common)
        self._passage = lru_cache(maxsize=4_096)(self._index.passages.__getitem__)
        self._owner, self._lock = os.getpid(), threading.Lock()
        self._row = np.zeros(self.size)  # all zero between searches

    def _all_impacts(self, frequencies: npt.NDArray[np.int64]) -> Floats:
        impacts = np.empty(len(self._index.docs), np.float32)
        step = max(1, len(frequencies) // 64)  # in parts, so that the temporaries stay small
        for first in range(0, len(frequencies), step):
            terms = slice(first, first + step)
            where = slice(self._index.starts[first], self._index.starts[min(first + step, len(frequencies))])
            impacts[where] = self._impact(np.repeat(self._idf[terms], frequencies[terms]), where)
        return impacts

    def _impact(self, weight: Any, where: slice) -> Floats:
        """Return what postings add to a score: w - w / (1 + tf * norm), all float32."""
        norms = self._norms[self._index.lengths[self._index.docs[where]]]
        return weight - weight / (np.float32(1) + self._index.tfs[where].astype(np.float32) * norms)

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return the best passages for each query; see `base.Retriever`."""
        if self._owner != os.getpid():  # a fork: who held the lock may be gone, amid a search
            self._owner, self._lock, self._row = os.getpid(), threading.Lock(), np.zeros(self.size)
        return [self._find(query, k) for query in check_search(queries, k)]

    def _find(self, query: str, k: int) -> list[Hit]:
        # numpy lets go of the interpreter at every step: threads that all wait for it would slow each other down.
        with self._lock:
            return self._hits(self._rank(self._analyze(query), k))

    def _hits(self, ranked: list[tuple[int, float]]) -> list[Hit]:
        return [Hit(id, score, title, text) for doc, score in ranked for id, title, text in (self._passage(doc),)]

    def _rank(self, terms: Sequence[str], k: int) -> list[tuple[int, float]]:
        """Return the best documents for index terms: number and score, best first; equal scores by id."""
        rare: list[RareTerm] = []
        common: list[CommonTerm] = []
        counts = dict.fromkeys(terms, 1)
        if len(counts) < len(terms):
            counts = Counter(terms)
        for text, times in counts.items():
            term = self._rare(text) if times == 1 else self._repeated(text, times)
            if isinstance(term, RareTerm):
                rare.append(term)
            elif term is not None:
                common.append(self._common(term))
        if not rare and not common:
            return []
        try:
            found = best_documents(rare, common, k, self._row)
        except BaseException:
            self._row = np.zeros(self.size)
            raise
        ranks = self._ranks
        best = sorted([(-score, ranks[doc], doc) for doc, score in found.items()])[:k]
        return [(doc, -score) for score, _, doc in best]

    def _postings(self, number: int) -> slice:
        return slice(int(self._index.starts[number]), int(self._index.starts[number + 1]))

    def _find_rare(self, text: str) -> RareTerm | int | None:
        """Return a rare term, the number of a common one, or None if no document has it."""
        number = self._index.term_number(text)
        if number is None:
            return None
        where = self._postings(number)
        if where.stop - where.start > self._most_rare:
            return number
        return RareTerm.of(self._index.docs[where], self._impacts[where])

    def _find_common(self, number: int) -> CommonTerm:
        where = self._postings(number)
        return CommonTerm.of(RareTerm.of(self._index.docs[where], self._impacts[where]), self.size)

    def _repeated(self, text: str, times: int) -> RareTerm | None:
        """Return a term that stands in the query several times: Lucene multiplies its weight before the formula."""
        number = self._index.term_number(text)
        if number is None:
            return None
        where = self._postings(number)
        return RareTerm.of(self._index.docs[where], self._impact(self._idf[number] * np.float32(times), where))

    def close(self) -> None:
        """Drop what is kept between searches; the files are unmapped with the object."""
        self._rare.cache_clear()
        self._common.cache_clear()
        self._passage.cache_clear()


def _norms(meta: dict[str, Any], k1: float, b: float) -> Floats:
    """Return 1 / (k1 * ((1 - b) + b * length / average)) for each of the 256 length bytes, in float32."""
    lengths = np.array([decode_length(code) for code in range(256)], np.float32)
    average = np.float32(meta["tokens"] / max(meta["documents"], 1))
    one, k1_, b_ = np.float32(1), np.float32(k1), np.float32(b)
    with np.errstate(divide="ignore", invalid="ignore"):
        return one / (k1_ * ((one - b_) + b_ * lengths / average))
