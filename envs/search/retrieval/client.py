"""Client of a retrieval server: ours, or any that speaks Search-R1's schema."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Sequence
from typing import Any

from trace_gym.envs.search.retrieval.base import KIND, Hit, check_search
from trace_gym.envs.search.retrieval.batcher import Batcher
from trace_gym.envs.search.retrieval.corpus import to_passage
from trace_gym.errors import BadInputError, InfrastructureError

_RETRIED = (429, 500, 502, 503, 504)
_MAX_ANSWER = 256 * 2**20
_AT_ONCE = 2  # requests: one is answered while the other is read


class HttpRetriever:
    """Asks a server; safe in threads, whose queries go together while others are on their way; connections are kept.

    Args:
        url: Such as ``http://127.0.0.1:8000``; a path other than ``/retrieve`` can be given.
        timeout_s: Deadline of one attempt.
        retries: Attempts after the first, with growing pauses, for lost connections and answers of overload.

    Attributes:
        size: Number of passages; 0 if the server does not say.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0, retries: int = 3) -> None:
        """Ask the server what it is.

        Raises:
            BadInputError: If the URL is none.
            InfrastructureError: If there is no server.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInputError(f"The http backend needs a URL such as http://127.0.0.1:8000, given {url!r:.200}.")
        self._scheme, self._host, self._port = parts.scheme, parts.hostname, parts.port
        self._path = parts.path if parts.path.strip("/") else "/retrieve"
        self._url = f"{parts.scheme}://{parts.netloc}"
        self._timeout_s, self._retries = timeout_s, retries
        self._idle: list[http.client.HTTPConnection] = []
        self._batcher = Batcher(self._retrieve, _AT_ONCE)
        status, health = self._ask("GET", "/health", None)
        known = health if status == 200 and isinstance(health, dict) else {}  # others may not have the route
        self.fingerprint = str(known.get("fingerprint") or f"http/{self._url}{self._path}")
        self.size = int(known.get("size") or 0)

    def search(self, queries: Sequence[str], k: int = 3) -> list[list[Hit]]:
        """Return the best passages for each query; see `base.Retriever`."""
        queries = check_search(queries, k)
        asked = [query for query in queries if query.strip()]
        results = iter(self._batcher.search(asked, k) if asked else ())
        return [next(results) if query.strip() else [] for query in queries]

    def _retrieve(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """Send queries, none of them empty, in one request."""
        status, answer = self._ask("POST", self._path, {"queries": queries, "topk": k, "return_scores": True})
        try:
            if status != 200:
                raise ValueError(f"status {status}, {answer!r:.200}")
            if answer.get("fingerprint", self.fingerprint) != self.fingerprint:
                raise ValueError(f"it serves another index now, {answer['fingerprint']}, not {self.fingerprint}")
            lists = [[_hit(found, place) for place, found in enumerate(hits)][:k] for hits in answer["result"]]
            if len(lists) != len(queries):
                raise ValueError(f"{len(lists)} results for {len(queries)} queries")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InfrastructureError(KIND, f"the server at {self._url} gave no usable answer: {error}") from error
        return lists

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
        """Send a request; return the status and the decoded answer."""
        data = None if body is None else json.dumps(body).encode()
        kept = self._take()
        reason = ""
        for attempt in range(self._retries + 1 + (kept is not None)):  # one more, since one that was kept may be dead
            if attempt:
                time.sleep(min(0.1 * 2**attempt, 2.0))
            connection = self._connect() if attempt or kept is None else kept
            try:
                connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
                response = connection.getresponse()
                text = response.read(_MAX_ANSWER)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                reason = (
                    f"no retrieval server at {self._url} ({error or type(error).__name__}); start it with: "
                    "trace-gym serve search"
                )
                continue
            self._idle.append(connection)
            try:
                answer = json.loads(text)
            except ValueError:
                answer = text[:200].decode("utf-8", "replace")
            if response.status not in _RETRIED:
                return response.status, answer
            reason = f"the retrieval server at {self._url} does not answer: status {response.status}, {answer!r:.200}"
        raise InfrastructureError(KIND, reason)

    def _take(self) -> http.client.HTTPConnection | None:
        """Return a connection that was kept; None if there is none, for other threads take them too."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)

    def close(self) -> None:
        """Close the connections; a later search opens others."""
        while (connection := self._take()) is not None:
            connection.close()


def _hit(found: dict[str, Any], place: int) -> Hit:
    """Read a hit; servers without ids or scores get the place in the list."""
    document = found.get("document", found)
    if isinstance(document, str):
        document = {"contents": document}
    score = float(found.get("score", -place))
    id, title, text = document.get("id"), document.get("title"), document.get("text")
    if isinstance(id, str) and isinstance(title, str) and isinstance(text, str):  # from ours, and quick
        return Hit(id, score, title, text)
    passage = to_passage({"id": str(place), **{name: value for name, value in document.items() if value is not None}})
    return Hit(passage.id, score, passage.title, passage.text)
