"""Laws of opening backends by name: shared engines, the choice of "auto", and refusals."""

import gc
import json
import logging
import os

import pytest

from trace_gym.envs.search.retrieval import open_retriever, shared
from trace_gym.envs.search.retrieval.base import Hit
from trace_gym.errors import BadInputError, InfrastructureError, MissingExtraError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE_GYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shared, "_no_lucene", [])
    return tmp_path / "cache" / "trace_gym" / "search"


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"p{n}", "contents": f"Page {n}\nword{n} common"}) + "\n" for n in range(9))
    )
    return path


def test_equal_arguments_share_one_engine_until_the_last_share_is_closed(corpus):
    """Closing one share leaves the others alone; closing twice is closing once."""
    first, second = open_retriever("embedded", corpus), open_retriever("embedded", str(corpus))
    assert first.engine is second.engine
    first.close()
    first.close()
    assert second.search(["word3"], 1)[0][0].id == "p3"
    other = open_retriever("embedded", corpus, k1=1.2)
    assert other.engine is not second.engine
    second.close()
    assert open_retriever("embedded", corpus).engine is not second.engine


def test_a_forgotten_share_is_given_back(corpus):
    """Nobody has to remember to close."""
    for _ in range(3):
        open_retriever("embedded", corpus)
    gc.collect()
    assert not any("corpus.jsonl" in key for key in shared._shares._open)


def test_a_changed_file_is_another_corpus(corpus):
    """Its index is built anew; the old one stays as it was for those who have it."""
    old = open_retriever("embedded", corpus)
    corpus.write_text('{"id": "new", "contents": "word3"}\n')
    new = open_retriever("embedded", corpus)
    assert [hit.id for hit in new.search(["word3"], 3)[0]] == ["new"]
    assert [hit.id for hit in old.search(["word3"], 3)[0]] == ["p3"]
    assert old.fingerprint != new.fingerprint


def test_an_index_is_built_once_and_found_again(corpus, cache):
    """By the content of the corpus, wherever it lies."""
    first = open_retriever("embedded", corpus)
    copy = corpus.with_name("copy.jsonl")
    copy.write_bytes(corpus.read_bytes())
    folders = [path for path in cache.iterdir() if path.is_dir()]
    second = open_retriever("embedded", copy)
    assert [path for path in cache.iterdir() if path.is_dir()] == folders and len(folders) == 1
    assert first.fingerprint == second.fingerprint


def test_the_fingerprint_says_what_decides_the_results(corpus):
    """Backend, corpus, analysis, parameters."""
    engine = open_retriever("embedded", corpus, k1=1.2, b=0.75)
    assert engine.fingerprint.startswith("bm25/") and engine.fingerprint.endswith("/anserini-english-1/k1=1.2,b=0.75")
    assert engine.size == 9


def test_an_index_folder_is_a_corpus(corpus, tmp_path):
    """As made by `trace-gym data index`; "auto" sees what it is."""
    from trace_gym.envs.search.retrieval.backends import build

    build("embedded", corpus, tmp_path / "index")
    for backend in ("embedded", "auto"):
        engine = open_retriever(backend, tmp_path / "index")
        assert engine.search(["word5"], 3) == [
            [Hit("p5", engine.search(["word5"])[0][0].score, "Page 5", "word5 common")]
        ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "embeded"}, "Did you mean 'embedded'"),
        ({"backend": "embedded", "k2": 1}, "option of the backend embedded 'k2'. Did you mean 'k1'"),
        ({"backend": "hybrid", "modle": "x"}, "Did you mean 'model'"),
        ({"backend": "embedded", "corpus": "nowhere"}, "No corpus nowhere"),
        ({"backend": "http", "url": "localhost:8000"}, "needs a URL such as"),
        ({"backend": "dense", "model": "/nowhere/at/all"}, "No encoder '/nowhere/at/all'"),
    ],
)
def test_bad_arguments_are_refused_in_a_line(corpus, arguments, message, monkeypatch):
    """What was given, what exists, the nearest match."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if arguments["backend"] == "dense":
        pytest.importorskip("transformers")
    with pytest.raises(BadInputError) as caught:
        open_retriever(**{"corpus": corpus, **arguments} if arguments["backend"] != "http" else arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (MissingExtraError("'pyserini' is not installed."), logging.INFO),
        (MissingExtraError("Pyserini needs Java 21 or newer (…)."), logging.WARNING),
        (InfrastructureError("retrieval", "Java did not open the index"), logging.WARNING),
    ],
)
def test_auto_falls_back_and_says_why_once(corpus, monkeypatch, caplog, error, level):
    """A line at the level of its importance: not having the extra is normal, having it in vain is not."""

    def fail(corpus, **options):
        raise error

    monkeypatch.setitem(shared._MAKERS, "pyserini", fail)
    with caplog.at_level(logging.DEBUG, "trace_gym.search"):
        first, second = open_retriever("auto", corpus), open_retriever("auto", corpus)
    assert first.engine is second.engine and first.fingerprint.startswith("bm25/")
    lines = [record for record in caplog.records if "embedded, not pyserini" in record.message]
    assert [record.levelno for record in lines] == [level] and str(error) in lines[0].message


def test_auto_takes_pyserini_where_it_works(corpus, monkeypatch):
    """The reference engine comes first."""

    class Engine:
        fingerprint, size = "pyserini/x", 1

        def search(self, queries, k=3):
            return [[] for _ in queries]

        def close(self):
            pass

    monkeypatch.setitem(shared._MAKERS, "pyserini", lambda corpus, **options: Engine())
    assert open_retriever("auto", corpus).fingerprint == "pyserini/x"


def test_without_the_stemmer_a_line_names_the_extra(corpus, monkeypatch):
    """The environment needs one light package."""
    monkeypatch.setitem(__import__("sys").modules, "nltk.stem.porter", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'trace-gym\[qa\]'"):
        open_retriever("embedded", corpus)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_can_search_and_open(corpus):
    """Data loaders fork; the engine of the parent goes on working in them."""
    engine = open_retriever("embedded", corpus)
    child = os.fork()
    if child == 0:
        found = engine.search(["word7"], 1)[0][0].id == "p7" and open_retriever("embedded", corpus).size == 9
        os._exit(0 if found else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
