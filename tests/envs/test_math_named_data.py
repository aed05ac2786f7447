"""Problems by name: sets and suites, the hub, noise, overlaps, the command line and the environment."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import pytest

from trace_gym import cli
from trace_gym.envs.math.tasks import NAMED, SUITES, Task, load_data
from trace_gym.envs.math.tasks.named import NamedSet
from trace_gym.envs.math.tasks.noise import Noise, identity, normalized, without_noise
from trace_gym.envs.math.tasks.overlap import find_overlaps, overlap_table
from trace_gym.errors import BadInputError, InfrastructureError, MissingExtraError

PAIRS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(40)]


def write(path: Path, *records: object) -> Path:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


# Names.


def test_a_file_can_stand_for_a_named_set(tmp_path: Path) -> None:
    """``NAME=PATH`` gives the ids of the name; the same stem twice needs names."""
    first = write(tmp_path / "test.jsonl", *PAIRS[:3])
    (tmp_path / "more").mkdir()
    second = write(tmp_path / "more" / "test.jsonl", *PAIRS[3:5])
    assert load_data(f"gsm8k={first}").ids == ("gsm8k-000001", "gsm8k-000002", "gsm8k-000003")
    with pytest.raises(BadInputError, match="a name of its own; got test, test"):
        load_data([first, second])
    joined = load_data([f"gsm8k={first}", f"own={second}"])
    assert joined.ids[2:] == ("gsm8k-000003", "own-000001", "own-000002")
    assert joined.get("own-000002").answer == "5" and joined.get("own-000002").family == "own"
    with pytest.raises(BadInputError, match="Did you mean 'own-000001'"):
        joined.get("owl-000001")
    odd = write(tmp_path / "a=b.jsonl", *PAIRS[:1])
    assert load_data(odd).ids == ("a=b-000001",)


def test_each_split_can_have_data_of_its_own(tmp_path: Path) -> None:
    """A mapping needs both; nothing is held out then."""
    train, test = write(tmp_path / "one.jsonl", *PAIRS), write(tmp_path / "two.jsonl", *PAIRS[:7])
    data = {"train": str(train), "eval": [str(test)]}
    assert len(load_data(data)) == len(load_data(data, "train")) == 40 and len(load_data(data, "eval")) == 7
    with pytest.raises(BadInputError, match="the keys 'train' and 'eval'"):
        load_data({"train": str(train)})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("gsm9k", "Unknown data set or file 'gsm9k'. Did you mean 'gsm8k'"),
        ("no/such/file.jsonl", "Cannot read tasks from no/such/file.jsonl"),
        ("gsm8k=no/such/file.jsonl", "Cannot read tasks from no/such/file.jsonl"),
        ("x" * 5000, "Unknown data set or file"),
        ("a\0b.jsonl", "Cannot read tasks from"),
        ([], "a name, a file or a sequence"),
        ([3], "a name, a file or a sequence"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, said: str) -> None:
    """The message has the names that exist, or the file that does not."""
    with pytest.raises(BadInputError, match=said):
        load_data(data)


def test_the_suites_are_those_of_the_paper() -> None:
    """Five sets of competition mathematics, three of knowledge; every member is known and pinned."""
    assert SUITES["math-id"] == ("aime24", "amc23", "math-500", "minerva", "olympiadbench")
    assert SUITES["math-ood"] == ("mmlu-pro", "arc-c", "gpqa-diamond")
    assert set().union(*SUITES.values()) < set(NAMED)
    assert all(len(spec.revision or "") == 40 for spec in NAMED.values())


HUB: dict[str, list[Mapping[str, Any]]] = {
    "aime24": [{"id": 60, "problem": "Find m.", "solution": "Long.", "answer": "204", "url": "u", "year": "2024"}],
    "amc23": [{"id": 0, "answer": "27.0", "url": "u", "question": "How far?"}],
    "math-500": [{"problem": "Pick x.", "solution": "s", "answer": "x^2", "subject": "Algebra", "level": 3}],
    "minerva": [{"question": "How bright?", "answer": "7.25"}],
    "olympiadbench": [
        {"id": 1, "question": "Prove.", "solution": ["s"], "final_answer": ["$5$"], "subfield": "Algebra"}
    ],
    "mmlu-pro": [{"question_id": 1, "question": "Why?", "options": ["a", "b"], "answer": "B", "answer_index": 1}],
    "arc-c": [{"id": "q", "question": "Why?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}],
    "gpqa-diamond": [
        {
            "Question": "Why?",
            "Correct Answer": "y",
            "Incorrect Answer 1": "n",
            "Incorrect Answer 2": "m",
            "Incorrect Answer 3": "o",
        }
    ],
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of the hub's form in place of the hub: a configuration in the card, one file per split."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    for name, records in HUB.items():
        spec = NAMED[name]
        folder = tmp_path / "hub" / name
        folder.mkdir(parents=True)
        write(folder / f"{spec.split}.jsonl", *records)
        card = f"configs:\n- config_name: {spec.config or 'default'}\n  data_files:\n  - split: {spec.split}\n"
        (folder / "README.md").write_text(f"---\n{card}    path: {spec.split}.jsonl\n---\n")
        monkeypatch.setitem(NAMED, name, NamedSet(str(folder), spec.split, len(records), spec.revision, spec.config))
    return tmp_path / "hub"


@pytest.mark.slow  # imports the library
def test_a_suite_is_loaded_from_the_hub_by_name(hub: Path) -> None:
    """Id, configuration, split and columns of each set go through the datasets library."""
    knowledge, mathematics = load_data("math-ood"), load_data(["math-id"])
    assert mathematics.ids == tuple(f"{name}-000001" for name in SUITES["math-id"])
    assert [task.answer for task in mathematics.tasks()] == ["204", "27.0", "x^2", "7.25", "5"]
    assert [task.options[ord(task.answer) - 65] for task in knowledge.tasks()] == ["b", "b", "y"]
    assert mathematics.get("math-500-000001").difficulty == 3
    assert mathematics.get("olympiadbench-000001").subject == "Algebra"


def test_a_hub_that_cannot_be_reached_is_an_infrastructure_failure(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the set, its id, the cause and the way around; a gated set says what to do."""
    monkeypatch.setitem(NAMED, "amc23", NamedSet(str(hub / "gone"), "test", 40, gated=True))
    with pytest.raises(InfrastructureError) as caught:
        load_data("amc23")
    said = str(caught.value)
    assert caught.value.kind == "data_unavailable"
    for part in ("'amc23'", "gone", "FileNotFoundError", "hf auth login", "'amc23=PATH'"):
        assert part in said


def test_without_the_library_the_extra_is_named_and_files_still_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local files but Parquet need the standard library only."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtraError, match=r"trace-gym\[math\]"):
        load_data("gsm8k")
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(MissingExtraError, match=r"trace-gym\[math\]"):
        load_data(tmp_path / "x.parquet")
    (tmp_path / "y.csv").write_text("question,answer\na?,1\n")
    for path in (write(tmp_path / "z.jsonl", *PAIRS), tmp_path / "y.csv"):
        assert load_data(path).get(f"{path.stem}-000001").answer == "1"


# Noise.


@pytest.mark.parametrize(
    "other",
    [
        "find  $ x $  if\n$\\frac{1}{2}x = 3$",
        "Find \\(x\\) if $\\dfrac{1}{2}\\, x=3$.",
        "Find $x$, if: $\\displaystyle\\frac12\\quad x = 3$.",
        "Find $x$ if \\[ \\tfrac{1}{2} x \\;=\\; 3 \\]",
        "FIND $x$ if $\\frac{1}{2}x = 3$.  \\_\\_\\_\\_",
    ],
)
def test_the_same_question_is_known_in_another_spelling(other: str) -> None:
    """Spaces, LaTeX spacing, grouping braces, case and the punctuation of sentences do not matter."""
    base = "Find $x$ if $\\frac{1}{2}x = 3$."
    assert normalized(other) == normalized(base)


@pytest.mark.parametrize(
    "other",
    [
        "Compute $\\sin 60^\\circ$.",
        "Compute $\\sin(60^\\circ)$.",
        "Compute $\\sin(-6.0^\\circ)$.",
        "Compute $\\cos(-60^\\circ)$.",
        "Compute $\\sin(-60^\\circ)!$",
    ],
)
def test_another_question_stays_another(other: str) -> None:
    """Signs, functions, decimal points and factorials do matter."""
    assert normalized(other) != normalized("Compute $\\sin(-60^\\circ)$.")


def test_typographic_characters_are_one_spelling() -> None:
    """Minus signs, quotes and full-width digits; a word that begins like a LaTeX command is left alone."""
    assert normalized("Ann\u2019s \u22125 \uff11") == normalized("Ann's -5 1")
    assert "leftarrow" in normalized("$a \\leftarrow b$")


def task(number: int, question: str, answer: str, options: tuple[str, ...] = ()) -> Task:
    return Task(f"t-{number:06d}", question, answer, "t", 0, options=options)


def test_equal_answers_are_merged_and_contradictory_ones_dropped() -> None:
    """The grader says what is equal, so 1/2 and 0.5 agree; of the others no record is kept."""
    tasks = [
        task(0, "What is half of 1?", "1/2"),
        task(1, "What is a third of 3?", "1"),
        task(2, "what is half of $1$ ?", "0.5"),
        task(3, "What is a third of 3?", "3"),
        task(4, "What is left?", "9"),
        task(5, "What is a third of 3?", "1"),
    ]
    noise = Noise(unusable=2)
    assert without_noise(enumerate(tasks), noise) == [0, 4]
    assert (noise.records, noise.repeated, noise.contradictory, noise.contradictions) == (6, 1, 3, 1)
    assert "2 tasks of 8 records; left out: 1 repeated, 3 with contradictory answers (to 1 questions), 2" in str(noise)


def test_options_belong_to_a_question_in_any_order() -> None:
    """The same stem with other options is another question; answers are compared by text, not by letter."""
    first, second = task(0, "Which?", "A", ("x", "y")), task(1, "which ?", "B", ("y", "x"))
    other, wrong = task(2, "Which?", "A", ("x", "z")), task(3, "Which?", "A", ("y", "x"))
    assert identity(first) == identity(second) != identity(other)
    assert without_noise(enumerate([first, second, other]), Noise()) == [0, 2]
    assert without_noise(enumerate([first, wrong]), Noise()) == []


def test_deepscaler_is_cleaned_and_benchmarks_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is left out is told, and the numbers of the others stay those of the file."""
    records = [PAIRS[0], {"question": "Empty?", "answer": ""}, {**PAIRS[0], "answer": "9"}, *PAIRS[1:4], PAIRS[2]]
    path = write(tmp_path / "own.jsonl", *records)
    with caplog.at_level(logging.WARNING):
        table = load_data(f"deepscaler={path}")
    assert table.ids == ("deepscaler-000004", "deepscaler-000005", "deepscaler-000006")
    assert table.get("deepscaler-000005").answer == "3"
    assert "deepscaler: 3 tasks of 7 records" in caplog.text
    with pytest.raises(BadInputError, match="line 2: expected a text or number"):
        load_data(f"gsm8k={path}")
    with pytest.raises(BadInputError, match="Unknown task id"):
        table.get("deepscaler-000001")


# Overlaps.

LONG = "A baker sells 12 rolls on Monday and twice as many on Tuesday. How many rolls does the baker sell on both days?"


def test_overlaps_are_found_exact_and_near() -> None:
    """Nearly the same question is a leak only with the same answer; the best match of each test question counts."""
    train = [
        task(0, "What is 2 + 2?", "4"),
        task(1, LONG.replace("12", "15"), "45"),
        task(2, f"Read carefully. {LONG} Answer with a number.", "36"),
        task(3, "A short one?", "1"),
    ]
    test = [
        task(10, "what is $2+2$", "4"),
        task(11, LONG, "36"),
        task(12, LONG.replace("12", "14").replace("Monday", "Friday"), "42"),
        task(13, "Something that stands nowhere else in the training data at all?", "1"),
        task(14, "A short one, perhaps?", "1"),
    ]
    found = {overlap.test.task_id: overlap for overlap in find_overlaps(train, test)}
    assert sorted(found) == ["t-000010", "t-000011", "t-000012"]
    assert found["t-000010"].kind == "exact" and found["t-000010"].is_leak
    assert found["t-000011"].train.task_id == "t-000002" and found["t-000011"].kind == "near 1.00, same answer"
    assert not found["t-000012"].is_leak and 0.6 <= found["t-000012"].share < 1
    assert not find_overlaps(train, test[2:3], threshold=1.0)
    with pytest.raises(BadInputError, match="threshold must be above 0"):
        find_overlaps(train, test, threshold=0)


def test_a_match_with_the_same_answer_goes_before_a_nearer_one() -> None:
    """A leak is never hidden behind a variant."""
    rephrased = task(1, LONG.replace("on both days", "in the two days"), "36.0")
    variant = task(0, LONG.replace("12", "13"), "39")
    (overlap,) = find_overlaps([variant, rephrased], [task(2, LONG, "36")])
    assert overlap.train is rephrased and overlap.is_leak


def test_the_table_of_overlaps_counts_by_test_set(tmp_path: Path) -> None:
    """Sets without overlap have a line as well."""
    train = load_data(write(tmp_path / "train.jsonl", *PAIRS))
    tests = load_data(
        [write(tmp_path / "one.jsonl", *PAIRS[:2]), write(tmp_path / "two.jsonl", {"question": "z?", "answer": 1})]
    )
    head, one, two, _, *shown = overlap_table(tests, find_overlaps(train.tasks(), tests.tasks()), 1).split("\n")
    assert head.split()[:4] == ["TEST", "SET", "TASKS", "EXACT"]
    assert one.split() == ["one", "2", "2", "0", "0"] and two.split() == ["two", "1", "0", "0", "0"]
    assert shown == ["one-000001 = train-000001 (exact): What is 0 + 1?"]


# The command line and the environment.


def test_the_data_commands_list_show_and_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``check`` ends with 1 if there is a leak, 0 if not; errors are one line."""
    assert cli.main(["data", "list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed and spec.hub_id in listed for name, spec in NAMED.items())
    assert "For trace_gym/HotpotQASearch-v0:" in listed
    path, other = (
        write(tmp_path / "own.jsonl", *PAIRS),
        write(tmp_path / "other.jsonl", {"question": "z?", "answer": 1}),
    )
    assert cli.main(["data", "show", str(path), "--n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "40 tasks" in shown and "--- own-000002\nWhat is 1 + 1?\n=> 2" in shown and "own-000003" not in shown
    assert cli.main(["data", "check", "--train", str(path), "--test", str(other)]) == 0
    assert cli.main(["data", "check", "--train", str(path), "--test", f"again={path}", str(other)]) == 1
    assert "again-000001 = own-000001 (exact)" in capsys.readouterr().out
    assert cli.main(["data", "show", "gsm9k"]) == 1 and "Did you mean 'gsm8k'" in capsys.readouterr().err
    assert cli.main(["data", "show", str(path), "--n", "0"]) == 1


def make(**options: Any) -> Any:
    return gymnasium.make("trace_gym/MathCode-v0", **options).unwrapped


def test_an_environment_plays_a_multiple_choice_set(tmp_path: Path) -> None:
    """The problem lists the options, and the answer is a letter."""
    path = write(tmp_path / "pets.jsonl", {"question": "Fish?", "options": ["cat", "dog", "eel"], "answer_index": 2})
    with make(data=str(path)) as env:
        prompt, _ = env.reset(seed=0)
        assert prompt == "Fish?\n\nA. cat\nB. dog\nC. eel\n\nAnswer with the letter of the right option."
        assert env.step("\\boxed{C}")[1] == 1.0
        env.reset(seed=0)
        assert env.step("\\boxed{A}")[1] == 0.0


def test_an_environment_takes_a_list_or_data_for_each_split(tmp_path: Path) -> None:
    """What the command line gives as JSON: names and files in lists and mappings."""
    one, two = str(write(tmp_path / "one.jsonl", *PAIRS[:3])), str(write(tmp_path / "two.jsonl", *PAIRS[3:5]))
    with make(data=[one, two]) as env:
        assert len(env.task_ids) == 5
        assert env.reset(options={"task_id": "two-000001"})[0] == "What is 3 + 1?"
    with make(data={"train": one, "eval": two}, split="eval") as env:
        assert env.task_ids == ("two-000001", "two-000002")
    with pytest.raises(BadInputError, match="leave them out with data"):
        make(data=one, families=["chain"])


def test_problems_from_data_have_no_demonstrations(tmp_path: Path) -> None:
    """A training run without a model learns so at once, and what it needs."""
    path = write(tmp_path / "own.jsonl", *PAIRS)
    with make(data=str(path), demonstrator_skill=0.5) as env, pytest.raises(BadInputError, match="--model"):
        env.reset(seed=0)
