"""One branch is played: the agent is asked, its environment steps, and what was said becomes nodes.

A request carries exactly the token ids of the path that it continues, and a node keeps those that the sampler gave.
What broke around a task (`InfrastructureError`, a state that does not replay) becomes a failed node; a programming
error is raised.

Seeds are derived from a branch's place in its tree, never from the order of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trace_gym.batching import Batch
from trace_gym.chat import ChatEncoder
from trace_gym.env_calls import AnEnv, EnvCalls
from trace_gym.errors import BadInputError, InfrastructureError, ReplayDivergenceError
from trace_gym.executor import AnyEnv
from trace_gym.messages import Completion, Failure, Message, Request
from trace_gym.snapshot import EnvState, load_state, save_state
from trace_gym.tree import NO_PARENT, Node, Status

WORLD, SAMPLING, STAGE_1, STAGE_2 = range(4)  # independent random streams of a run


@dataclass(frozen=True)
class Seeds:
    """The random generators of one step of a run.

    Attributes:
        seed: Seed of the run.
        step: Number of the step.
    """

    seed: int
    step: int

    def rng(self, stream: int, *place: int) -> np.random.Generator:
        """Return the generator of a place in the step; equal places get equal generators."""
        return np.random.default_rng(np.random.SeedSequence([self.seed, stream, self.step, *place]))

    def draw(self, stream: int, *place: int) -> int:
        """Return a seed for a place in the step, below 2**31."""
        return int(self.rng(stream, *place).integers(2**31))


@dataclass(frozen=True)
class Rules:
    """What holds for every branch; see `trace_gym.collect.Collector`.

    Attributes:
        encoder: Renders token ids for an agent that owns the tokenizer.
        max_tokens: Longest answer of one turn, in tokens.
        max_context: Longest conversation that the caller allows, in tokens.
        agent_context: Longest that the agent can take.
        keep_states: Keep every turn's state on its node.
        keep_anchors: Keep the states from which a bare rollout may be continued, until it has been.
    """

    encoder: ChatEncoder | None = None
    max_tokens: int | None = None
    max_context: int | None = None
    agent_context: int | None = None
    keep_states: bool = False
    keep_anchors: bool = False

    @property
    def longest(self) -> int | None:
        """Longest conversation, in tokens."""
        return min(filter(None, (self.max_context, self.agent_context)), default=None)


@dataclass
class Branch:
    """One branch while it is played.

    Attributes:
        key: Its place: tree, root and, of a continuation, the turn that it continues and its number there.
        state: Where it starts.
        path: Nodes from the prompt to the anchor.
        nodes: Its own turns only; their parents are set when trees are built.
        states: What its turns left behind, where they may be continued.
        unplayed: Tokens that the agent generated for a turn that is not a node yet.
    """

    key: tuple[int, ...]
    state: EnvState
    path: list[Node]
    nodes: list[Node] = field(default_factory=list)
    states: list[EnvState | None] = field(default_factory=list)
    unplayed: int = 0

    @property
    def is_bare(self) -> bool:
        """Whether it is a rollout from the start, no continuation."""
        return len(self.key) == 2

    @property
    def anchor_turn(self) -> int:
        """Number of turns before its start."""
        return len(self.path) - 1

    def token_ids(self) -> tuple[int, ...]:
        """Return all ids from the prompt on."""
        return tuple(token for node in (*self.path, *self.nodes) for token in node.token_ids)

    def messages(self) -> tuple[Message, ...]:
        """Return the conversation from the prompt on."""
        return tuple(message for node in (*self.path, *self.nodes) for message in node.messages)


class Player:
    """Plays the branches of one step.

    Args:
        rules: What holds for all of them.
        seeds: Where every seed comes from.
        batch: Asks the agent.
        envs: Calls environments.
    """

    def __init__(self, rules: Rules, seeds: Seeds, batch: Batch, envs: EnvCalls) -> None:
        """Store the parts."""
        self._rules = rules
        self._seeds = seeds
        self._batch = batch
        self._envs = envs

    async def begin(self, index: int, task_id: str) -> tuple[Node, EnvState | None]:
        """Reset for a prompt, once, so that all its rollouts share one start; return its node and the state.

        There is no state if the task cannot be set up, or if its prompt leaves no room for an answer.
        """
        seed = self._seeds.draw(WORLD, index)
        try:
            async with self._envs.lend() as env:
                state, info = await self._envs.call(env, _reset, task_id, seed)
        except InfrastructureError as error:
            return Node(NO_PARENT, (), status="failed", failure=_failure(error)), None
        messages = tuple(Message.from_dict(message) for message in info["messages"])
        ids = self._rules.encoder.prompt(messages, info["tools"]) if self._rules.encoder else ()
        node = Node(NO_PARENT, messages, ids, (False,) * len(ids), (0.0,) * len(ids))
        if self._rules.longest is not None and len(ids) >= self._rules.longest:
            reason = f"the prompt has {len(ids)} tokens, and answers must fit into {self._rules.longest} with it"
            return replace(node, status="failed", failure=Failure("context", reason)), None
        return node, state

    async def play(self, branch: Branch) -> None:
        """Play a branch to its end; what breaks around it is its last node."""
        try:
            async with self._envs.lend() as env:
                reseed = self._seeds.draw(WORLD, *branch.key)
                info: Mapping[str, Any] | None = await self._envs.call(env, _restore, branch.state, reseed)
                while info is not None:
                    info = await self._turn(env, branch, info)
        except (InfrastructureError, ReplayDivergenceError) as error:
            failed = Node(0, (), status="failed", failure=_failure(error), num_generated=branch.unplayed)
            branch.nodes.append(failed)

    async def _turn(self, env: AnEnv, branch: Branch, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Play one turn, given the info of the one before; return its own, or None if the episode is over."""
        request = self._request(branch, info)
        if request is None:
            last = branch.nodes[-1]
            said = sum(last.sampled)  # what was observed since will never be read
            branch.nodes[-1] = replace(
                last,
                token_ids=last.token_ids[:said],
                sampled=last.sampled[:said],
                logprobs=last.logprobs[:said],
                status="truncated",
                reward=0.0,
                outcome={"verdict": "wrong", "reason": f"no answer within {self._rules.longest} tokens"},
            )
            return None
        completion = await self._batch.complete(branch.key, request)
        branch.unplayed = completion.num_tokens
        is_anchor = self._rules.keep_anchors and branch.is_bare
        played = await self._envs.call(env, _step, completion.text, self._rules.keep_states, is_anchor)
        info = played.info
        messages = tuple(Message.from_dict(message) for message in info["messages"][len(branch.messages()) :])
        failure = Failure(**info["failure"]) if "failure" in info else None
        ids, sampled, logprobs = self._columns(request, completion, () if played.is_over else messages[1:])
        node = Node(
            parent=0,  # set when the tree is built
            messages=messages,
            token_ids=ids,
            sampled=sampled,
            logprobs=logprobs,
            status=played.status,
            reward=played.reward if played.is_over and not failure else None,
            outcome=info.get("outcome"),
            failure=failure,
            state=played.state if self._rules.keep_states else None,
            num_generated=completion.num_tokens,
            num_tool_calls=info["tool_calls"],
            num_tool_errors=info["tool_errors"],
        )
        branch.states.append(played.state)
        branch.nodes.append(node)
        branch.unplayed = 0
        return None if played.is_over else info

    def _request(self, branch: Branch, info: Mapping[str, Any]) -> Request | None:
        """Return what to ask the agent; None if the conversation has no room left for an answer."""
        ids = branch.token_ids() if self._rules.encoder else None
        max_tokens = self._rules.max_tokens
        if ids is not None and self._rules.longest is not None:
            # What the caller allows must hold a whole answer; what the model can take may cut it.
            wanted = 1 if self._rules.max_context is None else max_tokens or 1
            room = self._rules.longest - len(ids)
            if branch.nodes and room < wanted:
                return None
            max_tokens = room if max_tokens is None else min(max_tokens, room)
        return Request(
            messages=branch.messages(),
            tools=tuple(info["tools"]),
            prompt_ids=ids,
            max_tokens=max_tokens,
            seed=self._seeds.draw(SAMPLING, *branch.key, branch.anchor_turn + len(branch.nodes)),
            hint=info.get("demonstration"),
        )

    def _columns(
        self, request: Request, completion: Completion, observation: tuple[Message, ...]
    ) -> tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]]:
        """Return a turn's token ids, sampled flags and logprobs; nothing for agents without token ids."""
        if self._rules.encoder is None:
            return (), (), ()
        if completion.token_ids is None:
            raise BadInputError(
                "The agent gave no token ids, so what it said cannot be in the next prompt_ids; "
                "give the collector no encoder for agents that take messages."
            )
        answer = completion.token_ids
        if request.max_tokens is not None and len(answer) > request.max_tokens:
            raise BadInputError(
                f"The agent was asked for at most {request.max_tokens} tokens and gave {len(answer)}; "
                "an agent cuts an answer where its request has it."
            )
        closed = bool(answer) and answer[-1] == self._rules.encoder.eos_id
        added = self._rules.encoder.observation(observation, closed) if observation else ()
        logprobs = completion.logprobs or (0.0,) * len(answer)
        sampled = (True,) * len(answer) + (False,) * len(added)
        return answer + added, sampled, logprobs + (0.0,) * len(added)


@dataclass(frozen=True, slots=True)
class _Played:
    """What a step brought."""

    reward: float
    status: Status
    info: Mapping[str, Any]
    state: EnvState | None

    @property
    def is_over(self) -> bool:
        return self.status != "open"


# What runs in a thread, as few calls as possible: each costs a change of threads.


def _reset(env: AnyEnv, task_id: str, seed: int) -> tuple[EnvState, Mapping[str, Any]]:
    _, info = env.reset(seed=seed, options={"task_id": task_id})
    return save_state(env), info


def _restore(env: AnyEnv, state: EnvState, reseed: int) -> Mapping[str, Any]:
    load_state(env, state, reseed)
    info: Mapping[str, Any] = env.unwrapped.info()  # type: ignore[attr-defined]
    return info


def _step(env: AnyEnv, action: str, keep_state: bool, is_anchor: bool) -> _Played:
    _, reward, terminated, truncated, info = env.step(action)
    status: Status = "terminal" if terminated else "truncated" if truncated else "open"
    if "failure" in info:
        status, keep_state = "failed", False
    is_kept = keep_state or (is_anchor and status == "open")
    return _Played(float(reward), status, info, save_state(env) if is_kept else None)


def _failure(error: InfrastructureError | ReplayDivergenceError) -> Failure:
    if isinstance(error, InfrastructureError):
        return Failure(error.kind, error.reason)
    return Failure("replay_diverged", str(error))
