"""The bundled tasks: plans that run, slips that matter, splits that never meet."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from trace_gym.envs.math.grading.grader import grade
from trace_gym.envs.math.tasks import DIFFICULTIES, Task, TaskSet, make_task, split_of
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


def test_the_bundled_sets_stay_what_they_are() -> None:
    """A digest over ids, questions, answers and plans of both splits: saved policies were trained on these."""
    digest = hashlib.sha256()
    for split in ("train", "eval"):
        tasks = TaskSet(split, size=300)
        for task in tasks.tasks():
            plan = [(step.code, step.slips) for step in task.steps]
            digest.update(repr((task.task_id, task.prompt, task.answer, plan)).encode())
    assert digest.hexdigest()[:16] == "3176cdb466d9b545"


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
