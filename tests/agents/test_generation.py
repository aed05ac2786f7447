"""Answering continuously: nothing known is read twice or kept too long, and the numbers are those of the model."""

import asyncio
import random
import time

import numpy as np
import pytest
import torch
from small_models import CONFIGS, SIZES, build, scored
from transformers import AutoModelForCausalLM, Lfm2Config

from trace_gym.agents import decoding
from trace_gym.agents.kv_store import PrefixStore
from trace_gym.agents.transformers import TransformersAgent
from trace_gym.allocation import get_allocator
from trace_gym.collect import Collector
from trace_gym.envs.text_env import TextEnv, TurnResult
from trace_gym.errors import InfrastructureError
from trace_gym.messages import Message, Request
from trace_gym.predictor import PosteriorPredictor

pytestmark = pytest.mark.usefixtures("one_thread")


def some_ids(num, rng):
    return tuple(rng.randrange(2, 258) for _ in range(num))


class Talk:
    """Branches of two trees that talk turn by turn, fork, and check every answer against a fresh forward pass."""

    def __init__(self, agent, check=True):
        self.agent = agent
        self.check = check
        self.generation = agent.generation()
        self.rng = random.Random(5)
        self.paths = {}  # every distinct prefix that was answered: what the model had to read at least
        self.order = []
        self.num_asked = self.num_decoded = 0  # tokens of prompts; tokens read while decoding

    async def turn(self, asked, closed=()):
        """Ask for answers to prefixes, by key; return them."""
        found = {}
        requests = [
            (key, Request((), prompt_ids=ids, seed=hash((key, len(ids))) % 2**31, max_tokens=most))
            for key, (ids, most) in asked.items()
        ]
        while len(found) < len(asked):
            await self.generation.burst(requests, found.__setitem__, closed)
            requests, closed = [], ()
        self.order += found
        for key, answer in found.items():
            ids = asked[key][0]
            self.paths[ids + answer.token_ids[:-1]] = None
            self.num_asked += len(ids)
            self.num_decoded += len(answer.token_ids) - 1
            if self.check:
                np.testing.assert_allclose(answer.logprobs, scored(self.agent.model, ids, answer.token_ids), atol=1e-4)
        return {key: asked[key][0] + found[key].token_ids for key in asked}

    async def play(self):
        """Three turns of four roots with a common start, then forks of the first two turns, then three turns more."""
        start = some_ids(20, self.rng)
        prompts = [start + some_ids(11, self.rng), start + some_ids(17, self.rng)]
        now = {(tree, i): prompts[tree] for tree in (0, 1) for i in range(2)}
        anchors = []
        for _ in range(3):
            anchors.append(dict(now))
            now = await self.turn({key: (ids, 1 + self.rng.randrange(20)) for key, ids in now.items()})
            now = {key: ids + some_ids(self.rng.randrange(1, 9), self.rng) for key, ids in now.items()}
        forks = {(*key, 1 + turn, k): anchors[1 + turn][key] for key in now for turn in range(2) for k in range(2)}
        for _ in range(2):
            forks = await self.turn({key: (ids, 1 + self.rng.randrange(20)) for key, ids in forks.items()})
            forks = {key: ids + some_ids(self.rng.randrange(1, 9), self.rng) for key, ids in forks.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_over_kept_prefixes_are_those_of_a_fresh_forward_pass(name, tokenizer):
    """Turn after turn and at forks, with more branches than places; log-probabilities agree to 1e-4."""
    talk = Talk(TransformersAgent(build(name), tokenizer, batch_size=5))
    asyncio.run(talk.play())
    assert len(talk.order) > 40


def test_no_token_of_a_known_prefix_is_read_again(tokenizer, monkeypatch):
    """All reads are of distinct prefixes, but that a prompt known as a whole gives up its last token for its logits."""
    monkeypatch.setattr(decoding, "PASS_TOKENS", 0)  # else a few tokens are read twice rather than in a pass more
    talk = Talk(TransformersAgent(build(), tokenizer, batch_size=64), check=False)
    asyncio.run(talk.play())
    distinct = len({path[: n + 1] for path in talk.paths for n in range(len(path))})
    reads = talk.generation.num_read + talk.num_decoded
    assert distinct <= reads <= distinct + len(talk.order)
    assert talk.generation.num_read < talk.num_asked / 3


def test_the_same_calls_bring_the_same_numbers_to_the_last_bit(tokenizer):
    """What is kept, dropped and decoded together is no matter of chance, memory limit included."""

    def once():
        talk = Talk(TransformersAgent(build(), tokenizer, batch_size=5, cache_bytes=60_000), check=False)
        given = []
        burst = talk.generation.burst

        async def noted(requests, finished, closed=()):
            await burst(requests, lambda key, answer: (given.append((key, answer)), finished(key, answer)), closed)

        talk.generation.burst = noted
        asyncio.run(talk.play())
        return given

    assert once() == once()


def test_an_answer_is_that_of_the_request_alone(tokenizer):
    """Seeds decide, not who else is answered or what is kept."""
    agent = TransformersAgent(build(), tokenizer)
    rng = random.Random(3)
    wanted = [Request((), prompt_ids=some_ids(20, rng), seed=i, max_tokens=12) for i in range(6)]

    async def together():
        generation, found = agent.generation(), {}
        await generation.burst([((0, 0), wanted[0])], found.__setitem__)
        await generation.burst([((0, i), wanted[i]) for i in range(1, 6)], found.__setitem__)
        while len(found) < 6:
            await generation.burst([], found.__setitem__)
        return [found[0, i].token_ids for i in range(6)]

    alone = [completion.token_ids for completion in asyncio.run(agent.complete(wanted))]
    assert asyncio.run(together()) == alone


def test_short_answers_leave_while_a_long_one_goes_on(tokenizer):
    """A place is free as soon as its answer is there, and an answer is given away at once."""
    model = build()
    with torch.no_grad():
        model.lm_head.weight[1] = 0  # nobody says "end" by chance
    agent = TransformersAgent(model, tokenizer, batch_size=2, max_tokens=200)
    talk = Talk(agent, check=False)
    rng = random.Random(1)
    asked = {(0, i): (some_ids(9, rng), 150 if i == 0 else 4) for i in range(9)}
    asyncio.run(talk.turn(asked))
    assert talk.order[-1] == (0, 0) and len(talk.order) == 9


@pytest.mark.parametrize("when", ["between turns", "within a turn"])
def test_keys_and_values_of_old_weights_are_never_used(when, tokenizer):
    """After an update, what was kept is forgotten and what is being decoded is read anew."""
    model = build()
    agent = TransformersAgent(model, tokenizer, max_tokens=60)
    rng = random.Random(2)
    first = some_ids(30, rng)
    found = {}

    def update():
        torch.manual_seed(9)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    async def play():
        generation = agent.generation()
        if when == "between turns":
            await generation.burst([((0, 0), Request((), prompt_ids=first, max_tokens=9))], found.__setitem__)
            start, sampled = first + found.pop((0, 0)).token_ids + some_ids(4, rng), 0
            update()
        else:
            start, sampled = first, 16
        requests = [((0, 1), Request((), prompt_ids=start, max_tokens=40, seed=4))]
        for burst in range(9):
            await generation.burst(requests, found.__setitem__)
            requests = []
            if when == "within a turn" and burst == 0:
                assert not found
                update()
        return start, sampled

    model.lm_head.weight.data[1] = 0
    start, sampled = asyncio.run(play())
    answer = found[0, 1]
    expected = scored(model, start, answer.token_ids)
    np.testing.assert_allclose(answer.logprobs[sampled:], expected[sampled:], atol=1e-4)
    assert len(answer.token_ids) > sampled + 5


def test_what_is_kept_is_bounded_and_goes_with_its_tree(tokenizer):
    """Never more bytes than allowed; a closed tree leaves nothing behind, whoever shared its start."""
    limit = 60_000
    talk = Talk(TransformersAgent(build(), tokenizer, batch_size=5, cache_bytes=limit))
    store = talk.generation._decoder.store
    seen = []
    add = store.add
    store.add = lambda *args: (add(*args), seen.append(store.bytes))
    asyncio.run(talk.play())
    assert max(seen) <= limit and len(seen) > 40
    assert store.bytes > 0
    tree = asyncio.run(talk.turn({(2, 0): (some_ids(40, talk.rng), 5)}, closed=(0, 1)))
    assert store.bytes == (len(tree[2, 0]) - 1) * 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dim, float32


def test_a_failing_burst_is_an_infrastructure_failure(tokenizer, monkeypatch):
    """As for whole batches; a generation begun afterwards works."""
    model = build()
    agent = TransformersAgent(model, tokenizer)
    request = Request((), prompt_ids=(5, 6, 7), max_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", lambda **_: torch.empty(1 << 60))
        with pytest.raises(InfrastructureError) as caught:
            asyncio.run(agent.generation().burst([((0, 0), request)], lambda *_: None))
    assert caught.value.kind == "generation"
    found = {}
    asyncio.run(agent.generation().burst([((0, 0), request)], found.__setitem__))
    assert found[0, 0].num_tokens == 3 or found[0, 0].finish_reason == "stop"


@pytest.mark.filterwarnings("ignore")  # the model's own, about kernels that are not installed
def test_a_model_with_a_recurrent_state_is_answered_in_whole_batches(tokenizer):
    """Its states can neither be cut at a prefix nor joined; the numbers are those of a plain forward pass."""
    config = Lfm2Config(**SIZES, layer_types=["conv", "full_attention"], block_multiple_of=8)
    torch.manual_seed(0)
    agent = TransformersAgent(AutoModelForCausalLM.from_config(config).eval(), tokenizer, batch_size=4)
    assert not agent._keeps_all_tokens
    rng = random.Random(0)
    wanted = [Request((), prompt_ids=some_ids(9, rng), seed=i, max_tokens=1 + i) for i in range(6)]
    for request, answer in zip(wanted, asyncio.run(agent.complete(wanted)), strict=True):
        expected = scored(agent.model, request.prompt_ids, answer.token_ids)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


# The store by itself.


def ids_as_kv(ids):
    """Keys and values that say which prefix they belong to."""
    sums = torch.tensor([hash(ids[: n + 1]) % 10**6 for n in range(len(ids))], dtype=torch.float64)
    return sums[None, None, :, None]


def test_the_store_finds_the_longest_known_prefix():
    """Against a plain set of prefixes, over random sequences that fork everywhere."""
    rng = random.Random(0)
    store, known, used = PrefixStore(10**9), {}, {}
    for _ in range(400):
        ids = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12)))
        group = rng.randrange(3)
        count, pieces = store.find(ids, group)
        longest = max((n for n in range(len(ids) + 1) if n == 0 or ids[:n] in known), default=0)
        assert count == longest
        if count:
            assert torch.equal(torch.cat(pieces, dim=2), ids_as_kv(ids)[:, :, :count])
        store.add(ids, ids_as_kv(ids)[:, :, count:], group)
        known |= {ids[: n + 1]: None for n in range(len(ids))}
        for n in range(len(ids)):
            used.setdefault(ids[: n + 1], set()).add(group)
        assert store.bytes == 8 * len(known)
    store.release(0)
    store.release(1)
    assert store.bytes <= 8 * len(known)
    store.release(2)
    assert store.bytes == 0


def test_a_full_store_drops_what_was_used_longest_ago():
    """The prefix that is asked for again and again stays, and nothing is kept without what it continues."""
    store = PrefixStore(8 * 40)
    kept = (1, 2, 3)
    store.add(kept, ids_as_kv(kept), 0)
    for n in range(50):
        ids = (*kept, 10 + n, *range(9))
        count, _ = store.find(ids, 0)
        assert count == 3
        store.add(ids, ids_as_kv(ids)[:, :, 3:], 0)
        assert store.bytes <= 8 * 40
    assert store.find((*kept, 59, 0), 0)[0] == 5
    assert store.find((*kept, 10, 0), 0)[0] == 3
    gone = (*kept, 10, *range(9))
    store.add((*gone, 7), ids_as_kv((*gone, 7))[:, :, -1:], 0)  # what stands before is not known any more
    assert store.find((*gone, 7), 0)[0] == 3


# With the collector.


class Notes(TextEnv):
    """Answers with a number that depends on all that was said; decided after a few turns."""

    task_ids = ("a", "b", "c")

    def __init__(self, nap=0.0):
        super().__init__(max_turns=4)
        self.nap = nap

    def _begin(self, task_id, seed):
        return (Message("system", "Say something to get a number."), Message("user", task_id)), ()

    def _play(self, episode, action):
        time.sleep(self.nap * random.random())
        world = (*episode.world, sum(map(ord, action)) % 1000)
        if sum(world) % 3 == 0:
            return TurnResult((), world, float(len(world) % 2), {"verdict": "decided", "reason": "sum"})
        return TurnResult((Message("tool", f"number {world[-1]}", "notes"),), world, tool_calls=1)

    def _dump_world(self, world):
        return list(world)

    def _load_world(self, data, live, reseed):
        return tuple(data)

    def _twin(self):
        return Notes(self.nap)


def notes(agent, nap=0.0):
    """Return a collector of notes, with Stage 2."""
    options = {"allocator": get_allocator("trace"), "predictor": PosteriorPredictor(), "expansions": 2}
    return Collector(lambda: Notes(nap), agent, encoder=agent.encoder, **options)


def test_trees_are_equal_to_the_last_bit_and_true_to_the_model_whatever_the_timing(tokenizer):
    """With Stage 2, more branches than places and a small store; log-probabilities of every path agree to 1e-4."""
    model = build()
    agent = TransformersAgent(model, tokenizer, batch_size=6, max_tokens=12, cache_bytes=100_000)

    def grow(nap):
        with notes(agent, nap) as collector:
            return asyncio.run(collector.grow(Notes.task_ids, (3, 2, 3))).trees

    trees, again = grow(0.0), grow(0.02)
    assert [tree.nodes for tree in trees] == [tree.nodes for tree in again]
    continued = 0
    for tree in trees:
        for leaf in tree.leaves():
            ids, sampled, logprobs = map(np.array, zip(*tree.tokens(leaf), strict=True))
            expected = scored(model, ids[:1].tolist(), ids[1:].tolist())
            np.testing.assert_allclose(logprobs[1:][sampled[1:]], expected[sampled[1:]], atol=1e-4)
            continued += tree.nodes[leaf].birth != 0
    assert continued > 4


def test_a_round_can_be_cancelled_while_the_model_works(tokenizer):
    """Nothing of it is left in the next: its trees are those of a fresh agent, to the last bit."""
    model, rng = build(), random.Random(0)

    def fresh():
        return TransformersAgent(model, tokenizer, batch_size=6, max_tokens=12, cache_bytes=100_000)

    async def play(collector):
        for _ in range(8):
            round_ = asyncio.ensure_future(collector.grow(Notes.task_ids, (3, 2, 3)))
            await asyncio.wait([round_], timeout=0.1 * rng.random())
            round_.cancel()
            await asyncio.wait([round_])
            assert asyncio.all_tasks() == {asyncio.current_task()}
        return await collector.grow(Notes.task_ids, (3, 2, 3))

    with notes(fresh()) as collector, notes(fresh()) as undisturbed:
        found = asyncio.run(play(collector))
        expected = asyncio.run(undisturbed.grow(Notes.task_ids, (3, 2, 3)))
    assert [tree.nodes for tree in found.trees] == [tree.nodes for tree in expected.trees]
