"""Laws of the predictors that need a language model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trace_gym.agents.transformers import TransformersAgent
from trace_gym.chat import ChatEncoder
from trace_gym.errors import StateError
from trace_gym.messages import Message
from trace_gym.predictor import MODEL_PREDICTORS, TextFeaturePredictor
from trace_gym.processes import ALONE
from trace_gym.training import TraceGRPOTrainer
from trace_gym.training.prefix_reader import PrefixReader, read_rows
from trace_gym.training.torch_predictor import make_predictor
from trace_gym.tree import Prefix

MakeTrainer = Callable[..., TraceGRPOTrainer]


@pytest.fixture
def make(model: Any, tokenizer: Any) -> Callable[..., Any]:
    return lambda name, seed=0, **options: make_predictor(name, seed, model, ChatEncoder(tokenizer), ALONE, **options)


def step(encoder: ChatEncoder, seed: int, size: int = 60) -> tuple[list[Prefix], np.ndarray]:
    """Return prefixes of a game, and how often each is won: the task and what was observed decide."""
    rng = np.random.default_rng(seed)
    prefixes, chances = [], []
    for _ in range(size):
        digit, hint = int(rng.integers(4)), ("higher", "lower")[int(rng.integers(2))]
        asked = Message("user", f"guess {digit}{'abcdef'[int(rng.integers(6))]}")
        messages: tuple[Message, ...] = (asked,)
        chance = (0.05, 0.3, 0.6, 0.9)[digit]
        if rng.random() < 0.5:
            messages = (asked, Message("assistant", "1"), Message("user", hint))
            chance = 0.9 if hint == "higher" else 0.1
        # A task of its own each, so that only the text tells.
        task = f"{seed}-{len(prefixes)}"
        prefixes.append(Prefix(task, messages, turn=len(messages) // 2, token_ids=encoder.prompt(messages)))
        chances.append(chance)
    return prefixes, np.array(chances)


def log_loss(predicted: np.ndarray, chances: np.ndarray) -> float:
    return float(-np.mean(chances * np.log(predicted) + (1 - chances) * np.log(1 - predicted)))


def teach(predictor: Any, encoder: ChatEncoder, steps: int, start: int = 0) -> None:
    rng = np.random.default_rng(99 + start)
    for seed in range(start, start + steps):
        prefixes, chances = step(encoder, seed)
        predictor.predict(prefixes)
        predictor.update(prefixes, rng.binomial(3, chances), np.full(len(chances), 3))


@pytest.mark.parametrize("name", MODEL_PREDICTORS)
def test_it_predicts_better_than_the_constant(make: Any, tokenizer: Any, name: str) -> None:
    """On prefixes of tasks that it never saw, where features of the text do so too."""
    encoder = ChatEncoder(tokenizer)
    prefixes, chances = step(encoder, seed=1_000, size=200)
    predictor = make(name)
    assert predictor.predict(prefixes) == pytest.approx(0.5), "nothing is known before the first outcome"
    teach(predictor, encoder, steps=8)
    text = TextFeaturePredictor()
    teach(text, encoder, steps=8)
    constant = log_loss(np.full(len(chances), chances.mean()), chances)
    least = log_loss(chances, chances)
    for told in (predictor, text):
        explained = (constant - log_loss(told.predict(prefixes), chances)) / (constant - least)
        assert explained > 0.5, f"{type(told).__name__} explains {explained:.0%} of what can be explained"


@pytest.mark.parametrize("name", MODEL_PREDICTORS)
def test_a_restored_predictor_goes_on_exactly(make: Any, tokenizer: Any, tmp_path: Any, name: str) -> None:
    """Through a file, as a checkpoint holds it: predictions, and what is learnt afterwards, are the same."""
    encoder = ChatEncoder(tokenizer)
    first, second = make(name), make(name, seed=5)
    teach(first, encoder, steps=2)
    torch.save(first.get_state(), tmp_path / "state.pt")
    second.set_state(torch.load(tmp_path / "state.pt", weights_only=True))
    teach(first, encoder, steps=1, start=2)
    teach(second, encoder, steps=1, start=2)
    prefixes, _ = step(encoder, seed=7)
    assert np.array_equal(first.predict(prefixes), second.predict(prefixes))
    other = next(kind for kind in MODEL_PREDICTORS if kind != name)
    with pytest.raises(StateError, match="kind"):
        make(other).set_state(first.get_state())


def test_a_value_head_can_have_a_model_of_its_own(make: Any, model: Any, tokenizer: Any, tmp_path: Any) -> None:
    """It reads messages with its own tokenizer; the ids of the policy mean nothing to it."""
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    own = make("value_head", model_name=str(tmp_path / "small"))
    prefix = Prefix("a", (Message("user", "guess 0a"),), token_ids=(1, 2, 3))
    assert own.reader.ids(prefix) == ChatEncoder(tokenizer).prompt(prefix.messages)


def test_a_prefix_of_a_prefix_is_read_with_it(model: Any) -> None:
    """And its state is what reading it alone gives."""
    ids = [tuple(range(9, 9 + n)) for n in (3, 12, 7)] + [(9, 10, 30)]
    widths = []
    decoder = model.get_decoder()
    hook = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    with torch.no_grad():
        found = {
            row: state for rows, states in read_rows(decoder, ids) for row, state in zip(rows, states, strict=True)
        }
        assert widths == [(2, 12)]
        hook.remove()
        for row in ids:
            alone = decoder(input_ids=torch.tensor([row])).last_hidden_state[0, -1]
            torch.testing.assert_close(found[row], alone, rtol=1e-4, atol=1e-5)


def test_the_samplers_forward_passes_are_used(make_trainer: MakeTrainer) -> None:
    """Of what is predicted at turn boundaries nothing is read twice, and what is kept equals a fresh reading."""
    trainer = make_trainer(agent_factory=TransformersAgent, predictor="hidden")
    reader = trainer.predictor.reader
    passes: list[bool] = []
    trainer.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(kwargs.get("use_cache")), with_kwargs=True
    )
    collected = trainer._collect([f"{digit}a" for digit in "0123"])
    assert passes.count(False) == 1, "only the prompts, before the first allocation"
    prefixes = [tree.prefix(0) for tree in collected.trees] + [
        tree.prefix(node)
        for tree in collected.trees
        for node in range(1, len(tree))
        if tree.nodes[node].status == "open"
    ]
    assert len(prefixes) > 10
    states = reader(prefixes)
    assert passes.count(False) == 1
    fresh = PrefixReader(trainer.model, reader.encoder)(prefixes)
    torch.testing.assert_close(states, fresh, rtol=1e-3, atol=1e-4)
    trainer.source.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_PREDICTORS)
def test_a_resumed_run_predicts_as_the_uninterrupted_one(make_trainer: MakeTrainer, tmp_path: Any, name: str) -> None:
    """Also from the middle of a collection."""
    options = {"agent_factory": TransformersAgent, "predictor": name, "max_steps": 4, "updates_per_step": 2}
    whole = make_trainer(**options, save_strategy="steps", save_steps=3)
    whole.train()
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    expected, got = whole.predictor.get_state(), resumed.predictor.get_state()
    assert expected["steps"] == got["steps"] == 2
    for key, value in expected["network"].items():
        assert torch.equal(value, got["network"][key])
    assert expected["posterior"] == got["posterior"]


def test_the_policy_is_left_alone(make: Any, model: Any, tokenizer: Any) -> None:
    """A value head trains its own copy; a probe trains no language model at all."""
    before = copy.deepcopy(model.state_dict())
    for name in MODEL_PREDICTORS:
        teach(make(name), ChatEncoder(tokenizer), steps=1)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())
