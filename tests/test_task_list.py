"""Laws of lists of tasks that are read when they are needed."""

import json
import tracemalloc

import pytest

from trace_gym.errors import BadInputError
from trace_gym.task_list import open_tasks


def test_braces_expand_as_in_a_shell():
    """The last ones change fastest; numbers keep their leading zeros."""
    assert list(open_tasks("a{1..2}-{x,y}")) == ["a1-x", "a1-y", "a2-x", "a2-y"]
    assert list(open_tasks("n{008..011}")) == ["n008", "n009", "n010", "n011"]
    ids = open_tasks("chain-{2,3}-train-{000000..499999}")
    assert (len(ids), ids[-1], ids[500_000]) == (1_000_000, "chain-3-train-499999", "chain-3-train-000000")


def test_a_slice_is_a_list_of_the_same_kind():
    ids = open_tasks("t{0..9}")
    assert list(ids[2:9:3]) == ["t2", "t5", "t8"] and ids[::-1][0] == "t9" and ids[-1] == "t9"
    with pytest.raises(IndexError):
        ids[10]


@pytest.mark.parametrize("form", ["{}", '{{"task_id": "{}", "more": 1}}'])
def test_a_file_is_read_where_it_is_needed(tmp_path, form):
    """Plain lines or JSON Lines; empty lines are passed over, a last one without an end counts."""
    path = tmp_path / "tasks"
    path.write_text("\n" + "\n".join(form.format(f"täsk-{i}") + "\n" * (i % 3 == 0) for i in range(1_000)))
    ids = open_tasks(str(path))
    assert len(ids) == 1_000
    assert [ids[i] for i in (0, 255, 256, 257, 999)] == [f"täsk-{i}" for i in (0, 255, 256, 257, 999)]


@pytest.mark.slow
def test_a_million_lines_take_next_to_no_memory(tmp_path):
    path = tmp_path / "tasks.jsonl"
    with path.open("w") as file:
        for start in range(0, 1_000_000, 10_000):
            file.write("".join(f'{{"task_id": "{i}"}}\n' for i in range(start, start + 10_000)))
    tracemalloc.start()
    try:
        ids = open_tasks(str(path))
        assert (len(ids), ids[777_777]) == (1_000_000, "777777")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "words"), [("nowhere.txt", "no file"), ("t{5..4}", "names no task"), ("{a}", "names|no file")]
)
def test_what_names_no_task_is_refused(text, words):
    if text == "{a}":  # a single word in braces is that word
        assert list(open_tasks(text)) == ["a"]
        return
    with pytest.raises(BadInputError, match=words):
        open_tasks(text)


def test_lines_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("")
    with pytest.raises(BadInputError, match="is empty"):
        open_tasks(str(path))
    path.write_text(json.dumps({"id": "a"}) + "\n")
    with pytest.raises(BadInputError, match="task 1 has no task_id"):
        open_tasks(str(path))[0]
