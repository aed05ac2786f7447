"""The loop: allocate, play roots, allocate again, restore and continue, and hand over trees.

Every branch is a coroutine that starts from a saved state: a bare rollout from the state after reset, a continuation
(Stage 2 of TRACE, arXiv 2606.11119) from a visited prefix. The continuations of a finished rollout start at once; they
need only that rollout's outcome. Environments are stepped in threads and every call has a deadline; a call that hangs
keeps neither its place among the threads nor the program from ending.

What broke around a task (`InfrastructureError`, a state that does not replay) is recorded on the tree. A programming
error ends the round at once: nobody is asked anything any more, and closing the collector closes every environment.

Determinism: seeds are derived from a branch's place in the tree, never from the order of events; what a batched agent
is asked together is no matter of timing (`trace_gym.batching`); trees are put together in canonical order at the end.

Several processes: each resets its share of the prompts, process 0's allocation goes for all, prompts are dealt by the
rollouts they got (their states travel as bytes), and every process returns all trees. A tree is grown by one process.

Left out: a rollout of a single turn has no prefix to continue, and its expansions are then not spent elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_gym.allocation import Allocator
from trace_gym.batching import Batch, gather
from trace_gym.budget import Cost
from trace_gym.chat import ChatEncoder
from trace_gym.env_calls import AnEnv, EnvCalls, EnvPool
from trace_gym.errors import BadInputError, InfrastructureError, ReplayDivergenceError
from trace_gym.executor import AnyEnv, Envs, LocalEnvs, MakeEnv
from trace_gym.messages import Agent, Completion, Failure, Message, Request
from trace_gym.predictor import Predictor
from trace_gym.processes import ALONE, Processes, deal, merge
from trace_gym.snapshot import EnvState, load_state, save_state
from trace_gym.tree import NO_PARENT, ROOT, Node, Prefix, RolloutTree, Status

_WORLD, _SAMPLING, _STAGE_1, _STAGE_2 = range(4)  # independent random streams of a run


@dataclass(frozen=True)
class Collection:
    """What one round of collecting brought.

    Attributes:
        trees: One tree per candidate, in the order given; those without rollouts hold only their prompt.
        values: Predicted success probability of each candidate before anything was played, [B].
        counts: Bare rollouts given to each candidate, [B].
        cost: What was spent.
        seconds: Wall-clock seconds by phase: predict; generate (the agent works, whatever else happens); grade;
            environment (the rest: waiting for steps and restores); of several processes this one's, with wait: for
            the slowest of them.
    """

    trees: tuple[RolloutTree, ...]
    values: NDArray[np.float64]
    counts: NDArray[np.int64]
    cost: Cost
    seconds: dict[str, float]


@dataclass
class _Branch:
    """One branch while it is played; ``nodes`` hold its own turns only, parents are set when trees are built."""

    key: tuple[int, ...]
    state: EnvState
    path: list[Node]  # from the prompt to the anchor
    anchor_turn: int = 0
    nodes: list[Node] = field(default_factory=list)
    states: list[EnvState | None] = field(default_factory=list)
    unplayed: int = 0  # tokens that the agent generated for a turn that is not a node yet

    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for node in (*self.path, *self.nodes) for token in node.token_ids)

    def messages(self) -> tuple[Message, ...]:
        return tuple(message for node in (*self.path, *self.nodes) for message in node.messages)


class Collector:
    """Grows rollout trees.

    Args:
        make_env: Makes one environment; called as often as branches run at the same time.
        agent: Answers the conversations.
        allocator: Spends the budget, see `trace_gym.allocation`.
        predictor: Predicts success probabilities, see `trace_gym.predictor`.
        encoder: Renders token ids for an agent that owns the tokenizer; None for agents that take messages.
        expansions: Continuations per bare rollout (N of TRACE).
        max_tokens: Longest answer of one turn, in tokens; None leaves it to the agent.
        max_context: Longest conversation, in tokens; an episode that would exceed it is truncated. So is one that
            reaches the agent's own ``max_context``, where it has one. A first prompt that leaves no room for an answer
            is a failure of kind ``context``: nobody is asked and nobody scored.
        step_timeout_s: Deadline of one environment call; past it the episode is failed and the environment given up.
        completion_timeout_s: Deadline of one call, or one burst, of the agent.
        workers: Environment calls that run at the same time; calls past their deadline do not count.
        keep_states: Keep every turn's state on its node. Costs memory: live states may own processes.
        seed: Seed of every random choice.
        processes: Who collects together; all of them make the same calls.
        executor: Where the environments live, see `trace_gym.executor.get_executor`.

    Raises:
        BadInputError: If a number is out of range.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        agent: Agent,
        *,
        allocator: Allocator,
        predictor: Predictor,
        encoder: ChatEncoder | None = None,
        expansions: int = 0,
        max_tokens: int | None = None,
        max_context: int | None = None,
        step_timeout_s: float = 120.0,
        completion_timeout_s: float = 600.0,
        workers: int = 8,
        keep_states: bool = False,
        seed: int = 0,
        processes: Processes = ALONE,
        executor: Callable[[MakeEnv], Envs] = LocalEnvs,
    ) -> None:
        """Store the parts; environments are made when they are needed."""
        if expansions < 0 or seed < 0 or workers < 1:
            raise BadInputError(
                f"expansions and seed must not be negative, workers at least 1; got {expansions}, {seed} and {workers}."
            )
        if keep_states and processes.size > 1:
            raise BadInputError("keep_states needs a single process: states stay in the process that played them.")
        self.agent = agent
        self.allocator = allocator
        self.predictor = predictor
        self.encoder = encoder
        self.expansions = expansions
        self.max_tokens = max_tokens
        self.max_context = max_context
        self._longest = min(filter(None, (max_context, getattr(agent, "max_context", None))), default=None)
        self.step_timeout_s = step_timeout_s
        self.completion_timeout_s = completion_timeout_s
        self.keep_states = keep_states
        self.seed = seed
        self.workers = workers
        self.processes = processes
        self._pool = EnvPool(executor(make_env))

    async def collect(self, task_ids: Sequence[str], budget: int, step: int = 0) -> Collection:
        """Predict, allocate ``budget`` bare rollouts over the tasks, and grow their trees."""
        return await _Round(self, task_ids, step).run(budget, None)

    async def grow(self, task_ids: Sequence[str], counts: Sequence[int], step: int = 0) -> Collection:
        """Grow trees with given numbers of bare rollouts per task.

        Raises:
            BadInputError: If there is not one count per task.
        """
        if len(counts) != len(task_ids) or any(count < 0 for count in counts):
            raise BadInputError(f"Need one count >= 0 per task; got {len(counts)} for {len(task_ids)} tasks.")
        return await _Round(self, task_ids, step).run(0, np.asarray(counts, dtype=np.int64))

    def close(self) -> None:
        """Close every environment; a collector can be closed twice. One that hangs is not waited for."""
        self._pool.close()

    def __enter__(self) -> Collector:
        """Return the collector; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def rng(self, stream: int, *place: int) -> np.random.Generator:
        """Return the generator of a place in the run; equal places get equal generators."""
        return np.random.default_rng(np.random.SeedSequence([self.seed, stream, *place]))


class _Round:
    """One call of `Collector.collect`."""

    def __init__(self, collector: Collector, task_ids: Sequence[str], step: int) -> None:
        self.c = collector
        self.task_ids = list(task_ids)
        self.step = step
        self.predict_seconds = 0.0
        self.batch = Batch(collector.agent, collector.completion_timeout_s)
        self.envs = EnvCalls(collector._pool, collector.workers, collector.step_timeout_s)
        self.played: list[_Branch] = []

    async def run(self, budget: int, counts: NDArray[np.int64] | None) -> Collection:
        try:
            return await self.grow(budget, counts)
        finally:
            await self.batch.close()

    async def grow(self, budget: int, counts: NDArray[np.int64] | None) -> Collection:
        start = time.perf_counter()
        prompts, states = await self.begin_all()
        values = self.predict([Prefix.of(self.task_ids[i], [node]) for i, node in enumerate(prompts)])
        if counts is None:
            counts = np.zeros(len(prompts), dtype=np.int64)
            is_set_up = np.array([node.status != "failed" for node in prompts], dtype=bool)
            counts[is_set_up] = self.c.allocator.roots(values[is_set_up], budget, self.c.rng(_STAGE_1, self.step))
        values, counts = self.c.processes.gather((values, counts))[0]
        prompts = [replace(node, value=float(value)) for node, value in zip(prompts, values, strict=True)]
        owners = deal(counts.tolist(), self.c.processes.size)
        states = self.dealt({i: state for i, state in states.items() if counts[i]}, owners)
        roots = [_Branch((i, j), state, [prompts[i]]) for i, state in states.items() for j in range(int(counts[i]))]
        self.batch.enter(branch.key for branch in roots)
        await gather([self.play(branch) for branch in roots])
        waiting = time.perf_counter()
        own = {i: tree for i, tree in enumerate(self.build(prompts)) if owners[i] == self.c.processes.rank}
        trees = merge(self.c.processes.gather(own))
        total = time.perf_counter() - start
        seconds = {
            "predict": self.predict_seconds,
            "generate": self.batch.seconds,
            "grade": self.envs.grade_seconds,
        }
        if self.c.processes.size > 1:
            seconds["wait"] = time.perf_counter() - waiting
        seconds["environment"] = max(0.0, total - sum(seconds.values()))
        cost = replace(sum((Cost.of(tree) for tree in trees), Cost()), seconds=total)
        return Collection(tuple(trees), values, counts, cost, seconds)

    async def begin_all(self) -> tuple[list[Node], dict[int, EnvState]]:
        """Return all prompts, and the states of those that this process has set up, by prompt."""
        crew = self.c.processes
        mine = range(crew.rank, len(self.task_ids), crew.size)
        begun = dict(zip(mine, await gather([self.begin(i, self.task_ids[i]) for i in mine]), strict=True))
        prompts = merge(crew.gather({i: node for i, (node, _) in begun.items()}))
        return prompts, {i: state for i, (_, state) in begun.items() if state is not None}

    def dealt(self, states: dict[int, EnvState], owners: Sequence[int]) -> dict[int, EnvState]:
        """Hand over states as bytes; return those of this process's prompts, in order."""
        crew = self.c.processes
        sent = {i: state.to_bytes() for i, state in states.items() if owners[i] != crew.rank}
        kept = {i: state for i, state in states.items() if owners[i] == crew.rank}
        for part in crew.gather(sent):
            kept |= {i: EnvState.from_bytes(data) for i, data in part.items() if owners[i] == crew.rank}
        return dict(sorted(kept.items()))

    async def begin(self, index: int, task_id: str) -> tuple[Node, EnvState | None]:
        """Reset once per prompt, so that all its rollouts share one start."""
        seed = int(self.c.rng(_WORLD, self.step, index).integers(2**31))
        try:
            async with self.envs.lend() as env:
                state, info = await self.envs.call(env, _reset, task_id, seed)
        except InfrastructureError as error:
            return Node(NO_PARENT, (), status="failed", failure=_failure(error)), None
        messages = tuple(Message.from_dict(message) for message in info["messages"])
        ids = self.c.encoder.prompt(messages, info["tools"]) if self.c.encoder else ()
        node = Node(NO_PARENT, messages, ids, (False,) * len(ids), (0.0,) * len(ids))
        if self.c._longest is not None and len(ids) >= self.c._longest:
            reason = f"the prompt has {len(ids)} tokens, and answers must fit into {self.c._longest} with it"
            return replace(node, status="failed", failure=Failure("context", reason)), None
        return node, state

    async def play(self, branch: _Branch) -> None:
        """Play a branch to its end and, for a bare rollout, what TRACE wants continued."""
        try:
            async with self.envs.lend() as env:
                reseed = int(self.c.rng(_WORLD, self.step, *branch.key).integers(2**31))
                info: Mapping[str, Any] | None = await self.envs.call(env, _restore, branch.state, reseed)
                while info is not None:
                    info = await self.turn(env, branch, info)
        except (InfrastructureError, ReplayDivergenceError) as error:
            failed = Node(0, (), status="failed", failure=_failure(error), num_generated=branch.unplayed)
            branch.nodes.append(failed)
        self.played.append(branch)
        continuations = self.continuations(branch)
        self.batch.enter((continuation.key for continuation in continuations), after=branch.key)
        # Not reached after a programming error: then the others must not be asked any more.
        self.batch.leave(branch.key)
        branch.states.clear()
        await gather([self.play(continuation) for continuation in continuations])

    async def turn(self, env: AnEnv, branch: _Branch, info: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Play one turn, given the info of the one before; return its own, or None if the episode is over."""
        request = self.request(branch, info)
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
                outcome={"verdict": "wrong", "reason": f"no answer within {self.c._longest} tokens"},
            )
            return None
        completion = await self.batch.complete(branch.key, request)
        branch.unplayed = completion.num_tokens
        is_anchor = self.c.expansions > 0 and len(branch.key) == 2
        played = await self.envs.call(env, _step, completion.text, self.c.keep_states, is_anchor)
        info = played.info
        messages = tuple(Message.from_dict(message) for message in info["messages"][len(branch.messages()) :])
        failure = Failure(**info["failure"]) if "failure" in info else None
        ids, sampled, logprobs = self.columns(completion, () if played.is_over else messages[1:])
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
            state=played.state if self.c.keep_states else None,
            num_generated=completion.num_tokens,
            num_tool_calls=info["tool_calls"],
            num_tool_errors=info["tool_errors"],
        )
        branch.states.append(played.state)
        branch.nodes.append(node)
        branch.unplayed = 0
        return None if played.is_over else info

    def request(self, branch: _Branch, info: Mapping[str, Any]) -> Request | None:
        """Return what to ask the agent; None if the conversation has no room left for an answer."""
        ids = branch.token_ids() if self.c.encoder else None
        place = (self.step, *branch.key, branch.anchor_turn + len(branch.nodes))
        max_tokens = self.c.max_tokens
        if ids is not None and self.c._longest is not None:
            # What the caller allows must hold a whole answer; what the model can take may cut it.
            wanted = 1 if self.c.max_context is None else max_tokens or 1
            room = self.c._longest - len(ids)
            if branch.nodes and room < wanted:
                return None
            max_tokens = max_tokens and min(max_tokens, room)
        return Request(
            messages=branch.messages(),
            tools=tuple(info["tools"]),
            prompt_ids=ids,
            max_tokens=max_tokens,
            seed=int(self.c.rng(_SAMPLING, *place).integers(2**31)),
            hint=info.get("demonstration"),
        )

    def columns(
        self, completion: Completion, observation: tuple[Message, ...]
    ) -> tuple[tuple[int, ...], tuple[bool, ...], tuple[float, ...]]:
        """Return a turn's token ids, sampled flags and logprobs; nothing for agents without token ids."""
        if self.c.encoder is None:
            return (), (), ()
        if completion.token_ids is None:
            raise BadInputError(
                "The agent gave no token ids, so what it said cannot be in the next prompt_ids; "
                "give the collector no encoder for agents that take messages."
            )
        answer = completion.token_ids
        closed = bool(answer) and answer[-1] == self.c.encoder.eos_id
        added = self.c.encoder.observation(observation, closed) if observation else ()
        logprobs = completion.logprobs or (0.0,) * len(answer)
        sampled = (True,) * len(answer) + (False,) * len(added)
        return answer + added, sampled, logprobs + (0.0,) * len(added)

    def continuations(self, branch: _Branch) -> list[_Branch]:
        """Stage 2: the continuations of a finished bare rollout (TRACE.md section 3)."""
        reward = branch.nodes[-1].reward
        last = len(branch.nodes) - 1
        if len(branch.key) > 2 or reward is None or last < 1:
            return []
        prefixes, seen = [], [*branch.path]
        for node in branch.nodes[:-1]:
            seen.append(node)
            prefixes.append(Prefix.of(self.task_ids[branch.key[0]], seen))
        values = self.predict(prefixes)
        branch.nodes[:-1] = [replace(node, value=float(v)) for node, v in zip(branch.nodes[:-1], values, strict=True)]
        if self.c.expansions == 0:
            return []
        rng = self.c.rng(_STAGE_2, self.step, *branch.key)
        counts = self.c.allocator.prefixes(values, float(reward == 1.0), self.c.expansions, rng)
        found = []
        for turn, count in enumerate(counts, start=1):
            state = branch.states[turn - 1]
            if state is None:
                continue
            path = branch.path + branch.nodes[:turn]
            found += [_Branch((*branch.key, turn, k), state, path, turn) for k in range(int(count))]
        return found

    def build(self, prompts: Sequence[Node]) -> list[RolloutTree]:
        """Put the branches together, in canonical order."""
        trees = [
            RolloutTree(self.envs.env_id, task_id, node, self.step)
            for task_id, node in zip(self.task_ids, prompts, strict=True)
        ]
        places: dict[tuple[int, ...], list[int]] = {}
        for branch in sorted(self.played, key=lambda branch: (len(branch.key), branch.key)):
            tree = trees[branch.key[0]]
            chain = places[branch.key[:2]] if len(branch.key) > 2 else [ROOT]
            anchor = parent = chain[branch.anchor_turn]
            place = [*chain[: branch.anchor_turn + 1]]
            for node in branch.nodes:
                parent = tree.add(replace(node, parent=parent, birth=anchor))
                place.append(parent)
            places[branch.key] = place
        return trees

    def predict(self, prefixes: Sequence[Prefix]) -> NDArray[np.float64]:
        start = time.perf_counter()
        values = self.c.predictor.predict(prefixes)
        self.predict_seconds += time.perf_counter() - start
        return values


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
