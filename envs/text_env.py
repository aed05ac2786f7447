"""The base of every environment: text in, text out, one state value.

A family implements what a task is (`_begin`), what a turn does (`_play`) and how its world is written down
(`_dump_world`, `_load_world`). Everything else, from spaces to snapshots, is here once.

The world must be an immutable value: a state then shares nothing mutable with the environment, and taking one costs no
copy. An exception of type `InfrastructureError` inside a turn, or a world that has to be replayed and does not come out
the same, ends the episode as failed; it never becomes a reward.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, cast

import gymnasium
import numpy as np
from gymnasium import spaces

from trace_gym.errors import BadInputError, InfrastructureError, ReplayDivergenceError, StateError, unknown_name
from trace_gym.messages import Failure, Message
from trace_gym.snapshot import EnvState, decode, encode
from trace_gym.tool_formats import get_tool_format

SAMPLE_CHARS = 64

Frozen = TypeVar("Frozen")


class FreeText(spaces.Text):
    """Any string up to a length; `gymnasium.spaces.Text` alone would refuse spaces and Unicode.

    Args:
        max_length: Longest string, in characters.
    """

    def __init__(self, max_length: int) -> None:
        """Create the space."""
        super().__init__(max_length=max_length, min_length=0)

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a string that is short enough."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a short random string."""
        length = int(self.np_random.integers(1, min(SAMPLE_CHARS, self.max_length) + 1))
        letters = self.np_random.choice(np.array(list(self.character_list)), size=length)
        return "".join(letters.tolist())


def printable(text: str) -> str:
    """Return a text that can be encoded: lone surrogates become question marks."""
    return text.encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What one turn of an agent led to.

    Attributes:
        messages: The environment's answer; empty once the task is decided.
        world: The world afterwards.
        reward: The verified outcome, given once the task is decided.
        outcome: ``{"verdict": …, "reason": …}`` once the task is decided.
        action_error: Kind of what was wrong with the action, if nothing could be done with it.
        tool_calls: Tools called.
        tool_errors: Those whose result was an error.
    """

    messages: tuple[Message, ...]
    world: Any
    reward: float | None = None
    outcome: Mapping[str, str] | None = None
    action_error: str | None = None
    tool_calls: int = 0
    tool_errors: int = 0


@dataclass(frozen=True)
class Episode:
    """Everything that changes while an episode is played; replaced, never mutated."""

    task_id: str
    seed: int
    messages: tuple[Message, ...]
    world: Any = field(compare=False)
    turn: int = 0
    bad_actions: int = 0
    status: str = "open"
    action_error: str | None = None
    tool_calls: int = 0
    tool_errors: int = 0
    outcome: Mapping[str, str] | None = None
    failure: Failure | None = None


def changed(value: Frozen, **changes: Any) -> Frozen:
    """Return a frozen value with other fields: `dataclasses.replace` for one without slots, several times quicker."""
    twin = object.__new__(type(value))
    vars(twin).update(vars(value))
    vars(twin).update(changes)
    return twin


def write_episode(episode: Episode, world: Any, rng: np.random.Generator) -> str:
    """Return a state's data; ``world`` is the episode's world as plain data."""
    fields = {name: value for name, value in vars(episode).items() if name not in ("messages", "world", "failure")}
    data = {
        **fields,
        "messages": [message.to_dict() for message in episode.messages],
        "failure": episode.failure.to_dict() if episode.failure else None,
        "world": world,
        "np_random": rng,
    }
    return encode(data)


class TextEnv(gymnasium.Env[str, str]):
    """A multi-turn task whose whole state is one value.

    Args:
        max_turns: Agent turns after which the episode is truncated.
        max_bad_actions: Actions in a row with which nothing could be done, after which the episode ends as wrong.
        max_action_chars: Longest action; a longer one is cut, as a context window would.
        tool_format: How the agent writes tool calls, a name in `trace_gym.tool_formats.TOOL_FORMATS`.
        demonstrator_skill: Share of right steps, in [0, 1], of a scripted demonstrator whose next action then stands in
            ``info["demonstration"]``; None for no demonstrations.
        render_mode: ``"ansi"`` or None.

    Raises:
        BadInputError: If an argument is out of range or a name is unknown.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1, "snapshot": "exact"}  # noqa: RUF012
    tools: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    def __init__(
        self,
        max_turns: int,
        max_bad_actions: int = 3,
        max_action_chars: int = 16_384,
        max_observation_chars: int = 16_384,
        tool_format: str = "hermes",
        demonstrator_skill: float | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Check the arguments and create the spaces."""
        for name, value in (
            ("max_turns", max_turns),
            ("max_bad_actions", max_bad_actions),
            ("max_action_chars", max_action_chars),
            ("max_observation_chars", max_observation_chars),
        ):
            if value < 1:
                raise BadInputError(f"{name} must be at least 1; got {value}.")
        if demonstrator_skill is not None and not 0 <= demonstrator_skill <= 1:
            raise BadInputError(f"demonstrator_skill must be in [0, 1]; got {demonstrator_skill}.")
        if render_mode not in (None, "ansi"):
            raise unknown_name("render mode", render_mode, self.metadata["render_modes"])
        is_native = get_tool_format(tool_format).is_native
        if self.tools and not is_native:
            get_tool_format(tool_format).describe(self.tools)  # refuses tools that the format has no call for
        self.max_turns = max_turns
        self.max_bad_actions = max_bad_actions
        self.max_action_chars = max_action_chars
        self.tool_format = tool_format
        self.demonstrator_skill = demonstrator_skill
        self.render_mode = render_mode
        self.action_space = FreeText(max_action_chars)
        self.observation_space = FreeText(max_observation_chars)
        self.timings: dict[str, float] = {}  # seconds by phase, for the collector; never part of a state
        self._episode: Episode | None = None

    # What a family implements.

    @property
    @abstractmethod
    def task_ids(self) -> Sequence[str]:
        """Ids of the tasks on offer."""

    @abstractmethod
    def _begin(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], Any]:
        """Return the prompt and the world at the start of a task; of the tools the prompt need not tell."""

    @abstractmethod
    def _play(self, episode: Episode, action: str) -> TurnResult:
        """Do what the action says."""

    @abstractmethod
    def _dump_world(self, world: Any) -> Any:
        """Return the world as plain data."""

    @abstractmethod
    def _load_world(self, data: Any, live: Any, reseed: int | None) -> Any:
        """Return the world from plain data, or cheaper from the live handle if it still lives."""

    def _tools_to_announce(self, episode: Episode) -> list[Any]:
        """Return the tools on offer, for a chat template; the caller may do with them what it likes."""
        return copy.deepcopy(list(self.tools))

    def _demonstrate(self, episode: Episode, rng: np.random.Generator, skill: float) -> str:
        """Return the scripted demonstrator's next action."""
        raise BadInputError(f"{type(self).__name__} has no demonstrator; leave demonstrator_skill unset.")

    # The Gymnasium interface.

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Seeds the choice of the task and the world.
            options: ``{"task_id": …}`` picks the task.

        Returns:
            The prompt's last message, and the info.

        Raises:
            BadInputError: If the task or an option does not exist.
            InfrastructureError: If the world could not be set up.
        """
        super().reset(seed=seed)
        options = options or {}
        if unknown := set(options) - {"task_id"}:
            raise unknown_name("reset option", sorted(unknown)[0], ["task_id"])
        world_seed = int(self.np_random.integers(2**31))
        task_id = options.get("task_id")
        if task_id is None:
            task_id = self.task_ids[int(self.np_random.integers(len(self.task_ids)))]
        messages, world = self._begin(str(task_id), world_seed)
        messages = self._announce(messages)
        self._episode = Episode(str(task_id), world_seed, messages, world)
        return messages[-1].content, self.info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one turn.

        Args:
            action: The whole text the agent said in this turn. Lone surrogates, which no tokenizer and no file can
                hold, become question marks.

        Returns:
            Observation (what is new to the agent), reward (0.0 until the end, then the outcome in {0, 1}; NaN if the
            infrastructure failed), terminated, truncated, info.

        Raises:
            BadInputError: If the action is no string.
            StateError: If there is no open episode.
        """
        if not isinstance(action, str):
            raise BadInputError(f"An action is a str, the agent's whole text; got {type(action).__name__}.")
        episode = self._current()
        if episode.status != "open":
            raise StateError(f"The episode is {episode.status}; call reset() or load a state first.")
        action = printable(action[: self.max_action_chars])
        episode = changed(
            episode,
            turn=episode.turn + 1,
            messages=(*episode.messages, Message("assistant", action)),
            action_error=None,
            tool_calls=0,
            tool_errors=0,
        )
        reward = 0.0
        try:
            result = self._play(episode, action)
        except (InfrastructureError, ReplayDivergenceError) as error:
            broke = isinstance(error, InfrastructureError)
            failure = Failure(error.kind, error.reason) if broke else Failure("replay_diverged", str(error))
            self._episode = changed(episode, status="failed", failure=failure)
            reward = float("nan")
            observation = ""
        else:
            self._episode = self._conclude(episode, result)
            observation = "\n".join(message.content for message in result.messages)
            reward = result.reward or 0.0
        status = self._current().status
        terminated, truncated = status == "terminal", status in ("truncated", "failed")
        limit = cast(FreeText, self.observation_space).max_length
        return observation[:limit], reward, terminated, truncated, self.info()

    def _conclude(self, episode: Episode, result: TurnResult) -> Episode:
        """Return the episode after a turn: decided, out of patience, out of turns, or open."""
        episode = changed(
            episode,
            messages=episode.messages + _join(result.messages),
            world=result.world,
            bad_actions=0 if result.action_error is None else episode.bad_actions + 1,
            action_error=result.action_error,
            tool_calls=result.tool_calls,
            tool_errors=result.tool_errors,
        )
        if result.outcome is not None:
            return changed(episode, status="terminal", outcome=dict(result.outcome))
        if episode.bad_actions >= self.max_bad_actions:
            reason = f"{episode.bad_actions} actions in a row could not be read"
            return changed(episode, status="terminal", outcome={"verdict": "wrong", "reason": reason})
        if episode.turn >= self.max_turns:
            reason = f"no answer within {self.max_turns} turns"
            return changed(episode, status="truncated", outcome={"verdict": "wrong", "reason": reason})
        return episode

    def info(self) -> dict[str, Any]:
        """Return what `reset` and `step` return as info, for the current turn.

        Returns:
            ``messages`` (the conversation in chat form), ``tools`` (those that a chat template is to announce; none
            if the system message does), ``task_id``, ``turn``, ``tool_calls`` and ``tool_errors`` of this turn; where
            they apply ``action_error``, ``outcome``, ``failure`` and ``demonstration``.
        """
        episode = self._current()
        info: dict[str, Any] = {
            "messages": [message.to_dict() for message in episode.messages],
            "tools": self._tools_to_announce(episode) if get_tool_format(self.tool_format).is_native else [],
            "task_id": episode.task_id,
            "turn": episode.turn,
            "tool_calls": episode.tool_calls,
            "tool_errors": episode.tool_errors,
        }
        if episode.action_error is not None:
            info["action_error"] = episode.action_error
        if episode.outcome is not None:
            info["outcome"] = dict(episode.outcome)
        if episode.failure is not None:
            info["failure"] = episode.failure.to_dict()
        if self.demonstrator_skill is not None and episode.status == "open":
            rng = np.random.default_rng([episode.seed, episode.turn])
            info["demonstration"] = self._demonstrate(episode, rng, self.demonstrator_skill)
        return info

    def render(self) -> str | None:  # type: ignore[override]
        """Return the episode as text in mode ``"ansi"``."""
        if self.render_mode is None or self._episode is None:
            return None
        lines = [f"{message.role}: {message.content}" for message in self._episode.messages]
        if self._episode.outcome is not None:
            lines.append(f"outcome: {self._episode.outcome['verdict']} ({self._episode.outcome['reason']})")
        return "\n".join(lines)

    # State.

    def get_state(self) -> EnvState:
        """Return the state of the running episode, generators included.

        Raises:
            StateError: If no episode was started.
        """
        episode = self._current()
        data = write_episode(episode, self._dump_world(episode.world), self.np_random)
        return EnvState(self._env_id(), episode.task_id, data, live=episode.world)

    def set_state(self, state: EnvState, reseed: int | None = None) -> None:
        """Go on from a state that this kind of environment saved.

        Args:
            state: What `get_state` returned, here or in another process.
            reseed: Seed of an independent continuation; None replays the saved random streams exactly.

        Raises:
            StateError: If the state belongs to another environment or is broken.
            InfrastructureError: If the world could not be set up.
        """
        if state.env_id != self._env_id():
            raise StateError(f"The state belongs to {state.env_id}; this environment is {self._env_id()}.")
        try:
            episode, rng = self._read(state, reseed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(f"The state's data cannot be read: {error!r}.") from error
        if reseed is not None:
            rng = np.random.default_rng(reseed)
            episode = changed(episode, seed=int(rng.integers(2**31)))
        self.np_random = rng
        self._episode = episode

    def _read(self, state: EnvState, reseed: int | None) -> tuple[Episode, np.random.Generator]:
        """Return the episode and the generator of a state; reads what `write_episode` wrote."""
        data = decode(state.data)
        rng = data.pop("np_random")
        world = self._load_world(data.pop("world"), state.live, reseed)
        messages = tuple(Message.from_dict(message) for message in data.pop("messages"))
        failure = data.pop("failure")
        fields = {**data, "messages": messages, "world": world, "failure": Failure(**failure) if failure else None}
        return Episode(**fields), rng

    def __deepcopy__(self, memo: dict[int, Any]) -> TextEnv:
        """Return an independent copy: the same as cloning."""
        twin = self._twin()
        memo[id(self)] = twin
        twin.spec = copy.deepcopy(self.spec)
        twin.np_random = copy.deepcopy(self.np_random)
        # Spaces draw from generators of their own.
        twin.action_space = copy.deepcopy(self.action_space)
        twin.observation_space = copy.deepcopy(self.observation_space)
        if self._episode is not None:
            twin.set_state(self.get_state())
        return twin

    def __copy__(self) -> TextEnv:
        """Refuse: a shallow copy would share the episode."""
        raise TypeError("copy.copy would share the episode; use trace_gym.clone(env) or copy.deepcopy(env).")

    @abstractmethod
    def _twin(self) -> TextEnv:
        """Return a fresh environment with the same arguments."""

    def _announce(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return a prompt whose system message tells of the tools, if no chat template does in this tool format."""
        tool_format = get_tool_format(self.tool_format)
        if tool_format.is_native or not self.tools:
            return messages
        told = tool_format.describe(self.tools)
        if messages[0].role == "system":
            return (replace(messages[0], content=f"{messages[0].content}\n\n{told}"), *messages[1:])
        return (Message("system", told), *messages)

    def _env_id(self) -> str:
        return self.spec.id if self.spec is not None else type(self).__name__

    def _current(self) -> Episode:
        if self._episode is None:
            raise StateError("No episode is running; call reset() first.")
        return self._episode


def _join(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return messages with those of the user that follow one another put together: templates insist on turns."""
    joined: list[Message] = []
    for message in messages:
        if joined and message.role == joined[-1].role == "user":
            joined[-1] = Message("user", f"{joined[-1].content}\n{message.content}")
        else:
            joined.append(message)
    return tuple(joined)
