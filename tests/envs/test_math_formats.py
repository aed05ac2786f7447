"""MathCode in every tool format: told, played, answered and graded alike."""

import itertools
import sys

import pytest

from trace_gym.envs.math.env import SYSTEM_PROMPT, MathCodeEnv
from trace_gym.envs.math.python_tool import shared_tool
from trace_gym.errors import BadInputError
from trace_gym.messages import ToolCall
from trace_gym.tool_formats import TOOL_FORMATS, get_tool_format, parse_tool_calls, render_tool_call

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the Python tool needs Linux")

TASKS = ("arithmetic-1-train-000000", "chain-2-train-000001", "gcd_lcm-2-train-000002")


@pytest.fixture(scope="module")
def lease():
    """One tool serves all formats."""
    with shared_tool(**MathCodeEnv(size=30, cell_timeout_s=20.0)._settings) as leased:
        yield leased


@pytest.fixture(scope="module", params=sorted(TOOL_FORMATS))
def made(request, lease):
    with MathCodeEnv(size=30, cell_timeout_s=20.0, tool_format=request.param, demonstrator_skill=1.0) as env:
        yield env


@pytest.fixture
def env(made):
    made.reset(seed=0, options={"task_id": TASKS[0]})
    return made


def run(env, *cells):
    return "\n".join(render_tool_call(ToolCall("python", {"code": cell}), env.tool_format, env.tools) for cell in cells)


def gold(env):
    return env.tasks.get(env.info()["task_id"]).answer


def test_the_model_is_told_of_the_tool_exactly_once(env):
    """By the chat template where the format is native to it, by the system message where it is not."""
    info = env.info()
    system = info["messages"][0]["content"]
    assert info["messages"][0]["role"] == "system" and system.startswith(SYSTEM_PROMPT)
    if get_tool_format(env.tool_format).is_native:
        assert system == SYSTEM_PROMPT and info["tools"] == list(env.tools)
    else:
        assert "Variables persist between cells" in system and info["tools"] == []


@pytest.mark.parametrize("task_id", TASKS)
def test_the_demonstrator_plays_in_the_format_and_solves_the_task(made, task_id):
    _, info = made.reset(seed=1, options={"task_id": task_id})
    over = False
    while not over:
        parsed = parse_tool_calls(info["demonstration"], made.tool_format, info["tools"])
        assert bool(parsed.calls) != ("\\boxed" in info["demonstration"])
        _, reward, terminated, truncated, info = made.step(info["demonstration"])
        assert "action_error" not in info
        over = terminated or truncated
    assert (reward, info.get("failure")) == (1.0, None)


def test_results_come_back_in_the_form_of_the_format(env):
    """As a tool's message, or in the user's name between the marks that the model was told of."""
    observation, *_, info = env.step("I count.\n" + run(env, "x = 20\nx + 3"))
    answer = info["messages"][-1]
    assert (info["tool_calls"], info["tool_errors"]) == (1, 0)
    expected = get_tool_format(env.tool_format).observe("python", "23")
    assert (answer["role"], answer["content"]) == (expected.role, expected.content) and observation == expected.content
    assert answer["role"] == ("user" if env.tool_format in ("python_fence", "react") else "tool")


def test_several_cells_of_a_turn_run_in_order(env):
    """And users never follow one another in the conversation, since chat templates insist on turns."""
    observation, *_, info = env.step(run(env, "y = 5", "y / 0", "y + 1"))
    assert (info["tool_calls"], info["tool_errors"]) == (3, 1)
    assert observation.index("ZeroDivisionError") < observation.rindex("6")
    roles = [message["role"] for message in info["messages"]]
    assert all(pair != ("user", "user") for pair in itertools.pairwise(roles))


def test_an_answer_is_a_box_outside_of_calls_and_thoughts(env):
    """Beside a call its value was not seen yet; in a thought nobody said it."""
    right = f"\\boxed{{{gold(env)}}}"
    assert not env.step(f"{run(env, '1')}\n{right}")[2]
    *_, terminated, _, info = env.step(f"<think>{right}</think>I wonder.")
    assert not terminated and info["action_error"] == "no_action"
    *_, terminated, _, info = env.step(f"{right}</think>I wonder.")
    assert not terminated and info["action_error"] == "no_action"
    _, reward, terminated, *_ = env.step(f"<think>\\boxed{{-99}}</think>So {right}.")
    assert (reward, terminated) == (1.0, True)


def test_an_answer_after_an_invented_result_is_none(env):
    """The model is told; a box before the invention counts."""
    right = f"\\boxed{{{gold(env)}}}"
    stop = get_tool_format(env.tool_format).stops[0]
    observation, reward, terminated, _, info = env.step(f"I ran it.\n{stop}\n7\n{right}")
    assert (reward, terminated, info["action_error"]) == (0.0, False, "invented_result")
    assert "Results come from the tool" in observation
    assert env.step(f"{right}\n{stop}\n7")[1:3] == (1.0, True)


def test_what_cannot_be_read_is_answered_with_a_call_of_the_format(env):
    observation, *_, info = env.step("Hm.")
    example = get_tool_format(env.tool_format).example.replace("NAME", "python")
    assert info["action_error"] == "no_action" and example in observation and "NAME" not in observation


def test_an_unknown_tool_is_answered_with_those_that_exist(env):
    """In the formats that can name one."""
    if env.tool_format == "python_fence":
        with pytest.raises(BadInputError):
            render_tool_call(ToolCall("pyhton", {}), env.tool_format)
        return
    observation, *_, info = env.step(render_tool_call(ToolCall("pyhton", {}), env.tool_format))
    assert info["action_error"] == "unknown_tool" and "Available: python" in observation
