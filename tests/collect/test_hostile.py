"""Whatever agents and worlds do, trees keep their laws; wherever a round is cancelled, nothing of it goes on."""

import asyncio
import threading
import time

import numpy as np
import pytest
from walk import END, TASKS, Talker, Walk, collector, grow, nodes

from trace_gym.allocation import Allocator, get_allocator
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Completion
from trace_gym.tree import ROOT


class Saying(Talker):
    """Gives the same text always, spelled by letters, and cut where the request has it."""

    def __init__(self, text, batched=True):
        super().__init__(batched)
        self.text = text

    def answer(self, request):
        ids = tuple(map(ord, self.text))[: request.max_tokens]
        return Completion("".join(map(chr, ids)).replace(END, ""), ids, (-1.0,) * len(ids), num_tokens=len(ids))


class Endless(Walk):
    """A world that goes on for ever and says nothing."""

    def __init__(self, hook=None):
        super().__init__(hook)
        self.max_turns = 10**9

    def _twin(self):
        return Endless(self.hook)


class Slow(Walk):
    """A world that takes its time, and in which no two calls may run at once."""

    def __init__(self, hook=None):
        super().__init__(hook)
        self.lock = threading.Lock()
        self.naps = np.random.default_rng(0)

    def reset(self, **options):
        return self._alone(super().reset, **options)

    def set_state(self, state, reseed=None):
        self._alone(super().set_state, state, reseed)

    def step(self, action):
        return self._alone(super().step, action)

    def _alone(self, call, *args, **options):
        if not self.lock.acquire(blocking=False):
            raise RuntimeError("two calls at once")
        time.sleep(0.05 if self.naps.random() < 0.1 else 0.002)
        self.lock.release()
        return call(*args, **options)


def every_depth(values, reward, budget, rng):
    """One continuation from every prefix, whatever the budget."""
    return np.ones(len(values), dtype=np.int64)


def assert_lawful(collection, counts, limit=None):
    """What every tree has to keep."""
    for tree, count in zip(collection.trees, counts, strict=True):
        leaves = tree.leaves()
        bare = [leaf for leaf in leaves if tree.nodes[leaf].birth == ROOT]
        assert len(bare) == count
        for index, node in enumerate(tree.nodes[1:], start=1):
            assert node.parent < index and (node.status == "open") == (index not in leaves)
            if node.status != "failed":
                assert node.messages[0].role == "assistant" and sum(node.sampled) == node.num_generated
        for leaf in leaves:
            node = tree.nodes[leaf]
            assert (node.reward is None) == (node.status == "failed") == (node.failure is not None)
            assert limit is None or len(tree.token_ids(leaf)) <= limit


TEXTS = {"nothing": "", "an end": END, "ends": END * 9, "markup": "<assistant><user>stop", "much": "x" * 20_000}


@pytest.mark.parametrize("make_env", [Walk, Endless])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("max_tokens", [1, 60])
def test_trees_keep_their_laws_whatever_is_said(text, make_env, max_tokens):
    """Also in a world without an end: there the context is the end."""
    collection = grow(("a", "b"), (2, 1), Saying(text), make_env, max_tokens=max_tokens, max_context=400, expansions=2)
    assert_lawful(collection, (2, 1), 400)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_an_answer_of_any_length_is_played_where_there_is_no_limit(text):
    assert_lawful(grow(("a",), (2,), Saying(text), expansions=1), (2,))


@pytest.mark.parametrize("limits", [{"max_tokens": 5}, {"max_context": 60}])
def test_an_agent_that_says_more_than_it_may_is_refused(limits):
    """Else a sequence would be longer than the caller can hold."""

    class Rambling(Saying):
        def answer(self, request):
            return Completion(self.text, tuple(map(ord, self.text)), num_tokens=len(self.text))

    with pytest.raises(BadInputError, match="at most"):
        grow(("a",), (1,), Rambling("x" * 100), **limits)


@pytest.mark.parametrize("count", [1, 64])
@pytest.mark.parametrize("batched", [True, False])
def test_one_root_or_many_continued_at_every_depth(count, batched):
    """Every prefix of every bare rollout gets its continuation, and equal seeds give equal trees."""
    allocator = Allocator(get_allocator("uniform").root_rule, every_depth)

    def once():
        return grow(("a",), (count,), Talker(batched), expansions=1, allocator=allocator)

    collection = once()
    assert_lawful(collection, (count,))
    (tree,) = collection.trees
    born = {tree.nodes[leaf].birth for leaf in tree.leaves()} - {ROOT}
    bare = [leaf for leaf in tree.leaves() if tree.nodes[leaf].birth == ROOT]
    assert born == {index for leaf in bare for index in tree.path(leaf)[1:-1]}
    assert nodes(once()) == nodes(collection)


def unlucky(seed, share, make_error):
    """A hook of worlds, or of an agent, that raises at random."""
    rng, lock = np.random.default_rng(seed), threading.Lock()

    def hook(event, subject=None):
        with lock:
            fails = rng.random() < share
        if fails and event not in ("close", "end"):
            raise make_error()

    return hook


@pytest.mark.parametrize("seed", range(6))
def test_failures_at_random_places_fail_their_episodes_only(seed):
    """Of resets, steps, restores and answers; and every branch ends."""
    gone = unlucky(seed, 0.1, lambda: InfrastructureError("gone", "by lot"))
    with collector(Talker(seed % 2 == 0, hook=gone), lambda: Walk(gone), expansions=3) as made:
        collection = asyncio.run(made.grow(TASKS, (4, 4, 4)))
    begun = [4 * (tree.nodes[ROOT].status != "failed") for tree in collection.trees]
    assert_lawful(collection, begun)


@pytest.mark.parametrize("seed", range(6))
def test_a_bug_at_a_random_place_reaches_the_caller_and_the_collector_goes_on_afterwards(seed):
    """The next round of the same collector grows the trees that it would have grown anyway."""
    options = {"expansions": 2, "seed": seed}
    expected = nodes(grow(**options))
    broken = unlucky(seed, 0.04, lambda: KeyError("bug"))
    is_on = True

    def hook(event, subject=None):
        if is_on:
            broken(event, subject)

    async def play(made):
        nonlocal is_on
        with pytest.raises(KeyError):
            for _ in range(20):
                await made.grow(TASKS, (3, 2, 4))
        assert asyncio.all_tasks() == {asyncio.current_task()}
        is_on = False
        return await made.grow(TASKS, (3, 2, 4))

    with collector(Talker(seed % 2 == 0, hook=hook), lambda: Walk(hook), **options) as made:
        assert nodes(asyncio.run(play(made))) == expected


@pytest.mark.parametrize("batched", [True, False])
def test_a_round_can_be_cancelled_anywhere(batched):
    """Nobody is asked any more, no task goes on, every environment is closed, and the collector can go on."""
    envs, closed = [], []
    rng = np.random.default_rng(0)
    agent = Talker(batched, nap=0.02)

    def make_env():
        envs.append(Slow(lambda event, subject: closed.append(subject) if event == "close" else None))
        return envs[-1]

    async def cancelled(made, after):
        """Cancel after a while; return whether there was anything to cancel."""
        round_ = asyncio.ensure_future(made.grow(TASKS, (3, 2, 4)))
        await asyncio.wait([round_], timeout=after)
        is_cancelled = round_.cancel()
        await asyncio.wait([round_])
        assert round_.cancelled() == is_cancelled
        asked = len(agent.requests)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await asyncio.sleep(0.03)
        assert len(agent.requests) == asked
        return is_cancelled

    with collector(agent, make_env, expansions=2) as made:
        cut = [asyncio.run(cancelled(made, after)) for after in rng.uniform(0, 0.1, size=20)]
        assert any(cut)
        assert nodes(asyncio.run(made.grow(TASKS, (3, 2, 4)))) == nodes(grow(expansions=2))
    assert {id(env) for env in envs} == {id(env) for env in closed}
