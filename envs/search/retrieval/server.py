"""The retrieval server: Search-R1's ``POST /retrieve`` and ``GET /health``, for trainers that expect one.

The standard library's threading server: the engine, not HTTP, is the bottleneck, and one route needs no framework.
A thread for each connection decodes and encodes; one of them searches, for all that wait. The port answers
from the first moment on, and ``/health`` says 503 until the index is loaded.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trace_gym.envs.search.retrieval.base import Retriever
from trace_gym.envs.search.retrieval.batcher import Batcher
from trace_gym.envs.search.retrieval.corpus import corpus_path
from trace_gym.envs.search.retrieval.schema import encode_answer, make_answer, parse_request
from trace_gym.envs.search.retrieval.shared import open_retriever
from trace_gym.errors import BadInputError, TraceGymError

MAX_BODY = 16 * 2**20
_IDLE_S = 120.0  # a connection that says nothing for so long is closed


class SearchServer:
    """Serves one engine; the port is open from the start, answers come once `load` is through.

    Args:
        host: Address to listen at.
        port: Port; 0 takes a free one.

    Attributes:
        url: Where it listens.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Listen.

        Raises:
            BadInputError: If the address or the port cannot be had.
        """
        try:
            self._http = _HttpServer((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise BadInputError(f"Cannot listen at {host}:{port}: {error}. Choose another --port.") from error
        self._http.search_server = self
        name = f"[{host}]" if ":" in host else host
        self.url = f"http://{name}:{self._http.server_address[1]}"
        self.served = 0
        self._engine: Retriever | None = None
        self._batcher: Batcher | None = None
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()

    def load(self, make: Callable[[], Retriever]) -> Retriever:
        """Open the engine and serve it from now on; it is closed with the server."""
        engine = make()
        self._engine, self._batcher = engine, Batcher(engine.search)
        return engine

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return status and body of ``GET /health``."""
        if self._engine is None:
            return 503, {"status": "loading"}
        engine = self._engine
        return 200, {"status": "ok", "size": engine.size, "fingerprint": engine.fingerprint, "queries": self.served}

    def retrieve(self, body: bytes) -> tuple[int, bytes, str]:
        """Return status, body and content type of ``POST /retrieve``."""
        try:
            request = parse_request(body)
            if self._batcher is None or self._engine is None:
                return 503, *encode_answer({"error": "the index is being loaded"}, False)
            found = self._batcher.search(request.queries, request.k)
            self.served += len(found)
            answer = make_answer(request, found, self._engine.fingerprint)
            return 200, *encode_answer(answer, request.msgpack)
        except BadInputError as error:
            return 400, *encode_answer({"error": str(error)}, False)
        except TraceGymError as error:
            return 503, *encode_answer({"error": str(error)}, False)
        except Exception as error:
            return 500, *encode_answer({"error": f"{type(error).__name__}: {error}"}, False)

    def wait(self) -> None:
        """Serve until the process is interrupted."""
        while self._thread.is_alive():
            time.sleep(0.5)

    def close(self) -> None:
        """Stop listening, close connections and engine."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        if self._engine is not None:
            self._engine.close()


def serve(
    backend: str,
    corpus: str | None,
    options: dict[str, Any],
    *,
    host: str,
    port: int,
    say: Callable[[str], None],
) -> None:
    """Open an engine and serve it until the process is interrupted; arguments as for `open_retriever`."""
    server = SearchServer(host, port)
    try:
        size = (
            f"{path.stat().st_size / 1e6:.1f} MB" if (path := Path(corpus or corpus_path(None))).is_file() else "index"
        )
        say(f"search: listening at {server.url}; loading {corpus or 'the bundled corpus'} ({size}) for {backend}")
        began = time.monotonic()
        engine = server.load(lambda: open_retriever(backend, corpus, **options))
        say(f"search: ready after {time.monotonic() - began:.1f} s: {engine.size:,} passages, {engine.fingerprint}")
        server.wait()
    finally:
        server.close()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512  # as many connections may come at once
    search_server: SearchServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing when a client goes away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    wbufsize = -1  # one packet for head and body
    disable_nagle_algorithm = True
    server: _HttpServer

    def do_GET(self) -> None:
        """Answer ``/health``."""
        if self.path.partition("?")[0] != "/health":
            self._say(404, "there is GET /health and POST /retrieve")
            return
        status, body = self.server.search_server.health()
        self._send(status, json.dumps(body).encode(), "application/json")

    def do_POST(self) -> None:
        """Answer ``/retrieve``."""
        self.close_connection = True  # unless the body is read
        if self.path.partition("?")[0] != "/retrieve":
            self._say(404, "there is GET /health and POST /retrieve")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._say(411, "the request needs a Content-Length")
        elif int(length) > MAX_BODY:
            self._say(413, f"the body may have {MAX_BODY} bytes, it has {length}")
        else:
            body = self.rfile.read(int(length))
            if len(body) == int(length):
                self.close_connection = self.headers.get("Connection", "").lower() == "close"
                self._send(*self.server.search_server.retrieve(body))

    def _say(self, status: int, reason: str) -> None:
        self._send(status, json.dumps({"error": reason}).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep no access log."""
