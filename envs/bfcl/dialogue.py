"""BFCLMultiTurn as a dialogue of two agents: a PettingZoo environment whose user can be played as well.

Agents act one after another (AEC): the user says something once per turn, then the assistant acts until it answers
without a call. The user has no functions, and by default it says what the data set has it say; anything that talks can
put it in other words. Underneath runs one `BFCLMultiTurnEnv`, and the state of the whole dialogue is a value like that
of any environment: `trace_gym.save_state`, `load_state` and `clone` take it, PettingZoo's wrappers included.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from gymnasium import spaces

from trace_gym.envs.bfcl.env import BFCLMultiTurnEnv
from trace_gym.envs.text_env import FreeText
from trace_gym.errors import BadInputError, StateError, require, unknown_name
from trace_gym.messages import Agent, Message, Request
from trace_gym.snapshot import EnvState, decode, encode

USER, ASSISTANT = "user", "assistant"
USER_PROMPT = (
    "You are the user of an assistant that can call functions. In each turn you read what it answered and what you "
    "want next. Say that in your own words, with every name and number, and nothing else."
)
MAX_USER_CHARS = 16_384
ENV_ID = "trace_gym.envs.bfcl/dialogue_v0"

pettingzoo = require("pettingzoo", "bfcl")
conversions, wrappers = require("pettingzoo.utils.conversions", "bfcl"), require("pettingzoo.utils.wrappers", "bfcl")


@dataclass(frozen=True)
class _Table:
    """What the dialogue adds to the state of the environment underneath.

    Attributes:
        selection: Who acts next.
        living: For each agent that is not gone, its last and its cumulative reward.
        spoken: What the user and the assistant said to each other, by turns; of the assistant its answers alone.
        seen: What is new to the one who acts next.
        skipped: PettingZoo's note of who acts after the agents that are over.
    """

    selection: str
    living: tuple[tuple[str, float, float], ...]
    spoken: tuple[str, ...]
    seen: str
    skipped: str | None


class raw_env(pettingzoo.AECEnv):  # type: ignore[misc,name-defined]
    """The dialogue.

    ## Description
    ``user`` and ``assistant`` play a task of `BFCLMultiTurnEnv`.

    ## Action Spaces
    Text. What the user says stands in place of the data set's message; an empty text leaves that as it is. (Where
    functions are added, their documents go before it in either case.) The assistant's actions are those of the
    single-agent environment.

    ## Observation Spaces
    A dictionary: ``text`` is what is new to the agent, for the user the assistant's last answer; the user's ``script``
    is what the data set has it say.

    ## Rewards
    The assistant gets the task's outcome at the end, 1.0 or 0.0, the user 0.0.

    ## Infos
    The assistant's is that of the single-agent environment. The user's has ``messages`` (the conversation in which an
    agent that plays the user speaks next), ``tools`` (none), ``task_id``, ``user_turn`` and, while it has something to
    say, ``demonstration``: the script.

    Args:
        render_mode: ``"ansi"``, ``"human"`` (which prints) or None.
        **options: Of `BFCLMultiTurnEnv`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "name": "bfcl_dialogue_v0",
        "render_modes": ["human", "ansi"],
        "render_fps": 1,
        "is_parallelizable": True,
        "snapshot": "exact",
    }

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        """Make the environment underneath."""
        super().__init__()
        if render_mode not in (None, "human", "ansi"):
            raise unknown_name("render mode", render_mode, self.metadata["render_modes"])
        self.render_mode = render_mode
        self.inner = BFCLMultiTurnEnv(**options, render_mode="ansi")
        self.possible_agents = [USER, ASSISTANT]
        read = self.inner.observation_space
        self._observation_spaces: dict[str, spaces.Space[Any]] = {
            USER: spaces.Dict({"text": copy.deepcopy(read), "script": copy.deepcopy(read)}),
            ASSISTANT: spaces.Dict({"text": copy.deepcopy(read)}),
        }
        self._action_spaces: dict[str, spaces.Space[Any]] = {
            USER: FreeText(MAX_USER_CHARS),
            ASSISTANT: copy.deepcopy(self.inner.action_space),
        }

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of an agent's observations."""
        return self._observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of an agent's actions."""
        return self._action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """Start a dialogue; ``options={"task_id": …}`` picks the task."""
        # What else may stand there is for others: PettingZoo hands the options of a whole stack through.
        self.inner.reset(seed=seed, options={k: v for k, v in (options or {}).items() if k == "task_id"})
        self._sit_down(_Table(USER, ((USER, 0.0, 0.0), (ASSISTANT, 0.0, 0.0)), (), "", None))

    def step(self, action: str | None) -> None:
        """Let the selected agent act; one that is over takes None.

        Raises:
            BadInputError: If the action is no text.
        """
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        if not isinstance(action, str):
            raise BadInputError(f"An action is a str, what the {agent} says; got {type(action).__name__}.")
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        if agent == USER:
            self._speak(action[:MAX_USER_CHARS])
        else:
            self._assist(action)
        self._accumulate_rewards()
        self._look()

    def _speak(self, text: str) -> None:
        if text:
            self.inner.rephrase(text)
        self._spoken = (*self._spoken, text or self.inner.script())
        self._seen = self.inner.info()["messages"][-1]["content"]
        self.agent_selection = ASSISTANT

    def _assist(self, action: str) -> None:
        self._seen, reward, terminated, truncated, info = self.inner.step(action)
        self.rewards[ASSISTANT] = reward
        if "turn_end_reason" in info or terminated or truncated:
            answer = next(m["content"] for m in reversed(info["messages"]) if m["role"] == ASSISTANT)
            self._seen = answer.rpartition("</think>")[2].strip()
            self._spoken = (*self._spoken, self._seen)
            self.agent_selection = USER

    def observe(self, agent: str) -> dict[str, str]:
        """Return what is new to an agent; nothing is to the one that does not act."""
        text = self._seen if agent == self.agent_selection else ""
        return {"text": text} if agent == ASSISTANT else {"text": text, "script": self._script()}

    def info(self) -> dict[str, Any]:
        """Return the info of the agent that acts next."""
        return self.infos.get(self.agent_selection, {})

    def render(self) -> str | None:
        """Return the dialogue as text in mode ``"ansi"``; print it in mode ``"human"``."""
        text = self.inner.render()
        if self.render_mode == "human":
            print(text)
        return text if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Forget the dialogue."""
        self.inner.close()

    def _script(self) -> str:
        """Return what the user is to say now, if it is its turn."""
        return self.inner.script() if self.agent_selection == USER and not self._is_over() else ""

    def _is_over(self) -> bool:
        return any((*self.terminations.values(), *self.truncations.values()))

    def _look(self) -> None:
        """Learn from the environment underneath whether it is over, and tell both agents what they may know."""
        known = self.inner.info()
        status = self.inner.status
        self.terminations = dict.fromkeys(self.agents, status == "terminal")
        self.truncations = dict.fromkeys(self.agents, status in ("truncated", "failed"))
        script = self._script()
        if script:  # the assistant does not know yet what the user is going to say
            known["messages"] = known["messages"][:-1]
        user = {"messages": self._as_user(script), "tools": [], "task_id": known["task_id"]}
        user |= {"user_turn": known["user_turn"]} | ({"demonstration": script} if script else {})
        self.infos = {agent: user if agent == USER else known for agent in self.agents}

    def _as_user(self, script: str) -> list[dict[str, Any]]:
        """Return the conversation in which an agent that plays the user speaks next."""
        messages = [Message("system", USER_PROMPT)]
        answer = ""
        for turn in range(0, len(self._spoken) + 1, 2):
            spoken = self._spoken[turn : turn + 2]
            if not spoken and not script:
                break
            wanted = self.inner.script(turn // 2) if spoken else script
            told = f"The assistant answered:\n{answer}\n\n" if answer else ""
            messages.append(Message("user", f"{told}You want:\n{wanted}"))
            if spoken:
                messages.append(Message("assistant", spoken[0]))
            answer = spoken[1] if len(spoken) == 2 else ""
        return [message.to_dict() for message in messages]

    # State.

    def get_state(self) -> EnvState:
        """Return the state of the dialogue.

        Raises:
            StateError: If none was started.
        """
        inner = self.inner.get_state()
        table = _Table(
            self.agent_selection,
            tuple((agent, self.rewards[agent], self._cumulative_rewards[agent]) for agent in self.agents),
            self._spoken,
            self._seen,
            getattr(self, "_skip_agent_selection", None),
        )
        return EnvState(ENV_ID, inner.task_id, partial(_write, table, inner), live=(table, inner))

    def set_state(self, state: EnvState, reseed: int | None = None) -> None:
        """Go on from a state of a dialogue.

        Raises:
            StateError: If the state belongs to another environment or is broken.
        """
        if state.env_id != ENV_ID:
            raise StateError(f"The state belongs to {state.env_id}; this environment is {ENV_ID}.")
        try:
            table, inner = state.live if isinstance(state.live, tuple) else _read(state.data)
            self.inner.set_state(inner, reseed=reseed)
            self._sit_down(table)
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"The state's data cannot be read: {error!r}.") from error

    def _sit_down(self, table: _Table) -> None:
        self.agents = [agent for agent, _, _ in table.living]
        self.rewards = {agent: reward for agent, reward, _ in table.living}
        self._cumulative_rewards = {agent: reward for agent, _, reward in table.living}
        self.agent_selection = table.selection
        self._spoken = table.spoken
        self._seen = table.seen
        self._skip_agent_selection = table.skipped
        self._look()

    def __deepcopy__(self, memo: dict[int, Any]) -> raw_env:
        """Return an independent copy: the same as cloning."""
        twin = object.__new__(raw_env)
        memo[id(self)] = twin
        vars(twin).update(vars(self))
        twin._observation_spaces = copy.deepcopy(self._observation_spaces)
        twin._action_spaces = copy.deepcopy(self._action_spaces)
        twin.inner = copy.deepcopy(self.inner)
        if "agents" in vars(self):
            twin.set_state(self.get_state())
        return twin

    def __copy__(self) -> raw_env:
        """Refuse: a shallow copy would share the dialogue."""
        raise TypeError("copy.copy would share the dialogue; use trace_gym.clone(env) or copy.deepcopy(env).")


def env(**options: Any) -> Any:
    """Return the dialogue with PettingZoo's guard against calls in the wrong order."""
    return wrappers.OrderEnforcingWrapper(raw_env(**options))


def parallel_env(**options: Any) -> Any:
    """Return the dialogue for parallel play: in each step one agent acts, and what the other does is ignored."""
    return conversions.turn_based_aec_to_parallel(env(**options))


async def play(
    dialogue: Any,
    players: Mapping[str, Agent],
    *,
    task_id: str | None = None,
    seed: int = 0,
    max_tokens: int | None = None,
) -> float:
    """Play a dialogue to its end.

    Args:
        dialogue: An AEC environment of this module.
        players: Agents of `trace_gym.agents` by the names of those they play; without one the user keeps to the
            script.
        task_id: The task; drawn by the seed if there is none.
        seed: Seed of the choice of the task and of the agents' sampling.
        max_tokens: Longest answer of an agent, in tokens.

    Returns:
        The assistant's reward.

    Raises:
        BadInputError: If a name is none of an agent, or nobody plays the assistant.
        InfrastructureError: If an agent's backend failed.
    """
    if unknown := set(players) - {USER, ASSISTANT}:
        raise unknown_name("agent", sorted(unknown)[0], (USER, ASSISTANT))
    if ASSISTANT not in players:
        raise BadInputError("Nobody plays the assistant; give players={'assistant': …}.")
    dialogue.reset(seed=seed, options={} if task_id is None else {"task_id": task_id})
    reward = 0.0
    for number, name in enumerate(dialogue.agent_iter()):
        _, received, terminated, truncated, info = dialogue.last()
        reward += received if name == ASSISTANT else 0.0
        action: str | None = "" if name not in players else None
        if terminated or truncated:
            action = None
        elif name in players:
            messages = tuple(Message.from_dict(message) for message in info["messages"])
            hint = info.get("demonstration")
            request = Request(messages, tuple(info["tools"]), None, max_tokens, seed + number, hint)
            action = (await players[name].complete([request]))[0].text
        dialogue.step(action)
    return reward


def _write(table: _Table, inner: EnvState) -> str:
    return encode([{f.name: getattr(table, f.name) for f in fields(table)}, inner.env_id, inner.task_id, inner.data])


def _read(data: str) -> tuple[_Table, EnvState]:
    table, env_id, task_id, inner = decode(data)
    return _Table(**table), EnvState(env_id, task_id, inner)
