"""The local-model agent decodes what transformers decodes, exactly accounted for and independent of order."""

import asyncio
import math
import random

import numpy as np
import pytest
import torch
from small_models import CONFIGS, build, scored

from trace_gym.agents import decoding, kv_batch
from trace_gym.agents.transformers import TransformersAgent
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Message, Request

pytestmark = pytest.mark.usefixtures("one_thread")


def prompts(num, low=3, high=30, seed=0):
    rng = random.Random(seed)
    return [tuple(rng.randrange(2, 258) for _ in range(rng.randint(low, high))) for _ in range(num)]


def requests(num=12, **options):
    options = {"max_tokens": 20, **options}
    return [Request(messages=(), prompt_ids=ids, seed=seed, **options) for seed, ids in enumerate(prompts(num))]


def answer(agent, wanted):
    return asyncio.run(agent.complete(wanted))


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_answers_equal_those_of_generate(name, tokenizer):
    """Left padding, shared prompts, dropped rows and the cache change nothing about greedy decoding."""
    model = build(name)
    wanted = requests(12)
    wanted += wanted[:3]
    found = answer(TransformersAgent(model, tokenizer, temperature=0), wanted)
    for request, completion in zip(wanted, found, strict=True):
        expected = model.generate(
            torch.tensor([request.prompt_ids]),
            attention_mask=torch.ones(1, len(request.prompt_ids), dtype=torch.long),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=1,
            pad_token_id=0,
        )[0, len(request.prompt_ids) :]
        assert completion.token_ids == tuple(expected.tolist())
        assert completion.num_tokens == len(completion.token_ids)


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_are_those_of_a_plain_forward_pass_at_the_temperature(name, tokenizer):
    """Log-softmax of logits / temperature at the sampled ids: TRL's old log-probabilities."""
    model = build(name)
    wanted = requests(10)
    found = answer(TransformersAgent(model, tokenizer, temperature=0.7), wanted)
    for request, completion in zip(wanted, found, strict=True):
        expected = scored(model, request.prompt_ids, completion.token_ids, 0.7)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_rows_that_stop_early_leave_the_others_unchanged(tokenizer):
    """Each answer equals the one that its request gets alone, whoever finishes before it."""
    agent = TransformersAgent(build(), tokenizer)
    wanted = [
        Request(messages=(), prompt_ids=ids, seed=i, max_tokens=1 + 7 * i % 19) for i, ids in enumerate(prompts(16))
    ]
    together = answer(agent, wanted)
    alone = [answer(agent, [request])[0] for request in wanted]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.num_tokens for c in together] == [1 + 7 * i % 19 for i in range(16)]


def test_the_order_of_requests_changes_nothing(tokenizer):
    """The same set of requests gives bit-equal answers in any order."""
    agent = TransformersAgent(build(), tokenizer, batch_size=5)
    wanted = requests(13)
    order = random.Random(1).sample(range(13), 13)
    straight = answer(agent, wanted)
    shuffled = answer(agent, [wanted[i] for i in order])
    assert shuffled == [straight[i] for i in order]


def test_no_global_generator_is_touched(tokenizer):
    """Sampling leaves torch's and numpy's global generators where they were."""
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    answer(TransformersAgent(build(), tokenizer), [])
    torch.random.set_rng_state(before)
    agent = TransformersAgent(build(), tokenizer)
    state = torch.random.get_rng_state()
    answer(agent, requests(4))
    assert torch.equal(state, torch.random.get_rng_state())


def test_seeds_draw_from_the_distribution_of_the_model(tokenizer):
    """Over many seeds the first token has the probabilities of the softmax."""
    model = build()
    ids = prompts(1)[0]
    wanted = [Request(messages=(), prompt_ids=ids, seed=s, max_tokens=1) for s in range(4000)]
    found = answer(TransformersAgent(model, tokenizer, batch_size=4000, temperature=2.0), wanted)
    counts = np.bincount([c.token_ids[0] for c in found], minlength=300)
    with torch.inference_mode():
        probs = (model(torch.tensor([ids])).logits[0, -1] / 2.0).softmax(-1).numpy()
    error = np.sqrt(probs * (1 - probs) / 4000)
    assert np.all(np.abs(counts / 4000 - probs) < 5 * error + 1e-3)


def test_top_p_draws_only_from_the_nucleus_and_reports_the_models_logprobs(tokenizer):
    """Tokens outside the smallest set of mass top_p never occur; log-probabilities are not renormalised."""
    model = build()
    ids = prompts(1)[0]
    wanted = [Request(messages=(), prompt_ids=ids, seed=s, max_tokens=1) for s in range(500)]
    found = answer(TransformersAgent(model, tokenizer, batch_size=500, top_p=0.5), wanted)
    with torch.inference_mode():
        probs = model(torch.tensor([ids])).logits[0, -1].softmax(-1).numpy()
    order = np.argsort(-probs)
    nucleus = order[: 1 + int(np.searchsorted(np.cumsum(probs[order]), 0.5))]
    assert {c.token_ids[0] for c in found} <= set(nucleus.tolist())
    assert len({c.token_ids[0] for c in found}) > 1
    for completion in found[:20]:
        assert completion.logprobs[0] == pytest.approx(math.log(probs[completion.token_ids[0]]), abs=1e-4)


def test_an_answer_stops_at_the_end_of_turn_token_and_keeps_it(tokenizer):
    """The end-of-turn id is the last sampled id and no part of the text."""
    model = build()
    with torch.no_grad():
        model.lm_head.weight[1] = model.lm_head.weight.sum(0) * 3
    wanted = requests(30)
    found = answer(TransformersAgent(model, tokenizer), wanted)
    stopped = [c for c in found if c.finish_reason == "stop"]
    assert stopped
    for completion in found:
        assert (completion.token_ids[-1] == 1) == (completion.finish_reason == "stop")
        assert 1 not in completion.token_ids[:-1]
        assert "<|end|>" not in completion.text


def test_buffers_grow_beyond_their_first_room(tokenizer, monkeypatch):
    """Answers longer than the preallocated room are the same as with enough of it."""
    model = build()
    wanted = requests(6, max_tokens=40)
    roomy = answer(TransformersAgent(model, tokenizer), wanted)
    monkeypatch.setattr(kv_batch, "ROOM", 3)
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 16)
    narrow = answer(TransformersAgent(model, tokenizer), wanted)
    assert [c.token_ids for c in narrow] == [c.token_ids for c in roomy]


def test_messages_are_encoded_where_no_ids_are_given(tokenizer):
    """A request without prompt ids is rendered with the tokenizer's chat template."""
    agent = TransformersAgent(build(), tokenizer, temperature=0, max_tokens=5)
    messages = (Message("user", "hi"),)
    ids = agent.encoder.prompt(messages)
    plain, exact = answer(agent, [Request(messages), Request(messages, prompt_ids=ids)])
    assert plain.token_ids == exact.token_ids


def test_a_full_context_gives_an_empty_answer_cut_by_length(tokenizer):
    """A conversation longer than the model's context is cut, not an error, and others are still answered."""
    agent = TransformersAgent(build("gpt2"), tokenizer, max_tokens=50)
    assert agent.max_context == 256
    wanted = [Request(messages=(), prompt_ids=(5,) * length) for length in (300, 256, 255, 10)]
    found = answer(agent, wanted)
    assert [c.num_tokens for c in found[:3]] == [0, 0, 1]
    assert found[0].finish_reason == "length"
    assert found[3].num_tokens > 1


def test_the_mode_of_the_model_is_put_back(tokenizer):
    """A training model is evaluated without dropout and trains on afterwards."""
    model = build("gpt2").train()
    agent = TransformersAgent(model, tokenizer)
    first, second = answer(agent, requests(3)), answer(agent, requests(3))
    assert first == second
    assert model.training


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks for a renamed property
def test_a_peft_model_answers_with_its_adapter(tokenizer):
    """LoRA weights take part in the answers."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(build(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    wanted = requests(3)
    found = answer(TransformersAgent(model, tokenizer), wanted)
    for request, completion in zip(wanted, found, strict=True):
        expected = scored(model, request.prompt_ids, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_failing_model_is_an_infrastructure_failure(tokenizer, monkeypatch):
    """Running out of memory says nothing about the policy; neither do logits that are not finite."""
    model = build().train()
    agent = TransformersAgent(model, tokenizer)
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(InfrastructureError, match="not finite") as caught:
        answer(agent, requests(2))
    assert caught.value.kind == "generation"
    monkeypatch.setattr(model, "forward", lambda **_: torch.empty(1 << 60))
    with pytest.raises(InfrastructureError) as caught:
        answer(agent, requests(2))
    assert caught.value.kind == "generation"
    assert model.training


def test_a_saved_model_loads_by_folder(tokenizer, tmp_path):
    """from_pretrained gives the same answers as the model that was saved."""
    model = build()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = TransformersAgent.from_pretrained(str(tmp_path), device="cpu", temperature=0)
    original = TransformersAgent(model, tokenizer, temperature=0)
    found, expected = answer(loaded, requests(3)), answer(original, requests(3))
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_tokens": 0}, {"batch_size": 0}],
)
def test_options_out_of_range_are_refused(options, tokenizer):
    """Bad options are named when the agent is made."""
    with pytest.raises(BadInputError):
        TransformersAgent(build(), tokenizer, **options)


@pytest.mark.parametrize("bad", [{"prompt_ids": ()}, {"prompt_ids": (3,), "max_tokens": 0}])
def test_requests_that_cannot_be_answered_are_refused(bad, tokenizer):
    """An empty prompt or no room for an answer is the caller's mistake."""
    with pytest.raises(BadInputError, match="max_tokens"):
        answer(TransformersAgent(build(), tokenizer), [Request(messages=(), **bad)])
