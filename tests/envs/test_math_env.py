"""Every rule on the manual page of MathCode, and what a hostile agent may try."""

import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from trace_gym.envs.math import env as math_env
from trace_gym.envs.math.env import MAX_CALLS, MathCodeEnv
from trace_gym.envs.math.grading.grader import Verdict
from trace_gym.envs.math.tasks import DIFFICULTIES
from trace_gym.envs.math.tasks.families import FAMILIES
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.snapshot import EnvState, clone, load_state, save_state

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")

SLOW_CELL_S = 20.0  # the machine may be busy; no cell here is meant to take so long


def run(*cells):
    """Return an action that runs cells."""
    return "\n".join(use("python", code=cell) for cell in cells)


def use(tool, **arguments):
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def make(**options):
    return MathCodeEnv(**({"size": 30, "cell_timeout_s": SLOW_CELL_S} | options))


@pytest.fixture(scope="module")
def shared():
    """One environment for most tests: the tool's processes start once."""
    with make(max_turns=8, render_mode="ansi") as made:
        made.reset(seed=0)
        made.step(run("0"))
        yield made


@pytest.fixture
def env(shared):
    shared.reset(seed=0, options={"task_id": "arithmetic-1-train-000000"})
    return shared


def gold(env):
    return env.tasks.get(env.info()["task_id"]).answer


# Tools and answers.


def test_variables_persist_and_the_last_expression_is_shown(env):
    *_, info = env.step(run("x = 20"))
    assert info["messages"][-1] == {"role": "tool", "content": "(no output)", "name": "python"}
    observation, reward, terminated, truncated, info = env.step(f"Now the rest.\n{run('x + 3')}")
    assert (observation, reward, terminated, truncated) == ("23", 0.0, False, False)
    assert (info["turn"], info["tool_calls"], info["tool_errors"]) == (2, 1, 0)
    assert "action_error" not in info


def test_a_right_answer_ends_the_episode_with_reward_1(env):
    """The last box counts."""
    observation, reward, terminated, truncated, info = env.step(f"Not \\boxed{{-7}} but \\boxed{{{gold(env)}}}.")
    assert (observation, reward, terminated, truncated) == ("", 1.0, True, False)
    assert info["outcome"]["verdict"] == "correct"


@pytest.mark.parametrize("answer", ["-123456789", "", "who knows", "{", "9^{9^{9^9}}", "\0", "\ud800"])
def test_a_wrong_answer_ends_the_episode_with_reward_0(env, answer):
    """Whatever stands in the box."""
    _, reward, terminated, truncated, info = env.step(f"\\boxed{{{answer}}}\n\\boxed{{{answer}}}")
    if answer == "{":  # that is no box at all
        assert info["action_error"] == "no_action"
    else:
        assert (reward, terminated, truncated, info["outcome"]["verdict"]) == (0.0, True, False, "wrong")


def test_a_box_beside_a_call_is_not_an_answer(env):
    """Its value was not seen yet."""
    observation, reward, terminated, *_ = env.step(f"{run('1 + 1')} so \\boxed{{{gold(env)}}}")
    assert (observation, reward, terminated) == ("2", 0.0, False)


def test_a_box_beside_a_call_that_cannot_be_read_is_not_an_answer(env):
    *_, terminated, _, info = env.step(f"<tool_call>oops</tool_call> \\boxed{{{gold(env)}}}")
    assert not terminated and info["action_error"] == "invalid_json"


def test_a_box_in_a_thought_is_no_answer(env):
    """Nor is a call."""
    *_, terminated, _, info = env.step(f"<think>\\boxed{{{gold(env)}}} {run('1')}</think> I do not know.")
    assert not terminated and info["action_error"] == "no_action" and info["tool_calls"] == 0


def test_calls_of_one_turn_run_in_order(env):
    """Each is answered; an error does not stop those after it."""
    observation, *_, info = env.step(run("y = 5", "y / 0", "y + 1"))
    assert [message["role"] for message in info["messages"][-3:]] == ["tool"] * 3
    assert "ZeroDivisionError" in observation and observation.endswith("\n6")
    assert (info["tool_calls"], info["tool_errors"]) == (3, 1)
    assert "action_error" not in info


def test_calls_beyond_the_fourth_are_not_run(env):
    """However many there are, they are answered with one error."""
    *_, info = env.step(run(*["n = globals().get('n', 0) + 1"] * 300))
    assert info["tool_calls"] == MAX_CALLS
    assert len(info["messages"]) == 2 + 1 + MAX_CALLS + 1
    assert "Only 4 calls" in info["messages"][-1]["content"]
    assert env.step(run("n"))[0] == "4"


def test_however_much_is_wrong_beside_a_call_is_answered_once(env):
    """A thousand broken blocks must not fill the context."""
    *_, info = env.step(run("1") + "<tool_call>{}</tool_call>" * 500)
    assert [message["role"] for message in info["messages"][-2:]] == ["tool", "user"]
    assert len(info["messages"]) == 5 and "action_error" not in info


@pytest.mark.parametrize(
    ("action", "kind", "said"),
    [
        ("Let me think.", "no_action", "No tool call and no answer"),
        ("", "no_action", "No tool call and no answer"),
        ("<tool_call>python(1)</tool_call>", "invalid_json", "not valid JSON"),
        ("<tool_call>{}</tool_call>", "missing_name", '"name"'),
        ("<tool_call>[1]</tool_call>", "missing_name", '"name"'),
        ('<tool_call>{"name": "python", "arguments": 3}</tool_call>', "arguments_not_object", "JSON object"),
        ("<think>hm " + run("1"), "unclosed_think", "</think>"),
        (use("pyhton", code="1"), "unknown_tool", "Available: python"),
        (use("python"), "bad_arguments", '"code"'),
        (use("python", cod="1"), "bad_arguments", '"code"'),
        (use("python", code=1), "bad_arguments", '"code"'),
        (use("python", code=None), "bad_arguments", '"code"'),
        (use("python", code=["1"]), "bad_arguments", '"code"'),
    ],
)
def test_what_cannot_be_done_is_answered_with_what_is_allowed(env, action, kind, said):
    """The turn counts, nothing ran, and the episode goes on."""
    observation, reward, terminated, truncated, info = env.step(action)
    assert (info["action_error"], reward, terminated, truncated, info["turn"]) == (kind, 0.0, False, False, 1)
    assert said in observation and observation.startswith("Error: ")


def test_errors_of_cells_are_no_bad_actions(env):
    """The model wrote a cell; that it raises is the session's answer."""
    for _ in range(4):
        *_, terminated, _, info = env.step(run("1 / 0"))
        assert not terminated and "action_error" not in info and info["tool_errors"] == 1


def test_three_bad_actions_in_a_row_end_the_episode_as_wrong(env):
    env.step("?")
    env.step(run("1"))
    for _ in range(2):
        assert not env.step(use("shell", cmd="ls"))[2]
    _, reward, terminated, truncated, info = env.step("?")
    assert (reward, terminated, truncated, info["outcome"]["verdict"]) == (0.0, True, False, "wrong")


def test_out_of_turns_is_truncated_and_wrong(env):
    for turn in range(1, 9):
        _, reward, terminated, truncated, info = env.step(run(str(turn)))
        assert (reward, terminated, truncated) == (0.0, False, turn == 8)
    assert info["outcome"] == {"verdict": "wrong", "reason": "no answer within 8 turns"}


def test_a_call_that_was_cut_by_the_limit_is_answered(env):
    """The action is cut as by a context window; half a call is no call."""
    with make(max_action_chars=60) as small:
        small.reset(seed=0)
        *_, info = small.step(run("1 + 1" + " " * 100))
        assert info["action_error"] == "invalid_json" and len(info["messages"][-2]["content"]) == 60


# Tasks.


def test_a_reset_picks_a_task_by_seed_or_id(env):
    """The question is the observation; ids of the generator outside the set are known as well."""
    first, again = (make().reset(seed=5) for _ in range(2))
    assert first == again
    observation, info = env.reset(options={"task_id": "chain-4-eval-000123"})
    assert info["task_id"] == "chain-4-eval-000123" and info["messages"][-1]["content"] == observation
    assert len({make().reset(seed=seed)[1]["task_id"] for seed in range(8)}) > 3


@pytest.mark.parametrize("task_id", ["chian-2-train-000000", "chain-9-train-000000", "chain", ""])
def test_an_unknown_task_is_refused(env, task_id):
    """And the episode that runs stays as it is."""
    before = env.info()
    with pytest.raises(BadInputError) as caught:
        env.reset(options={"task_id": task_id})
    assert task_id.startswith("chian") == ("Did you mean 'chain'" in str(caught.value))
    assert env.info() == before


def test_tasks_can_come_from_a_file(tmp_path):
    """In place of the bundled ones; an unknown id lists the nearest; there are no demonstrations."""
    path = tmp_path / "own.jsonl"
    path.write_text('{"question": "2 + 2?", "answer": "4"}\n{"question": "Half of 1?", "answer": "1/2"}\n')
    with make(data=path) as env:
        assert list(env.task_ids) == ["own-000001", "own-000002"]
        assert env.reset(options={"task_id": "own-000002"})[0] == "Half of 1?"
        assert env.step("\\boxed{0.5}")[1] == 1.0
        with pytest.raises(BadInputError, match="Did you mean 'own-000001'"):
            env.reset(options={"task_id": "own-00001"})
    with make(data=path, demonstrator_skill=1.0) as env, pytest.raises(BadInputError, match="no demonstrations"):
        env.reset(seed=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "test"}, "train"),
        ({"families": ["chian"]}, "chain"),
        ({"difficulties": [6]}, "1, 2, 3, 4, 5"),
        ({"size": 0}, "size"),
        ({"tool_format": "hermse"}, "hermes"),
        ({"max_turns": 0}, "max_turns"),
        ({"data": "no/such/file.jsonl"}, "no/such/file.jsonl"),
        ({"demonstrator_skill": 2}, "demonstrator_skill"),
    ],
)
def test_arguments_that_do_not_exist_are_refused(options, said):
    """The message says what does."""
    with pytest.raises(BadInputError, match=said):
        make(**options)


def test_the_registered_id_has_the_manuals_defaults():
    with gymnasium.make("trace_gym/MathCode-v0", size=15) as made:
        assert made.unwrapped.max_turns == 8 and len(made.unwrapped.task_ids) == 15


# Worlds and states.


def test_the_same_seed_gives_the_same_world_and_another_seed_another():
    """Random numbers of the session follow the seed; no wall-clock value stands in the info."""
    cell = run("import random\nrandom.random()", "import numpy\nnumpy.random.random()")

    def play(seed):
        with make() as env:
            env.reset(seed=seed, options={"task_id": "gcd_lcm-1-train-000000"})
            return env.step(cell)

    assert play(1) == play(1)
    assert play(1)[0] != play(2)[0]


def test_clones_diverge_and_leave_one_another_alone(env):
    env.step(run("x = [1]"))
    first, second = clone(env, 2)
    assert first.step(run("x.append(2)\nx"))[0] == "[1, 2]"
    assert second.step(run("x.append(3)\nx"))[0] == "[1, 3]"
    first.close()
    assert env.step(run("x"))[0] == "[1]" and second.step(run("x"))[0] == "[1, 3]"
    second.close()


def test_clones_draw_from_spaces_of_their_own(env):
    """Sampling an action in a clone does not change what its parent samples next."""
    env.reset(seed=0)
    drawn = []
    for num_draws in (0, 2):
        env.action_space.seed(3)
        for _ in range(num_draws):
            clone(env)[0].action_space.sample()
        drawn.append(env.action_space.sample())
    assert drawn[0] == drawn[1]


def test_a_state_restores_from_bytes(env):
    """Variables, turn and conversation; the key is that of the content."""
    env.step(run("x = 41"))
    state = save_state(env)
    read = EnvState.from_bytes(state.to_bytes())
    assert read == state and read.key == state.key and read.live is None
    env.step(run("x = 0"))
    load_state(env, read)
    assert env.info()["turn"] == 1 and env.step(run("x + 1"))[0] == "42"
    assert save_state(env).key != state.key


@pytest.mark.parametrize("num_cells", [0, 1])
def test_a_reseeded_restore_draws_other_numbers(env, num_cells):
    """Before the first cell as well as after; equal reseeds draw equal ones, and none replays."""
    draw = run("import random\nrandom.random()")
    for _ in range(num_cells):
        env.step(run("x = 1"))
    state = save_state(env)
    for saved in (state, EnvState.from_bytes(state.to_bytes())):
        drawn = []
        for reseed in (None, None, 7, 7, 8):
            load_state(env, saved, reseed)
            drawn.append(env.step(draw)[0])
        assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and len(set(drawn)) == 3


def test_a_reseed_outlives_a_cell_that_was_undone(env):
    """After a killed cell the session is as before it; the continuation still draws numbers of its own."""
    env.step(run("import os, random"))
    state = save_state(env)
    drawn = []
    for reseed, cells in ((7, ()), (7, ("os._exit(1)",)), (None, ("os._exit(1)",))):
        load_state(env, state, reseed)
        for cell in cells:
            env.step(run(cell))
        drawn.append(env.step(run("random.random()"))[0])
    assert drawn[0] == drawn[1] != drawn[2]


def test_closing_twice_is_fine_and_a_reset_begins_anew():
    """A closed environment can be used again."""
    env = make()
    env.reset(seed=0)
    env.step(run("1"))
    env.close()
    env.close()
    env.reset(seed=0)
    assert env.step(run("2"))[0] == "2"
    env.close()
    assert make().close() is None


def test_a_rendered_episode_shows_the_dialogue(env):
    env.step(run("6 * 7"))
    env.step("\\boxed{-1}")
    text = env.render()
    assert "tool: 42" in text and text.split("\n")[-1].startswith("outcome: wrong")


# What breaks is no outcome.


def assert_failed(step, kind):
    observation, reward, terminated, truncated, info = step
    assert np.isnan(reward) and (observation, terminated, truncated) == ("", False, True)
    assert info["failure"]["kind"] == kind and "outcome" not in info


def test_a_dead_sandbox_fails_the_episode_and_the_next_one_plays():
    """Its processes were killed from outside; nobody is scored for that."""
    with make() as env:
        env.reset(seed=0)
        env.step(run("x = 1"))
        session = env._episode.world.session
        session._sessions.backend.sandbox.close()
        assert_failed(env.step(run("x")), "sandbox_died")
        env.reset(seed=0)
        assert env.step(run("2 + 2"))[0] == "4"


@pytest.mark.parametrize("where", ["start", "step"])
def test_an_infrastructure_error_of_the_tool_fails_the_episode(env, monkeypatch, where):
    def die(*_, **__):
        raise InfrastructureError("sandbox_start", "no more processes")

    if where == "step":
        env.step(run("1"))
    monkeypatch.setattr("trace_gym.envs.math.python_tool.tool.PythonTool._start", die)
    monkeypatch.setattr("trace_gym.envs.math.python_tool.sessions.Sessions.step", die)
    assert_failed(env.step(run("2")), "sandbox_start")


def test_an_answer_nobody_can_grade_fails_the_episode(env, monkeypatch):
    """Scoring it would reward or punish what nobody knows."""
    monkeypatch.setattr(math_env, "grade", lambda *_, **__: Verdict("ungradable", "no idea"))
    assert_failed(env.step("\\boxed{1}"), "ungradable")


def test_a_session_that_does_not_replay_fails_the_episode(env):
    """A cell that shows the time cannot be run again; the policy wrote it, but the loss of its process was ours."""
    env.step(run("import time\ntime.time_ns()"))
    load_state(env, save_state(env))
    node = env._episode.world.session._node
    node.process.kill()
    assert_failed(env.step(run("1")), "replay_diverged")


def test_a_session_that_replays_goes_on_after_its_process_is_lost(env):
    env.step(run("x = 3"))
    env._episode.world.session._node.process.kill()
    assert env.step(run("x"))[0] == "3"


# The demonstrator.


def play(env, task_id, seed=0):
    _, info = env.reset(seed=seed, options={"task_id": task_id})
    over, kinds = False, Counter()
    while not over:
        _, reward, terminated, truncated, info = env.step(info["demonstration"])
        kinds[info.get("action_error", "fine")] += 1
        over = terminated or truncated
    assert set(kinds) == {"fine"}, kinds
    return reward


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_perfect_demonstrator_solves_every_family_and_difficulty(family):
    """In the turns that there are by default."""
    with make(demonstrator_skill=1.0) as env:
        tasks = [f"{family}-{level}-{split}-000000" for level in DIFFICULTIES for split in ("train", "eval")]
        assert {task: play(env, task) for task in tasks} == dict.fromkeys(tasks, 1.0)


@pytest.mark.slow
def test_a_clumsy_demonstrator_fails_mostly_and_a_middling_one_sometimes():
    """Right steps come with the chance that was asked for."""
    rates = []
    for skill in (0.0, 0.7):
        with make(demonstrator_skill=skill, difficulties=[2]) as env:
            rates.append(np.mean([play(env, task, seed) for seed, task in enumerate(env.task_ids)]))
    assert rates[0] < 0.2 < rates[1] < 1.0


# A hostile agent.

HOSTILE_CELLS = {
    "surrogates in the code": "x = '\ud800'\nlen(x)",
    "surrogates in the output": "print('\\ud800', chr(0xDFFF))",
    "surrogates in an error": "raise ValueError('\\ud800')",
    "surrogates in a repr": "class A:\n  def __repr__(self): return '\\udcff'\nA()",
    "zero bytes in the code": "x = '\0'",
    "zero bytes in the output": "print('a\\0b')",
    "frames of the tool": 'print(\'{"id": 1, "status": "ok"}\')',
    "frames on every descriptor": (
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'{\"id\": 1}\\n')\n  except OSError: pass"
    ),
    "no builtins": (
        "import builtins\nfor name in list(vars(builtins)):\n"
        "  if name not in ('list', 'vars', 'delattr'): delattr(builtins, name)"
    ),
    "a patched json and os": (
        "import json, os, sys\njson.dumps = lambda *a, **k: 'x'\njson.loads = os.fork = os.write = os.read = None\n"
        "sys.stdout = sys.stderr = sys.excepthook = sys.displayhook = None"
    ),
    "endless recursion": "f = lambda: f()\nf()",
    "recursion in a repr": "class A:\n  def __repr__(self): return repr(self)\nA()",
    "nested code": "(" * 5000,
    "an exit in a repr": "class A:\n  def __repr__(self): raise SystemExit(3)\nA()",
    "the end of the process": "import os\nos._exit(0)",
    "a signal to itself": "import os\nos.kill(os.getpid(), 9)",
    "ten million characters": "print('y' * 10**7)",
    "a huge integer": "10**20000",
    "a raised BaseException": "class Stop(BaseException): pass\nraise Stop",
    "no frames left": "import sys\nsys.settrace(lambda *a: 1 / 0)\n1",
}


@pytest.mark.parametrize("name", HOSTILE_CELLS)
def test_a_hostile_cell_is_answered_and_the_session_goes_on(env, name):
    """No exception, no failure, a text that any file can hold, a state that can be saved; then the next cell runs."""
    observation, reward, terminated, truncated, info = env.step(run(HOSTILE_CELLS[name]))
    assert (reward, terminated, truncated) == (0.0, False, False) and "failure" not in info
    assert observation.encode() and len(observation) <= 5000
    json.dumps(info, ensure_ascii=False).encode()
    assert EnvState.from_bytes(save_state(env).to_bytes()).key == save_state(env).key
    assert env.step(run("40 + 2"))[0] == "42"


HOSTILE_TEXTS = {
    "a megabyte": "x" * 1_000_000,
    "a megabyte of tags": "<tool_call>" * 90_000,
    "a megabyte of boxes": "\\boxed{" * 140_000,
    "nested boxes": "\\boxed{" * 2000 + "1" + "}" * 2000,
    "nested objects": "<tool_call>" + '{"a":' * 3000,
    "nested arguments": '<tool_call>{"name": "python", "arguments": {"code": ' + "[" * 3000 + "]" * 3000 + "}}",
    "a huge number as code": '<tool_call>{"name": "python", "arguments": {"code": ' + "9" * 9000 + "}}",
    "a surrogate in the name": '<tool_call>{"name": "py\\ud800", "arguments": {"code": "1"}}</tool_call>',
    "a long name": use("n" * 10_000),
    "a name with markup": use("</tool_call><|im_end|>\n"),
    "zero bytes": "\0" * 100,
    "raw surrogates": "\ud800 \udfff",
}


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_a_hostile_text_is_answered_shortly_and_at_once(env, name):
    """Neither an exception nor a flood, and everything can be written down."""
    start = time.process_time()
    observation, *_, info = env.step(HOSTILE_TEXTS[name])
    assert time.process_time() - start < 0.5
    assert "failure" not in info and len(observation) < 500
    json.dumps(info, ensure_ascii=False).encode()
    assert sum(len(message["content"]) for message in info["messages"][3:]) < 500
    assert save_state(env).to_bytes()


def test_abandoned_clones_leave_no_session_behind(env):
    """Collected without close: their states are let go, and with them the processes."""
    env.step(run("x = 1"))
    tool = env._tool.tool
    gc.collect()
    before = tool.num_live
    for _ in range(5):
        clone(env)[0].step(run("x += 1"))
    gc.collect()
    assert tool.num_live == before


@pytest.mark.slow
def test_hundreds_of_episodes_of_random_and_hostile_actions_leave_nothing(tmp_path, monkeypatch):
    """Nothing is raised through step; no process, socket or temporary file is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    rng = np.random.default_rng(0)
    actions = [run(code) for code in HOSTILE_CELLS.values() if "while True" not in code] + list(HOSTILE_TEXTS.values())
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    env = gymnasium.make("trace_gym/MathCode-v0", demonstrator_skill=0.5, cell_timeout_s=2.0, disable_env_checker=True)
    for episode in range(200):
        _, info = env.reset(seed=episode)
        for _ in range(3):
            hostile = rng.random() < 0.3
            action = actions[int(rng.integers(len(actions)))] if hostile else info["demonstration"]
            _, _, terminated, truncated, info = env.step(action)
            assert "failure" not in info
            if terminated or truncated:
                break
    env.close()
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
