"""The loop: allocate, play roots, allocate again, restore and continue, and hand over trees.

Every branch is a coroutine that starts from a saved state: a bare rollout from the state after reset, a continuation
(Stage 2 of TRACE, arXiv 2606.11119) from a visited prefix. The continuations of a finished rollout start at once; they
need only that rollout's outcome. Environments are stepped in threads and every call has a deadline; a call that hangs
keeps neither its place among the threads nor the program from ending.

What broke around a task (`InfrastructureError`, a state that does not replay) is recorded on the tree. A programming
error ends the round at once: nobody is asked anything any more, and closing the collector closes every environment.

Determinism: seeds are derived from a branch's place in the tree, never from the order of events; a batched agent gets
the requests of all live branches in one call, in canonical order; trees are put together in canonical order at the end.

Left out: a rollout of a single turn has no prefix to continue, and its expansions are then not spent elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from trace_gym.allocation import Allocator
from trace_gym.batching import Batch, gather, in_thread
from trace_gym.budget import Cost
from trace_gym.chat import ChatEncoder
from trace_gym.errors import BadInputError, InfrastructureError, ReplayDivergenceError
from trace_gym.messages import Agent, Completion, Failure, Message, Request
from trace_gym.predictor import Predictor
from trace_gym.snapshot import EnvState, load_state, save_state
from trace_gym.tree import NO_PARENT, ROOT, Node, Prefix, RolloutTree

AnyEnv = gymnasium.Env[Any, Any]
T = TypeVar("T")

_WORLD, _SAMPLING, _STAGE_1, _STAGE_2 = range(4)  # independent random streams of a run
_CLOSE_S = 2.0  # how long closing waits for environments that were given up


@dataclass(frozen=True)
class Collection:
    """What one round of collecting brought.

    Attributes:
        trees: One tree per candidate, in the order given; those without rollouts hold only their prompt.
        values: Predicted success probability of each candidate before anything was played, [B].
        counts: Bare rollouts given to each candidate, [B].
        cost: What was spent.
        seconds: Wall-clock seconds by phase: predict, generate, environment (stepping and restoring), grade.
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
        completion_timeout_s: Deadline of one call of the agent.
        workers: Environment calls that run at the same time; calls past their deadline do not count.
        keep_states: Keep every turn's state on its node. Costs memory: live states may own processes.
        seed: Seed of every random choice.

    Raises:
        BadInputError: If a number is out of range.
    """

    def __init__(
        self,
        make_env: Callable[[], AnyEnv],
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
    ) -> None:
        """Store the parts; environments are made when they are needed."""
        if expansions < 0 or seed < 0 or workers < 1:
            raise BadInputError(
                f"expansions and seed must not be negative, workers at least 1; got {expansions}, {seed} and {workers}."
            )
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
        self._make_env = make_env
        self.workers = workers
        self._idle: list[AnyEnv] = []
        self._closing: set[Future[None]] = set()
        self._env_id = ""

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
        while self._idle:
            self._idle.pop().close()
        wait(tuple(self._closing), _CLOSE_S)

    def __enter__(self) -> Collector:
        """Return the collector; leaving the block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _give_up(self, env: AnyEnv, running: Future[Any]) -> None:
        """Close an environment in which a call still runs: now, and again in case the call opens something anew."""
        closing = in_thread(env.close)
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        running.add_done_callback(lambda _: env.close())

    def rng(self, stream: int, *place: int) -> np.random.Generator:
        """Return the generator of a place in the run; equal places get equal generators."""
        return np.random.default_rng(np.random.SeedSequence([self.seed, stream, *place]))


class _Round:
    """One call of `Collector.collect`."""

    def __init__(self, collector: Collector, task_ids: Sequence[str], step: int) -> None:
        self.c = collector
        self.task_ids = list(task_ids)
        self.step = step
        self.seconds = {"predict": 0.0, "grade": 0.0}
        self.batch = Batch(collector.agent, collector.completion_timeout_s)
        self.played: list[_Branch] = []
        self._slots = asyncio.Semaphore(collector.workers)
        self._lent: dict[int, AnyEnv] = {}

    async def run(self, budget: int, counts: NDArray[np.int64] | None) -> Collection:
        try:
            return await self.grow(budget, counts)
        finally:
            await self.batch.close()

    async def grow(self, budget: int, counts: NDArray[np.int64] | None) -> Collection:
        start = time.perf_counter()
        prompts = await gather([self.begin(i, task_id) for i, task_id in enumerate(self.task_ids)])
        prefixes = [Prefix(task_id, node.messages) for task_id, (node, _) in zip(self.task_ids, prompts, strict=True)]
        values = self.predict(prefixes)
        if counts is None:
            counts = np.zeros(len(prompts), dtype=np.int64)
            is_set_up = np.array([state is not None for _, state in prompts], dtype=bool)
            counts[is_set_up] = self.c.allocator.roots(values[is_set_up], budget, self.c.rng(_STAGE_1, self.step))
        roots = [
            _Branch((i, j), state, [replace(node, value=float(values[i]))])
            for i, (node, state) in enumerate(prompts)
            if state is not None
            for j in range(int(counts[i]))
        ]
        self.batch.live += len(roots)
        await gather([self.play(branch) for branch in roots])
        trees = self.build([replace(node, value=float(v)) for (node, _), v in zip(prompts, values, strict=True)])
        total = time.perf_counter() - start
        self.seconds["generate"] = self.batch.seconds
        self.seconds["environment"] = max(0.0, total - sum(self.seconds.values()))
        cost = replace(sum((Cost.of(tree) for tree in trees), Cost()), seconds=total)
        return Collection(tuple(trees), values, counts, cost, self.seconds)

    async def begin(self, index: int, task_id: str) -> tuple[Node, EnvState | None]:
        """Reset once per prompt, so that all its rollouts share one start."""
        seed = int(self.c.rng(_WORLD, self.step, index).integers(2**31))
        try:
            async with self.lend() as env:
                await self.call(env, env.reset, seed=seed, options={"task_id": task_id})
                info = env.unwrapped.info()  # type: ignore[attr-defined]
                state = await self.call(env, save_state, env)
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
            async with self.lend() as env:
                reseed = int(self.c.rng(_WORLD, self.step, *branch.key).integers(2**31))
                await self.call(env, load_state, env, branch.state, reseed)
                while await self.turn(env, branch):
                    pass
        except (InfrastructureError, ReplayDivergenceError) as error:
            failed = Node(0, (), status="failed", failure=_failure(error), num_generated=branch.unplayed)
            branch.nodes.append(failed)
        self.played.append(branch)
        continuations = self.continuations(branch)
        self.batch.live += len(continuations)
        self.batch.leave()  # not reached after a programming error: then the others must not be asked any more
        branch.states.clear()
        await gather([self.play(continuation) for continuation in continuations])

    async def turn(self, env: AnyEnv, branch: _Branch) -> bool:
        """Play one turn; return whether the episode goes on."""
        request = self.request(env, branch)
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
            return False
        completion = await self.batch.complete(branch.key, request)
        branch.unplayed = completion.num_tokens
        _, reward, terminated, truncated, info = await self.call(env, env.step, completion.text)
        known = len(branch.messages())
        messages = tuple(Message.from_dict(message) for message in info["messages"][known:])
        failure = Failure(**info["failure"]) if "failure" in info else None
        over = terminated or truncated or failure is not None
        ids, sampled, logprobs = self.columns(completion, () if over else messages[1:])
        node = Node(
            parent=0,  # set when the tree is built
            messages=messages,
            token_ids=ids,
            sampled=sampled,
            logprobs=logprobs,
            status="failed" if failure else "terminal" if terminated else "truncated" if truncated else "open",
            reward=float(reward) if over and not failure else None,
            outcome=info.get("outcome"),
            failure=failure,
            num_generated=completion.num_tokens,
            num_tool_calls=info["tool_calls"],
            num_tool_errors=info["tool_errors"],
        )
        is_anchor = self.c.expansions > 0 and len(branch.key) == 2 and not over
        keep = failure is None and (self.c.keep_states or is_anchor)
        state = await self.call(env, save_state, env) if keep else None
        branch.states.append(state)
        branch.nodes.append(replace(node, state=state if self.c.keep_states else None))
        branch.unplayed = 0
        return not over

    def request(self, env: AnyEnv, branch: _Branch) -> Request | None:
        """Return what to ask the agent; None if the conversation has no room left for an answer."""
        info = env.unwrapped.info()  # type: ignore[attr-defined]
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
            RolloutTree(self.c._env_id, task_id, node, self.step)
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
        self.seconds["predict"] += time.perf_counter() - start
        return values

    async def call(self, env: AnyEnv, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run an environment call in a thread, under its deadline; if it is not waited for, give the env up."""
        async with self._slots:
            running = in_thread(function, *args, **kwargs)
            try:
                return await self.wait(running, getattr(function, "__name__", "call"))
            finally:
                if not running.done():
                    del self._lent[id(env)]
                    self.c._give_up(env, running)

    async def wait(self, running: Future[T], name: str) -> T:
        """Wait for a call in a thread until its deadline."""
        try:
            async with asyncio.timeout(self.c.step_timeout_s) as clock:
                return await asyncio.wrap_future(running)
        except TimeoutError:
            if not clock.expired():  # the environment's own
                raise
            raise InfrastructureError("deadline", f"{name} took longer than {self.c.step_timeout_s} s") from None

    async def make(self) -> AnyEnv:
        """Make an environment in a thread; one that is ready only when nobody waits any more is closed."""
        async with self._slots:
            running = in_thread(self.c._make_env)
            try:
                return await self.wait(running, "making an environment")
            except BaseException:
                running.add_done_callback(lambda made: None if made.exception() else made.result().close())
                raise

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[AnyEnv]:
        """Lend an environment; unless it was given up meanwhile, somebody else can have it afterwards."""
        env = self.c._idle.pop() if self.c._idle else await self.make()
        self.c._env_id = env.spec.id if env.spec is not None else ""
        self._lent[id(env)] = env
        try:
            yield env
        finally:
            if self._lent.pop(id(env), None) is not None:
                timings = getattr(env.unwrapped, "timings", {})
                self.seconds["grade"] += timings.pop("grade", 0.0)
                self.c._idle.append(env)


def _failure(error: InfrastructureError | ReplayDivergenceError) -> Failure:
    if isinstance(error, InfrastructureError):
        return Failure(error.kind, error.reason)
    return Failure("replay_diverged", str(error))
