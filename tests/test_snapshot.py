"""Laws of saving, loading and cloning, on a small environment with real randomness."""

import copy
from collections import deque

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import trace_gym
from trace_gym.check import check_snapshot
from trace_gym.errors import BadInputError, StateError
from trace_gym.snapshot import EnvState, decode, encode


class Walk(gymnasium.Env):
    """A random walk whose whole state is a position and a generator; ``fault`` breaks one law on purpose."""

    observation_space = spaces.Box(-1e6, 1e6, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self, fault=None):
        self.fault = fault
        self.position = [0.0]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = [0.0]
        return np.array(self.position), {}

    def step(self, action):
        if self.fault == "global rng":
            np.random.random()  # noqa: NPY002
        self.position[0] += float(self.np_random.normal()) + action
        return np.array(self.position), 0.0, False, False, {}

    def info(self):
        return {}

    def get_state(self):
        if self.fault == "noisy save":
            self.np_random.random()
        rng = None if self.fault == "no rng" else self.np_random
        live = self.position if self.fault == "aliases" else None
        return EnvState("Walk", "walk", encode([self.position[0], rng]), live=live)

    def set_state(self, state, reseed=None):
        if state.env_id != "Walk" and self.fault != "accepts all":
            raise StateError("not a Walk")
        position, rng = decode(state.data)
        self.position = state.live if state.live is not None else [position]
        if rng is not None:
            self.np_random = rng
        if reseed is not None and self.fault != "ignores reseed":
            self.np_random = np.random.default_rng(reseed)

    def __copy__(self):
        raise TypeError("no")


def broken(fault):
    laws = check_snapshot(Walk(fault), actions=[1, 0, 1], cycles=20)
    return [law.sentence for law in laws if law.holds is False]


def test_a_sound_environment_breaks_no_law():
    """The checker has no false alarms."""
    assert broken(None) == []


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("global rng", "global random generator"),
        ("noisy save", "Saving leaves"),
        ("no rng", "uninterrupted run"),
        ("aliases", "share nothing mutable"),
        ("ignores reseed", "reseed"),
        ("accepts all", "refused with a StateError"),
    ],
)
def test_the_checker_finds_a_fault_of_each_kind(fault, word):
    """A law that cannot fail would be worthless."""
    assert any(word in sentence for sentence in broken(fault))


def test_the_checker_needs_a_step():
    """An empty episode proves nothing."""
    with pytest.raises(BadInputError, match="at least one action"):
        check_snapshot(Walk(), actions=[])


def test_wrapper_counters_are_restored():
    """TimeLimit and RecordEpisodeStatistics count on from where the state was saved."""
    env = RecordEpisodeStatistics(TimeLimit(Walk(), 3))
    env.reset(seed=0)
    env.step(1)
    state = trace_gym.save_state(env)
    assert [env.step(1)[3] for _ in range(2)] == [False, True]
    trace_gym.load_state(env, state)
    assert [env.step(1)[3] for _ in range(2)] == [False, True]
    assert env.episode_lengths == 3


def test_restoring_into_another_stack_is_refused():
    """A state saved under a time limit does not fit the bare environment; the message names both stacks."""
    limited = TimeLimit(Walk(), 3)
    limited.reset(seed=0)
    with pytest.raises(StateError, match=r"TimeLimit.*\[\]"):
        trace_gym.load_state(Walk(), trace_gym.save_state(limited))


def test_a_wrapper_with_unknown_state_is_refused_by_name():
    """Silently dropping a wrapper's state would be worse than an error."""

    class Odd(gymnasium.Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.handle = object.__new__(type("Handle", (), {}))

    env = Odd(Walk())
    env.reset(seed=0)
    with pytest.raises(StateError, match=r"Odd holds 'handle'.*get_state"):
        trace_gym.save_state(env)


def test_a_wrapper_with_its_own_hooks_is_asked():
    """get_state and set_state of a wrapper replace the generic copy."""

    class Counting(gymnasium.Wrapper):
        calls = object()

        def __init__(self, env):
            super().__init__(env)
            self.hidden = {"steps": 0, "self": object()}

        def step(self, action):
            self.hidden["steps"] += 1
            return self.env.step(action)

        def get_state(self):
            return self.hidden["steps"]

        def set_state(self, state):
            self.hidden["steps"] = state

    env = Counting(Walk())
    env.reset(seed=0)
    env.step(1)
    state = trace_gym.save_state(env)
    env.step(1)
    trace_gym.load_state(env, state)
    assert env.hidden["steps"] == 1


def test_inherited_hooks_of_a_wrapper_are_asked():
    """A wrapper that derives from one with hooks is saved by them too."""

    class Hooked(gymnasium.Wrapper):
        def __init__(self, env):
            super().__init__(env)
            self.handle = object.__new__(type("Handle", (), {}))
            self.steps = 0

        def get_state(self):
            return self.steps

        def set_state(self, state):
            self.steps = state

    class Derived(Hooked):
        pass

    env = Derived(Walk())
    env.reset(seed=0)
    state = trace_gym.save_state(env)
    env.steps = 5
    trace_gym.load_state(env, state)
    assert env.steps == 0


def test_an_environment_without_hooks_is_refused():
    """The error says what to implement."""
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=0)
    with pytest.raises(StateError, match="get_state/set_state"):
        trace_gym.save_state(env)
    env.close()


def test_clones_are_counted():
    """clone(env, n) gives n environments; a negative number is refused."""
    env = Walk()
    env.reset(seed=0)
    assert len(trace_gym.clone(env, 3)) == 3
    assert trace_gym.clone(env, 0) == []
    with pytest.raises(BadInputError, match="-1"):
        trace_gym.clone(env, -1)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, 2.5, "é\u2028", True],
        (1, (2,)),
        {"a": 1, 2: (3,)},
        deque([1, 2], maxlen=5),
        np.float32(0.1),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        {"$tuple": [1]},
    ],
)
def test_plain_data_round_trips_with_its_types(value):
    """What is saved comes back equal and of the same type."""
    back = decode(encode(value))
    assert type(back) is type(value)
    assert np.array_equal(back, value) if isinstance(value, np.ndarray) else back == value
    if isinstance(value, deque):
        assert back.maxlen == value.maxlen


def test_a_generator_round_trips():
    """The restored generator draws the same numbers, the saved one is not moved."""
    rng = np.random.default_rng(5)
    rng.normal(size=3)
    twin = decode(encode(rng))
    assert np.array_equal(twin.random(8), rng.random(8))


def test_what_is_no_data_is_refused():
    """No pickle, ever."""
    with pytest.raises(StateError, match="set is not plain data"):
        encode({1, 2})


def test_keys_are_content_hashes():
    """Equal content, equal key; the live handle is no content."""
    a = EnvState("E", "t", "1", live=object())
    b = EnvState.from_bytes(a.to_bytes())
    assert a == b
    assert a.key == b.key != EnvState("E", "t", "2").key


def test_data_that_is_written_late_is_written_once_and_only_if_asked_for():
    """A live restore reads nothing; key, bytes and equality do."""
    written = []
    state = EnvState("E", "t", lambda: written.append(1) or "1")
    assert not written
    assert state.key == EnvState("E", "t", "1").key and state == EnvState.from_bytes(state.to_bytes())
    assert len(written) == 1


def test_shallow_copies_of_our_environments_raise():
    """copy.copy would share the episode."""
    env = gymnasium.make("trace_gym/MathCode-v0")
    with pytest.raises(TypeError, match="clone"):
        copy.copy(env.unwrapped)
    env.close()
