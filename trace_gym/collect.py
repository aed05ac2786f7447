"""The loop: allocate, play roots, allocate again, restore and continue, and hand over trees.

Every branch is a coroutine that starts from a saved state: a bare rollout from the state after reset, a continuation
(Stage 2 of TRACE, arXiv 2606.11119) from a visited prefix. The continuations of a finished rollout start at once; they
need only that rollout's outcome. Environments are stepped in threads and every call has a deadline; a call that hangs
keeps neither its place among the threads nor the program from ending.

A programming error ends the round at once: nobody is asked anything any more, and closing the collector closes every
environment.

Determinism: seeds come from a branch's place in the tree (`trace_gym.play`); what a batched agent is asked together is
no matter of timing (`trace_gym.batching`); trees are put together in canonical order at the end.

Several processes: each resets its share of the prompts, process 0's allocation goes for all, prompts are dealt by the
rollouts they got (their states travel as bytes), and every process returns all trees. A tree is grown by one process.

Left out: a rollout of a single turn has no prefix to continue, and its expansions are then not spent elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trace_gym.allocation import Allocator
from trace_gym.batching import Batch, gather
from trace_gym.budget import Cost
from trace_gym.chat import ChatEncoder
from trace_gym.env_calls import EnvCalls, EnvPool
from trace_gym.errors import BadInputError
from trace_gym.executor import Envs, LocalEnvs, MakeEnv
from trace_gym.messages import Agent
from trace_gym.play import STAGE_1, STAGE_2, Branch, Player, Rules, Seeds
from trace_gym.predictor import Predictor
from trace_gym.processes import ALONE, Processes, deal, merge
from trace_gym.snapshot import EnvState
from trace_gym.tree import ROOT, Node, Prefix, RolloutTree


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
        self.expansions = expansions
        self.rules = Rules(
            encoder=encoder,
            max_tokens=max_tokens,
            max_context=max_context,
            agent_context=getattr(agent, "max_context", None),
            keep_states=keep_states,
            keep_anchors=expansions > 0,
        )
        self.step_timeout_s = step_timeout_s
        self.completion_timeout_s = completion_timeout_s
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


class _Round:
    """One call of `Collector.collect`."""

    def __init__(self, collector: Collector, task_ids: Sequence[str], step: int) -> None:
        self.c = collector
        self.task_ids = list(task_ids)
        self.step = step
        self.seeds = Seeds(collector.seed, step)
        self.predict_seconds = 0.0
        self.batch = Batch(collector.agent, collector.completion_timeout_s)
        self.envs = EnvCalls(collector._pool, collector.workers, collector.step_timeout_s)
        self.player = Player(collector.rules, self.seeds, self.batch, self.envs)
        self.played: list[Branch] = []

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
            counts[is_set_up] = self.c.allocator.roots(values[is_set_up], budget, self.seeds.rng(STAGE_1))
        values, counts = self.c.processes.gather((values, counts))[0]
        prompts = [replace(node, value=float(value)) for node, value in zip(prompts, values, strict=True)]
        owners = deal(counts.tolist(), self.c.processes.size)
        states = self.dealt({i: state for i, state in states.items() if counts[i]}, owners)
        roots = [Branch((i, j), state, [prompts[i]]) for i, state in states.items() for j in range(int(counts[i]))]
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
        begun = dict(zip(mine, await gather([self.player.begin(i, self.task_ids[i]) for i in mine]), strict=True))
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

    async def play(self, branch: Branch) -> None:
        """Play a branch to its end and, for a bare rollout, what TRACE wants continued."""
        await self.player.play(branch)
        self.played.append(branch)
        continuations = self.continuations(branch)
        self.batch.enter((continuation.key for continuation in continuations), after=branch.key)
        # Not reached after a programming error: then the others must not be asked any more.
        self.batch.leave(branch.key)
        branch.states.clear()
        await gather([self.play(continuation) for continuation in continuations])

    def continuations(self, branch: Branch) -> list[Branch]:
        """Stage 2: the continuations of a finished bare rollout (TRACE.md section 3)."""
        reward = branch.nodes[-1].reward
        last = len(branch.nodes) - 1
        if not branch.is_bare or reward is None or last < 1:
            return []
        prefixes, seen = [], [*branch.path]
        for node in branch.nodes[:-1]:
            seen.append(node)
            prefixes.append(Prefix.of(self.task_ids[branch.key[0]], seen))
        values = self.predict(prefixes)
        branch.nodes[:-1] = [replace(node, value=float(v)) for node, v in zip(branch.nodes[:-1], values, strict=True)]
        if self.c.expansions == 0:
            return []
        rng = self.seeds.rng(STAGE_2, *branch.key)
        counts = self.c.allocator.prefixes(values, float(reward == 1.0), self.c.expansions, rng)
        found = []
        for turn, count in enumerate(counts, start=1):
            state = branch.states[turn - 1]
            if state is None:
                continue
            path = branch.path + branch.nodes[:turn]
            found += [Branch((*branch.key, turn, k), state, path) for k in range(int(count))]
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
            chain = [ROOT] if branch.is_bare else places[branch.key[:2]]
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
