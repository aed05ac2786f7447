"""The default policy as it is built: what it can do before it has learned anything."""

import pytest
import torch

from trace_gym.training.policy import PolicyShape, build_model, build_tokenizer

SHAPE = PolicyShape(layers=2, mlp=256, vocabulary=1024)


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["a few words, by which no more than the alphabet is learned"], SHAPE, splits_words=True)


@pytest.mark.parametrize("seed", range(2))
def test_a_fresh_policy_with_induction_heads_repeats_what_it_saw(tokenizer, seed):
    """Of a random sequence that comes again it foretells most tokens; without these heads it knows nothing."""
    generator = torch.Generator().manual_seed(seed)
    once = torch.stack([torch.randperm(len(tokenizer), generator=generator)[:60] for _ in range(8)])
    twice, shares = torch.cat([once, once], 1), {}
    for copying in (False, True):
        with torch.no_grad():
            logits = build_model(tokenizer, SHAPE, seed, copying)(input_ids=twice).logits
        shares[copying] = (logits[:, 60:-1].argmax(-1) == twice[:, 61:]).float().mean()
    assert shares[False] < 0.1
    assert shares[True] > 0.75


def test_a_policy_is_a_function_of_its_seed(tokenizer):
    """Other code that draws from the global generator neither changes it nor is changed by it."""
    first = build_model(tokenizer, SHAPE, 0, copying=True).state_dict()
    state = torch.get_rng_state()
    torch.rand(3)
    second = build_model(tokenizer, SHAPE, 0, copying=True).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.set_rng_state(state)
    build_model(tokenizer, SHAPE, 1, copying=True)
    assert torch.equal(torch.get_rng_state(), state)
