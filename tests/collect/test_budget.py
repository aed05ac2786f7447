"""What is played: as the allocator has it, and no longer than the context."""

import asyncio
import threading

import numpy as np
import pytest
from walk import TASKS, Talker, Walk, collector, grow, leaves

from trace_gym.allocation import Allocator, get_allocator
from trace_gym.errors import BadInputError
from trace_gym.tree import ROOT


def test_stage_2_obeys_the_allocator():
    """Every finished bare rollout with a prefix is asked once; what is asked for is what is born there."""
    asked = []

    def rule(values, reward, budget, rng):
        asked.append((len(values), reward, budget))
        return np.bincount(rng.integers(len(values), size=budget), minlength=len(values))

    root_rule = get_allocator("uniform").root_rule
    collection = grow(expansions=3, allocator=Allocator(root_rule, rule))
    bare = [
        (len(tree.path(leaf)) - 2, tree.nodes[leaf].reward, 3)
        for tree in collection.trees
        for leaf in tree.leaves()
        if tree.nodes[leaf].birth == ROOT and len(tree.path(leaf)) > 2
    ]
    assert sorted(asked) == sorted(bare) and len(bare) == 9
    assert collection.cost.continuations == 3 * 9
    for tree in collection.trees:
        for leaf in tree.leaves():
            anchor = tree.nodes[leaf].birth
            assert anchor == ROOT or tree.nodes[anchor].value is not None


def test_a_partial_reward_counts_as_not_solved_for_the_allocator():
    """Stage 2 knows two outcomes; a reward of 0.5 is not a success and not a crash."""
    collection = grow(expansions=2, make_env=lambda: Walk(prize=0.5))
    assert {node.reward for node in leaves(collection)} == {0.0, 0.5}
    assert collection.cost.continuations == 18


def test_continuations_of_a_finished_root_start_before_slow_roots_end():
    """Stage 2 needs one outcome only; an endpoint's branches do not wait for one another."""
    events = []
    continued = threading.Event()

    def hook(event, subject):
        if event == "load" and subject.turn > 0 and subject.task_id == "a":
            continued.set()
        if event == "step" and subject.task_id == "slow" and subject.turn == 1:
            events.append(continued.wait(5))

    grow(("a", "slow"), (2, 1), agent=Talker(False), make_env=lambda: Walk(hook), expansions=2)
    assert events[0] is True


def test_collect_spends_the_budget_that_stage_1_divides():
    """Predictions, counts and trees have one entry per candidate; unplayed ones hold only their prompt."""
    with collector(expansions=1) as made:
        collection = asyncio.run(made.collect(("a", "b", "c", "d"), 4))
    assert collection.values.shape == collection.counts.shape == (4,)
    assert collection.counts.sum() == 4 == collection.cost.rollouts
    for tree, count, value in zip(collection.trees, collection.counts, collection.values, strict=True):
        assert sum(tree.nodes[leaf].birth == ROOT for leaf in tree.leaves()) == count
        assert tree.nodes[ROOT].value == value
    assert {"predict", "generate", "environment", "grade"} == set(collection.seconds)
    assert all(seconds >= 0 for seconds in collection.seconds.values())


def test_nothing_to_do_is_no_error():
    """No task, no budget, no count."""
    with collector(expansions=2) as made:
        for call in (made.collect((), 8), made.grow((), ())):
            empty = asyncio.run(call)
            assert (empty.trees, empty.cost.turns, empty.counts.shape) == ((), 0, (0,))
        for call in (made.collect(TASKS, 0), made.grow(TASKS, (0, 0, 0))):
            bare = asyncio.run(call)
            assert [len(tree) for tree in bare.trees] == [1, 1, 1] and bare.cost.rollouts == 0


@pytest.mark.parametrize("counts", [(1, 2), (1, 2, -1)])
def test_counts_that_do_not_fit_the_tasks_are_refused(counts):
    with collector() as made, pytest.raises(BadInputError, match="one count"):
        asyncio.run(made.grow(TASKS, counts))


@pytest.mark.parametrize("option", [{"expansions": -1}, {"seed": -1}, {"workers": 0}])
def test_numbers_out_of_range_are_refused(option):
    with pytest.raises(BadInputError):
        collector(**option)


def test_a_long_conversation_is_truncated():
    """It ends as wrong where an answer may not fit any more; no sequence is longer than the limit."""
    limit = 70
    collection = grow(agent=Talker(), max_context=limit, max_tokens=12, expansions=3)
    cut = [node for node in leaves(collection) if node.status == "truncated" and "tokens" in node.outcome["reason"]]
    assert cut and all(node.reward == 0.0 and node.outcome["verdict"] == "wrong" for node in cut)
    for tree in collection.trees:
        assert all(len(tree.token_ids(leaf)) <= limit for leaf in tree.leaves())
        assert all(all(tree.nodes[leaf].sampled) for leaf in tree.leaves())


@pytest.mark.parametrize("whose", ["collector", "agent"])
def test_a_first_prompt_that_cannot_fit_is_a_failure_and_nobody_is_asked(whose):
    """Kind "context", before any generation: the task is neither scored nor given a budget; the others play."""
    agent = Talker()
    long = "b" * 40
    options = {"max_context": 70} if whose == "collector" else {}
    if whose == "agent":
        agent.max_context = 70
    with collector(agent, **options) as made:
        collection = asyncio.run(made.grow(("a", long), (3, 3)))
    root = collection.trees[1].nodes[ROOT]
    assert (root.status, root.failure.kind, root.reward) == ("failed", "context", None)
    assert len(collection.trees[1]) == 1 and collection.trees[0].leaves()
    assert {request.messages[1].content for request in agent.requests} == {"a"}


def test_an_answer_is_never_asked_for_beyond_the_limit():
    """A prompt that leaves room for a short answer only gets a short answer."""
    agent = Talker()
    grow(("a",), (2,), agent=agent, max_context=50, max_tokens=40)
    assert agent.requests
    assert all(len(request.prompt_ids) + request.max_tokens <= 50 for request in agent.requests)


def test_what_the_agent_can_take_cuts_an_answer_but_ends_no_episode():
    """An agent's own context is full only when not one token fits; a long max_tokens is no reason to stop before."""
    agent = Talker()
    agent.max_context = 120
    collection = grow(agent=agent, max_tokens=100)
    assert max(len(request.prompt_ids) for request in agent.requests) > 20
    assert collection.cost.turns > 9
    assert all(len(request.prompt_ids) + request.max_tokens <= 120 for request in agent.requests)
