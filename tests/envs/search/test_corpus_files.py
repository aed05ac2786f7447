"""Laws of corpus files: the usual schemas are read, and a bad line is named."""

import gzip
import json

import pytest

from trace_gym.envs.search.retrieval import Passage, read_corpus
from trace_gym.errors import BadInputError


@pytest.mark.parametrize(
    ("record", "passage"),
    [
        ({"id": "1", "contents": "Title\nText.\nMore."}, Passage("1", "Title", "Text.\nMore.")),
        ({"id": 0, "contents": '"Title"\nText.'}, Passage("0", "Title", "Text.")),  # as wiki-18
        ({"id": "1", "title": "Title", "text": "Text."}, Passage("1", "Title", "Text.")),
        ({"_id": "1", "title": "Title", "text": "Text.", "metadata": {}}, Passage("1", "Title", "Text.")),
        ({"id": "1", "title": "Title", "contents": "Title\nText."}, Passage("1", "Title", "Text.")),
        ({"id": "1", "title": "Title", "contents": "Text."}, Passage("1", "Title", "Text.")),
        ({"id": "1", "title": "A\n B ", "text": "Text."}, Passage("1", "A B", "Text.")),
    ],
)
def test_the_usual_schemas_give_the_same_passages(tmp_path, record, passage):
    """Title in one line without quotes, text without the title."""
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert read_corpus(path) == (passage,)


def test_contents_are_title_and_text():
    """What is indexed."""
    assert Passage("1", "Title", "Text.").contents == "Title\nText."


def test_lines_end_at_line_feeds_only_and_blank_ones_are_skipped(tmp_path):
    """A text may hold other separators of lines; a mark of the byte order is no text."""
    path = tmp_path / "corpus.jsonl.gz"
    rows = '\ufeff{"id": "1", "contents": "A\\nx\u2028y\x85z"}\r\n\n{"id": "2", "contents": "B"}'
    path.write_bytes(gzip.compress(rows.encode()))
    assert [passage.text for passage in read_corpus(path)] == ["x\u2028y\x85z", ""]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"contents": "Text."}', "no id"),
        ('{"id": "", "contents": "Text."}', "no id"),
        ('{"id": true, "contents": "Text."}', "no id"),
        ('{"id": "2"}', "no text"),
        ('{"id": "2", "title": "Title"}', "no text"),
        ('{"id": "2", "contents": " \\n"}', "no text"),
        ('{"id": "2", "contents": ["Text."]}', "no text"),
        ('["2", "Text."]', "expected an object"),
        ('{"id": "2", "contents": "Text.', "Unterminated string"),
        ("[" * 100_000, "recursion"),
        (b"\xff\xfe", "can't decode"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    """File, line number, and what was expected."""
    path = tmp_path / "corpus.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b'{"id": "1", "contents": "Text."}\n' + line + b"\n")
    with pytest.raises(BadInputError, match=rf"corpus\.jsonl, line 2: .*{reason}"):
        read_corpus(path)


def test_a_broken_archive_is_named(tmp_path):
    """With the line where it broke."""
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "1", "contents": "Text."}\n' * 1000)[:60])
    with pytest.raises(BadInputError, match=r"corpus\.jsonl\.gz, line \d+: "):
        read_corpus(path)


def test_ids_are_unique(tmp_path):
    """The message names the id."""
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "1", "contents": "A"}\n{"id": 1, "contents": "B"}\n')
    with pytest.raises(BadInputError, match="two passages have the id '1'"):
        read_corpus(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    """And what could be given instead."""
    with pytest.raises(BadInputError, match=r"No corpus .*nowhere\.jsonl: give a file of JSON lines"):
        read_corpus(tmp_path / "nowhere.jsonl")
