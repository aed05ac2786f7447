"""Every rule on the manual page of BFCLMultiTurn, and what clones and files must not change."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from trace_gym.agents import make_agent
from trace_gym.allocation import get_allocator
from trace_gym.chat import render_tool_call
from trace_gym.cli import main
from trace_gym.collect import Collector
from trace_gym.envs.bfcl.demonstrator import truth_calls
from trace_gym.envs.bfcl.env import MAX_STEPS, MORE_FUNCTIONS, BFCLMultiTurnEnv
from trace_gym.envs.bfcl.executor import Instances
from trace_gym.envs.bfcl.tasks import load_tasks
from trace_gym.envs.bfcl.tools import get_offer
from trace_gym.errors import BadInputError, StateError
from trace_gym.messages import ToolCall
from trace_gym.predictor import get_predictor
from trace_gym.snapshot import EnvState, clone, load_state, save_state

BASE = "multi_turn_base_0"
MISSING = "multi_turn_miss_func_0"  # sort is on offer from turn 3 on; turn 2 asks for it in vain
LS = ToolCall("ls", {})
EVERY = int(os.environ.get("TRACE_GYM_TEST_EVERY", "9"))  # of the tasks in the slow tests of clones and threads


def make(**options):
    return BFCLMultiTurnEnv(**{"subset": "all", "split": "all", "tool_doc": "compact"} | options)


def begin(task_id=BASE, **options):
    env = make(**options)
    env.reset(seed=0, options={"task_id": task_id})
    return env


def say(*calls, tool_format="hermes"):
    return "\n".join(render_tool_call(call, tool_format) for call in calls)


def truth(env):
    """Return the calls of each turn of the running task."""
    return truth_calls(env.tasks.get(env.info()["task_id"]))


def play_turn(env, *calls):
    """Make the calls one by one, then end the turn."""
    for call in calls:
        env.step(say(call))
    return env.step("Done.")


def digest(env):
    return Instances.loads(env._episode.world.instances).digest()


def demonstrate(env, task_id, seed=0):
    """Play the demonstrations; return the results of all steps."""
    _, info = env.reset(seed=seed, options={"task_id": task_id})
    results = []
    while not results or not (results[-1][2] or results[-1][3]):
        results.append(env.step(info["demonstration"]))
        info = results[-1][4]
    return results


# The ground truth.


@pytest.mark.parametrize("tool_format", ["hermes", "llama_json", "pythonic"])
def test_the_ground_truth_is_rewarded_in_every_format(tool_format):
    """A sample of all four variants and domains, through text alone."""
    env = make(tool_format=tool_format, demonstrator_skill=1.0)
    for task_id in env.task_ids[7::61]:
        *_, (_, reward, terminated, _, info) = demonstrate(env, task_id)
        assert (reward, terminated, info["progress"]) == (1.0, True, 1.0), (task_id, info["error_type"])
        assert info["turn_valid"] == [True] * info["num_user_turns"]


@pytest.mark.slow
def test_all_800_ground_truths_are_rewarded():
    """Each call in a step of its own, as text."""
    env = make(demonstrator_skill=1.0)
    lost = [task_id for task_id in env.task_ids if demonstrate(env, task_id)[-1][1] != 1.0]
    assert len(env.task_ids) == 800 and not lost


def test_the_calls_of_a_turn_may_come_in_one_step_and_the_results_come_one_by_one():
    """Parallel calls, each answered by a message of its own with the function's name."""
    env = begin()
    calls = truth(env)[0]
    observation, *_, info = env.step(say(*calls))
    answers = info["messages"][-len(calls) :]
    assert [m["role"] for m in answers] == ["tool"] * len(calls) and [m["name"] for m in answers] == [
        call.name for call in calls
    ]
    assert observation == "\n".join(m["content"] for m in answers) and info["tool_calls"] == len(calls)
    assert env.step("Done.")[4]["turn_valid"] == [True]


def test_the_demonstrators_skill_is_a_dial():
    """Right at 1, less often with less skill, and the same for the same seed."""
    ids = load_tasks("base", "train").ids[::16]
    shares = []
    for skill in (1.0, 0.8, 0.3):
        env = make(demonstrator_skill=skill)
        runs = [demonstrate(env, task_id, seed) for seed, task_id in enumerate(ids)]
        shares.append(np.mean([run[-1][1] for run in runs]))
        assert repr(demonstrate(env, ids[3], seed=3)) == repr(runs[3])
    assert shares[0] == 1.0 > shares[1] > shares[2] > 0.0


# Turns.


def test_a_turn_is_checked_when_an_answer_without_a_call_ends_it():
    """What the user says next is the observation; nothing is rewarded before the end."""
    env = begin()
    observation, reward, terminated, truncated, info = play_turn(env, *truth(env)[0])
    assert observation == env.tasks.get(BASE).turns[1] == info["messages"][-1]["content"]
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert (info["turn_end_reason"], info["user_turn"], info["turn_valid"]) == ("no_call", 1, [True])
    assert info["progress"] == 1 / len(truth(env)) and "error_type" not in info
    assert "turn_end_reason" not in env.step(say(LS))[4]


@pytest.mark.parametrize(
    ("calls", "error_type"),
    [
        ((), "multi_turn:empty_turn_model_response"),
        ((LS,), "multi_turn:instance_state_mismatch"),
        ((ToolCall("no_such_function", {}),), "multi_turn:instance_state_mismatch"),
    ],
)
def test_a_failed_turn_says_why_and_the_episode_goes_on(calls, error_type):
    """Upstream's names; the task is lost, later turns are still checked."""
    env = begin()
    *_, info = play_turn(env, *calls)
    assert (info["error_type"], info["turn_valid"], info["progress"]) == (error_type, [False], 0.0)
    result = [play_turn(env, *turn) for turn in truth(env)[1:]][-1]
    assert result[1:3] == (0.0, True) and result[4]["outcome"] == {"verdict": "wrong", "reason": error_type}


def test_a_turn_whose_answers_were_never_seen_fails():
    """The response check: the state is right, since looking changes nothing."""
    env = begin("multi_turn_base_1")  # its first turn is a single look
    assert truth(env)[0] == (ToolCall("ls", {"a": True}),)
    assert play_turn(env, ToolCall("pwd", {}))[4]["error_type"] == "multi_turn:execution_response_mismatch"


def test_terminate_on_fail_ends_the_episode_with_the_first_turn_that_fails():
    """The option."""
    env = begin(terminate_on_fail=True)
    _, reward, terminated, _, info = play_turn(env)
    assert (reward, terminated, info["outcome"]["verdict"]) == (0.0, True, "wrong")


def test_an_unreadable_call_ends_the_turn_as_upstream_and_says_so():
    """The work done before it counts; three in a row do not end the episode before its turns are over."""
    env = begin()
    env.step(say(*truth(env)[0]))
    *_, terminated, _, info = env.step('<tool_call>{"name": "ls", "arguments": {</tool_call>')
    assert (info["turn_end_reason"], info["action_error"], info["turn_valid"]) == (
        "parse_error",
        "invalid_json",
        [True],
    )
    assert not terminated
    endings = [env.step("<tool_call>")[2] for _ in truth(env)[1:]]
    assert endings == [*[False] * (len(endings) - 1), True]


def test_with_retry_unreadable_the_agent_is_told_and_may_try_again():
    """A step is counted, the turn goes on."""
    env = begin(retry_unreadable=True)
    observation, *_, info = env.step("<tool_call>{}</tool_call>")
    assert observation.startswith("Error: ") and '"name": "NAME"' in observation
    assert info["action_error"] == "missing_name" and "turn_end_reason" not in info
    for _ in range(MAX_STEPS - 1):
        assert env.step("<tool_call>{}</tool_call>")[2] is False
    assert env.step("<tool_call>{}</tool_call>")[4]["turn_end_reason"] == "forced"


def test_results_that_the_agent_makes_up_are_no_calls():
    """What follows them is not read."""
    env = begin()
    before = digest(env)
    *_, info = env.step("<tool_response>done</tool_response>" + say(ToolCall("mkdir", {"dir_name": "x"})))
    assert (info["turn_end_reason"], info["action_error"], digest(env)) == ("parse_error", "invented_result", before)


# The limit of steps.


def test_twenty_steps_are_fine_and_the_twenty_first_runs_and_ends_the_episode():
    """Not the calls are counted but the steps that have one."""
    env = begin()
    for _ in range(MAX_STEPS):
        *_, terminated, _, info = env.step(say(LS, LS))
        assert not terminated
    assert env.step("Done.")[2] is False  # the next turn has twenty of its own
    for _ in range(MAX_STEPS):
        env.step(say(LS))
    before = digest(env)
    observation, reward, terminated, _, info = env.step(say(ToolCall("mkdir", {"dir_name": "late"})))
    assert observation == "None" and digest(env) != before
    assert (reward, terminated, info["turn_end_reason"]) == (0.0, True, "forced")
    assert info["error_type"] == "multi_turn:force_terminated" and info["turn_valid"] == [False, False]


@pytest.mark.parametrize(("quirk", "reward"), [(True, 1.0), (False, 0.0)])
def test_a_last_turn_that_is_cut_off_is_checked_only_with_upstreams_quirk(quirk, reward):
    """Upstream notices a forced end by the number of turns alone."""
    env = begin(official_last_turn_quirk=quirk)
    *turns, last = truth(env)
    for calls in turns:
        play_turn(env, *calls)
    results = [env.step(say(call)) for call in [*last, *[LS] * (MAX_STEPS + 1 - len(last))]]
    assert [result[2] for result in results] == [*[False] * MAX_STEPS, True]
    info = results[-1][4]
    assert (results[-1][1], info["turn_valid"][-1], info["turn_end_reason"]) == (reward, quirk, "forced")


def test_the_quirk_does_not_save_an_earlier_turn():
    """Forced before the last turn is lost in either case."""
    env = begin(official_last_turn_quirk=True)
    calls = [*truth(env)[0], *[LS] * MAX_STEPS][: MAX_STEPS + 1]
    assert [env.step(say(call)) for call in calls][-1][1:3] == (0.0, True)


# Functions that come later, turns without an answer.


def test_a_function_that_is_not_on_offer_does_not_run():
    """Upstream would run it; the text is that of an unknown name."""
    env = begin(MISSING)
    before = digest(env)
    sort = ToolCall("sort", {"file_name": "final_report.pdf"})
    assert "sort" not in [tool["function"]["name"] for tool in env.info()["tools"]]
    assert env.step(say(sort))[0] == "Error during execution: name 'sort' is not defined"
    assert digest(env) == before
    free = begin(MISSING, enforce_tools=False)
    assert "not defined" not in free.step(say(sort))[0]


@pytest.mark.parametrize("tool_format", ["hermes", "pythonic"])
def test_added_functions_are_announced_and_told(tool_format):
    """From their turn on they are tools, and their documents stand in the user's message."""
    env = begin(MISSING, tool_format=tool_format)
    for calls in truth(env)[:3]:
        for call in calls:
            env.step(say(call, tool_format=tool_format))
        observation, *_, info = env.step("Done.")
    document, sentence = observation.split("\n")
    assert json.loads(document)["name"] == "sort" and sentence == MORE_FUNCTIONS
    announced = [tool["function"]["name"] for tool in info["tools"]]
    assert ("sort" in announced) == (tool_format == "hermes")
    assert ("You can use these tools" in info["messages"][0]["content"]) == (tool_format == "pythonic")
    call = say(truth(env)[3][0], tool_format=tool_format)
    assert "not defined" not in env.step(call)[0]


def test_the_one_early_call_of_the_ground_truth_runs():
    """Task 49 calls tail two turns before it is on offer."""
    env = begin("multi_turn_miss_func_49")
    play_turn(env, *truth(env)[0])
    assert play_turn(env, *truth(env)[1])[4]["turn_valid"] == [True, True]
    assert "not defined" in env.step(say(ToolCall("wc", {"file_name": "file3.txt"})))[0]


@pytest.mark.parametrize(
    ("in_vain", "afterwards", "reward"),
    [
        ((LS,), None, 1.0),  # a look does no harm, the work is done when it can be
        (None, (), 0.0),  # the work is done too early, and nothing is called when it is asked for
        (None, (LS,), 1.0),  # any call will do then
    ],
)
def test_a_turn_that_asks_in_vain_is_not_checked(in_vain, afterwards, reward):
    """What is done in it shows later, as upstream."""
    env = begin(MISSING, enforce_tools=False)
    turns = list(truth(env))
    assert turns[2] == ()
    turns[2], turns[3] = (turns[3] if in_vain is None else in_vain), (turns[3] if afterwards is None else afterwards)
    results = [play_turn(env, *calls) for calls in turns]
    assert results[2][4]["turn_valid"][2] is True
    assert results[-1][1:3] == (reward, True)


# Documents and arguments.


def test_compact_documents_are_half_as_long_and_lack_nothing_that_a_call_needs():
    """Official ones have the response and the simulator's description in every function."""
    for task in [load_tasks().get(BASE), load_tasks().get("multi_turn_base_199")]:
        official, compact = (get_offer(task, 0, name).tools for name in ("official", "compact"))
        assert len(json.dumps(compact)) < 0.55 * len(json.dumps(official))
        for long, short in zip(official, compact, strict=True):
            long, short = long["function"], short["function"]
            assert long["parameters"] == short["parameters"] and long["name"] == short["name"]
            assert long["description"].endswith(short["description"]) and "response" in long and "response" not in short


def test_tools_are_json_schema():
    """Upstream's own type names are gone, in nested places too."""

    def types(value):
        if isinstance(value, dict):
            yield from ([value["type"]] if isinstance(value.get("type"), str) else [])
            yield from (kind for inner in value.values() for kind in types(inner))

    tools = [tool for task in load_tasks("base").tasks() for tool in get_offer(task, 0, "official").tools]
    found = {kind for tool in tools for kind in types(tool["function"]["parameters"])}
    assert found == {"object", "string", "integer", "number", "boolean", "array"}


def test_what_is_done_to_infos_tools_is_done_to_a_copy():
    """Neither another environment nor a clone sees it, and it changes no call."""
    env = begin()
    tools = env.info()["tools"]
    tools[0]["function"]["name"] = "nothing"
    del tools[1:]
    assert len(env.info()["tools"]) > 1
    assert "nothing" not in [other.info()["tools"][0]["function"]["name"] for other in (*clone(env), begin())]
    assert env.step(say(ToolCall("pwd", {})))[0].startswith('{"current_working_directory"')


@pytest.mark.parametrize(
    "options",
    [
        {"subset": "bases"},
        {"split": "test"},
        {"tool_doc": "short"},
        {"tool_format": "react"},
        {"max_turns": 0},
    ],
)
def test_bad_arguments_are_refused(options):
    """The message has what is allowed."""
    with pytest.raises(BadInputError):
        make(**options)


def test_the_options_choose_the_tasks():
    """Subset, split and the list of suspects."""
    sizes = [(o, len(BFCLMultiTurnEnv(**o).task_ids)) for o in ({}, {"split": "eval"}, {"subset": "all"})]
    assert [size for _, size in sizes] == [160, 40, 640]
    assert len(make(exclude_suspect=True).task_ids) == 796


# Hostile agents.

HOSTILE = (
    ToolCall("__init__", {}),
    ToolCall("_load_scenario", {"scenario": {}}),
    ToolCall("os.system", {"command": "id"}),
    ToolCall("ls", {"self": 1}),
    ToolCall("ls", {"a=bool(exit()) or dict(z": 1}),
    ToolCall("mkdir", {"dir_name": ["x"]}),
    ToolCall("mkdir", {"dir_name": {"a": {"b": [1, None, True, 1.5]}}}),
    ToolCall("touch", {"file_name": "\ud800"}),
    ToolCall("echo", {"content": "x" * 30_000, "file_name": "big.txt"}),
    ToolCall("cd", {"folder": None}),
    ToolCall("find", {"path": 10**400, "name": -1}),
)


@pytest.mark.parametrize("tool_format", ["hermes", "llama_json", "pythonic"])
def test_nothing_that_a_model_writes_raises(tool_format):
    """Each is answered, can be saved to a file and goes on from there."""
    env = begin(tool_format=tool_format)
    for call in HOSTILE:
        arguments = json.dumps(dict(call.arguments))
        written = {
            "hermes": f'<tool_call>{{"name": "{call.name}", "arguments": {arguments}}}</tool_call>',
            "llama_json": f'{{"name": "{call.name}", "parameters": {arguments}}}',
            "pythonic": f"[{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})]",
        }[tool_format]
        env.reset(seed=0, options={"task_id": BASE})
        observation, *_ = env.step(written)
        observation.encode()
        load_state(env, EnvState.from_bytes(save_state(env).to_bytes()))
        env.step("Done.")


def test_more_calls_than_are_run_in_a_step_are_said_not_to_be():
    """The first 64 run."""
    env = begin()
    observation, *_, info = env.step(say(*[LS] * 70))
    assert info["tool_calls"] == 64 and "Only 64 calls are run" in observation.rpartition("\n")[2]


def test_file_systems_that_contain_themselves_or_are_deep_are_saved_and_checked():
    """The check finds them different; no recursion gets out."""
    env = begin()
    env.step(say(ToolCall("cd", {"folder": "document"})))
    for _ in range(9):
        env.step(
            say(
                *[c for _ in range(32) for c in (ToolCall("mkdir", {"dir_name": "d"}), ToolCall("cd", {"folder": "d"}))]
            )
        )
    env.step(say(ToolCall("mkdir", {"dir_name": "e"}), ToolCall("cp", {"source": "e", "destination": "e"})))
    state = save_state(env)
    twin = make()
    load_state(twin, EnvState.from_bytes(state.to_bytes()))
    assert save_state(twin).key == state.key
    results = [each.step("Done.")[4] for each in (env, twin)]
    assert results[0] == results[1] and results[0]["error_type"] == "multi_turn:instance_state_mismatch"


# States and clones.


def interleaved(env, slipping, task_id, rng):
    """Branch a right and a wrong continuation at a random turn, step them by turns; compare with each played alone."""
    _, info = env.reset(seed=0, options={"task_id": task_id})
    for _ in range(int(rng.integers(0, 6))):
        if not info["demonstration"].startswith("<tool_call>") and info["user_turn"] == info["num_user_turns"] - 1:
            break
        *_, info = env.step(info["demonstration"])
    state = save_state(env)

    def alone(player):
        load_state(player, state, reseed=7)
        return [*rest(player)]

    def rest(player):
        over = False
        while not over:
            result = player.step(player.info()["demonstration"])
            over = result[2] or result[3]
            yield result

    expected = [alone(env), alone(slipping)]
    pair = [clone(env)[0], clone(slipping)[0]]
    for player in pair:
        load_state(player, state, reseed=7)
    runs, seen = [rest(player) for player in pair], [[], []]
    while any(len(done) < len(wanted) for done, wanted in zip(seen, expected, strict=True)):
        for i in (0, 1):
            if len(seen[i]) < len(expected[i]):
                seen[i].append(next(runs[i]))
    assert seen[0][-1][1] == 1.0
    assert repr(seen) == repr(expected), task_id


def test_two_interleaved_clones_never_influence_each_other():
    """A right continuation is rewarded whatever a wrong one from the same state does in between."""
    env, slipping = make(demonstrator_skill=1.0), make(demonstrator_skill=0.5)
    for number, task_id in enumerate(env.task_ids[5::23]):
        interleaved(env, slipping, task_id, np.random.default_rng(number))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_interleaved_clones_never_influence_each_other_in_any_task():
    """All 800 if asked for."""
    env, slipping = make(demonstrator_skill=1.0), make(demonstrator_skill=0.5)
    for number, task_id in enumerate(env.task_ids[::EVERY]):
        interleaved(env, slipping, task_id, np.random.default_rng(number))


def play_in_threads(task_id):
    """Four play the ground truth, four slip; each sees what it would see alone."""
    skills = [1.0, 0.5] * 4
    envs = [make(demonstrator_skill=skill) for skill in skills]
    expected = [repr(demonstrate(env, task_id)) for env in envs[:2]] * 4
    with ThreadPoolExecutor(8) as pool:
        assert [repr(run) for run in pool.map(demonstrate, envs, [task_id] * 8)] == expected, task_id


def test_eight_threads_on_one_task_do_not_disturb_each_other():
    """One task that calculates with shared numbers, one that books."""
    for task_id in ("multi_turn_base_49", "multi_turn_base_160"):
        play_in_threads(task_id)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_eight_threads_on_one_task_do_not_disturb_each_other_in_any_task():
    """All 800 if asked for."""
    for task_id in make().task_ids[::EVERY]:
        play_in_threads(task_id)


def test_a_state_goes_on_from_a_file_at_every_step():
    """Bytes hold the simulators as a graph: results, infos and later states are the same."""
    env, twin = make(demonstrator_skill=0.8), make(demonstrator_skill=0.8)
    for task_id in (
        "multi_turn_base_10",
        "multi_turn_long_context_70",
        "multi_turn_miss_func_120",
        "multi_turn_base_180",
    ):
        env.reset(seed=1, options={"task_id": task_id})
        over = False
        while not over:
            load_state(twin, EnvState.from_bytes(save_state(env).to_bytes()))
            action = env.info()["demonstration"]
            result = env.step(action)
            assert repr(twin.step(action)) == repr(result)
            assert save_state(twin).key == save_state(env).key
            over = result[2] or result[3]


def test_equal_actions_give_equal_keys():
    """No wall clock and no identity of this process is in a state; a state's data may be written late."""
    first, second = begin(), begin()
    states = [save_state(first)]
    for call in truth(first)[0]:
        first.step(say(call))
        second.step(say(call))
        states.append(save_state(first))
    assert save_state(second).key == states[-1].key
    assert len({state.key for state in states}) == len(states)


def test_a_file_has_the_calls_that_led_to_its_state():
    """Replayed on fresh simulators they give the same state: a file can be checked without trusting it."""
    env = begin(demonstrator_skill=0.6)
    demonstrate(env, "multi_turn_base_20")
    data = json.loads(json.loads(save_state(env).to_bytes())["data"])
    world = dict(data["$dict"])["world"]
    log = [call for turn in world[5] for step in turn for call in step]
    instances = Instances.fresh(env.tasks.get("multi_turn_base_20"))
    offered = get_offer(env.tasks.get("multi_turn_base_20"), 0, "compact").callable_names
    for name, arguments in log:
        if name in offered:
            instances.call(name, {key: value for key, value in arguments["$dict"]})
    assert len(log) > 3 and instances.digest() == digest(env)


def test_a_file_that_does_not_fit_is_refused():
    """Another task's simulators, other simulators, a task that there is not."""
    env = begin()
    text = save_state(env).to_bytes().decode()
    other = save_state(begin("multi_turn_base_100")).to_bytes().decode()
    fingerprint = json.loads(json.loads(text)["data"])["$dict"]
    world = dict(fingerprint)["world"]
    broken = [
        text.replace(world[1], "0" * 16),
        other.replace("multi_turn_base_100", BASE),
        text.replace(BASE, "multi_turn_base_999"),
        text.replace("GorillaFileSystem", "subprocess.Popen"),
    ]
    for each in broken:
        assert each not in (text, other)
        with pytest.raises(StateError):
            load_state(env, EnvState.from_bytes(each.encode()))
    load_state(env, EnvState.from_bytes(text.encode()))


# With the rest.


def test_the_command_tells_what_was_fetched(capsys):
    """Its hash, and the counts of every subset and split."""
    assert main(["data", "bfcl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["sha256", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"]
    assert ["long_context", "eval", "40", *["10"] * 4, "146", "245"] in [line.split() for line in lines]
    assert ["all", "800", *["200"] * 4, "3336", "4625"] in [line.split() for line in lines]


def test_the_collector_grows_trees_on_it():
    """Rollouts and continuations from restored turns, all with an outcome."""
    ids = load_tasks("miss_param", "eval").ids[::10]
    parts = {"allocator": get_allocator("trace"), "predictor": get_predictor("posterior"), "expansions": 2}
    with Collector(lambda: make(demonstrator_skill=0.7), make_agent("scripted"), **parts) as collector:
        trees = asyncio.run(collector.grow(ids, [2] * len(ids))).trees
    nodes = [node for tree in trees for node in tree.nodes]
    ends = [node for node in nodes if node.status != "open"]
    assert len(ends) == 6 * len(ids) and {node.status for node in ends} == {"terminal"}
    assert {node.reward for node in ends} == {0.0, 1.0}
