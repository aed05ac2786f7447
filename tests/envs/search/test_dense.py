"""Laws of dense retrieval: vectors are what E5's authors say, encoding can be interrupted, fusion is reciprocal."""

import json
import shutil
import threading

import numpy as np
import pytest

from trace_gym.envs.search.retrieval import dense, dense_index, open_retriever
from trace_gym.envs.search.retrieval.backends import build
from trace_gym.envs.search.retrieval.base import Hit
from trace_gym.envs.search.retrieval.encoder import EncoderConfig, TextEncoder
from trace_gym.envs.search.retrieval.hybrid import fuse
from trace_gym.errors import BadInputError, MissingExtraError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
WORDS = "red blue green old new big small house river mountain king queen city song".split()
PAGES = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random BERT of two layers, in a folder."""
    folder = tmp_path_factory.mktemp("bert")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    rng = np.random.default_rng(0)
    rows = ({"id": f"p{n}", "contents": "page\n" + " ".join(rng.choice(WORDS, 8))} for n in range(PAGES))
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACE_GYM_CACHE", str(folder))
        yield folder / "corpus.jsonl"


def by_hand(model, text, pooling="mean", normalize=True):
    """Encode one text, without padding."""
    tokenizer, bert = transformers.AutoTokenizer.from_pretrained(model), transformers.AutoModel.from_pretrained(model)
    with torch.no_grad():
        states = bert.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    vector = (states.mean(0) if pooling == "mean" else states[0]).numpy()
    return vector / np.linalg.norm(vector) if normalize else vector


def test_queries_and_passages_get_their_prefix_and_the_mean_of_their_tokens(model):
    """Also in a batch with longer texts: padding does not count."""
    encoder = TextEncoder(EncoderConfig(model))
    texts = ["red house", "old king of the big city by the small river", "song"]
    for encode, prefix in ((encoder.encode_queries, "query: "), (encoder.encode_passages, "passage: ")):
        vectors = encode(texts)
        assert vectors.shape == (3, 32) and vectors.dtype == np.float32
        for text, vector in zip(texts, vectors, strict=True):
            np.testing.assert_allclose(vector, by_hand(model, prefix + text), atol=1e-5)
    assert not np.allclose(encoder.encode_queries(["song"]), encoder.encode_passages(["song"]))


def test_another_model_brings_its_own_settings(model):
    """No prefix, the first token, no unit length."""
    config = EncoderConfig(model, query_prefix="", pooling="cls", normalize=False)
    vector = TextEncoder(config).encode_queries(["red house"])[0]
    np.testing.assert_allclose(vector, by_hand(model, "red house", "cls", False), atol=1e-5)


def test_long_texts_are_cut(model):
    """At max_tokens, the special ones included."""
    encoder = TextEncoder(EncoderConfig(model, query_prefix="", max_tokens=4))
    one, other = encoder.encode_queries(["red blue green old", "red blue new new new"])
    np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("wrong", [{"pooling": "max"}, {"max_tokens": 1}])
def test_settings_that_are_not_allowed_are_refused(wrong):
    """Before anything is loaded."""
    with pytest.raises(BadInputError):
        EncoderConfig(**wrong)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_best_passages_have_the_highest_inner_products(model, corpus, dtype):
    """Exactly, best first; blank queries find nothing; a passage finds itself."""
    engine = open_retriever("dense", corpus, model=model, dtype=dtype, method="numpy")
    assert engine.size == PAGES and dtype in engine.fingerprint and "pooling=mean" in engine.fingerprint
    encoder = TextEncoder(EncoderConfig(model))
    lines = [json.loads(line) for line in corpus.read_text().split("\n") if line]
    matrix = encoder.encode_passages([line["contents"] for line in lines])
    for query in ("red house", "queen of the mountain"):
        hits = engine.search(["", query, " "], 5)
        scores = matrix @ encoder.encode_queries([query])[0]
        best = np.argsort(-scores, kind="stable")[:5]
        assert hits[0] == hits[2] == []
        np.testing.assert_allclose(
            [hit.score for hit in hits[1]], scores[best], atol=2e-3 if dtype == "float16" else 1e-5
        )
        if dtype == "float32":
            assert [hit.id for hit in hits[1]] == [lines[row]["id"] for row in best]
    engine.close()


def test_blocks_and_ties_do_not_change_the_order():
    """Equal scores in the order of the passages, however the matrix is cut."""
    vectors = np.array([[1, 0], [0, 1], [1, 0], [0.5, 0], [1, 0]], np.float32)
    queries = np.array([[1, 0], [0, 2]], np.float32)
    whole = dense._best_rows(vectors, queries, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_BLOCK", 2)
        parts = dense._best_rows(vectors, queries, 4)
    assert whole[1].tolist() == parts[1].tolist() == [[0, 2, 4, 3], [1, 0, 2, 3]]
    assert whole[0].tolist() == parts[0].tolist()


@pytest.mark.parametrize("method", ["flat", "ivf", "hnsw"])
def test_faiss_finds_what_numpy_finds(model, corpus, method):
    """On a corpus so small that the approximate methods are exact."""
    pytest.importorskip("faiss")
    exact = open_retriever("dense", corpus, model=model, method="numpy")
    for _ in range(2):  # built, then read back
        other = open_retriever("dense", corpus, model=model, method=method)
        for one, two in zip(exact.search(WORDS, 3), other.search(WORDS, 3), strict=True):
            np.testing.assert_allclose([hit.score for hit in one], [hit.score for hit in two], atol=1e-5)
        other.close()
    exact.close()


def test_a_missing_faiss_is_a_line_that_names_the_extra(model, corpus, monkeypatch):
    """Only when it is asked for; "auto" does without."""
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"trace-gym\[search\]"):
        open_retriever("dense", corpus, model=model, method="hnsw")


def test_encoding_goes_on_where_it_was_interrupted(model, corpus, tmp_path, monkeypatch):
    """What is encoded is not encoded again, and the result is the same."""
    monkeypatch.setattr(dense_index, "_CHUNK", 8)
    encoder = TextEncoder(EncoderConfig(model))
    dense_index.build_dense_index(corpus, tmp_path / "whole", None, encoder)
    encode, calls = encoder.encode_passages, []

    def failing(texts):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(len(texts))
        return encode(texts)

    monkeypatch.setattr(encoder, "encode_passages", failing)
    with pytest.raises(KeyboardInterrupt):
        dense_index.build_dense_index(corpus, tmp_path / "cut", None, encoder)
    assert not (tmp_path / "cut").exists()
    monkeypatch.setattr(encoder, "encode_passages", lambda texts: calls.append(len(texts)) or encode(texts))
    told = []
    dense_index.build_dense_index(corpus, tmp_path / "cut", told.append, encoder)
    assert sum(calls) == PAGES and told[-1] == PAGES
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    assert np.array_equal(np.load(tmp_path / "cut" / "vectors.npy"), np.load(tmp_path / "whole" / "vectors.npy"))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


def test_an_interrupted_run_with_other_settings_is_not_continued(model, corpus, tmp_path):
    """It begins anew."""
    part = tmp_path / "index.part"
    part.mkdir()
    (part / "encoded.json").write_text(json.dumps({"settings": {"model": "other"}, "done": 30}))
    build("dense", corpus, tmp_path / "index", model=model)
    assert np.linalg.norm(np.load(tmp_path / "index" / "vectors.npy"), axis=1) == pytest.approx(np.ones(PAGES))


def test_an_index_of_another_encoder_is_refused_with_what_differs(model, corpus, tmp_path):
    """Its vectors would mean something else."""
    build("dense", corpus, tmp_path / "index", model=model)
    with pytest.raises(BadInputError, match="other settings: pooling 'mean', not 'cls'"):
        open_retriever("dense", tmp_path / "index", model=model, pooling="cls")
    copy = shutil.copytree(model, tmp_path / "copy")
    with pytest.raises(BadInputError, match="other settings: model"):
        open_retriever("dense", tmp_path / "index", model=str(copy))
    share = open_retriever("dense", tmp_path / "index", model=model)
    assert share.search(["red"], 1)[0]
    share.close()


def test_threads_encode_as_one_caller_does(model, corpus):
    """The tokenizer is lent to one at a time."""
    engine = open_retriever("dense", corpus, model=model)
    expected = [hit.id for hit in engine.search(["red house"], 3)[0]]
    wrong = []

    def work():
        for _ in range(5):
            if [hit.id for hit in engine.search(["red house"], 3)[0]] != expected:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    engine.close()


def test_fusion_adds_reciprocal_ranks():
    """1 / (60 + rank) from each list, ties by id."""
    one = [Hit("b", 9.0, "", ""), Hit("a", 8.0, "", ""), Hit("c", 7.0, "", "")]
    two = [Hit("a", 0.9, "", ""), Hit("b", 0.8, "", ""), Hit("d", 0.7, "", "")]
    fused = fuse([one, two], 3)
    assert [hit.id for hit in fused] == ["a", "b", "c"]
    assert fused[0].score == fused[1].score == 1 / 61 + 1 / 62 and fused[2].score == 1 / 63
    assert fuse([[], []], 3) == []


def test_the_hybrid_fuses_bm25_and_dense(model, corpus):
    """The first 20 of each, over the same corpus."""
    engine = open_retriever("hybrid", corpus, lexical="embedded", model=model, k1=1.2)
    lexical, vectors = open_retriever("embedded", corpus, k1=1.2), open_retriever("dense", corpus, model=model)
    queries = ["red house", "queen song", ""]
    expected = [fuse(pair, 5) for pair in zip(lexical.search(queries, 20), vectors.search(queries, 20), strict=True)]
    assert engine.search(queries, 5) == expected
    assert engine.fingerprint.startswith("hybrid(bm25/") and "dense/" in engine.fingerprint
    assert engine.size == PAGES
    for share in (engine, lexical, vectors):
        share.close()


def test_the_hybrid_needs_the_corpus_file(model, corpus, tmp_path):
    """One folder holds one index."""
    build("embedded", corpus, tmp_path / "index")
    with pytest.raises(BadInputError, match="needs two indexes"):
        open_retriever("hybrid", tmp_path / "index", model=model)
