"""Laws of `trace-gym data index`: a folder that is a corpus, progress, refusals in a line."""

import json

import pytest

from trace_gym.cli import main
from trace_gym.envs.search.retrieval import open_retriever


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": f"p{n}", "contents": f"Page {n}\nword{n}"}) + "\n" for n in range(5)))
    return path


def test_the_command_makes_an_index_that_is_searched(corpus, tmp_path, capsys):
    """With the number of passages and the time."""
    assert main(["data", "index", str(corpus), "--out", str(tmp_path / "index")]) == 0
    assert "5 passages" in capsys.readouterr().out
    engine = open_retriever("embedded", tmp_path / "index")
    assert engine.search(["word3"], 1)[0][0].id == "p3"
    engine.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl", "--out", "{}/index"], "No corpus nowhere.jsonl"),
        (["{}/corpus.jsonl", "--out", "{}/index", "--backend", "embeded"], "Did you mean 'embedded'"),
        (["{}/corpus.jsonl", "--out", "{}"], "exists already"),
        (["{}/bad.jsonl", "--out", "{}/index"], "bad.jsonl, line 2: no id"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(corpus, tmp_path, capsys, arguments, words):
    """Exit code 1."""
    (tmp_path / "bad.jsonl").write_text('{"id": "1", "contents": "x"}\n{"contents": "y"}\n')
    before = set(tmp_path.iterdir())
    assert main(["data", "index", *(argument.format(tmp_path) for argument in arguments)]) == 1
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1
    assert set(tmp_path.iterdir()) == before
