"""Laws of bursts: the same for equal answers whatever the timing, nobody is waited for too long, nothing is lost."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from trace_gym.batching import Batch, gather
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Completion, Request


class Speaker:
    """Works in bursts; an answer takes as many of them as the request's seed says."""

    batched = True

    def __init__(self, slack=1, hook=None):
        self.slack = slack
        self.hook = hook or (lambda number, requests: None)
        self.bursts, self.closed, self.begun = [], [], 0

    def generation(self):
        self.begun += 1
        return Bursts(self)


class Bursts:
    def __init__(self, speaker):
        self.speaker, self.slack, self.left = speaker, speaker.slack, {}

    async def burst(self, requests, finished, closed=()):
        self.speaker.bursts.append(tuple(key for key, _ in requests))
        self.speaker.closed.append(tuple(closed))
        if asyncio.iscoroutine(waiting := self.speaker.hook(len(self.speaker.bursts), requests)):
            await waiting
        self.left |= {key: 1 + request.seed for key, request in requests}
        for key in list(self.left):
            await asyncio.sleep(0)
            self.left[key] -= 1
            if not self.left[key]:
                del self.left[key]
                finished(key, Completion(str(key)))


class Party:
    """Branches that ask a random number of times; roots that have ended bring continuations."""

    def __init__(self, agent, nap=None, timeout_s=60.0):
        self.batch = Batch(agent, timeout_s)
        self.nap = nap or (lambda key: 0.0)
        self.failed = {}

    async def play(self, key):
        rng = np.random.default_rng(key)
        try:
            for _ in range(1 + rng.integers(5)):
                await asyncio.sleep(self.nap(key))
                answer = await self.batch.complete(key, Request((), seed=int(rng.integers(4))))
                assert answer.text == str(key)
        except InfrastructureError as error:
            self.failed[key] = error.kind
        more = [(*key, i) for i in range(rng.integers(3))] if len(key) == 2 else []
        self.batch.enter(more, after=key)
        self.batch.leave(key)
        await gather([self.play(continuation) for continuation in more])

    def run(self, num_trees=3, num_roots=4):
        async def run():
            keys = [(tree, root) for tree in range(num_trees) for root in range(num_roots)]
            self.batch.enter(keys)
            try:
                await asyncio.wait_for(gather([self.play(key) for key in keys]), 120)
            finally:
                await self.batch.close()

        asyncio.run(run())
        return self


def dawdle(seed):
    """Environments of which a few are fast and a few are slow, differently every time."""
    rng = np.random.default_rng(seed)
    return lambda key: float(rng.choice([0.0, 0.0, 0.001, 0.01]))


@pytest.mark.parametrize("slack", [0, 1, 2])
def test_bursts_are_the_same_whatever_the_timing(slack):
    """Who is in which burst, and when a tree is closed, depends on the answers alone."""
    plain = Speaker(slack)
    Party(plain).run()
    assert sum(map(len, plain.bursts)) > 40
    for seed in range(3):
        other = Speaker(slack)
        Party(other, dawdle(seed)).run()
        assert (other.bursts, other.closed) == (plain.bursts, plain.closed)


def test_a_burst_does_not_wait_for_an_environment_within_its_slack():
    """While a branch plays, the agent goes on with the others; after that many bursts it is waited for."""
    begun = {}

    def note(number, requests):
        begun.setdefault(number, asyncio.get_running_loop().time())

    async def run(slack):
        begun.clear()
        batch = Batch(Speaker(slack, note), 60.0)
        batch.enter([(0, 0), (0, 1)])

        async def quick():
            await batch.complete((0, 0), Request((), seed=0))
            await asyncio.sleep(0.2)  # the environment
            await batch.complete((0, 0), Request((), seed=0))
            batch.leave((0, 0))

        async def long():
            await batch.complete((0, 1), Request((), seed=5))
            batch.leave((0, 1))

        await gather([quick(), long()])
        await batch.close()
        return max(number for number, when in begun.items() if when < begun[1] + 0.1)

    assert [asyncio.run(run(slack)) for slack in (0, 1, 3)] == [1, 2, 4]


def test_a_tree_is_closed_once_and_is_not_asked_for_again():
    """What is kept of a tree can go when its last branch has ended, continuations included."""
    speaker = Speaker()
    Party(speaker).run(num_trees=6, num_roots=2)
    closed = Counter(tree for trees in speaker.closed for tree in trees)
    assert closed and set(closed.values()) == {1}
    for number, trees in enumerate(speaker.closed):
        asked = {key[0] for keys in speaker.bursts[number:] for key in keys}
        assert not asked & set(trees)


def test_a_failed_burst_fails_those_who_are_answered_and_no_others():
    """A generation is begun anew, and what failed is not heard of again."""

    def fail(number, requests):
        if number == 3:
            raise InfrastructureError("generation", "out of memory")

    speaker = Speaker(hook=fail)
    party = Party(speaker).run()
    assert speaker.begun == 2
    assert party.failed and set(party.failed.values()) == {"generation"}
    assert len(party.failed) < 12 and sum(map(len, speaker.bursts)) > 20


def test_a_burst_has_a_deadline():
    """One that hangs is a failure of kind "deadline"; its answers, should they come after all, reach nobody."""

    def hang(number, requests):
        return asyncio.sleep(60) if number == 2 else None

    party = Party(Speaker(hook=hang), timeout_s=0.1).run()
    assert party.failed and set(party.failed.values()) == {"deadline"}


@pytest.mark.parametrize("error", [KeyError("bug"), BadInputError("bug")])
def test_a_programming_error_reaches_the_caller(error):
    """And nobody waits for ever."""

    def fail(number, requests):
        if number == 2:
            raise error

    with pytest.raises(type(error)):
        Party(Speaker(hook=fail)).run()
