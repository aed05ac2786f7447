"""What breaks around a task is a failed node, never a reward, and the others play on."""

import asyncio
import threading
from collections import Counter

import pytest
from walk import NUM_MESSAGES, TASKS, Talker, Walk, collector, grow, leaves, nodes

from trace_gym.budget import Cost
from trace_gym.errors import InfrastructureError, ReplayDivergenceError
from trace_gym.tree import ROOT


def test_a_hanging_step_fails_its_episode_only(gate):
    """More calls hang than there are workers: each is a failure of kind "deadline", the others play as if alone."""

    def hook(event, subject):
        if event == "step" and subject.task_id == "odd":
            gate.wait(30)

    tasks, options = ("a", "odd", "b"), {"expansions": 2, "step_timeout_s": 0.3, "workers": 2}
    collection = grow(tasks, (3, 5, 3), make_env=lambda: Walk(hook), **options)
    hung = [collection.trees[1].nodes[leaf] for leaf in collection.trees[1].leaves()]
    assert [(node.status, node.failure.kind, node.reward) for node in hung] == [("failed", "deadline", None)] * 5
    assert all(node.num_generated > 0 for node in hung)  # what was said was paid for
    calm = grow(tasks, (3, 5, 3), **options)
    assert [nodes(collection)[i] for i in (0, 2)] == [nodes(calm)[i] for i in (0, 2)]


def test_an_environment_that_is_long_in_the_making_fails_its_episode_and_is_closed_in_the_end(gate):
    """Making one has the deadline of a step and holds up nobody: the other tasks play meanwhile."""
    made, closed = [], threading.Event()

    def make():
        made.append(None)
        if len(made) == 2:
            gate.wait(30)
            return Walk(lambda event, subject: event == "close" and closed.set())
        return Walk()

    collection = grow(counts=(1, 1, 1), make_env=make, step_timeout_s=0.5)
    failures = [tree.nodes[ROOT].failure for tree in collection.trees if tree.nodes[ROOT].status == "failed"]
    assert [failure.kind for failure in failures] == ["deadline"] and "making" in failures[0].reason
    assert sum(bool(tree.leaves()) for tree in collection.trees) == 2
    assert not closed.is_set()
    gate.set()
    assert closed.wait(10)


def test_a_hanging_answer_fails_its_episodes_only():
    """An endpoint that never answers for one task; nothing is scored 0."""

    class Stuck(Talker):
        async def complete(self, requests):
            if requests[0].messages[1].content == "b":
                await asyncio.sleep(60)
            return await super().complete(requests)

    collection = grow(agent=Stuck(False), completion_timeout_s=0.2)
    failed = [node for node in leaves(collection) if node.status == "failed"]
    assert [node.failure.kind for node in failed] == ["deadline"] * 2
    assert all(tree.nodes[leaf].reward is None for tree in collection.trees[1:2] for leaf in tree.leaves())
    assert [nodes(collection)[i] for i in (0, 2)] == [nodes(grow())[i] for i in (0, 2)]


@pytest.mark.parametrize("batched", [True, False])
def test_an_agent_that_fails_fails_every_branch_and_nothing_hangs(batched):
    """All branches of a tick fail at once; the round ends."""

    class Down(Talker):
        async def complete(self, requests):
            if len(requests[0].messages) > NUM_MESSAGES:
                raise InfrastructureError("endpoint", "gone")
            return await super().complete(requests)

    collection = grow(agent=Down(batched), expansions=2)
    assert {(node.status, node.failure.kind) for node in leaves(collection)} == {("failed", "endpoint")}
    assert (collection.cost.rollouts, collection.cost.continuations) == (9, 0)


@pytest.mark.parametrize("error", [InfrastructureError("sandbox_died", "gone"), ReplayDivergenceError("other")])
@pytest.mark.parametrize("event", ["step", "load"])
def test_a_broken_world_is_a_failed_node(event, error):
    """Whether a turn or a restore breaks; a state that does not replay must not end a training run."""

    def hook(happened, subject):
        if happened == event and subject.task_id == "b" and subject.turn > (event == "step"):
            raise error

    collection = grow(make_env=lambda: Walk(hook), expansions=3)
    kind = getattr(error, "kind", "replay_diverged")
    failed = [node for node in leaves(collection) if node.status == "failed"]
    assert failed and {node.failure.kind for node in failed} == {kind}
    assert all(node.reward is None for node in failed)
    assert all(tree.nodes[leaf].status != "failed" for tree in collection.trees[::2] for leaf in tree.leaves())


def test_a_turn_that_broke_the_world_keeps_what_was_said_and_what_it_cost():
    """Its tokens were generated and are paid for, whatever became of them."""

    def hook(happened, subject):
        if happened == "step" and subject.turn > 1:
            raise InfrastructureError("sandbox_died", "gone")

    agent = Talker()
    collection = grow(make_env=lambda: Walk(hook), agent=agent, expansions=2)
    failed = [node for node in leaves(collection) if node.status == "failed"]
    assert failed and all(node.messages[0].role == "assistant" and node.num_generated > 0 for node in failed)
    assert collection.cost.turns == len(agent.said)
    assert collection.cost.tokens == sum(said.num_tokens for said in agent.said)


def test_a_task_that_cannot_be_set_up_gets_no_budget():
    """Its prompt is marked failed and has no leaves; the whole budget goes to the others."""

    def hook(event, subject):
        if event == "begin" and subject == "b":
            raise InfrastructureError("index", "unreachable")

    with collector(make_env=lambda: Walk(hook)) as made:
        collection = asyncio.run(made.collect(TASKS, 8))
        given = asyncio.run(made.grow(TASKS, (1, 2, 1)))
    assert collection.counts[1] == 0 and collection.counts.sum() == 8
    for tree in (collection.trees[1], given.trees[1]):
        assert (tree.nodes[ROOT].status, tree.nodes[ROOT].failure.kind) == ("failed", "index")
        assert tree.leaves() == [] and Cost.of(tree) == Cost()


def test_if_no_task_can_be_set_up_nothing_is_played():
    def hook(event, subject):
        if event == "begin":
            raise InfrastructureError("index", "unreachable")

    with collector(make_env=lambda: Walk(hook), expansions=2) as made:
        collection = asyncio.run(made.collect(TASKS, 8))
    assert collection.counts.tolist() == [0, 0, 0] and leaves(collection) == []


def test_an_environment_that_cannot_be_made_fails_its_episode():
    """The first three serve the prompts; making any more breaks."""
    made = []

    def make_env():
        if len(made) == 3:
            raise InfrastructureError("port", "all taken")
        made.append(Walk())
        return made[-1]

    statuses = Counter(node.status == "failed" for node in leaves(grow(make_env=make_env)))
    assert statuses == {True: 6, False: 3}
