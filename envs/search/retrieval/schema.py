"""The requests of retrieval clients and what each expects back.

One route, ``POST /retrieve``, serves the clients of Search-R1 (and of the projects that took its server over), SkyRL,
GEM and rLLM, which differ in small things:

=========== ============================================== =====================================================
client      request                                        answer
=========== ============================================== =====================================================
Search-R1   ``queries``, ``topk``, ``return_scores``       ``result``: per query ``{"document", "score"}``, or
                                                           bare documents if ``return_scores`` is false
SkyRL       ``query``, ``topk``, ``return_scores``         the same, an outer list of one
rLLM        ``query``, ``top_k`` or ``k``                  also ``results``: ``{"id", "content", "score"}``
GEM         as SkyRL, body in msgpack                      msgpack; ``result`` without the outer list
=========== ============================================== =====================================================
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from trace_gym.envs.search.retrieval.base import MAX_K, Hit
from trace_gym.errors import BadInputError, MissingExtraError, require

DEFAULT_K = 3
MAX_QUERIES = 4096
_NAMES_OF_K = ("topk", "top_k", "k")


@dataclass(frozen=True)
class SearchRequest:
    """A decoded request.

    Attributes:
        queries: What to search for.
        k: Hits per query.
        with_scores: Whether documents are wrapped together with their scores.
        single: Whether the request had one ``query`` instead of ``queries``.
        rllm: Whether the answer needs the fields of rLLM.
        msgpack: Whether body and answer are msgpack.
    """

    queries: tuple[str, ...]
    k: int
    with_scores: bool
    single: bool
    rllm: bool
    msgpack: bool


def parse_request(body: bytes) -> SearchRequest:
    """Decode a request.

    Raises:
        BadInputError: If it is none; the message says what is allowed.
    """
    record, packed = _decode(body)
    if not isinstance(record, dict):
        raise BadInputError(f"The body must be an object, given {type(record).__name__}.")
    queries, single = record.get("queries"), False
    if queries is None:
        queries, single = record.get("query"), True
    if isinstance(queries, str):
        queries = [queries]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadInputError('The body needs "queries", a list of strings, or "query", a string.')
    if len(queries) > MAX_QUERIES:
        raise BadInputError(f"At most {MAX_QUERIES} queries in a request, given {len(queries)}.")
    k = next((record[name] for name in _NAMES_OF_K if record.get(name)), DEFAULT_K)  # null and 0 mean the default
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_K:
        raise BadInputError(f"topk must be an integer from 1 to {MAX_K}, given {k!r:.40}.")
    return SearchRequest(
        queries=tuple(queries),
        k=k,
        with_scores=bool(record.get("return_scores", False)),
        single=single,
        rllm=single and ("top_k" in record or "k" in record),
        msgpack=packed,
    )


def make_answer(request: SearchRequest, found: list[list[Hit]], fingerprint: str) -> dict[str, Any]:
    """Return the answer in the shape that the client expects."""
    lists = [[_entry(hit, request.with_scores) for hit in hits] for hits in found]
    flat = request.msgpack and request.single
    answer: dict[str, Any] = {"result": lists[0] if flat else lists, "fingerprint": fingerprint}
    if request.rllm:
        results = [{"id": hit.id, "content": hit.contents, "score": hit.score} for hit in found[0]]
        answer |= {"query": request.queries[0], "method": fingerprint.partition("/")[0]}
        answer |= {"results": results, "num_results": len(results)}
    return answer


def encode_answer(answer: dict[str, Any], msgpack: bool) -> tuple[bytes, str]:
    """Return the bytes and their content type."""
    if msgpack:
        packed: bytes = require("msgpack", "serve").packb(answer)
        return packed, "application/msgpack"
    try:
        encoded: bytes = require("orjson", "serve").dumps(answer)
    except TypeError:  # half of a surrogate pair, which no UTF-8 has
        encoded = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
    return encoded, "application/json"


def _entry(hit: Hit, with_score: bool) -> dict[str, Any]:
    document = {"id": hit.id, "title": hit.title, "text": hit.text, "contents": hit.contents}
    return {"document": document, "score": hit.score} if with_score else document


def _decode(body: bytes) -> tuple[Any, bool]:
    """Decode JSON, else msgpack; say which."""
    try:
        return json.loads(body), False
    except (ValueError, RecursionError) as error:
        reason = f"The body is no JSON: {error}."
    try:
        return require("msgpack", "serve").unpackb(body), True
    except MissingExtraError as error:
        raise BadInputError(f"{reason} For msgpack: {error}") from error
    except Exception as error:  # msgpack has many ways to say no
        raise BadInputError(reason) from error
