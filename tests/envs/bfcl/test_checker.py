"""The check of a turn: the rules of upstream, by the names of upstream."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trace_gym.envs.bfcl.checker import EMPTY_TURN, RESPONSE_MISMATCH, STATE_MISMATCH, check_turn
from trace_gym.envs.bfcl.executor import Instances
from trace_gym.envs.bfcl.gold import gold
from trace_gym.envs.bfcl.tasks import load_tasks

PARITY = Path(__file__).resolve().parents[2] / "benchmarks" / "bfcl_parity.py"


def judge(task, turns):
    """Return what is wrong with each turn."""
    instances, texts, failures = Instances.fresh(task), [], []
    for number, calls in enumerate(turns):
        texts += [instances.call_text(call) for call in calls]
        failures.append(check_turn(instances, task, number, texts, bool(calls)))
    return failures


@pytest.mark.slow
def test_all_800_ground_truths_pass():
    """Every turn of every task."""
    tasks = list(load_tasks().tasks())
    assert len(tasks) == 800
    assert sum(len(calls) for task in tasks for calls in task.ground_truth) == 4_625
    failed = {task.id: failures for task in tasks if any(failures := judge(task, task.ground_truth))}
    assert failed == {}


@pytest.mark.slow
def test_verdicts_and_texts_are_those_of_upstream():
    """A part of ``tests/benchmarks/bfcl_parity.py``, which says how; the whole takes minutes."""
    command = [sys.executable, str(PARITY), "--every", "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ground truths"] == report["passed"]["ground truth"] == 16
    assert report["perturbed trajectories"] == 128
    assert report["unexplained"] == []
    leak = {"task": "multi_turn_base_77", "kind": "leak", "ours": STATE_MISMATCH, "upstream": None}
    assert report["flagged"] == [{**leak, "leaks": ["post_tweet"]}]


def test_a_turn_without_a_call_fails_even_if_its_work_was_done_before():
    """Upstream's rule, and the reason to look at turns one by one."""
    task = load_tasks().get("multi_turn_base_0")
    first, second, *rest = task.ground_truth
    assert judge(task, task.ground_truth) == [None] * len(task.ground_truth)
    assert judge(task, [(*first, *second), (), *rest])[1] == EMPTY_TURN


def test_results_count_wherever_they_were_earlier_and_in_any_order():
    """Each as often as it occurred."""
    task = load_tasks().get("multi_turn_base_0")
    instances, results = Instances.fresh(task), []
    for turn, expected in enumerate(gold(task)):
        instances = Instances.loads(expected.blob)
        results = [*expected.results[::-1], "something else", *results]
        assert check_turn(instances, task, turn, results, True) is None
        lacking = list(results)
        lacking.remove(expected.results[0])
        assert check_turn(instances, task, turn, lacking, True) in (None, RESPONSE_MISMATCH)
    assert check_turn(instances, task, turn, [], True) == RESPONSE_MISMATCH


def test_a_turn_in_which_nothing_can_be_done_is_not_checked():
    """Harmless calls pass; what was changed shows in the next turn."""
    task = load_tasks().get("multi_turn_miss_func_0")
    abstain = task.ground_truth.index(())
    assert task.turns[abstain + 1] is None or task.turns[abstain] is not None
    for extra, failure in ((("ls()",), None), (("touch('x')",), STATE_MISMATCH)):
        turns = list(task.ground_truth)
        turns[abstain] = extra
        failures = judge(task, turns)
        assert failures[abstain] is None
        assert failures[abstain + 1] == failure


def test_a_state_that_contains_itself_is_a_mismatch():
    """Upstream raises when it compares two such states; ours cannot be equal to one that a ground truth leads to."""
    task = load_tasks().get("multi_turn_base_0")
    turns = [(*task.ground_truth[0], "cd('..')", "cp('document','document')"), *task.ground_truth[1:]]
    assert judge(task, turns)[0] == STATE_MISMATCH


def test_gold_is_computed_once_and_never_shared():
    """Each check gets a state of its own."""
    task = load_tasks().get("multi_turn_base_0")
    assert gold(task) is gold(task)
    first, second = (Instances.loads(gold(task)[0].blob) for _ in range(2))
    first.call("touch", {"file_name": "x"})
    assert first.digest() != second.digest() == Instances.loads(gold(task)[0].blob).digest()
