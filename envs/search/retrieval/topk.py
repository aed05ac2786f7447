"""The best documents for a query's terms: exact, and quick in numpy.

The documents of rare terms are scored in full. A document that has common terms only can be among the best only if the
sum of their highest impacts reaches the k-th best of those; seldom, and then every document is scored (the idea is
MaxScore's: Turtle and Flood, "Query evaluation: strategies and optimizations", 1995). The impacts of common terms are
kept as dense rows, which are quick to look up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_TINY = 1e-30  # less than any impact
_SLACK = 1 + 1e-6  # of bounds: far above the rounding to float32, so that all that ties at the k-th place survives

Docs = npt.NDArray[np.intp]
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RareTerm:
    """A term as its documents.

    Attributes:
        docs: int32: the documents, ascending.
        impacts: float32: what each gets, positive.
    """

    docs: npt.NDArray[np.int32]
    impacts: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CommonTerm:
    """A term as a row over all documents; few bytes for each, since few impacts differ.

    Attributes:
        codes: Unsigned ``[documents]``: which impact each gets, 0 for none.
        impacts: float64: by code, ascending; the first is 0.
    """

    codes: npt.NDArray[np.unsignedinteger[Any]]
    impacts: Scores

    @classmethod
    def of(cls, term: RareTerm, size: int) -> CommonTerm:
        """Spread a term over so many documents."""
        impacts, codes = np.unique(term.impacts, return_inverse=True)
        row = np.zeros(size, np.min_scalar_type(len(impacts)))
        row[term.docs] = codes + 1
        return cls(row, np.concatenate([[0.0], impacts]))


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
    floor = 0.0  # k documents reach it
    rest = float(sum(term.impacts[-1] for term in common)) * _SLACK
    if rare:
        docs = np.concatenate([term.docs for term in rare], dtype=np.intp)  # np.add.at is quick on native types only
        impacts = np.concatenate([term.impacts for term in rare], dtype=np.float64)
        np.add.at(row, docs, impacts)
        near, scores = docs, row[docs]
        row[docs] = 0
        count = k * len(rare)  # so many hold k documents, since one is there once for each of its terms
        if common:
            near, scores = _highest(near, scores, count, rest)
            for term in common:
                scores += term.impacts[term.codes[near]]
        found = _to_dict(*_highest(near, scores, count, 0.0))
        floor = sorted(found.values())[-k] / _SLACK if len(found) >= k else 0.0
    if not common or floor > rest:
        return found
    scores = np.zeros(len(row))
    for term in common:
        scores += term.impacts[term.codes]
    if rare:
        np.add.at(scores, docs, impacts)
    near = np.flatnonzero(scores >= max(floor, _TINY))
    return _to_dict(*_highest(near, scores[near], k, 0.0))


def _highest(docs: Docs, scores: Scores, count: int, margin: float) -> tuple[Docs, Scores]:
    """Return the documents with the `count` highest scores, and those that fall short of the last by the margin."""
    surplus = len(docs) - count
    if surplus <= 0:
        return docs, scores
    chosen = np.flatnonzero(scores >= np.partition(scores, surplus)[surplus] / _SLACK - margin)
    return docs[chosen], scores[chosen]


def _to_dict(docs: Docs, scores: Scores) -> dict[int, float]:
    return dict(zip(docs.tolist(), scores.astype(np.float32).tolist(), strict=True))
