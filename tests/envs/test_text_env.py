"""Laws of the base of every environment, on a world of one number."""

import copy
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from trace_gym.check import check_snapshot
from trace_gym.envs.text_env import FreeText, TextEnv, TurnResult
from trace_gym.errors import BadInputError, InfrastructureError, ReplayDivergenceError, StateError
from trace_gym.messages import Message
from trace_gym.snapshot import EnvState, load_state, save_state

TOOL = {"type": "function", "function": {"name": "roll", "parameters": {"type": "object", "properties": {}}}}


class Dice(TextEnv):
    """ "roll" adds a die to the sum; "=7" is an answer; "break" and "drift" break the world; else a bad action."""

    tools = (TOOL,)
    task_ids = ("low", "high")

    def __init__(self, max_turns=6, **options):
        super().__init__(max_turns=max_turns, **options)

    def _begin(self, task_id, seed):
        return (Message("system", "Roll."), Message("user", task_id)), (seed, 0)

    def _play(self, episode, action):
        seed, total = episode.world
        if action == "break":
            raise InfrastructureError("table_fell", "The table fell over.")
        if action == "drift":
            raise ReplayDivergenceError("The dice fell differently.")
        if action.startswith("="):
            right = action == f"={total}"
            return TurnResult(
                (), episode.world, float(right), {"verdict": "correct" if right else "wrong", "reason": ""}
            )
        if action != "roll":
            return TurnResult((Message("user", f"No: {action}"),), episode.world, action_error="no_action")
        total += int(np.random.default_rng([seed, episode.turn]).integers(1, 7))
        return TurnResult((Message("tool", str(total), "roll"),), (seed, total), tool_calls=1)

    def _demonstrate(self, episode, rng, skill):
        return f"roll {rng.random() < skill}"

    def _dump_world(self, world):
        return list(world)

    def _load_world(self, data, live, reseed):
        return (data[0] if reseed is None else reseed, data[1])

    def _twin(self):
        return Dice(self.max_turns)


@pytest.fixture
def env():
    made = Dice(render_mode="ansi")
    made.reset(seed=0)
    return made


def rolls(env, n=5):
    return [env.step("roll")[0] for _ in range(n)]


def test_it_is_a_gymnasium_environment_and_snapshot_able():
    """Gymnasium's checker has nothing to complain about, and every law of a snapshot holds."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*spec.*|.*render.*")  # it is not registered
        check_env(Dice(), skip_render_check=True)
    check_snapshot(Dice())


def test_a_reset_shows_the_prompt_and_the_tools():
    """The observation is the last message; the info holds the whole conversation."""
    observation, info = Dice().reset(seed=1, options={"task_id": "high"})
    assert observation == "high"
    assert [message["role"] for message in info["messages"]] == ["system", "user"]
    assert (info["tools"], info["task_id"], info["turn"]) == ([TOOL], "high", 0)
    assert "outcome" not in info and "failure" not in info and "demonstration" not in info


def test_the_same_seed_gives_the_same_task_and_world():
    """Another seed gives another; without a seed the generator goes on; the global one is not touched."""
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    first, second = Dice(), Dice()
    assert first.reset(seed=3) == second.reset(seed=3)
    assert rolls(first) == rolls(second)
    assert first.reset() == second.reset()
    assert rolls(first) == rolls(second)
    worlds = []
    for seed in range(6):
        first.reset(seed=seed, options={"task_id": "low"})
        worlds.append(tuple(rolls(first)))
    assert len(set(worlds)) > 1
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002


class Bare(Dice):
    """A prompt without a system message, and answers of several messages."""

    def _begin(self, task_id, seed):
        return (Message("user", task_id),), (seed, 0)

    def _play(self, episode, action):
        return TurnResult(tuple(Message(role, role) for role in action.split()), episode.world)


def test_a_format_no_template_knows_is_told_in_the_system_message():
    """Which is written if there is none; then no template is to announce the tools a second time."""
    for kind, roles in ((Dice, ["system", "user"]), (Bare, ["system", "user"])):
        _, info = kind(tool_format="llama_json").reset(seed=0)
        assert [message["role"] for message in info["messages"]] == roles
        assert '"roll"' in info["messages"][0]["content"] and '"parameters"' in info["messages"][0]["content"]
        assert info["tools"] == []
    assert [message["role"] for message in Bare().reset(seed=0)[1]["messages"]] == ["user"]


def test_a_tool_that_a_format_has_no_call_for_is_refused():
    with pytest.raises(BadInputError, match="one tool, python"):
        Dice(tool_format="python_fence")


def test_what_is_said_in_the_users_name_in_one_turn_is_one_message():
    """Many chat templates insist that user and assistant take turns; the observation is the same text."""
    env = Bare()
    env.reset(seed=0)
    observation, *_, info = env.step("tool user user tool user")
    assert [message["content"] for message in info["messages"][2:]] == ["tool", "user\nuser", "tool", "user"]
    assert observation == "tool\nuser\nuser\ntool\nuser"


def test_unknown_reset_options_are_refused_with_those_that_exist(env):
    with pytest.raises(BadInputError, match="task_id"):
        env.reset(options={"task": "low"})


@pytest.mark.parametrize(
    "options",
    [
        {"max_turns": 0},
        {"max_bad_actions": 0},
        {"demonstrator_skill": 1.5},
        {"demonstrator_skill": -0.1},
        {"render_mode": "human"},
        {"tool_format": "hermse"},
    ],
)
def test_arguments_out_of_range_are_refused(options):
    """The message shows what was given."""
    with pytest.raises(BadInputError, match=str(next(iter(options.values())))):
        Dice(**options)


@pytest.mark.parametrize("action", [None, 3, b"roll", ["roll"], {"content": "roll"}])
def test_an_action_that_is_no_text_is_the_callers_mistake(env, action):
    with pytest.raises(BadInputError, match=type(action).__name__):
        env.step(action)


def test_steps_before_a_reset_and_after_the_end_are_refused(env):
    """The message says what to do."""
    for use in (lambda: Dice().step("roll"), lambda: Dice().info(), lambda: Dice().get_state()):
        with pytest.raises(StateError, match="reset"):
            use()
    env.step("=0")
    with pytest.raises(StateError, match="terminal"):
        env.step("roll")


def test_rewards_are_0_until_the_end_and_then_the_outcome(env):
    total, reward, *over, info = env.step("roll")
    assert (reward, over, info["tool_calls"]) == (0.0, [False, False], 1)
    observation, reward, *over, info = env.step(f"={total}")
    assert (observation, reward, over, info["outcome"]["verdict"]) == ("", 1.0, [True, False], "correct")
    env.reset(seed=0)
    assert env.step("=99")[1:4] == (0.0, True, False)


def test_the_conversation_grows_by_action_and_observation(env):
    before = env.info()["messages"]
    observation, *_, info = env.step("roll")
    assert info["messages"][: len(before)] == before
    assert info["messages"][len(before) :] == [
        {"role": "assistant", "content": "roll"},
        {"role": "tool", "content": observation, "name": "roll"},
    ]


def test_bad_actions_in_a_row_end_the_episode_as_wrong():
    """A good action in between starts the count anew."""
    env = Dice(max_turns=9, max_bad_actions=2)
    env.reset(seed=0)
    for action in ("?", "roll", "?"):
        assert env.step(action)[2:4] == (False, False)
    assert env.info()["action_error"] == "no_action"
    _, reward, terminated, truncated, info = env.step("?")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert info["outcome"] == {"verdict": "wrong", "reason": "2 actions in a row could not be read"}


def test_the_last_turn_truncates_unless_it_answers():
    """Out of turns is wrong, with an outcome; an answer in the last turn counts."""
    env = Dice(max_turns=2)
    env.reset(seed=0)
    env.step("roll")
    state = save_state(env)
    _, reward, terminated, truncated, info = env.step("roll")
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["outcome"]["verdict"] == "wrong" and "2 turns" in info["outcome"]["reason"]
    load_state(env, state)
    assert env.step(f"={env.info()['messages'][-1]['content']}")[1:4] == (1.0, True, False)


@pytest.mark.parametrize(("action", "kind"), [("break", "table_fell"), ("drift", "replay_diverged")])
def test_a_failure_is_never_an_outcome(env, action, kind):
    """NaN, truncated, the kind and the reason in the info; the failed episode can be saved, and reset works."""
    observation, reward, terminated, truncated, info = env.step(action)
    assert np.isnan(reward) and (observation, terminated, truncated) == ("", False, True)
    assert info["failure"]["kind"] == kind and info["failure"]["reason"]
    assert "outcome" not in info
    twin = Dice()
    load_state(twin, EnvState.from_bytes(save_state(env).to_bytes()))
    assert twin.info() == info
    with pytest.raises(StateError, match="failed"):
        env.step("roll")
    env.reset(seed=0)
    assert env.step("roll")[1] == 0.0


def test_an_action_is_cut_where_a_context_window_would_end():
    """What is cut off is neither played nor remembered."""
    env = Dice(max_action_chars=4)
    env.reset(seed=0)
    *_, info = env.step("rollercoaster")
    assert "action_error" not in info and info["messages"][-2]["content"] == "roll"
    assert "rollercoaster" not in env.action_space and "roll" in env.action_space


def test_a_long_observation_is_cut_but_remembered_whole():
    """The observation fits its space."""
    env = Dice(max_observation_chars=5)
    env.reset(seed=0)
    observation, *_, info = env.step("x" * 100)
    assert observation in env.observation_space and len(observation) == 5
    assert info["messages"][-1]["content"] == "No: " + "x" * 100


def test_lone_surrogates_become_question_marks(env):
    """No tokenizer and no file could hold them; other texts stay as they are."""
    *_, info = env.step("a\ud800b\udfff \U0001f642 é\0")
    assert info["messages"][-2]["content"] == "a?b? \U0001f642 é\0"


def test_the_info_shares_nothing_with_the_environment(env):
    """Whoever changes it changes nothing."""
    info = env.info()
    info["messages"][0]["content"] = "Cheat."
    info["tools"][0]["function"]["name"] = "cheat"
    assert env.info()["messages"][0]["content"] == "Roll."
    assert env.info()["tools"] == [TOOL] and TOOL["function"]["name"] == "roll"


def test_a_demonstration_depends_on_episode_and_turn_only():
    """Asking twice gives the same; a restored episode shows the same; there is none after the end."""
    env = Dice(demonstrator_skill=0.5)
    _, info = env.reset(seed=0)
    assert info["demonstration"] == env.info()["demonstration"]
    env.step("roll")
    twin = Dice(demonstrator_skill=0.5)
    load_state(twin, save_state(env))
    assert twin.info() == env.info()
    *_, info = env.step("=0")
    assert "demonstration" not in info


def test_a_family_without_a_demonstrator_says_so():
    class Mute(Dice):
        _demonstrate = TextEnv._demonstrate

    with pytest.raises(BadInputError, match="Mute has no demonstrator"):
        Mute(demonstrator_skill=1.0).reset(seed=0)


def test_a_rendered_episode_is_its_conversation_and_outcome(env):
    env.step("roll")
    env.step("=99")
    lines = env.render().split("\n")
    assert lines[0] == "system: Roll." and lines[2] == "assistant: roll" and lines[-1].startswith("outcome: wrong")
    assert Dice().render() is None


def test_copies_are_independent_and_shallow_ones_refused(env):
    """A deep copy goes on exactly; its steps change nothing here."""
    env.step("roll")
    twin = copy.deepcopy(env)
    assert twin.info() == env.info()
    ahead = rolls(twin, 2)
    assert env.info()["turn"] == 1 and rolls(env, 2) == ahead
    assert copy.deepcopy(Dice()) is not None  # before a reset
    with pytest.raises(TypeError, match="clone"):
        copy.copy(env)


def test_a_reseeded_restore_goes_on_differently_but_repeatably(env):
    """Equal seeds give equal continuations; without one the continuation replays."""
    env.step("roll")
    state = save_state(env)
    played = []
    for reseed in (None, None, 1, 1, 2, 3):
        load_state(env, state, reseed)
        played.append(rolls(env, 4))
    assert played[0] == played[1] and played[2] == played[3]
    assert len({tuple(rolled) for rolled in played}) > 2


@pytest.mark.parametrize(
    "data", ["{}", "[]", "null", '{"$dict": []}', "not JSON", '{"$dict": [["np_random", 1]]}', '{"$rng": {}}']
)
def test_damaged_data_is_a_state_error_and_changes_nothing(env, data):
    before = env.info()
    with pytest.raises(StateError):
        env.set_state(EnvState("Dice", "low", data))
    assert env.info() == before


def test_a_state_of_another_environment_is_refused(env):
    other = gymnasium.make("trace_gym/MathCode-v0", size=15)
    other.reset(seed=0)
    with pytest.raises(StateError, match="MathCode"):
        env.set_state(save_state(other.unwrapped))
    other.close()


def test_free_text_holds_any_text_up_to_its_length():
    """Samples are members, and equal seeds give equal samples."""
    space = FreeText(8)
    assert "" in space and "a b\n🙂" in space
    assert "x" * 9 not in space and 3 not in space and None not in space
    space.seed(0)
    samples = [space.sample() for _ in range(20)]
    assert all(sample in space for sample in samples)
    space.seed(0)
    assert [space.sample() for _ in range(20)] == samples
