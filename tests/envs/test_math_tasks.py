"""The bundled tasks: plans that run, slips that matter, splits that never meet, files that load."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from trace_gym.envs.math.grading.grader import grade
from trace_gym.envs.math.tasks import DIFFICULTIES, Task, TaskSet, load_tasks, make_task, split_of
from trace_gym.envs.math.tasks.families import FAMILIES
from trace_gym.errors import BadInputError

GRID = [(family, level) for family in FAMILIES for level in DIFFICULTIES]


def show_last(cells: Sequence[str]) -> str:
    """Run cells one after another in one namespace; return what the last one shows, as a notebook would."""
    names: dict[str, object] = {}
    shown = ""
    for code in cells:
        tree = ast.parse(code)
        last = tree.body.pop()
        assert isinstance(last, ast.Expr), f"the last line of {code!r} shows nothing"
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, "<cell>", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        shown = printed.getvalue() + ("" if value is None else repr(value))
    return shown.strip()


def draw(family: str, level: int, count: int = 6, split: str = "train") -> list[Task]:
    """A few tasks of one family and difficulty."""
    return [make_task(f"{family}-{level}-{split}-{index:06d}") for index in range(count)]


def cells_of(task: Task) -> list[str]:
    return [step.code for step in task.steps]


@pytest.mark.parametrize(("family", "level"), GRID)
def test_running_the_plan_shows_exactly_the_answer(family: str, level: int) -> None:
    """The last cell's output is the answer, character by character, and the grader agrees."""
    for task in draw(family, level):
        assert show_last(cells_of(task)) == task.answer
        assert grade(task.answer, task.answer).outcome == "correct"


@pytest.mark.parametrize(("family", "level"), GRID)
def test_every_silent_slip_changes_the_answer_and_the_last_slip_raises(family: str, level: int) -> None:
    """Each cell has at least one silent slip that spoils the final answer, and one that raises, in place."""
    for task in draw(family, level, 4):
        cells = cells_of(task)
        for place, step in enumerate(task.steps):
            *silent, broken = step.slips
            assert silent, f"no silent slip for {step.code!r}"
            for slip in silent:
                shown = show_last([*cells[:place], slip, *cells[place + 1 :]])
                assert grade(shown, task.answer).outcome == "wrong", slip
            with pytest.raises((NameError, TypeError, SyntaxError)):
                show_last([*cells[:place], broken])


@pytest.mark.parametrize(("family", "level"), GRID)
def test_texts_stay_within_the_reach_of_a_tiny_model(family: str, level: int) -> None:
    """Questions, lines and answers are short; one cell at difficulty 1, at most three at 5."""
    for task in draw(family, level, 20):
        assert len(task.question) <= 120
        assert len(task.answer) <= 10
        assert len(task.steps) == 1 if level == 1 else len(task.steps) <= 3
        for code in cells_of(task):
            assert len(code.split("\n")) <= 3
            assert max(map(len, code.split("\n"))) <= 62
    assert any(len(task.steps) > 1 for task in draw(family, 5) + draw(family, 4))


def test_later_cells_need_the_state_that_earlier_cells_left() -> None:
    """Without its first cell a plan of several cells raises: the tool's state carries the solution."""
    dependent = [task for family in FAMILIES for task in draw(family, 5, 2) if len(task.steps) > 1]
    assert len(dependent) >= 2 * 12
    for task in dependent:
        with pytest.raises(NameError):
            show_last(cells_of(task)[1:])


def test_a_task_is_regenerated_from_its_id_and_seed_alone() -> None:
    """Equal ids give equal tasks, whatever was drawn before; another seed gives other tasks."""
    tasks = TaskSet(size=150, seed=3)
    again = TaskSet(size=40, seed=3)
    for task_id in tasks:
        assert again.get(task_id) == tasks.get(task_id) == make_task(task_id, seed=3)
    other = TaskSet(size=150, seed=4)
    assert sum(other.get(name).question == tasks.get(name).question for name in tasks) < 20


def test_known_ids_keep_their_texts() -> None:
    """Golden tasks: a change here breaks every saved run and needs a new environment version."""
    task = make_task("chain-2-train-000007")
    assert (task.question, task.answer) == (
        "Start with 3, add 5, subtract 4. What is the result?",
        "4",
    )
    assert make_task("congruences-3-eval-000001").question == (
        "Find the least n >= 264 with n % 11 = 9 and n % 12 = 3."
    )


def test_train_and_eval_never_share_a_question_whatever_the_seed() -> None:
    """The split is a digest of the plan, so different seeds and wordings cannot mix the sides."""
    sides = {
        split: [
            task for seed in (0, 1) for tasks in [TaskSet(split, size=450, seed=seed)] for task in map(tasks.get, tasks)
        ]
        for split in ("train", "eval")
    }
    for field in ("question", "steps"):
        train = {getattr(task, field) for task in sides["train"]}
        assert not train & {getattr(task, field) for task in sides["eval"]}


def test_about_one_draft_in_five_belongs_to_eval() -> None:
    """The share of the eval split is 1/5 over all families."""
    rng = np.random.default_rng(0)
    drafts = [FAMILIES[name](rng, 1 + place % 5) for place in range(60) for name in FAMILIES]
    share = sum(split_of(draft) == "eval" for draft in drafts) / len(drafts)
    assert 0.15 < share < 0.25


def test_a_set_is_balanced_and_its_questions_are_distinct() -> None:
    """Every family and difficulty comes equally often, in every prefix as far as it goes."""
    tasks = TaskSet(size=5 * len(FAMILIES) * 4)
    counts = Counter(tuple(name.split("-")[:2]) for name in tasks)
    assert set(counts.values()) == {4} and len(counts) == 5 * len(FAMILIES)
    assert len({name.split("-")[0] for name in tasks.ids[: len(FAMILIES)]}) == len(FAMILIES)
    assert len({tasks.get(name).question for name in tasks}) == len(tasks)
    few = TaskSet(families=["chain", "power"], difficulties=[2, 4], size=10)
    assert {name.rsplit("-", 2)[0] for name in few} == {"chain-2", "chain-4", "power-2", "power-4"}


def test_a_set_behaves_like_a_sequence_of_ids() -> None:
    """Length, index, slice, membership."""
    tasks = TaskSet(size=7)
    assert len(tasks) == len(tasks.ids) == 7
    assert tasks[0] == tasks.ids[0] and tasks[-2:] == tasks.ids[-2:]
    assert tasks[3] in tasks and "nothing" not in tasks


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TaskSet(split="evl"), "Did you mean 'eval'"),
        (lambda: TaskSet(families=["chian"]), "Did you mean 'chain'"),
        (lambda: TaskSet(difficulties=[6]), "one of 1, 2, 3, 4, 5"),
        (lambda: TaskSet(size=0), "size must be from 1"),
        (lambda: TaskSet(seed=-1), "at least 0"),
        (lambda: TaskSet(families=[]), "at least one family"),
        (lambda: make_task("chain-2"), "family-difficulty-split-index"),
        (lambda: make_task("chains-2-train-000001"), "Did you mean 'chain'"),
        (lambda: TaskSet(size=3).get("chain-9-train-000001"), "difficulty must be"),
    ],
)
def test_what_does_not_exist_is_named_with_what_does(make: object, said: str) -> None:
    """Errors say what was given and what is allowed."""
    with pytest.raises(BadInputError, match=said):
        make()  # type: ignore[operator]


def test_a_family_without_questions_for_a_split_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The redraw is bounded and says what to do."""
    one = FAMILIES["chain"]

    def constant(rng: object, level: int) -> object:
        return one(np.random.default_rng(0), level)

    monkeypatch.setitem(FAMILIES, "tiny", constant)  # type: ignore[arg-type]
    draft = constant(None, 1)
    missing = "train" if split_of(draft) == "eval" else "eval"  # type: ignore[arg-type]
    with pytest.raises(BadInputError, match="too few different questions"):
        make_task(f"tiny-1-{missing}-000000")


def write(path: Path, *records: object, tail: str = "") -> Path:
    path.write_text("\n".join(json.dumps(r, ensure_ascii=False) for r in records) + tail, "utf-8")
    return path


def test_questions_and_answers_are_found_in_the_usual_fields(tmp_path: Path) -> None:
    """GSM8K, MATH and plain records load side by side; a line separator inside a text ends no line."""
    path = write(
        tmp_path / "mixed.jsonl",
        {"question": "How many?\u2028Say it.", "answer": "3 + 4 = <<3+4=7>>7\n#### 7"},
        {"problem": "Half of 1?", "answer": "\\frac{1}{2}", "level": 2},
        {"prompt": "Now?", "solution": "So it is \\boxed{\\frac{3}{4}}."},
        {"question": "As a number?", "answer": 145.0},
        tail="\n\n",
    )
    tasks = load_tasks(path)
    loaded = [tasks.get(name) for name in tasks]
    assert [task.answer for task in loaded] == ["7", "\\frac{1}{2}", "\\frac{3}{4}", "145"]
    assert loaded[0].question == "How many?\u2028Say it."
    assert [task.difficulty for task in loaded] == [0, 2, 0, 0]
    assert tasks.ids[1] == "mixed-000002" and loaded[1].steps == ()
    with pytest.raises(BadInputError, match="Did you mean 'mixed-000004'"):
        tasks.get("mixed-00004")


def test_a_json_array_loads_like_lines(tmp_path: Path) -> None:
    """An array of records is read too, with a byte order mark or without."""
    path = tmp_path / "array.json"
    path.write_text("\ufeff" + json.dumps([{"prompt": "a?", "answer": "1"}, {"prompt": "b?", "answer": "2"}]))
    assert load_tasks(path).ids == ("array-000001", "array-000002")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"question": "a?", "answer": "1"}\n{"question": ', "line 2: expected one JSON object"),
        ('{"question": "a?", "answer": "1"}\n\n{"q": "b?", "answer": "1"}', "line 3: expected a question"),
        ('{"question": "a?"}', "line 1: expected a text or number in 'answer'"),
        ('{"question": "a?", "solution": "cut off \\\\boxed{3"}', "line 1: expected a text"),
        ('{"question": "  ", "answer": "1"}', "line 1: 'question' must be a text"),
        ('[{"question": "a?", "answer": "1"}, 7]', "record 2: expected a JSON object, got int"),
        ("[1, 2", "not a JSON array"),
        ("", "holds no tasks"),
    ],
)
def test_a_bad_record_is_reported_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    """The message has the file, the line and what was expected."""
    path = tmp_path / "bad.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(BadInputError, match=said) as caught:
        load_tasks(path)
    assert "bad.jsonl" in str(caught.value)


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    """No bare OSError reaches the user."""
    with pytest.raises(BadInputError, match="Cannot read tasks"):
        load_tasks(tmp_path / "nowhere.jsonl")


def test_a_file_is_split_without_overlap(tmp_path):
    """The same digest holds out one question in five; both parts together are the file."""
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(200))
    )
    whole, train, held_out = (load_tasks(path, split) for split in (None, "train", "eval"))
    assert len(whole) == 200 and 20 < len(held_out) < 60
    assert not set(train.ids) & set(held_out.ids)
    assert set(train.ids) | set(held_out.ids) == set(whole.ids)
    with pytest.raises(BadInputError, match="Available: eval, train"):
        load_tasks(path, "test")
