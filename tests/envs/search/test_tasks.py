"""Questions by name and from files of the usual schemas."""

import gzip
import json
from functools import partial

import pytest

from trace_gym import cli
from trace_gym.envs import hub
from trace_gym.envs.search.retrieval import read_corpus
from trace_gym.envs.search.tasks import (
    NAMED,
    SUITES,
    Question,
    QuestionTable,
    bundled_questions,
    context_corpus,
    load_questions,
    side_of,
)
from trace_gym.envs.search.tasks.named import list_sets
from trace_gym.envs.search.tasks.schemas import read_passages, read_record
from trace_gym.errors import BadInputError, InfrastructureError

# One record of each schema, about the same two passages.
FLASHRAG = {
    "id": "dev_0",
    "question": "Where was the author of Emma born?",
    "golden_answers": ["Steventon", "Steventon, Hampshire"],
    "metadata": {
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": ["Emma", "Jane Austen"], "sent_id": [0, 1]},
        "context": {"title": ["Emma"], "sentences": [["Emma is a novel.", " It is by Jane Austen."]]},
    },
}
HOTPOTQA = {
    "_id": "5a",
    "question": "Where was the author of Emma born?",
    "answer": "Steventon",
    "type": "bridge",
    "level": "easy",
    "supporting_facts": [["Emma", 0], ["Emma", 1], ["Jane Austen", 0]],
    "context": [
        ["Emma", ["Emma is a novel.", " It is by Jane Austen."]],
        ["Jane Austen", ["She was born in Steventon."]],
    ],
}
WIKI2 = {
    "_id": "93",
    "type": "compositional",
    "question": "Where was the author of Emma born?",
    "answer": "Steventon",
    "supporting_facts": [["Emma", 0], ["Jane Austen", 1]],
    "evidences": [["Emma", "author", "Jane Austen"]],
    "context": [["Emma", ["Emma is a novel.", "It is by Jane Austen."]]],
}
MUSIQUE = {
    "id": "2hop__1_2",
    "question": "Where was the author of Emma born?",
    "answer": "Steventon",
    "answer_aliases": ["Steventon, Hampshire"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Emma", "paragraph_text": "Emma is a novel.", "is_supporting": True},
        {"idx": 1, "title": "Ulysses", "paragraph_text": "Ulysses is a novel.", "is_supporting": False},
        {"idx": 2, "title": "Jane Austen", "paragraph_text": "Born in Steventon.", "is_supporting": True},
    ],
}
BAMBOOGLE = {"Question": "Where was the author of Emma born?", "Answer": "Steventon"}


def write(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("record", "titles", "difficulty"),
    [
        (FLASHRAG, ("Emma", "Jane Austen"), 3),
        (HOTPOTQA, ("Emma", "Jane Austen"), 1),
        (WIKI2, ("Emma", "Jane Austen"), 0),
        (MUSIQUE, ("Emma", "Jane Austen"), 0),
        (BAMBOOGLE, (), 0),
    ],
)
def test_every_usual_schema_is_read(record, titles, difficulty):
    said = read_record(record)
    assert said.question == "Where was the author of Emma born?"
    assert said.golden_answers[0] == "Steventon"
    assert (said.supporting_titles, said.difficulty) == (titles, difficulty)


def test_aliases_are_golden_answers():
    assert read_record(FLASHRAG).golden_answers == read_record(MUSIQUE).golden_answers
    assert read_record({"question": "q", "answer": ["a", "b", "a"]}).golden_answers == ("a", "b")
    assert read_record({"question": "q", "answers": ["a"], "answer_aliases": "b"}).golden_answers == ("a", "b")


@pytest.mark.parametrize(("value", "text"), [(True, "yes"), (False, "no"), (12, "12"), (12.0, "12"), (1.5, "1.5")])
def test_answers_that_are_no_text_become_text(value, text):
    assert read_record({"question": "q", "answer": value}).golden_answers == (text,)


def test_sentences_are_joined_with_one_space_each():
    """HotpotQA's keep the space before them, 2Wiki's do not."""
    for record in (HOTPOTQA, WIKI2, FLASHRAG):
        assert next(read_passages(record)) == ("Emma", "Emma is a novel. It is by Jane Austen.")
    assert [title for title, _ in read_passages(MUSIQUE)] == ["Emma", "Ulysses", "Jane Austen"]
    assert not list(read_passages(BAMBOOGLE))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({}, "expected a text in 'question'; the fields are none"),
        ({"question": " ", "answer": "a"}, "expected a text in 'question'; the fields are question, answer"),
        ({"question": ["q"], "answer": "a"}, "'question'"),
        ({"question": "q"}, "'golden_answers'"),
        ({"question": "q", "answer": None}, "'answer'"),
        ({"question": "q", "answer": " "}, "'answer'"),
        ({"question": "q", "golden_answers": []}, "'golden_answers'"),
        ({"question": "q", "answer": float("nan")}, "'answer'"),
        ({"question": "q", "answer": "a", "supporting_titles": "Emma"}, "list of titles"),
        ({"question": "q", "answer": "a", "supporting_facts": ["Emma"]}, "pairs that begin with a title"),
        ({"question": "q", "answer": "a", "supporting_facts": [[1, 2]]}, "list of titles"),
        ({"question": "q", "answer": "a", "paragraphs": ["text"]}, "'paragraph_text'"),
    ],
)
def test_a_record_that_does_not_fit_is_told_what_was_expected(record, expected):
    with pytest.raises(BadInputError, match=expected):
        read_record(record)


def test_a_bad_line_is_named_with_its_file_and_number(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(BAMBOOGLE) + "\n\n" + json.dumps({"question": "q"}) + "\n")
    with pytest.raises(BadInputError, match=r"set\.jsonl, line 3: expected texts in 'golden_answers'"):
        load_questions(path)
    path.write_text(json.dumps(BAMBOOGLE) + "\n{broken\n")
    with pytest.raises(BadInputError, match=r"set\.jsonl, line 2: expected one JSON object per line"):
        load_questions(path)
    path.write_text(json.dumps([BAMBOOGLE, 7]))
    with pytest.raises(BadInputError, match=r"set\.jsonl, record 2: expected a JSON object"):
        load_questions(path)
    write(path, [{**HOTPOTQA, "context": [["Emma", [1]]]}])
    with pytest.raises(BadInputError, match=r"set\.jsonl, line 1: expected a title and a text"):
        context_corpus(path)


def test_lines_end_at_line_feeds_only(tmp_path):
    """Other line ends of Unicode stand inside of texts."""
    record = {"question": "one\u2028two\u0085three\x0cfour", "answer": "a"}
    table = load_questions(write(tmp_path / "set.jsonl", [record, BAMBOOGLE]))
    assert [question.question for question in table.questions()] == [record["question"], BAMBOOGLE["Question"]]


def test_json_arrays_and_packed_files_are_read(tmp_path):
    (tmp_path / "array.json").write_text(json.dumps([HOTPOTQA, WIKI2]))
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write(json.dumps(MUSIQUE) + "\n")
    assert load_questions(tmp_path / "array.json").ids == ("array-000001", "array-000002")
    assert load_questions(tmp_path / "packed.jsonl.gz").ids == ("packed-000001",)


def test_unanswerable_questions_are_left_out(tmp_path):
    """MuSiQue holds questions whose passages were taken away on purpose; the ids of the others stay."""
    path = write(tmp_path / "set.jsonl", [{**MUSIQUE, "answerable": False}, MUSIQUE])
    assert load_questions(path).ids == ("set-000002",)


def test_one_question_in_five_is_held_out_by_its_passages(tmp_path):
    """Two questions about the same passages are on the same side, in whatever order they name them."""
    records = [
        {"question": f"{n} {side}", "answer": "a", "supporting_titles": [f"A{n}", f"B{n}"][::side]}
        for n in range(300)
        for side in (1, -1)
    ]
    path = write(tmp_path / "set.jsonl", records)
    train, held_out = (load_questions(path, split) for split in ("train", "eval"))
    assert set(train) | set(held_out) == set(load_questions(path)) and not set(train) & set(held_out)
    assert 60 < len(held_out) < 180 and len(held_out) % 2 == 0
    numbers = [{question.question.split()[0] for question in table.questions()} for table in (train, held_out)]
    assert not numbers[0] & numbers[1]


def test_each_fold_holds_out_other_questions(tmp_path):
    """Five folds: every question is held out once."""
    path = write(tmp_path / "set.jsonl", [{"question": f"{n}?", "answer": "a"} for n in range(100)])
    for load in (bundled_questions, partial(load_questions, path)):
        parts = [set(load(split="eval", fold=fold)) for fold in range(5)]
        everything = set(load(split="train")) | parts[0]
        assert sum(map(len, parts)) == len(set.union(*parts)) == len(everything)
        assert all(set(load(split="train", fold=fold)) == everything - part for fold, part in enumerate(parts))
        with pytest.raises(BadInputError, match="fold must be from 0 to 4; got 5"):
            load(split="eval", fold=5)


def test_questions_without_passages_are_split_by_their_text():
    first, second = Question("a", "Who?  ", ("x",)), Question("b", "who?", ("y",))
    assert side_of(first) == side_of(second)


def test_a_mapping_gives_each_split_data_of_its_own(tmp_path):
    one, two = write(tmp_path / "one.jsonl", [BAMBOOGLE]), write(tmp_path / "two.jsonl", [MUSIQUE])
    data = {"train": str(one), "eval": [str(two)]}
    assert load_questions(data).ids == load_questions(data, "train").ids == ("one-000001",)
    assert load_questions(data, "eval").ids == ("two-000001",)
    with pytest.raises(BadInputError, match="keys 'train' and 'eval'"):
        load_questions({"test": str(one)})


def test_several_sources_are_joined_under_their_names(tmp_path):
    one, two = write(tmp_path / "one.jsonl", [BAMBOOGLE]), write(tmp_path / "two.jsonl", [MUSIQUE])
    table = load_questions([str(one), f"musique={two}"])
    assert table.ids == ("one-000001", "musique-000001")
    with pytest.raises(BadInputError, match="Two questions have the id 'one-000001'"):
        load_questions([str(one), str(one)])


def test_the_passages_of_the_questions_make_a_corpus(tmp_path, monkeypatch):
    """Each passage once; None where a source has no passages."""
    monkeypatch.setenv("TRACE_GYM_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path / "set.jsonl", [HOTPOTQA, WIKI2, MUSIQUE])
    corpus = context_corpus(str(path))
    passages = read_corpus(corpus)
    assert [passage.title for passage in passages] == ["Emma", "Jane Austen", "Emma", "Ulysses", "Jane Austen"]
    assert context_corpus(str(path)) == corpus
    bare = write(tmp_path / "bare.jsonl", [BAMBOOGLE])
    assert context_corpus([str(path), str(bare)]) is None


def test_the_suite_qa_is_what_the_paper_reports():
    assert SUITES == {"qa": ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")}
    assert [NAMED[name].size for name in SUITES["qa"]] == [7_405, 12_576, 2_417, 125]
    assert NAMED["hotpotqa-train"].size == 90_447
    assert all(name in list_sets() for name in NAMED)


def test_an_unknown_name_or_path_is_refused_with_what_there_is(tmp_path):
    with pytest.raises(BadInputError, match="Did you mean 'hotpotqa'"):
        load_questions("hotpot")
    with pytest.raises(BadInputError, match=r"nothing\.jsonl"):
        load_questions(tmp_path / "nothing.jsonl")
    with pytest.raises(BadInputError, match="split"):
        load_questions("hotpotqa", "test")
    for data in ([], [7], 7.5):
        with pytest.raises(BadInputError, match="a name, a file or a sequence of them"):
            load_questions(data)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(BadInputError, match="no questions"):
        load_questions(empty)


def test_without_a_hub_a_named_set_says_how_to_do_without(monkeypatch):
    """One error of the infrastructure, with the cause and the local file as the way out."""
    datasets = pytest.importorskip("datasets")

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(hub, "_why_away", lambda extra: "")  # it answers, and then no more
    with pytest.raises(InfrastructureError, match=r"no route to the hub.*'musique=PATH'") as caught:
        load_questions("musique")
    assert caught.value.kind == "data_unavailable"


def test_a_named_set_is_loaded_from_where_its_row_says(monkeypatch):
    """And read like a file: records of the hub are mappings."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(hub_id, config, split, revision):
        asked.append((hub_id, config, split, len(revision)))
        return datasets.Dataset.from_list([FLASHRAG])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    table = load_questions("2wikimultihopqa")
    assert asked == [("RUC-NLPIR/FlashRAG_datasets", "2wikimultihopqa", "dev", 40)]
    assert table.get("2wikimultihopqa-000001").supporting_titles == ("Emma", "Jane Austen")


def test_bundled_questions_are_chosen_by_difficulty_and_type():
    assert {question.difficulty for question in bundled_questions("train", (3,)).questions()} == {3}
    assert {question.type for question in bundled_questions("eval", None, ("comparison",)).questions()} == {
        "comparison"
    }
    for difficulties, types in (((4,), None), (None, ("riddle",)), ((1,), ("bridge",))):
        with pytest.raises(BadInputError, match="bundled question"):
            bundled_questions("train", difficulties, types)


def test_a_table_gives_questions_by_id():
    table = QuestionTable([Question("a-1", "q", ("x",)), Question("a-2", "r", ("y",))])
    assert (len(table), table[0], table[:1], list(table)) == (2, "a-1", ("a-1",), ["a-1", "a-2"])
    assert table.get("a-2").question == "r"
    with pytest.raises(BadInputError, match="Did you mean"):
        table.get("a-3")
    large = QuestionTable(Question(f"n{i}", "q", ("x",)) for i in range(10_001))
    with pytest.raises(BadInputError, match=r"There are 10001, from 'n0' to 'n10000'"):
        large.get("m")


def test_the_data_commands_show_and_check_questions(tmp_path, capsys):
    """As of problems; a local copy under a known name needs no option, another file says whose it is."""
    path = write(tmp_path / "own.jsonl", [FLASHRAG])
    assert cli.main(["data", "show", f"musique={path}"]) == 0
    shown = capsys.readouterr().out
    assert "1 questions\n\n--- musique-000001" in shown and "from: Emma; Jane Austen" in shown
    search = ["--env", "trace_gym/HotpotQASearch-v0"]
    assert cli.main(["data", "check", "--train", str(path), "--test", f"musique={path}"]) == 1
    assert "musique-000001 = own-000001 (exact)" in capsys.readouterr().out
    assert cli.main(["data", "show", str(path), *search]) == 0
    assert cli.main(["data", "show", str(path), "--env", "trace_gym/HotpotQASearch"]) == 1
    assert "Did you mean 'trace_gym/HotpotQASearch-v0'" in capsys.readouterr().err
