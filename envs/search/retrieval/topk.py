"""The best documents for a query's terms: exact, and quick in numpy.

The documents of rare terms are scored in full; the k-th highest impact of one of the terms is a score that k of them
reach. A document that has common terms only can be among the best only if the sum of their highest impacts reaches the
k-th best of those; where it does, the documents of one common term after the other are scored as well, until what is
left of the sum does not (the idea is MaxScore's: Turtle and Flood, "Query evaluation: strategies and optimizations",
1995). The impacts of common terms are kept as dense rows, which are quick to look up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

_KEPT = 16  # highest impacts of a rare term; k that are larger have no bound from them
_SLACK = 1 + 1e-6  # of bounds: far above the rounding to float32, so that all that ties at the k-th place survives

Docs = npt.NDArray[np.intp]
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RareTerm:
    """A term as its documents.

    Attributes:
        docs: int32: the documents, ascending.
        impacts: float32: what each gets, positive.
        highest: The highest impacts, the highest first, `_KEPT` of them if there are as many.
    """

    docs: npt.NDArray[np.int32]
    impacts: npt.NDArray[np.float32]
    highest: Sequence[float]

    @classmethod
    def of(cls, docs: npt.NDArray[np.int32], impacts: npt.NDArray[np.float32]) -> RareTerm:
        """Make a term of its postings."""
        surplus = max(0, len(impacts) - _KEPT)
        return cls(docs, impacts, sorted(np.partition(impacts, surplus)[surplus:].tolist(), reverse=True))


@dataclass(frozen=True, slots=True)
class CommonTerm:
    """A term as a row over all documents as well; few bytes for each, since few impacts differ.

    Attributes:
        term: The term as its documents.
        codes: Unsigned ``[documents]``: which impact each gets, 0 for none.
        impacts: float64: by code, ascending; the first is 0.
        highest: The highest impact.
    """

    term: RareTerm
    codes: npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
    impacts: Scores
    highest: float

    @classmethod
    def of(cls, term: RareTerm, size: int) -> CommonTerm:
        """Spread a term over so many documents."""
        impacts, codes = np.unique(term.impacts, return_inverse=True)
        row = np.zeros(size, np.min_scalar_type(len(impacts)))
        row[term.docs] = codes + 1
        return cls(term, row, np.concatenate([[0.0], impacts]), float(impacts[-1]))

    def gains(self, docs: Docs) -> Scores:
        """Return what the term gives to some documents."""
        return self.impacts.take(self.codes.take(docs))


def best_documents(rare: Sequence[RareTerm], common: Sequence[CommonTerm], k: int, row: Scores) -> dict[int, float]:
    """Return the k best documents, all that tie with the last of them, and perhaps some more.

    Args:
        rare: The rare terms of the query; there is at least one term.
        common: The common ones.
        k: How many are wanted.
        row: float64 ``[documents]``, all zero; zero again afterwards.

    Returns:
        Document numbers and their scores, summed in float64 and rounded to float32.
    """
    found: dict[int, float] = {}
    if rare:
        docs = np.concatenate([term.docs for term in rare], dtype=np.intp)  # np.add.at is quick on native types only
        np.add.at(row, docs, np.concatenate([term.impacts for term in rare], dtype=np.float64))
        scores = row.take(docs)
        row[docs] = 0
        for term in common:
            scores += term.gains(docs)
        reached = max([term.highest[k - 1] for term in rare if len(term.highest) >= k], default=0.0)  # by k documents
        chosen = (scores >= reached / _SLACK).nonzero()[0]
        found = _highest(k * len(rare), docs[chosen], scores[chosen])  # one is there at most once for each of its terms
    common = sorted(common, key=lambda term: -term.highest)
    rests = list(accumulate((term.highest * _SLACK for term in reversed(common)), initial=0.0))[::-1]
    for place, term in enumerate(common):
        floor = sorted(found.values())[-k] / _SLACK if len(found) >= k else 0.0  # k documents reach it
        if rests[place] < floor:
            break
        # Those that have a rare or an earlier term as well have their score already.
        docs, scores = term.term.docs.astype(np.intp), term.term.impacts.astype(np.float64)
        for other, rest in zip(common[place + 1 :], rests[place + 1 :], strict=False):
            if floor > rest:
                chosen = (scores >= floor - rest).nonzero()[0]
                docs, scores = docs[chosen], scores[chosen]
            scores += other.gains(docs)
        found = _highest(k, docs, scores) | found
    return found


def _highest(count: int, docs: Docs, scores: Scores) -> dict[int, float]:
    """Return the documents with the highest scores, so many and all that tie with the last of them."""
    surplus = len(docs) - count
    if surplus > 0:
        chosen = (scores >= np.partition(scores, surplus)[surplus] / _SLACK).nonzero()[0]
        docs, scores = docs[chosen], scores[chosen]
    return dict(zip(docs.tolist(), scores.astype(np.float32).tolist(), strict=True))
