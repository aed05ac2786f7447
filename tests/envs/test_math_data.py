"""Problems from files: every usual form of records and files, and what is said of a bad one."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trace_gym.envs.math.tasks import load_data, load_tasks
from trace_gym.envs.math.tasks.noise import normalized
from trace_gym.envs.math.tasks.readers import read_record
from trace_gym.errors import BadInputError

# Forms of records, in words of our own.

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "First?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "What is 6 / 2?"},
]
RECORDS: dict[str, tuple[Mapping[str, Any], str, str]] = {
    "GSM8K": ({"question": "Two and five?", "answer": "2 + 5 = <<2+5=7>>7\n#### 7"}, "Two and five?", "7"),
    "MATH": (
        {"problem": "Half of 1?", "solution": "It is $\\boxed{0}$.", "answer": "\\frac{1}{2}", "unique_id": "a/1.json"},
        "Half of 1?",
        "\\frac{1}{2}",
    ),
    "MATH without answer": (
        {"problem": "Three quarters?", "solution": "Not \\boxed{1} but \\boxed{\\frac{3}{4}}."},
        "Three quarters?",
        "\\frac{3}{4}",
    ),
    "DeepScaleR": ({"problem": "1 + 1?", "answer": "2", "solution": ""}, "1 + 1?", "2"),
    "DeepScaleR by level": ({"prompt": "1 + 2?\n", "answer": "3", "source": "s", "id": "0"}, "1 + 2?", "3"),
    "AIME": ({"ID": "2099-I-1", "Problem": "How many?", "Answer": 73}, "How many?", "73"),
    "AMC": ({"id": 0, "question": "Which n?", "answer": 27.0, "url": "none"}, "Which n?", "27"),
    "Minerva": ({"question": "How hot?", "answer": "1.6e3"}, "How hot?", "1.6e3"),
    "OlympiadBench": (
        {"question": "Find x.", "solution": ["So x = 2."], "final_answer": ["$2$"], "unit": None, "image_1": None},
        "Find x.",
        "2",
    ),
    "several answers": ({"question": "Solve.", "final_answer": ["$-1$", "$3$"]}, "Solve.", "-1, 3"),
    "formulas in a sentence": ({"question": "Solve.", "final_answer": ["$1$ or $3$"]}, "Solve.", "$1$ or $3$"),
    "answers of two records": ({"prompt": "Which?", "answers": ["18", "64"]}, "Which?", "18, 64"),
    "SVAMP": (
        {"Body": "Ann has 9 nuts and eats 3", "Question": "How many are left?", "Answer": 6.0},
        "Ann has 9 nuts and eats 3. How many are left?",
        "6",
    ),
    "SVAMP with a full stop": ({"Body": "Ann sat.", "Question": "Why?", "Answer": "1"}, "Ann sat. Why?", "1"),
    "model solutions": ({"question": "9 - 4?", "ground_truth": "She has 9.\nIt is 9 - 4.\nA: 5"}, "9 - 4?", "5"),
    "chat and reward model": (
        {"data_source": "d", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "3"}},
        "What is 6 / 2?",
        "3",
    ),
    "messages": ({"messages": CHAT, "ground_truth": "3"}, "What is 6 / 2?", "3"),
    "boxed answer": ({"problem": "8 / 2?", "answer": "It is $\\boxed{4}$."}, "8 / 2?", "4"),
    "half a surrogate pair": ({"question": "a\ud800?", "answer": "1"}, "a??", "1"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_the_columns_say_where_question_and_answer_stand(name: str) -> None:
    """Every usual form of a record is recognised without being told."""
    record, question, answer = RECORDS[name]
    read = read_record(record)
    assert (read.question, read.answer, read.options) == (question, answer, ())


PETS = ("cat", "dog", "eel")
CHOICES: dict[str, Mapping[str, Any]] = {
    "MMLU-Pro": {"question": "Fish?", "options": list(PETS), "answer": "C", "answer_index": 2, "category": "biology"},
    "ARC": {"question": "Fish?", "choices": {"text": list(PETS), "label": ["A", "B", "C"]}, "answerKey": "C"},
    "ARC with digits": {
        "question": "Fish?",
        "choices": {"text": list(PETS), "label": ["1", "2", "3"]},
        "answerKey": "3",
    },
    "ARC with numbers": {"question": "Fish?", "choices": {"text": list(PETS), "label": [1, 2, 3]}, "answerKey": 3},
    "MMLU": {"question": "Fish?", "choices": list(PETS), "answer": 2, "subject": "biology"},
    "index in a text": {"question": "Fish?", "choices": list(PETS), "answer": "2"},
    "the text itself": {"question": "Fish?", "options": list(PETS), "answer": "eel"},
    "letters as keys": {"question": "Fish?", "options": {"A": "cat", "B": "dog", "C": "eel"}, "answer": "c"},
    "objects": {
        "question": "Fish?",
        "choices": [{"label": label, "text": text} for label, text in zip("PQR", PETS, strict=True)],
        "answerKey": "R",
    },
    "JSON in a cell": {"question": "Fish?", "options": '["cat", "dog", "eel"]', "answer_index": "2"},
    "label": {"question": "Fish?", "choices": list(PETS), "label": 2},
}


@pytest.mark.parametrize("name", CHOICES)
def test_options_come_in_order_and_the_answer_is_a_letter(name: str) -> None:
    """However the right option is named, the answer is its letter."""
    read = read_record(CHOICES[name])
    assert read.options == PETS and read.answer == "C"


def test_the_options_of_gpqa_are_shuffled_the_same_way_every_time() -> None:
    """The right one stands anywhere, by a digest of the question."""

    def read(number: int) -> tuple[str, ...]:
        wrong = {f"Incorrect Answer {n}": f"no {n}" for n in (1, 2, 3)}
        found = read_record({"Question": f"Number {number}?", "Correct Answer": "yes", **wrong, "Subdomain": "Physics"})
        assert found.options["ABCD".index(found.answer)] == "yes" and found.subject == "Physics"
        return found.options

    assert read(1) == read(1) and sorted(read(1)) == ["no 1", "no 2", "no 3", "yes"]
    assert {read(number).index("yes") for number in range(30)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"q": "a?", "answer": "1"}, "expected a question in one of question, problem, prompt, messages; .* q, answer"),
        ({}, "the columns are none"),
        ({"question": " ", "answer": "1"}, "'question' must be a text that is not empty"),
        ({"question": 7, "answer": "1"}, "'question' must be a text"),
        ({"prompt": [{"role": "system", "content": "x"}], "answer": "1"}, "a chat with a message of the user"),
        ({"prompt": ["no chat"], "answer": "1"}, "a chat with a message of the user"),
        ({"question": "a?"}, "expected a text or number in 'answer'"),
        ({"question": "a?", "answer": ""}, "expected a text or number"),
        ({"question": "a?", "answer": True}, "expected a text or number"),
        ({"question": "a?", "answer": float("nan")}, "expected a text or number"),
        ({"question": "a?", "answer": ["1", None]}, "expected a text or number"),
        ({"question": "a?", "answer": {"x": 1}}, "expected a text or number"),
        ({"question": "a?", "solution": "cut off \\boxed{3"}, "expected a text or number"),
        ({"question": "a?", "options": ["x"], "answer": "A"}, "from 2 to 10 options, each a text; got 1"),
        ({"question": "a?", "options": list("abcdefghijk"), "answer": "A"}, "got 11"),
        ({"question": "a?", "options": ["x", 2], "answer": "A"}, "each a text"),
        ({"question": "a?", "options": "x or y", "answer": "A"}, "expected a list of options, got str"),
        ({"question": "a?", "options": "[x", "answer": "A"}, "neither a list nor JSON"),
        ({"question": "a?", "options": ["x", "y"], "answer": "C"}, "expected the right one of 2 options"),
        ({"question": "a?", "options": ["x", "y"], "answer": -1}, "expected the right one of 2 options"),
        ({"question": "a?", "Correct Answer": "x", "Incorrect Answer 1": "y"}, "'Incorrect Answer 1' to"),
    ],
)
def test_a_record_of_no_known_form_says_what_was_expected(record: Mapping[str, Any], said: str) -> None:
    """Nothing is guessed and nothing else is raised."""
    with pytest.raises(BadInputError, match=said):
        read_record(record)


def test_level_and_subject_are_kept() -> None:
    """A level from 1 to 5 is the difficulty, as a number or as MATH writes it."""
    levels = [2, "Level 4", "5", 0, 7, None, "hard", True]
    read = [read_record({"problem": "a?", "answer": "1", "level": level, "type": "Algebra"}) for level in levels]
    assert [each.difficulty for each in read] == [2, 4, 5, 0, 0, 0, 0, 0]
    assert {each.subject for each in read} == {"Algebra"}


# Files.

PAIRS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]


def write(path: Path, *records: object, tail: str = "\n") -> Path:
    """Write JSON Lines."""
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records) + tail, "utf-8")
    return path


def forms(folder: Path) -> list[Path]:
    """Write the same problems in every form of file."""
    text = json.dumps(PAIRS)
    lines = write(folder / "a.jsonl", *PAIRS).read_text("utf-8")
    (folder / "b.json").write_text("\ufeff \n" + text, "utf-8")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "d.json.gz").write_bytes(gzip.compress(text.encode()))
    with (folder / "e.csv").open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, ["question", "answer"])
        writer.writeheader()
        writer.writerows(PAIRS)
    (folder / "f.csv.gz").write_bytes(gzip.compress((folder / "e.csv").read_bytes()))
    return sorted(folder.iterdir())


def test_every_form_of_file_gives_the_same_tasks(tmp_path: Path) -> None:
    """JSON Lines, an array, gzipped or not, and CSV; the id is the file's name and the record's number."""
    for path in forms(tmp_path):
        table = load_tasks(path)
        assert table.ids[0] == f"{path.name[0]}-000001" and len(table) == 40, path
        assert [(task.question, task.answer) for task in table.tasks()] == [tuple(pair.values()) for pair in PAIRS]
        assert table.get(table[3]).family == path.name[0]


@pytest.mark.slow  # imports the library
def test_parquet_is_read_with_the_datasets_library(tmp_path: Path) -> None:
    """Nested columns included."""
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": CHAT, "reward_model": {"ground_truth": str(n)}} for n in range(5)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "g.parquet")
    table = load_tasks(tmp_path / "g.parquet")
    assert [task.answer for task in table.tasks()] == ["0", "1", "2", "3", "4"]
    (tmp_path / "h.parquet").write_bytes(b"no parquet")
    with pytest.raises(BadInputError, match=r"Cannot read tasks from .*h\.parquet"):
        load_tasks(tmp_path / "h.parquet")


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    """A line separator inside a text ends no line; blank lines have no number."""
    path = write(tmp_path / "own.jsonl", {"question": "How many?\u2028Say.", "answer": "1"}, tail="\n\n \n")
    path.write_text(path.read_text("utf-8") + '{"question": "b?", "answer": 2}', "utf-8")
    table = load_tasks(path)
    assert table.ids == ("own-000001", "own-000002")
    assert table.get("own-000001").question == "How many?\u2028Say."


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", '{"question": "a?", "answer": "1"}\n{"question": ', "line 2: expected one JSON object"),
        ("x.jsonl", '{"question": "a?", "answer": "1"}\n\n{"q": "b?", "answer": "1"}', "line 3: expected a question"),
        ("x.jsonl", '{"question": "a?", "answer": "1"}\n7', "line 2: expected a JSON object, got int"),
        ("x.jsonl", '{"question": "a?"}', "line 1: expected a text or number in 'answer'"),
        ("x.jsonl", '{"question": ' + "[" * 100_000, "line 1: expected one JSON object"),
        ("x.jsonl", b'{"question": "\xff\xfe", "answer": "1"}', "line 1: expected one JSON object"),
        ("x.json", '[{"question": "a?", "answer": "1"}, 7]', "record 2: expected a JSON object, got int"),
        ("x.json", '[{"question": "a?", "answer": "1"}, {"question": "b?"}]', "record 2: expected a text or number"),
        ("x.json", "[1, 2", "not a JSON array"),
        ("x.jsonl", "", "holds no tasks"),
        ("x.json", "[]", "holds no tasks"),
        ("x.csv", "question,answer\na?,1\nb?,\n", "line 3: expected a text or number"),
        ("x.csv", 'question,answer\n"a\nb?",1\n"c?,2\n', "line 4: expected comma-separated values"),
        ("x.csv", b"question,answer\n\xff?,1\n", "expected comma-separated values"),
        ("x.jsonl.gz", b"no archive", "Cannot read tasks"),
        ("x.jsonl.gz", gzip.compress(b'{"question": "a?", "answer": "1"}', mtime=0)[:-9], "Cannot read tasks"),
        ("x.jsonl.gz", gzip.compress(b'\n{"question": "a?"}', mtime=0), "line 2: expected a text or number"),
    ],
)
def test_a_bad_file_is_reported_with_the_place(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    """The message has the file, the line or record, and what was expected."""
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadInputError, match=said) as caught:
        load_tasks(path)
    assert name in str(caught.value)


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    """No bare OSError reaches the user; nor does one for a folder."""
    for path in (tmp_path / "nowhere.jsonl", tmp_path):
        with pytest.raises(BadInputError, match="Cannot read tasks"):
            load_tasks(path)


def test_records_of_lines_are_read_when_asked_for_and_never_from_another_file(tmp_path: Path) -> None:
    """The file is indexed, not kept; if it changes, that is said instead of reading from the middle of a line."""
    path = write(tmp_path / "own.jsonl", *PAIRS)
    table = load_tasks(path)
    assert table.get("own-000040").answer == "40"
    write(path, {"question": "Other?", "answer": "0"}, *PAIRS)
    with pytest.raises(BadInputError, match="has changed since it was loaded"):
        table.get("own-000040")
    assert load_data(str(path)).get("own-000001").question == "Other?"  # no stale table comes from the cache


def test_an_unknown_id_is_answered_with_the_nearest_or_with_the_range(tmp_path: Path) -> None:
    """Large tables are not searched for a near miss."""
    small = load_tasks(write(tmp_path / "own.jsonl", *PAIRS))
    for wrong in ("own-00001", "own-000041", "own-", "other-000001", "own--00001", "own-\u0661", "own-" + "9" * 40):
        with pytest.raises(BadInputError, match=r"Unknown task id .*own-0000"):
            small.get(wrong)
    large = load_tasks(write(tmp_path / "large.jsonl", *(PAIRS * 251)))
    with pytest.raises(BadInputError, match="10040, from 'large-000001' to 'large-010040'"):
        large.get("large-20000")


def test_a_file_is_split_without_overlap(tmp_path: Path) -> None:
    """One question in five is held out, whatever its spelling; both parts together are the file."""
    twice = [{"question": f"What is  ${n}$ + 1 ?", "answer": str(n + 1)} for n in range(200)]
    path = write(
        tmp_path / "own.jsonl", *[{**each, "question": f"what is {n} + 1?"} for n, each in enumerate(twice)], *twice
    )
    whole, train, held_out = (load_tasks(path, split) for split in (None, "train", "eval"))
    assert len(whole) == 400 and 40 < len(held_out) < 120
    assert set(train.ids) | set(held_out.ids) == set(whole.ids)
    said = [{normalized(task.question) for task in table.tasks()} for table in (train, held_out)]
    assert not said[0] & said[1]
    with pytest.raises(BadInputError, match="Available: eval, train"):
        load_tasks(path, "test")
    with pytest.raises(BadInputError, match="no task in the train split"):
        load_tasks(write(tmp_path / "one.jsonl", {"question": "a?", "answer": "1"}), "train")
