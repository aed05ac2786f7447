"""Laws of the retrieval server and its client: every client's schema, reasons, and failures that are failures."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from trace_gym.envs.search.retrieval import open_retriever
from trace_gym.envs.search.retrieval.batcher import Batcher
from trace_gym.envs.search.retrieval.server import MAX_BODY, SearchServer
from trace_gym.errors import BadInputError, InfrastructureError

PAGES = 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    rows = ({"id": f"p{n}", "contents": f"Page {n}\nword{n} common “é” \u2028"} for n in range(PAGES))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACE_GYM_CACHE", str(folder))
        yield folder / "corpus.jsonl"


@pytest.fixture(scope="module")
def server(corpus):
    server = SearchServer(port=0)
    server.load(lambda: open_retriever("embedded", corpus))
    yield server
    server.close()


def ask(server, body, path="/retrieve", method="POST", headers=None):
    """Return status and answer of one raw request."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, None if method == "GET" else data, headers or {})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    packed = response.getheader("Content-Type") == "application/msgpack"
    return response.status, text if packed else json.loads(text)


DOCUMENT = {
    "id": "p3",
    "title": "Page 3",
    "text": "word3 common “é” \u2028",
    "contents": "Page 3\nword3 common “é” \u2028",
}


def test_search_r1_gets_lists_of_documents_with_scores(server):
    """The clients read result[i][j]["document"]["contents"] and split it at the first line feed."""
    status, answer = ask(server, {"queries": ["word3", "word4 word5"], "topk": 2, "return_scores": True})
    assert status == 200 and [len(hits) for hits in answer["result"]] == [1, 2]
    (hit,) = answer["result"][0]
    assert hit["document"] == DOCUMENT and hit["score"] > 0


@pytest.mark.parametrize("extra", [{}, {"return_scores": False}])
def test_without_scores_the_documents_are_bare(server, extra):
    """As Search-R1 documents it, and without its error."""
    assert ask(server, {"queries": ["word3"], "topk": 1, **extra})[1]["result"] == [[DOCUMENT]]


def test_skyrl_asks_a_single_query(server):
    """The answer has an outer list of one."""
    status, answer = ask(server, {"query": "word3", "topk": 3, "return_scores": True})
    assert status == 200 and answer["result"][0][0]["document"] == DOCUMENT and len(answer["result"]) == 1


def test_rllm_gets_its_own_fields(server):
    """It sends top_k and a null k."""
    _, answer = ask(server, {"query": "common", "top_k": 10, "k": None})
    assert answer["num_results"] == len(answer["results"]) == 10 and answer["query"] == "common"
    assert set(answer["results"][0]) == {"id", "content", "score"}


def test_gem_speaks_msgpack_and_wants_a_flat_list(server):
    """Only when the body is no JSON."""
    msgpack = pytest.importorskip("msgpack")
    status, packed = ask(server, msgpack.packb({"query": "word3", "topk": 3, "return_scores": True}))
    assert status == 200
    (hit,) = msgpack.unpackb(packed)["result"]
    assert hit["document"] == DOCUMENT


@pytest.mark.parametrize("k", [{}, {"topk": None}, {"topk": 0}, {"k": 3}, {"top_k": 3}])
def test_the_default_is_three_passages(server, k):
    """Whatever the name of the number."""
    assert len(ask(server, {"queries": ["common"], **k})[1]["result"][0]) == 3


def test_fewer_hits_and_empty_queries_are_normal(server):
    """Lists as long as what there is."""
    answer = ask(server, {"queries": ["", "the", "word1", "nothing"], "topk": 5})[1]
    assert [len(hits) for hits in answer["result"]] == [0, 0, 1, 0]
    assert ask(server, {"queries": []})[1]["result"] == []
    assert ask(server, {"queries": "word1"})[1]["result"][0][0]["id"] == "p1"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe\x00", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        ([1], "must be an object"),
        ({}, 'needs \\"queries\\"'),
        ({"queries": [1]}, 'needs \\"queries\\"'),
        ({"queries": {"a": 1}}, 'needs \\"queries\\"'),
        ({"query": None}, 'needs \\"queries\\"'),
        ({"queries": ["x"], "topk": -1}, "from 1 to 1000"),
        ({"queries": ["x"], "topk": 10**6}, "from 1 to 1000"),
        ({"queries": ["x"], "topk": "3"}, "from 1 to 1000"),
        ({"queries": ["x"] * 5000}, "At most 4096 queries"),
    ],
)
def test_a_bad_request_is_answered_with_a_reason(server, body, reason):
    """4xx, never 500; the server goes on."""
    status, answer = ask(server, body)
    assert status == 400 and reason in json.dumps(answer["error"])
    assert ask(server, {"queries": ["word1"]})[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 404),
        ("POST", "/search", {}, 404),
        ("POST", "/retrieve", {"Content-Length": str(MAX_BODY + 1)}, 413),
        ("POST", "/retrieve", {"Content-Length": "many"}, 411),
    ],
)
def test_what_is_not_there_or_too_large_is_refused(server, method, path, headers, status):
    """Before the body is read."""
    got, answer = ask(server, {"queries": ["x"]}, path, method, headers)
    assert got == status and answer["error"]


def test_a_half_request_holds_up_nobody(server):
    """Each connection has its own thread."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /retrieve HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        assert ask(server, {"queries": ["word1"]})[0] == 200


def test_health_is_green_only_when_the_index_is_loaded(corpus):
    """Until then it says 503, and so does a search."""
    server = SearchServer(port=0)
    assert ask(server, b"", "/health", "GET") == (503, {"status": "loading"})
    assert ask(server, {"queries": ["word1"]})[0] == 503
    server.load(lambda: open_retriever("embedded", corpus))
    status, answer = ask(server, b"", "/health", "GET")
    assert status == 200 and answer["size"] == PAGES and answer["fingerprint"].startswith("bm25/")
    server.close()


def test_a_port_that_is_taken_is_named(server):
    """With the remedy."""
    with pytest.raises(BadInputError, match="Choose another --port"):
        SearchServer(port=int(server.url.rpartition(":")[2]))


def test_the_client_returns_what_the_engine_returns(server, corpus):
    """Same hits, same scores, same fingerprint."""
    engine, client = open_retriever("embedded", corpus), open_retriever("http", url=server.url)
    queries = ["word3", "", "common", "nothing", "é word9"]
    assert client.search(queries, 7) == engine.search(queries, 7)
    assert (client.size, client.fingerprint) == (engine.size, engine.fingerprint)


def test_64_environments_search_at_once_without_an_error(server, corpus):
    """Each gets its own answers."""
    client = open_retriever("http", url=server.url)
    wrong = []

    def play(number):
        for turn in range(10):
            name = (number + turn) % PAGES
            try:
                if client.search([f"word{name}"], 3)[0][0].id != f"p{name}":
                    wrong.append(name)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=play, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    client.close()


def test_batches_give_each_caller_its_part_and_each_the_error():
    """Whatever waits goes to the engine in one call, by k."""
    calls, go = [], threading.Event()

    def engine(queries, k):
        calls.append((list(queries), k))
        go.wait(10)
        if "bad" in queries:
            raise InfrastructureError("retrieval", "broken")
        return [[query] * k for query in queries]

    batcher, results = Batcher(engine), {}

    def search(queries, k):
        try:
            results[queries[0]] = batcher.search(queries, k)
        except InfrastructureError as error:
            results[queries[0]] = error.reason

    work = [(["first"], 1), (["a", "b"], 2), (["c"], 2), (["bad"], 3)]
    threads = [threading.Thread(target=search, args=each) for each in work]
    threads[0].start()
    while not calls:
        pass
    for thread in threads[1:]:
        thread.start()
    while len(batcher._waiting) < 3:
        pass
    go.set()
    for thread in threads:
        thread.join()
    assert len(calls) == 3 and sorted(len(queries) for queries, _ in calls[1:]) == [1, 3]
    assert results == {"first": [["first"]], "a": [["a"] * 2, ["b"] * 2], "c": [["c"] * 2], "bad": "broken"}


@pytest.mark.skipif(os.name != "posix", reason="sends itself an interrupt")
@pytest.mark.parametrize("when", ["while others are asked for", "when it would be next"])
def test_a_caller_who_is_interrupted_while_waiting_holds_up_nobody(monkeypatch, when):
    """The place goes on to the next, whether the interrupt came before or after its turn did."""
    begun, go = threading.Event(), threading.Event()

    def ask_them(queries, k):
        begun.set()
        go.wait(30)
        return [[query] for query in queries]

    batcher = Batcher(ask_them)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(batcher.search(["a"], 1))) for _ in range(3)]
    threads[0].start()
    begun.wait(30)
    wait = Batcher._wait

    def interrupted(self, asked):
        if when == "when it would be next":
            with self._lock:
                self._waiting.remove(asked)
                asked.is_next = True
            go.set()
            threads[0].join()
            self._free = 0  # its own
        asked.wake = Interrupted()
        wait(self, asked)

    class Interrupted:
        def acquire(self):
            signal.raise_signal(signal.SIGINT)
            time.sleep(30)

        def release(self):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(Batcher, "_wait", interrupted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                batcher.search(["mine"], 1)
        finally:
            signal.signal(signal.SIGINT, before)
    go.set()
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [[["a"]]] * 3 and batcher._free == 1 and not batcher._waiting


def test_no_server_is_a_failure_that_says_what_to_do():
    """Never an empty result."""
    with pytest.raises(
        InfrastructureError, match=r"no retrieval server at http://127\.0\.0\.1:9 .*trace-gym serve search"
    ):
        open_retriever("http", url="http://127.0.0.1:9", retries=1)


def test_a_server_that_went_and_came_is_found_again_and_one_that_loads_is_named(corpus):
    """Without any retry: a connection that was kept is dead then, which is no fault of the new server."""
    first = SearchServer(port=0)
    first.load(lambda: open_retriever("embedded", corpus))
    port = int(first.url.rpartition(":")[2])
    client = open_retriever("http", url=first.url, retries=0)
    assert client.search(["word3"], 1)[0][0].id == "p3"
    first.close()
    client.engine._idle[0].sock.shutdown(socket.SHUT_RDWR)  # as when the server's process ends
    second = SearchServer(port=port)
    with pytest.raises(InfrastructureError, match=r"does not answer: status 503, .*being loaded"):
        client.search(["word3"], 1)
    second.load(lambda: open_retriever("embedded", corpus))
    assert client.search(["word3"], 1)[0][0].id == "p3"
    client.close()
    second.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"no json", "status 200"),
        (b'{"result": []}', "0 results for 1 queries"),
        (b'{"other": 1}', "'result'"),
        (b'{"result": [[{"document": 3}]]}', "no usable answer"),
        (b'{"result": [[]], "fingerprint": "x"}', "serves another index now"),
    ],
)
def test_a_strange_answer_is_a_failure(answer, reason):
    """With what was wrong."""
    with StrangeServer(answer) as url:
        client = open_retriever("http", url=url, retries=0)
        with pytest.raises(InfrastructureError, match="no usable answer") as caught:
            client.search(["x"], 3)
        assert reason in str(caught.value) or answer == b"no json"
        client.close()


def test_a_search_r1_server_without_health_or_titles_is_understood():
    """Raw contents, with the quotes of wiki-18 or without a wrapper."""
    body = {"result": [[{"document": {"id": "7", "contents": '"Title"\ntext'}, "score": 0.5}, {"contents": "T\nx"}]]}
    with StrangeServer(json.dumps(body).encode()) as url:
        client = open_retriever("http", url=url)
        first, second = client.search(["x"], 3)[0]
        assert (first.id, first.title, first.text, first.score) == ("7", "Title", "text", 0.5)
        assert (second.title, second.text) == ("T", "x")
        assert client.fingerprint == f"http/{url}/retrieve"
        client.close()


class StrangeServer:
    """Answers every search with the same bytes and knows no other route."""

    def __init__(self, answer):
        from http.server import BaseHTTPRequestHandler, HTTPServer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_error(404)

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@contextlib.contextmanager
def started(corpus, port=0):
    """Yield the process of the command, its URL and its first lines."""
    code = (  # a background job of a shell ignores interrupts
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from trace_gym.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "serve", "search", "--backend", "embedded", "--port", str(port)]
    with subprocess.Popen([*command, "--corpus", str(corpus)], stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [process.stdout.readline(), process.stdout.readline()]
            yield process, lines[0].partition("listening at ")[2].partition(";")[0], lines
        finally:
            process.kill()


@pytest.mark.slow
def test_the_command_says_what_it_loads_and_survives_its_clients_and_the_clients_survive_it(corpus):
    """Two lines at the start; a killed server is a failure, and the same client works again when it is back."""
    with started(corpus) as (process, url, lines):
        assert "corpus.jsonl (0.0 MB) for embedded" in lines[0] and f"{PAGES} passages, bm25/" in lines[1]
        client = open_retriever("http", url=url, retries=1)
        assert client.search(["word3"], 1)[0][0].id == "p3"
    with pytest.raises(InfrastructureError, match="no retrieval server"):
        client.search(["word3"], 1)
    with started(corpus, int(url.rpartition(":")[2])) as (process, _, _):
        assert client.search(["word3"], 1)[0][0].id == "p3"
        client.close()
        process.send_signal(signal.SIGINT if os.name == "posix" else signal.SIGTERM)
        assert process.wait(30) in (130, 1)


@pytest.mark.slow
def test_the_command_refuses_in_a_line(tmp_path, corpus):
    """Exit code 1 and no traceback."""
    command = [sys.executable, "-m", "trace_gym.cli", "serve", "search", "--port", "0"]
    done = subprocess.run([*command, "--corpus", str(tmp_path / "nowhere")], capture_output=True, text=True)
    assert done.returncode == 1 and "No corpus" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run([*command, "--backend", "embeded"], capture_output=True, text=True)
    assert done.returncode == 1 and "Did you mean 'embedded'" in done.stderr
