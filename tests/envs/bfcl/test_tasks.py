"""The tasks and their split: what the data says, and that no scenario stands on both sides."""

import hashlib
import json
import subprocess
import sys
from collections import Counter

import pytest

from trace_gym.envs.bfcl import backend as backend_module
from trace_gym.envs.bfcl.backend import FINGERPRINT, MODULES, SUBSETS
from trace_gym.envs.bfcl.tasks import DOMAINS, load_tasks, side_of
from trace_gym.errors import BadInputError, InfrastructureError


def test_there_are_200_scenarios_in_four_variants():
    """160 to train on and 40 to evaluate, ten from each domain."""
    counts = Counter((task.subset, side_of(task.base_id), task.domain) for task in load_tasks().tasks())
    assert counts == {
        (subset, side, domain): number
        for subset in SUBSETS
        for side, number in (("train", 40), ("eval", 10))
        for domain in DOMAINS
    }
    assert len(load_tasks(split="train")) == 640
    assert len(load_tasks("base", "eval")) == 40
    assert len(load_tasks("base", "all", exclude_suspect=True)) == 199


def test_the_split_is_the_published_one():
    """The digest of the list stands in the specification."""
    ids = [str(task.base_id) for task in load_tasks("base", "eval").tasks()]
    assert hashlib.sha256(",".join(ids).encode()).hexdigest().startswith("09fb0e46a321d2c6")


def test_no_first_message_state_or_answer_stands_on_both_sides():
    """In any variant."""
    sides = {}
    for task in load_tasks().tasks():
        for part in (task.turns[0], task.initial_config, task.ground_truth):
            sides.setdefault(json.dumps(part), set()).add(side_of(task.base_id))
    assert [part[:80] for part, both in sides.items() if len(both) > 1] == []


def test_held_out_functions_come_with_their_turn():
    """And not before."""
    task = load_tasks().get("multi_turn_miss_func_0")
    assert task.missed_functions == {3: ("sort",)}
    assert task.turns[3] is None
    assert [("sort" in task.offered(turn), "sort" in task.held_out(turn)) for turn in (0, 2, 3, 4)] == [
        (False, True),
        (False, True),
        (True, False),
        (True, False),
    ]


def test_every_function_has_a_document_and_a_parameter_for_each_that_it_names(backend):
    """128 of them; none has a name in common with another."""
    documented = {doc["name"]: set(doc["parameters"]["properties"]) for docs in backend.docs.values() for doc in docs}
    assert documented == {name: set(function.parameters) for name, function in backend.functions.items()}
    assert len(documented) == sum(len(docs) for docs in backend.docs.values()) == 128
    assert set(backend.docs) == set(MODULES)
    assert {f.name: f.defaults for f in backend.functions.values() if f.defaults} == {
        "post_tweet": {"tags": [], "mentions": []}
    }


@pytest.mark.parametrize(
    ("arguments", "said"), [({"subset": "bas"}, "Did you mean 'base'"), ({"split": "test"}, "Available: eval, train")]
)
def test_names_that_do_not_exist_are_refused(arguments, said):
    """With those that do."""
    with pytest.raises(BadInputError, match=said):
        load_tasks(**arguments)
    with pytest.raises(BadInputError, match="multi_turn_base_0"):
        load_tasks("base").get("multi_turn_base_")


def test_files_of_the_wheel_that_were_changed_are_refused(backend, monkeypatch):
    """By name, with what to do."""
    monkeypatch.setattr(backend_module, "_ANSWERS", ("0" * 16, *backend_module._ANSWERS[1:]))
    with pytest.raises(InfrastructureError, match=r"BFCL_v4_multi_turn_base\.json.*Remove"):
        backend_module._check(backend.folder)


def test_loading_the_simulators_leaves_a_bfcl_eval_of_the_host_alone():
    """None is needed, none is made, and one that is there, whatever it is, stays as it is."""
    code = (
        "import sys, types; theirs = sys.modules['bfcl_eval'] = types.ModuleType('x'); before = list(sys.path)\n"
        "from trace_gym.envs.bfcl.backend import load_backend; print(load_backend().fingerprint)\n"
        "assert sys.modules['bfcl_eval'] is theirs and vars(theirs).keys() == vars(types.ModuleType('x')).keys()\n"
        "assert sys.path == before and not [m for m in sys.modules if m.startswith('bfcl_eval.')]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == FINGERPRINT, done.stderr
