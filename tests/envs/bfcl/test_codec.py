"""A saved state is the state: whatever is played afterwards, from bytes, from data, from a clone."""

import copy
import json
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_gym.envs.bfcl.codec import from_graph, to_graph
from trace_gym.envs.bfcl.executor import Instances
from trace_gym.envs.bfcl.stand_ins import Dice
from trace_gym.envs.bfcl.tasks import load_tasks
from trace_gym.errors import StateError

FILES = "multi_turn_base_0"


def fresh(task_id=FILES):
    return Instances.fresh(load_tasks().get(task_id))


def play(instances, turns):
    return [instances.call_text(call) for calls in turns for call in calls]


@pytest.mark.slow
def test_restored_at_any_turn_a_state_goes_on_as_if_nothing_had_been():
    """Ground truths of twenty scenarios in four variants, saved at every turn, while a clone does something else."""
    for number, task in enumerate(task for task in load_tasks().tasks() if task.base_id % 10 == 3):
        instances = Instances.fresh(task)
        expected = play(Instances.fresh(task), task.ground_truth)
        texts = []
        for turn, calls in enumerate(task.ground_truth):
            blob, graph = instances.dumps(), json.dumps(instances.to_graph())
            other = task.ground_truth[turn:][::-1]
            for twin in (Instances.loads(blob), Instances.from_graph(json.loads(graph))):
                assert json.dumps(twin.to_graph()) == graph
                play(twin, other)
            assert json.dumps(instances.to_graph()) == graph, "a clone changed its parent"
            again = Instances.loads(blob) if number % 2 else Instances.from_graph(json.loads(graph))
            assert texts + play(again, task.ground_truth[turn:]) == expected
            texts += [instances.call_text(call) for call in calls]


def test_copied_and_moved_directories_keep_what_they_share():
    """A copy shares its files with the original, and a moved directory leaves its children's parents behind."""
    calls = ["cp('document','copy')", "mv('document','moved')", "cd('copy')"]
    probes = ["echo('changed','final_report.pdf')", "cd('..')", "cd('moved')", "cat('final_report.pdf')", "pwd()"]
    instances = fresh()
    play(instances, [calls])
    blob, graph = instances.dumps(), instances.to_graph()
    expected = play(instances, [probes])
    assert "changed" in expected[3]
    assert play(Instances.loads(blob), [probes]) == expected
    assert play(Instances.from_graph(graph), [probes]) == expected


def test_a_cyclic_file_system_is_saved():
    """A directory that contains itself."""
    instances = fresh()
    play(instances, [["cp('document','document')"]])
    for twin in (Instances.loads(instances.dumps()), Instances.from_graph(instances.to_graph())):
        assert twin.digest() == instances.digest()
        document = twin.by_class["GorillaFileSystem"].root.contents["document"]
        assert document.contents["document"].contents["final_report.pdf"] is document.contents["final_report.pdf"]


def test_directories_5000_deep_are_saved():
    """Far beyond where pickle gives up."""
    instances = fresh()
    for _ in range(5_000):
        assert instances.call("mkdir", {"dir_name": "d"}) == "None"
        instances.call("cd", {"folder": "d"})
    with pytest.raises(RecursionError):
        pickle.dumps(instances.by_class)
    twin = Instances.loads(instances.dumps())
    assert twin.digest() == instances.digest()
    assert twin.call("pwd", {}) == instances.call("pwd", {}) != fresh().call("pwd", {})


def test_values_keep_their_types_and_order():
    """Keys that are no texts, numbers beyond a double, whole floats, order of keys."""
    value = {
        1: 1.0,
        "1": 1,
        None: -0.0,
        False: True,
        "big": 10**400,
        "far": [float("inf"), -float("inf")],
        "set": {3, 1, 2},
    }
    twin = from_graph(json.loads(json.dumps(to_graph(value, {}))), {})
    assert repr(twin) == repr(value)
    nan = from_graph(json.loads(json.dumps(to_graph([float("nan")], {}))), {})
    assert nan != nan or nan[0] != nan[0]


class Mischief:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    "value", [Mischief(exec, "raise SystemExit"), Mischief(print, "x"), Mischief(getattr, "", "join"), random.Random(0)]
)
def test_a_pickle_of_anything_else_is_refused_before_it_does_anything(value, capsys):
    """Bytes name the simulators' classes or nothing."""
    with pytest.raises(StateError, match="does not hold"):
        Instances.loads(pickle.dumps({"GorillaFileSystem": value}))
    assert capsys.readouterr().out == ""


def bad_graphs():
    good = fresh().to_graph()
    yield from (None, 3, [], {}, {"root": [0]}, {"root": [0], "nodes": 3}, {"root": [0], "nodes": []})
    yield {"root": [0], "nodes": [["list", []]]}
    yield {"root": [0], "nodes": [["dict", ["GorillaFileSystem", [1]]], ["dict", []]]}
    yield {"root": [0], "nodes": [["dict", ["GorillaFileSystem", [1]]], ["Popen", []]]}
    yield {"root": [0], "nodes": [["dict", ["GorillaFileSystem", [1]]], ["dice", [0, 10**12]]]}
    for wrong in ([-1], [10**9], [True], ["ls"], [0, 0], {}, [[0]], [None]):
        graph = copy.deepcopy(good)
        graph["nodes"][1][1][1] = wrong
        yield graph
    for wrong in (
        ["dict", [[0], 1]],
        ["dict", ["odd"]],
        ["set", [[0]]],
        ["list"],
        ["list", [], []],
        [],
        3,
        ["dice", [0.5, 0]],
    ):
        yield {**good, "nodes": [*good["nodes"][:-1], wrong]}


def test_data_that_is_no_state_is_refused_with_one_kind_of_error():
    """Data may come from anywhere."""
    for graph in bad_graphs():
        with pytest.raises(StateError):
            Instances.from_graph(graph)


def test_a_state_without_its_attributes_makes_calls_fail_and_nothing_else():
    """What the agent is told is an error; nothing is raised."""
    graph = {"root": [0], "nodes": [["dict", ["GorillaFileSystem", [1]]], ["GorillaFileSystem", ["ls", 1]]]}
    instances = Instances.from_graph(graph)
    for name in ("ls", "du", "find", "cp", "pwd"):
        assert instances.call(name, {}).startswith("Error during execution: ")


def test_something_that_is_no_data_cannot_be_saved():
    """Better than a state that is silently different."""
    instances = fresh()
    instances.by_class["TwitterAPI"].tweets[0]["x"] = object()
    with pytest.raises(StateError, match="holds a object"):
        instances.to_graph()


DRAWS = st.lists(
    st.one_of(
        st.tuples(st.just("randint"), st.integers(-9, 9), st.integers(10, 10**30)),
        st.tuples(st.just("uniform"), st.floats(-9, 9), st.floats(-9, 9)),
        st.just(("save",)),
        st.just(("data",)),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**7), draws=DRAWS)
def test_dice_draw_what_random_draws(seed, draws):
    """Wherever they are saved and restored in between."""
    dice, real = Dice(seed), random.Random(seed)
    for name, *arguments in draws:
        if name == "save":
            dice = pickle.loads(pickle.dumps(dice))
        elif name == "data":
            dice = from_graph(json.loads(json.dumps(to_graph(dice, {}))), {})
        else:
            assert getattr(dice, name)(*arguments) == getattr(real, name)(*arguments)
