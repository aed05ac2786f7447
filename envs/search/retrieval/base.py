"""What every retrieval backend speaks: passages, hits and the `Retriever` protocol.

Invariants: a retriever has no state that a search changes, so all environments of a process may share one, from any
thread; fewer than `k` hits are normal, an empty query has none; a broken engine raises and never answers with nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trace_gym.errors import BadInputError

MAX_K = 1000
MAX_QUERY_CHARS = 10_000  # what stands behind is ignored, so that no query can keep an engine busy
KIND = "retrieval"  # the kind of every InfrastructureError of this package


@dataclass(frozen=True, slots=True)
class Passage:
    """One text of a corpus.

    Attributes:
        id: Unique in its corpus.
        title: One line.
        text: The text without the title.
    """

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Return what is indexed: the title, a newline, the text."""
        return f"{self.title}\n{self.text}"


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found.

    Attributes:
        id: Id of the passage.
        score: Higher is better; comparable within one list only.
        title: Title of the passage.
        text: The text without the title.
    """

    id: str
    score: float
    title: str
    text: str

    @property
    def contents(self) -> str:
        """Return the title, a newline, the text."""
        return f"{self.title}\n{self.text}"


class Retriever(Protocol):
    """A search engine over one corpus.

    Attributes:
        fingerprint: Says what decides the results: backend, corpus, analysis, parameters.
        size: Number of passages.
    """

    @property
    def fingerprint(self) -> str:
        """Return what decides the results, in one line."""

    @property
    def size(self) -> int:
        """Return the number of passages."""

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return the best passages for each query, best first.

        Args:
            queries: Plain text; nothing in it is an operator.
            k: Most hits per query, 1 to `MAX_K`.

        Raises:
            BadInputError: If the arguments are of the wrong kind.
            InfrastructureError: If the engine cannot answer; never an empty result instead.
        """

    def close(self) -> None:
        """Release what the engine holds; doing so again does nothing."""


def check_search(queries: Sequence[str], k: int) -> list[str]:
    """Check the arguments of a search.

    Returns:
        The queries, none longer than `MAX_QUERY_CHARS`.

    Raises:
        BadInputError: If `queries` is not a sequence of strings, or `k` is out of range.
    """
    if isinstance(queries, str) or not all(isinstance(query, str) for query in queries):
        raise BadInputError(f"queries must be a list of strings, given {queries!r:.80}.")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise BadInputError(f"k must be an integer from 1 to {MAX_K}, given {k!r:.80}.")
    return [query[:MAX_QUERY_CHARS] for query in queries]


def check_parameters(k1: float, b: float) -> None:
    """Check the parameters of BM25.

    Raises:
        BadInputError: If k1 is negative or b is not in [0, 1].
    """
    if not (0 <= k1 < float("inf") and 0 <= b <= 1):
        raise BadInputError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, given k1={k1!r} and b={b!r}.")
