"""The dialogue is a PettingZoo environment, plays as the single-agent one does, and is saved as a whole."""

import asyncio
import contextlib
import copy
import io

import pytest
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, render_test, seed_test

import trace_gym
from trace_gym.agents import make_agent
from trace_gym.envs.bfcl import dialogue_v0
from trace_gym.envs.bfcl.env import MORE_FUNCTIONS, BFCLMultiTurnEnv
from trace_gym.errors import BadInputError, StateError
from trace_gym.messages import Completion
from trace_gym.snapshot import EnvState, clone, load_state, save_state

BASE = "multi_turn_base_0"
MISSING = "multi_turn_miss_func_0"
OPTIONS = {"subset": "all", "split": "all", "tool_doc": "compact", "demonstrator_skill": 1.0}

# Words are neither arrays nor boxes, and the two agents have names instead of numbers.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "Observation is not a NumPy array",
        "(Observation|Action) space for each agent probably should be",
        "We recommend agents to be named",
        "Agents have different observation space sizes",
    )
]


def begin(task_id=BASE, **options):
    env = dialogue_v0.env(**OPTIONS | options)
    env.reset(seed=0, options={"task_id": task_id})
    return env


def act(env):
    """Let the next agent do what is demonstrated."""
    *_, terminated, truncated, info = env.last()
    env.step(None if terminated or truncated else info["demonstration"])


class Paraphraser:
    """An agent that keeps what it was asked, and says it in other words."""

    batched = False

    def __init__(self):
        self.requests = []

    async def complete(self, requests):
        self.requests += requests
        return [Completion(f"Please: {request.hint}") for request in requests]


# PettingZoo.


@pytest.mark.parametrize(
    ("test", "make"),
    [
        (lambda make: api_test(make(), num_cycles=60), dialogue_v0.env),
        (lambda make: seed_test(make, num_cycles=60), dialogue_v0.env),
        (render_test, dialogue_v0.env),
        (lambda make: parallel_api_test(make(), num_cycles=60), dialogue_v0.parallel_env),
        (lambda make: parallel_seed_test(make, num_cycles=60), dialogue_v0.parallel_env),
    ],
    ids=["api", "seed", "render", "parallel_api", "parallel_seed"],
)
def test_pettingzoos_own_tests_pass(test, make):
    """Agents take turns, spaces hold what is observed, equal seeds give equal dialogues."""
    with contextlib.redirect_stdout(io.StringIO()):
        test(make)


def test_in_parallel_play_one_agent_acts_at_a_time():
    """What the other does is ignored."""
    env = dialogue_v0.parallel_env(**OPTIONS)
    env.reset(seed=0, options={"task_id": BASE})
    env.step({"user": "", "assistant": "not heard"})
    observations, *_ = env.step({"user": "not heard", "assistant": "I am done."})
    assert observations["user"]["text"] == "I am done."


# Play.


@pytest.mark.parametrize("task_id", [BASE, MISSING, "multi_turn_miss_param_101", "multi_turn_long_context_150"])
def test_with_a_scripted_user_it_is_the_single_agent_environment(task_id):
    """The assistant reads the same conversation and gets the same outcome; the user gets nothing."""
    single = BFCLMultiTurnEnv(**OPTIONS)
    _, info = single.reset(seed=0, options={"task_id": task_id})
    env = begin(task_id)
    rewards = {"user": 0.0, "assistant": 0.0}
    for name in env.agent_iter():
        observation, reward, terminated, _, known = env.last()
        rewards[name] += reward
        if name == "assistant" and not terminated:
            assert known == info
            *_, info = single.step(info["demonstration"])
            assert env.infos["assistant"]["messages"][-1]["content"] == observation["text"]
        act(env)
    assert rewards == {"user": 0.0, "assistant": 1.0} and env.unwrapped.inner.info() == info


def test_the_user_may_put_the_script_in_other_words():
    """The assistant reads them in its place, behind the documents of added functions; empty words keep the script."""
    env = begin(MISSING)
    observation, *_ = env.last()
    assert observation == {"text": "", "script": env.unwrapped.inner.tasks.get(MISSING).turns[0]}
    assert env.infos["assistant"]["messages"] == []
    env.step("Move it, please.")
    assert env.last()[0] == {"text": "Move it, please."} and env.observe("user") == {"text": "", "script": ""}
    while env.infos["assistant"]["user_turn"] < 3:
        act(env)
    assert env.last()[0] == {"text": "I cannot do this with what I have.", "script": MORE_FUNCTIONS}
    env.step("Here, take these.")
    document, words = env.last()[0]["text"].split("\n")
    assert '"name": "sort"' in document and words == "Here, take these."
    while env.agent_selection == "assistant":
        act(env)
    env.step("")
    assert env.last()[0]["text"] == env.unwrapped.inner.tasks.get(MISSING).turns[4]


def test_any_agent_can_play_the_user():
    """It sees its own side of the conversation, no functions, and what it is to want."""
    user = Paraphraser()
    env = dialogue_v0.env(**OPTIONS)
    players = {"user": user, "assistant": make_agent("scripted")}
    assert asyncio.run(dialogue_v0.play(env, players, task_id=MISSING)) == 1.0
    last = user.requests[-1]
    assert not last.tools and [m.role for m in last.messages] == ["system", *["user", "assistant"] * 4, "user"]
    assert last.messages[2].content == f"Please: {user.requests[0].hint}"
    assert "The assistant answered:\nDone." in last.messages[-1].content and last.hint in last.messages[-1].content
    heard = [m["content"] for m in env.unwrapped.inner.info()["messages"] if m["role"] == "user"]
    assert all("Please: " in words for words in heard) and len(heard) == 5


def test_a_missing_player_keeps_to_the_script_and_unknown_ones_are_refused():
    """Somebody has to play the assistant."""
    env = dialogue_v0.env(**OPTIONS)
    agent = make_agent("scripted")
    assert asyncio.run(dialogue_v0.play(env, {"assistant": agent}, task_id=BASE)) == 1.0
    for players in ({"user": agent}, {"assistant": agent, "friend": agent}):
        with pytest.raises(BadInputError):
            asyncio.run(dialogue_v0.play(env, players))


def test_bad_actions_and_arguments_are_refused():
    """As in every environment."""
    with pytest.raises(BadInputError):
        begin().step(3)
    with pytest.raises(BadInputError):
        dialogue_v0.env(render_mode="rgb_array")


# State.


def test_a_dialogue_goes_on_from_a_state_at_every_step():
    """From the value and from its bytes, in another environment, wrappers included: the same to the end."""
    env, twin = begin(MISSING), dialogue_v0.env(**OPTIONS)
    while env.agents:
        state = save_state(env)
        load_state(twin, EnvState.from_bytes(state.to_bytes()))
        assert save_state(twin).key == state.key
        assert repr(twin.last()) == repr(env.last())
        act(env)
        act(twin)
        assert (twin.agents, repr(twin.infos), twin.rewards) == (env.agents, repr(env.infos), env.rewards)


def test_clones_of_a_dialogue_are_independent():
    """Two users say different things; neither the parent nor the sibling hears."""
    env = begin()
    act(env)
    act(env)
    before = save_state(env).key
    first, second = clone(env, 2)
    first.step("Done.")
    first.step("Forget it.")
    assert save_state(env).key == save_state(second).key == before != save_state(first).key
    assert type(first) is type(env)
    with pytest.raises(TypeError):
        copy.copy(env.unwrapped)


def test_a_foreign_state_is_refused():
    """The single-agent environment's, and one that is broken."""
    env = begin()
    state = save_state(env)
    single = BFCLMultiTurnEnv(**OPTIONS)
    single.reset(seed=0)
    for foreign in (
        EnvState(single.get_state().env_id, BASE, single.get_state().data, state.wrappers),
        EnvState(state.env_id, BASE, "[1, 2]", state.wrappers),
    ):
        with pytest.raises(StateError):
            trace_gym.load_state(env, foreign)
