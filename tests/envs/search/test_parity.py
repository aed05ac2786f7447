"""The law of the embedded engine: it returns Lucene's lists. Runs wherever Pyserini and Java are installed."""

import json
import random
from pathlib import Path

import pytest

from trace_gym.envs.search.retrieval import java, open_retriever
from trace_gym.envs.search.retrieval.corpus import corpus_path
from trace_gym.errors import MissingExtraError

try:
    java.find_jar()
    java.find_java()
    WHY_NOT = ""
except MissingExtraError as error:
    WHY_NOT = str(error)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
SETTINGS = [(0.9, 0.4), (1.2, 0.75)]
POOLS = [
    "abcXYZ",
    "0123",
    "'.:,;·’‘․\"",
    "_‿",
    "אבגד",
    "éüßİΣ",
    "日本語ひら",
    "カタナーｶ",
    "ไทยลาว่",
    "한글",
    "\u0301\u00ad",
    "😀👍♪☆™",
    "🇩🇪",
    "⅓²½٣٫",
    "ⅧⓐʰⒶ",
    "    ",
    "-/()",
    "sS",
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACE_GYM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def compare(corpus, queries, k1, b):
    """Return the queries whose lists differ; scores may differ by Anserini's rounding to four digits."""
    embedded, pyserini = (open_retriever(name, corpus, k1=k1, b=b) for name in ("embedded", "pyserini"))
    assert embedded.size == pyserini.size
    different = []
    for query, ours, theirs in zip(queries, embedded.search(queries, 10), pyserini.search(queries, 10), strict=True):
        same = [hit.id for hit in ours] == [hit.id for hit in theirs]
        pairs = zip(ours, theirs, strict=False)
        if not same or any(abs(one.score - other.score) > 1e-4 or one.text != other.text for one, other in pairs):
            different.append(query)
    embedded.close()
    pyserini.close()
    return different


@pytest.mark.parametrize(("k1", "b"), SETTINGS)
@pytest.mark.skipif(not Path(corpus_path(None)).is_file(), reason="no bundled corpus")
def test_every_bundled_question_has_lucenes_list(k1, b):
    """Top 10 ids in the same order, with the own analyzer."""
    lines = corpus_path(None).with_name("search_questions.jsonl").read_text(encoding="utf-8").split("\n")
    questions = [json.loads(line)["question"] for line in lines if line]
    assert len(questions) >= 400
    assert compare(None, questions, k1, b) == []


@pytest.mark.parametrize(("k1", "b"), SETTINGS)
def test_any_text_has_lucenes_list(tmp_path, k1, b):
    """Strings of many scripts, joiners and signs as passages and as questions."""
    rng = random.Random(5)

    def text(most):
        return "".join(rng.choice(rng.choice(POOLS)) for _ in range(rng.randint(1, most)))

    path = tmp_path / "corpus.jsonl"
    rows = ({"id": str(number), "title": "x", "text": text(200) + " ."} for number in range(500))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    queries = [text(30) for _ in range(200)]
    queries += ["AND (", "title:x", "*", '"x', "x~2 [1 TO 2] /x/", "x " * 3000, "\x00x\ud800", "", "  "]
    assert compare(path, queries, k1, b) == []


def test_any_number_of_distinct_words_can_be_asked(tmp_path):
    """Lucene's own limit of 1,024 clauses does not show."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": f"{n}", "contents": f"t\nw{n} w{n + 1}"}) + "\n" for n in range(1900)))
    assert compare(path, [" ".join(f"w{n}" for n in range(1800))], 0.9, 0.4) == []
