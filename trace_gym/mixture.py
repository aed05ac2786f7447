"""Several environments as one: tasks of all of them, mixed by weight.

>>> import gymnasium, trace_gym
>>> sources = [{"env": "trace_gym/MathCode-v0", "weight": 2}, {"env": "trace_gym/HotpotQASearch-v0"}]
>>> env = gymnasium.make("trace_gym/Mixture-v0", sources=sources)

A task is called ``NAME/ID`` after its source. An episode is one of the source's: prompt, tools, rewards and states are
its own, and so are all the laws. Sources are made when they are first played.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gymnasium
import numpy as np

from trace_gym.errors import BadInputError, StateError, unknown_name
from trace_gym.snapshot import EnvState, Snapshotable, decode, encode, load_state, rng_from_state, rng_state, save_state
from trace_gym.task_list import LazyIds, open_tasks

AnyEnv = gymnasium.Env[Any, Any]

_PERIOD = 100  # tasks within which the weights are kept
_OPTIONS = ("env", "weight", "name", "kwargs", "tasks")


@dataclass(frozen=True)
class Source:
    """One of the environments of a mixture.

    Attributes:
        name: What its tasks are called after.
        env_id: Its id.
        kwargs: Its arguments.
        weight: Its share of the tasks that are drawn; all of them add up to 1.
        task_ids: Ids of its tasks in the mixture.
        max_turns: Agent turns of an episode, where it has a limit.
    """

    name: str
    env_id: str
    kwargs: Mapping[str, Any]
    weight: float
    task_ids: Sequence[str]
    max_turns: int | None

    def make(self) -> AnyEnv:
        """Return a new environment."""
        return gymnasium.make(self.env_id, disable_env_checker=True, **self.kwargs)


def source_of(task_id: str) -> str:
    """Return the name of the source that a task of a mixture comes from."""
    return task_id.partition("/")[0]


class MixtureEnv(gymnasium.Env[str, str]):
    """Tasks of several environments.

    ## Arguments
    | argument | default | meaning |
    |---|---|---|
    | `sources` | | list of environments: `env` (its id), `weight` (1), `kwargs` (its arguments), `name` (the end of its id), `tasks` (ids or a file, see `trace_gym.task_list.open_tasks`; all of them, and for the training split only) |
    | `render_mode` | None | `"ansi"` or None |
    | … | | arguments for all sources, such as `split` and `demonstrator_skill` |

    Raises:
        BadInputError: If the sources do not make sense.
    """  # noqa: E501

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1, "snapshot": "exact"}  # noqa: RUF012

    def __init__(self, sources: Sequence[Mapping[str, Any]], render_mode: str | None = None, **shared: Any) -> None:
        """Ask every source for its tasks."""
        if not sources:
            raise BadInputError('A mixture needs sources, such as [{"env": "trace_gym/MathCode-v0", "weight": 2}].')
        self._arguments: dict[str, Any] = {"sources": sources, "render_mode": render_mode, **shared}
        self.render_mode = render_mode
        self.timings: dict[str, float] = {}
        self._envs: dict[str, AnyEnv] = {}
        self._current: Source | None = None
        shown = {"render_mode": render_mode} if render_mode else {}
        self.sources = _sources(sources, {**shared, **shown}, self._envs)
        spaces = [(env.action_space, env.observation_space) for env in self._envs.values()]
        self.action_space, self.observation_space = (
            copy.deepcopy(max(kind, key=lambda space: getattr(space, "max_length", 0)))
            for kind in zip(*spaces, strict=True)
        )
        self._names = {source.name: source for source in self.sources}
        self._ids = _interleaved(self.sources)

    @property
    def task_ids(self) -> Sequence[str]:
        """Ids of all tasks: in the first ones the sources stand by weight, until one of them is used up."""
        return self._ids

    @property
    def max_turns(self) -> int | None:
        """Most agent turns of an episode, if all sources have a limit."""
        limits = [source.max_turns for source in self.sources]
        return max((limit for limit in limits if limit is not None), default=None) if all(limits) else None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode of the source that ``options["task_id"]`` names, or of one that is drawn by weight."""
        super().reset(seed=seed)
        options = dict(options or {})
        world_seed = int(self.np_random.integers(2**31))
        task_id = options.get("task_id")
        if task_id is None:
            source = self.sources[int(self.np_random.choice(len(self.sources), p=[s.weight for s in self.sources]))]
            task_id = source.task_ids[int(self.np_random.integers(len(source.task_ids)))]
        name, _, own = str(task_id).partition("/")
        if name not in self._names:
            raise unknown_name("source of tasks", name, self._names)
        env = self._env(self._names[name])
        observation, _ = env.reset(seed=world_seed, options={**options, "task_id": own})
        self._current = self._names[name]
        return observation, self.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn of the source's episode."""
        observation, reward, terminated, truncated, _ = self._playing().step(action)
        return observation, float(reward), terminated, truncated, self.info()

    def info(self) -> dict[str, Any]:
        """Return what the source returns, with the task's id in the mixture."""
        info = cast(Snapshotable, self._playing().unwrapped).info()
        return {**info, "task_id": f"{self._source().name}/{info['task_id']}"}

    def render(self) -> Any:
        """Return what the source shows."""
        return None if self._current is None else self._playing().render()

    def close(self) -> None:
        """Close every source that was made."""
        self._current = None
        while self._envs:
            self._envs.popitem()[1].close()

    def get_state(self) -> EnvState:
        """Return the state of the running episode: the source's, and which source it is."""
        source, inner = self._source(), save_state(self._playing())
        drawn = rng_state(self.np_random)

        def content() -> str:
            return encode({"source": source.name, "state": inner.to_bytes().decode(), "np_random": drawn})

        return EnvState(self._env_id(), f"{source.name}/{inner.task_id}", content, live=(source.name, inner, drawn))

    def set_state(self, state: EnvState, reseed: int | None = None) -> None:
        """Go on from a state that a mixture with this source saved.

        Raises:
            StateError: If it belongs to another environment, or the mixture has no such source.
        """
        if state.env_id != self._env_id():
            raise StateError(f"The state belongs to {state.env_id}; this environment is {self._env_id()}.")
        name, inner, drawn = _read(state)
        if name not in self._names:
            raise StateError(f"The state is of source {name!r}; this mixture has {', '.join(self._names)}.")
        load_state(self._env(self._names[name]), inner, reseed)
        self._current = self._names[name]
        self.np_random = rng_from_state(drawn) if reseed is None else np.random.default_rng(reseed)

    def __deepcopy__(self, memo: dict[int, Any]) -> MixtureEnv:
        """Return an independent copy: the same as cloning."""
        twin = MixtureEnv(**self._arguments)
        memo[id(self)] = twin
        twin.spec = copy.deepcopy(self.spec)
        twin.np_random = copy.deepcopy(self.np_random)
        twin.action_space = copy.deepcopy(self.action_space)
        twin.observation_space = copy.deepcopy(self.observation_space)
        if self._current is not None:
            twin.set_state(self.get_state())
        return twin

    def __copy__(self) -> MixtureEnv:
        """Refuse: a shallow copy would share the episode."""
        raise TypeError("copy.copy would share the episode; use trace_gym.clone(env) or copy.deepcopy(env).")

    def _env(self, source: Source) -> AnyEnv:
        if source.name not in self._envs:
            self._envs[source.name] = source.make()
        env = self._envs[source.name]
        vars(env.unwrapped)["timings"] = self.timings  # the collector looks for them here
        return env

    def _source(self) -> Source:
        if self._current is None:
            raise StateError("No episode is running; call reset() first.")
        return self._current

    def _playing(self) -> AnyEnv:
        return self._env(self._source())

    def _env_id(self) -> str:
        return self.spec.id if self.spec is not None else type(self).__name__


def _sources(
    given: Sequence[Mapping[str, Any]], shared: Mapping[str, Any], envs: dict[str, AnyEnv]
) -> tuple[Source, ...]:
    """Return the sources; ``envs`` gets one environment of each."""
    total = 0.0
    for row in given:
        for option in row:
            if option not in _OPTIONS:
                raise unknown_name("option of a source", option, _OPTIONS)
        if "env" not in row:
            raise BadInputError(f"A source needs an env, the id of an environment; got {dict(row)}.")
        if not float(row.get("weight", 1)) > 0:
            raise BadInputError(f"The weight of {row['env']} is {row['weight']}; it must be above 0.")
        total += float(row.get("weight", 1))
    found = []
    for row in given:
        name = str(row.get("name") or row["env"].rpartition("/")[2])
        if name in envs or "/" in name:
            raise BadInputError(f"Sources need names of their own, without a slash; give {row['env']} one: {name!r}.")
        kwargs = {**shared, **row.get("kwargs", {})}
        if row["env"].rpartition(":")[2] not in gymnasium.registry and ":" not in row["env"]:
            raise unknown_name("environment", row["env"], gymnasium.registry)
        env = envs[name] = gymnasium.make(row["env"], disable_env_checker=True, **kwargs)
        base: Any = env.unwrapped
        own = base.task_ids
        if row.get("tasks") is not None and kwargs.get("split") != "eval":
            own = open_tasks(row["tasks"])
        weight = float(row.get("weight", 1)) / total
        found.append(Source(name, row["env"], kwargs, weight, _named(name, own), getattr(base, "max_turns", None)))
    return tuple(found)


def _named(name: str, own: Sequence[str]) -> LazyIds:
    return LazyIds(len(own), lambda place: f"{name}/{own[place]}")


def _interleaved(sources: Sequence[Source]) -> LazyIds:
    """Return the tasks of all sources, by weight in every hundred as long as all of them have some."""
    weights = np.array([source.weight for source in sources])
    counts = np.zeros(len(sources), dtype=np.int64)
    pattern = []  # (source, how many of it came before in the period)
    for drawn in range(1, _PERIOD + 1):
        latest = int(np.argmax(weights * drawn - counts))
        pattern.append((latest, int(counts[latest])))
        counts[latest] += 1
    sizes = np.array([len(source.task_ids) for source in sources])
    periods = int(min(size // count for size, count in zip(sizes, counts, strict=True) if count))
    ends = np.cumsum(sizes - periods * counts)
    mixed = periods * _PERIOD

    def get(place: int) -> str:
        if place < mixed:
            period, within = divmod(place, _PERIOD)
            index, before = pattern[within]
            return sources[index].task_ids[period * int(counts[index]) + before]
        index = int(np.searchsorted(ends, place - mixed, side="right"))
        return sources[index].task_ids[int(sizes[index] - (ends[index] - (place - mixed)))]

    return LazyIds(int(sizes.sum()), get)


def _read(state: EnvState) -> tuple[str, EnvState, Mapping[str, Any]]:
    if isinstance(state.live, tuple):
        name, inner, drawn = state.live
        return name, inner, drawn
    try:
        data = decode(state.data)
        return data["source"], EnvState.from_bytes(data["state"].encode()), data["np_random"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"The state's data cannot be read: {error!r}.") from error
