"""Laws of the embedded BM25: Lucene's numbers, bit by bit where they are known, and nothing lost by pruning."""

import json
import math
import random
import threading
from collections import Counter

import numpy as np
import pytest

from trace_gym.envs.search.retrieval import base, bm25, bm25_index
from trace_gym.envs.search.retrieval.bm25 import EmbeddedBm25
from trace_gym.envs.search.retrieval.bm25_index import build_index, decode_length, encode_length
from trace_gym.errors import BadInputError

HARBOUR = "The orchestra rehearsed the symphony in the hall by the harbour"
DOCS = [
    (
        "d1",
        "Lighthouse",
        "The old lighthouse was built by a stonemason in 1843 and its lamp was seen twelve miles out at sea.",
    ),
    (
        "d2",
        "Stonemason",
        "A stonemason cuts stone. The stonemason's guild kept a lodge near the lighthouse, "
        "and the lodge kept the stonemason.",
    ),
    ("d10", "Harbour", "The harbour lies below the lighthouse."),
    ("d3", "Harbour bell", "The harbour lies below the lighthouse."),
    ("d4", "Ferry", "The ferry crosses the strait at 6:30 and 18:30; O'Neill's family has run it since 1901."),
    (
        "d5",
        "Geology",
        "Geologists agreed that the cliffs' geology, archaeological finds and dying reefs "
        "are 3.14 million years apart.",
    ),
    ("d6", "Stop", "It was not to be, and they will be there."),
    ("d7", "Orchestra", " ".join([HARBOUR] * 6)),
    ("d8", "Wi-Fi", "The ferry's wi-fi and the harbour's Wi-Fi are free: ask for v1.2 of the form a_b."),
    ("d9", "Résumé", "Une résumé of naïve cafés, ½ finished: İzmir, ΣΟΦΟΣ, 東京, Ελλάς and 😀."),
]
# What Lucene 9 (Anserini 1.7.1) answers on these passages.
LUCENE = [
    (0.9, 0.4, "who built the lighthouse", "d1:1.6449 d10:0.5293 d3:0.5201 d2:0.4639"),
    (0.9, 0.4, "stonemason stonemason lighthouse", "d2:2.8697 d1:2.1487 d10:0.5293 d3:0.5201"),
    (0.9, 0.4, "harbour", "d7:0.7187 d10:0.6649 d3:0.6576 d8:0.4639"),
    (0.9, 0.4, "the ferry of O'Neill", "d4:2.0206 d8:0.769"),
    (0.9, 0.4, "geological agreement", ""),
    (0.9, 0.4, "symphony orchestra harbour hall", "d7:5.5708 d10:0.6649 d3:0.6576 d8:0.4639"),
    (0.9, 0.4, "wi-fi v1.2 a_b", "d8:5.1125"),
    (0.9, 0.4, "résumé izmir σοφος 東京 😀", "d9:5.5767"),
    (0.9, 0.4, "to be or not to be", ""),
    (1.2, 0.75, "stonemason stonemason lighthouse", "d2:2.6447 d1:1.8543 d10:0.5346 d3:0.5118"),
    (1.2, 0.75, "harbour", "d10:0.6691 d3:0.6509 d7:0.6232 d8:0.3943"),
    (
        1.2,
        0.75,
        "lighthouses lodge ferries seen sea miles",
        "d1:3.1839 d2:1.614 d4:0.8868 d8:0.6536 d10:0.5346 d3:0.5118",
    ),
]


def write(folder, passages, name="corpus.jsonl"):
    path = folder / name
    rows = ({"id": id, "title": title, "text": text} for id, title, text in passages)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(folder, passages, **parameters):
    build_index(write(folder, passages), folder / "index")
    return EmbeddedBm25(folder / "index", **parameters)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bm25")
    build_index(write(folder, DOCS), folder / "index")
    return folder / "index"


@pytest.mark.parametrize(("k1", "b", "query", "expected"), LUCENE)
def test_the_answers_are_lucenes(index, k1, b, query, expected):
    """Ids in the same order, scores to the four digits that Anserini reports."""
    hits = EmbeddedBm25(index, k1, b).search([query], 10)[0]
    assert " ".join(f"{hit.id}:{round(hit.score, 4)}" for hit in hits) == expected


@pytest.mark.parametrize(
    ("length", "kept"), [(40, 40), (41, 40), (57, 56), (95, 88), (151, 144), (500, 472), (1000, 984)]
)
def test_a_length_is_kept_in_one_byte(length, kept):
    """Four significant bits, rounded down."""
    assert decode_length(encode_length(length)) == kept
    assert 0 <= encode_length(2**31 - 1) <= 255


def test_the_byte_of_a_length_rises_with_it_and_stays():
    """Decoding undoes encoding for the 256 lengths that have a byte of their own."""
    decoded = [decode_length(code) for code in range(256)]
    assert decoded == sorted(set(decoded))
    assert [encode_length(length) for length in decoded] == list(range(256))


def test_equal_scores_are_ordered_by_the_id_as_text(tmp_path):
    """d10 stands before d2, and the cut to k keeps the right ones of many that tie."""
    engine = make(tmp_path, [(f"d{number}", "Bell", "rings") for number in range(30)])
    names = sorted(f"d{number}" for number in range(30))
    for k in (1, 3, 12, 30, 100):
        assert [hit.id for hit in engine.search(["bell"], k)[0]] == names[:k]


def brute_force(passages, analyze, query, k, k1, b):
    """Score every document by the formula as Lucene writes it, one float32 operation after the other."""
    f = np.float32
    bags = {id: Counter(analyze(f"{title}\n{text}")) for id, title, text in passages}
    lengths = {id: sum(bag.values()) for id, bag in bags.items() if bag}
    average = f(sum(lengths.values()) / len(lengths))
    scores = {}
    for id in lengths:
        norm = f(1) / (f(k1) * ((f(1) - f(b)) + f(b) * f(decode_length(encode_length(lengths[id]))) / average))
        total = 0.0
        for term, times in Counter(analyze(query)).items():
            df = sum(term in bag for bag in bags.values())
            if bags[id][term]:
                weight = f(times) * f(math.log(1 + (len(lengths) - df + 0.5) / (df + 0.5)))
                total += float(weight - weight / (f(1) + f(bags[id][term]) * norm))
        if total:
            scores[id] = f(total)
    best = sorted(scores, key=lambda id: (-scores[id], id))[:k]
    return [(id, float(scores[id])) for id in best]


@pytest.mark.parametrize("share", [1, 4, 32, 10**9])
def test_no_document_is_lost_by_pruning(tmp_path, monkeypatch, share):
    """Whether no term is common, some are or all, the answer is the one of scoring everything."""
    monkeypatch.setattr(bm25, "_COMMON_SHARE", share)
    rng = random.Random(7)
    words = [f"w{rank}k" for rank in range(60)]
    weights = [1 / (rank + 1) for rank in range(60)]

    def text(most):
        return " ".join(rng.choices(words, weights, k=rng.randint(0, most)))

    passages = [(f"d{number}", "", text(30) or "the") for number in range(250)]
    monkeypatch.setattr(bm25, "_COMMON_BYTES", 250 * 20)  # rows for a third of the words
    engine = make(tmp_path, passages, k1=1.2, b=0.75)
    for _ in range(40):
        query, k = text(9), rng.choice([1, 3, 10, 300])
        found = [(hit.id, hit.score) for hit in engine.search([query], k)[0]]
        expected = brute_force(passages, engine._analyze, query, k, 1.2, 0.75)
        assert [id for id, _ in found] == [id for id, _ in expected]
        assert np.allclose([score for _, score in found], [score for _, score in expected], rtol=2e-7, atol=0)


def test_the_parameters_are_chosen_when_the_index_is_opened(index):
    """k1 = 0 counts no repetition, b = 0 no length; one folder serves all."""
    hits = EmbeddedBm25(index, k1=0, b=0).search(["harbour"], 10)[0]
    assert len({hit.score for hit in hits}) == 1
    assert [hit.id for hit in hits] == ["d10", "d3", "d7", "d8"]


@pytest.mark.parametrize(
    ("k1", "b"), [(-1, 0.4), (0.9, 1.5), (float("nan"), 0.4), (0.9, float("nan")), (float("inf"), 0)]
)
def test_parameters_out_of_range_are_refused(index, k1, b):
    """The message names both."""
    with pytest.raises(BadInputError, match="k1 >= 0 and 0 <= b <= 1"):
        EmbeddedBm25(index, k1, b)


@pytest.mark.parametrize("query", ["AND (", "harbour AND NOT", "title:", "*", '"', "\x00\ud800", "~^[1 TO", "🇩"])
def test_a_query_has_no_operators(index, query):
    """What looks like one is text, found as such or not at all."""
    hits = EmbeddedBm25(index).search([query], 10)[0]
    plain = EmbeddedBm25(index).search([query.replace("AND", "").replace("NOT", "").replace("TO", "")], 10)[0]
    assert hits == plain


def test_empty_and_unknown_queries_find_nothing(index):
    """An empty list for each, never an error; no query, no list."""
    engine = EmbeddedBm25(index)
    assert engine.search(["", "  ", "the of", "xylophone"], 3) == [[], [], [], []]
    assert engine.search([], 3) == []


def test_a_huge_query_is_cut(index):
    """Only its first characters count."""
    engine = EmbeddedBm25(index)
    filler = "zz " * (base.MAX_QUERY_CHARS // 3 + 1)
    assert engine.search([filler + "harbour"], 3) == [[]]
    assert engine.search(["harbour " + filler * 100], 3) == engine.search(["harbour"], 3)


@pytest.mark.parametrize(
    ("queries", "k"), [("harbour", 3), ([b"x"], 3), (["x"], 0), (["x"], True), (["x"], 1001), (["x"], 2.0)]
)
def test_arguments_of_the_wrong_kind_are_refused(index, queries, k):
    """One string is no list of queries."""
    with pytest.raises(BadInputError, match="given"):
        EmbeddedBm25(index).search(queries, k)


def test_threads_get_what_one_caller_gets(index):
    """Searches share nothing but read-only arrays."""
    engine = EmbeddedBm25(index)
    queries = [query for _, _, query, _ in LUCENE]
    expected = engine.search(queries, 10)
    wrong = []

    def work():
        for _ in range(20):
            if engine.search(queries, 10) != expected:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not engine._row.any()


def test_an_index_is_the_same_however_it_was_cut_into_blocks(tmp_path, monkeypatch):
    """Byte for byte; memory bounds the block, not the corpus."""
    corpus = write(tmp_path, DOCS)
    build_index(corpus, tmp_path / "whole")
    monkeypatch.setattr(bm25_index, "_BLOCK_TOKENS", 10)
    build_index(corpus, tmp_path / "parts")
    names = {path.name for path in (tmp_path / "whole").iterdir()}
    assert names == {path.name for path in (tmp_path / "parts").iterdir()}
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes(), name


def test_the_texts_come_back_as_they_were(tmp_path):
    """Any characters, from the index alone: the corpus file may go."""
    odd = [("1", "A\u2028B", "line\nline\u2028\x00\ud83d tail"), ("2", "", "only text"), ("3", "only title", "")]
    engine = make(tmp_path, odd)
    (tmp_path / "corpus.jsonl").unlink()
    (hit,) = engine.search(["tail"], 3)[0]
    assert (hit.id, hit.title, hit.text) == ("1", "A B", "line\nline\u2028\x00\ud83d tail")
    assert hit.contents == "A B\nline\nline\u2028\x00\ud83d tail"
    assert engine.search(["title"], 3)[0][0].text == ""
    assert engine.size == 3


@pytest.mark.parametrize("passages", [[], [("1", "the", "of")]])
def test_a_corpus_without_a_term_can_be_searched(tmp_path, passages):
    """It has nothing, and says so."""
    engine = make(tmp_path, passages)
    assert engine.search(["anything", ""], 3) == [[], []]
    assert engine.size == len(passages)


def test_two_passages_with_one_id_are_refused(tmp_path):
    """The message names file and id, and no half-made folder stays."""
    corpus = write(tmp_path, [*DOCS, ("d4", "Again", "x")])
    with pytest.raises(BadInputError, match=r"corpus\.jsonl: two passages have the id 'd4'"):
        build_index(corpus, tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_a_folder_in_the_way_is_left_alone(tmp_path):
    """Nothing is overwritten."""
    (tmp_path / "index").mkdir()
    with pytest.raises(BadInputError, match="exists already"):
        build_index(write(tmp_path, DOCS), tmp_path / "index")


def test_an_index_of_another_analyzer_is_refused_with_what_differs(index, tmp_path, monkeypatch):
    """Its terms would not be those of the queries."""
    monkeypatch.setattr("trace_gym.envs.search.retrieval.bm25_index.ANALYZER_VERSION", "newer-2")
    with pytest.raises(BadInputError, match=r"other settings: analyzer 'anserini-english-\d+', not 'newer-2'"):
        EmbeddedBm25(index)
    with pytest.raises(BadInputError, match="no index of trace_gym"):
        EmbeddedBm25(tmp_path)
