"""Laws of a mixture: its sources' laws, their names, and their shares."""

import warnings
from collections import Counter

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import trace_gym
from trace_gym.errors import BadInputError, StateError

MATH = {"env": "trace_gym/MathCode-v0", "weight": 3, "kwargs": {"size": 90, "families": ["power"]}, "name": "math"}
SEARCH = {"env": "trace_gym/HotpotQASearch-v0"}


def make(*sources, **options):
    return gymnasium.make("trace_gym/Mixture-v0", sources=list(sources or (MATH, SEARCH)), **options)


@pytest.fixture
def env():
    made = make(demonstrator_skill=0.7)
    yield made
    made.close()


def test_it_is_an_environment(env):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("name", ["math", "HotpotQASearch-v0"])
def test_an_episode_is_one_of_its_source(env, name):
    """Same prompt, tools and outcome; the task's id says where it is from."""
    task_id = next(task for task in env.unwrapped.task_ids if task.startswith(name))
    source = next(source for source in env.unwrapped.sources if source.name == name)
    alone = source.make()
    _, info = env.reset(seed=1, options={"task_id": task_id})
    alone.reset(seed=1, options={"task_id": task_id.partition("/")[2]})
    over = False
    assert info["task_id"] == task_id and info["tools"] == alone.unwrapped.info()["tools"]
    assert info["messages"] == alone.unwrapped.info()["messages"]
    while not over:
        _, reward, terminated, truncated, info = env.step(info["demonstration"])
        over = terminated or truncated
    assert reward in (0.0, 1.0) and info["outcome"]["verdict"] in ("correct", "wrong")
    alone.close()


@pytest.mark.slow
@pytest.mark.parametrize("source", [MATH, SEARCH])
def test_the_laws_of_a_snapshot_hold(source):
    env = make(source, demonstrator_skill=0.7)
    laws = trace_gym.check_snapshot(env, cycles=20)
    env.close()
    assert all(law.holds is not False for law in laws), "\n".join(map(str, laws))


def test_a_state_moves_an_environment_to_another_source(env):
    """Whatever it played before; and it is refused where the source is unknown."""
    first = next(task for task in env.unwrapped.task_ids if task.startswith("math"))
    other = next(task for task in env.unwrapped.task_ids if task.startswith("Hotpot"))
    env.reset(seed=0, options={"task_id": first})
    state = trace_gym.save_state(env)
    env.reset(seed=0, options={"task_id": other})
    trace_gym.load_state(env, trace_gym.EnvState.from_bytes(state.to_bytes()))
    assert env.unwrapped.info()["task_id"] == first
    assert trace_gym.save_state(env).key == state.key
    stranger = make(SEARCH)
    stranger.reset(seed=0)
    with pytest.raises(StateError, match="source 'math'"):
        trace_gym.load_state(stranger, state)
    stranger.close()


def test_the_first_tasks_and_the_drawn_ones_are_mixed_by_weight(env):
    """Every task once; three of four are of the source with three times the weight, while it has any."""
    ids = list(env.unwrapped.task_ids)
    assert len(set(ids)) == len(ids)
    assert Counter(task.partition("/")[0] for task in ids[:80]) == {"math": 60, "HotpotQASearch-v0": 20}
    drawn = Counter(env.reset(seed=seed)[1]["task_id"].partition("/")[0] for seed in range(100))
    assert 60 < drawn["math"] < 90


def test_a_source_can_be_limited_to_some_tasks():
    """For training only; held-out tasks stay those of the split."""
    limited = {**MATH, "tasks": "power-{1,2}-train-{000000..499999}"}
    env = make(limited, SEARCH)
    assert len(env.unwrapped.sources[0].task_ids) == 1_000_000
    _, info = env.reset(seed=0, options={"task_id": "math/power-2-train-400000"})
    assert info["task_id"] == "math/power-2-train-400000"
    env.close()
    env = make(limited, split="eval")
    assert len(env.unwrapped.sources[0].task_ids) == 90
    env.close()


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([{"weight": 1}], "needs an env"),
        ([{**SEARCH, "weight": 0}], "must be above 0"),
        ([{**SEARCH, "wieght": 1}], "Did you mean 'weight'"),
        ([{"env": "trace_gym/MathCod-v0"}], "Did you mean 'trace_gym/MathCode-v0'"),
        ([SEARCH, SEARCH], "names of their own"),
    ],
)
def test_sources_that_make_no_sense_are_refused(sources, words):
    with pytest.raises(BadInputError, match=words):
        make(*sources)


def test_a_mixture_of_nothing_is_refused():
    with pytest.raises(BadInputError, match="needs sources"):
        gymnasium.make("trace_gym/Mixture-v0", sources=[])


def test_an_unknown_source_is_named(env):
    with pytest.raises(BadInputError, match="Did you mean 'math'"):
        env.reset(options={"task_id": "mat/power-1-train-000000"})
