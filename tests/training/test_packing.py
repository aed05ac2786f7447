"""Laws of packed rows: the same numbers as flat rows, from fewer tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trl.trainer.utils
from torch.nn.attention.flex_attention import create_mask, flex_attention
from transformers import TrainerCallback
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trl.trainer.utils import add_fused_lm_head

from trace_gym.budget import Cost
from trace_gym.collect import Collection
from trace_gym.messages import Message
from trace_gym.training import TraceGRPOTrainer
from trace_gym.training.packing import PackedRows, pack_rows, prepare_model, tree_attention, why_not_packed
from trace_gym.training.policy import PolicyShape, build_model
from trace_gym.training.tree_batch import pad_rows, tree_rows
from trace_gym.tree import NO_PARENT, ROOT, Node, RolloutTree

MakeTrainer = Callable[..., TraceGRPOTrainer]
Tensors = dict[str, torch.Tensor]
LOSS_TYPES = ["dapo", "cispo", "grpo", "sapo", "bnpo", "dr_grpo"]
SHAPE = PolicyShape(hidden=16, layers=2, heads=2, mlp=32, vocabulary=300, context=128)


def grow(task_id: str, *rollouts: list[float], seed: int = 0) -> RolloutTree:
    """Return a tree with one bare rollout per list, of three turns; the other rewards are of its continuations.

    Turns have random lengths, and the environment adds the second token of each.
    """
    rng = np.random.default_rng(seed)

    def turn(parent: int, reward: float | None = None, birth: int = ROOT) -> int:
        size = int(rng.integers(2, 9))
        ids, sampled = tuple(rng.integers(10, 250, size).tolist()), tuple(k != 1 for k in range(size))
        logprobs = tuple(np.where(sampled, rng.uniform(-7, -4, size), 0.0).tolist())
        said, status = (Message("assistant", "x"),), "open" if reward is None else "terminal"
        node = Node(parent, said, ids, sampled, logprobs, status, reward, birth=birth, num_generated=sum(sampled))
        return grown.add(node)

    prompt = tuple(rng.integers(10, 250, int(rng.integers(5, 12))).tolist())
    root = Node(NO_PARENT, (Message("user", task_id),), prompt, (False,) * len(prompt), (0.0,) * len(prompt), value=0.5)
    grown = RolloutTree("test", task_id, root)
    for first, *others in rollouts:
        anchors = [turn(ROOT)]
        anchors.append(turn(anchors[0]))
        turn(anchors[1], first)
        for reward in others:
            anchor = anchors[int(rng.integers(2))]
            turn(turn(anchor, birth=anchor), reward, birth=anchor)
    return grown


# A prompt with many leaves, one with two, one whose outcomes are alike, one with a single rollout, one with none.
TREES = (
    grow("a", [1, 0, 0], [0, 1], [0], seed=1),
    grow("b", [1], [0], seed=2),
    grow("c", [1, 1], [1], seed=3),
    grow("d", [1], seed=4),
    grow("e", seed=5),
    grow("f", [0, 1, 1, 0], seed=6),
)


def batch(trees: tuple[RolloutTree, ...] = TREES) -> Tensors:
    """Return the padded rows of the trees with contrast."""
    return pad_rows(tree_rows(trees, [dict.fromkeys(tree.leaves(), 1.0) for tree in trees]), pad_id=0)


def packed_batch() -> tuple[PackedRows, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the layout, and ids, mask and scored tokens as `pack_rows` took them."""
    rows = batch()
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    return pack_rows(ids, mask, rows["tool_mask"]), ids, mask, rows["tool_mask"]


def adapter() -> Any:
    """Return the configuration of a LoRA adapter that changes the model from the start."""
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")


def distance(given: Tensors, expected: Tensors) -> float:
    """Return the largest relative L2 distance of any tensor."""
    assert given.keys() == expected.keys()
    return max(float((given[name] - value).norm() / value.norm()) for name, value in expected.items())


# The layout.


def test_every_unique_token_stands_once_and_sees_its_path() -> None:
    """Each row's path is its tokens from depth 0 on; a token sees exactly the tokens before it on its path."""
    packed, ids, mask, _ = packed_batch()
    rows = [tuple(row[keep].tolist()) for row, keep in zip(ids, mask.bool(), strict=True)]
    prefixes = {row[: i + 1] for row in rows for i in range(len(row))}
    tokens, positions, ends = packed.token_ids[0], packed.position_ids[0], packed.ends
    places = torch.arange(len(tokens))
    sees = (places <= places[:, None]) & (places[:, None] < ends)
    spelled = [tuple(tokens[seen].tolist()) for seen in sees]
    assert len(spelled) == len(prefixes) and set(spelled) == prefixes
    assert [len(path) - 1 for path in spelled] == positions.tolist()


def test_only_sampled_tokens_are_scored_each_once_from_its_predecessor() -> None:
    packed, ids, mask, scored = packed_batch()
    places = torch.arange(packed.ends.numel())
    expected = set()
    for row, keep, marks in zip(ids, mask.bool(), scored.bool(), strict=True):
        start = len(row) - len(marks)
        expected |= {tuple(row[: start + c + 1][keep[: start + c + 1]].tolist()) for c in marks.nonzero()[:, 0]}
    found = set()
    for source, target in zip(packed.sources, packed.targets[0], strict=True):
        path = packed.token_ids[0][(places <= source) & (source < packed.ends)]
        found.add((*path.tolist(), int(target)))
    assert found == expected and len(packed.sources) == len(expected)
    values = packed.to_rows(torch.arange(1.0, 1 + len(expected))[None])
    assert torch.equal(values > 0, scored.bool())


def test_branches_and_the_block_mask_attend_to_the_same_tokens() -> None:
    """The scaled dot product over paths is flex attention with the block mask; grouped heads included."""
    packed, *_ = packed_batch()
    size = packed.ends.numel()
    query, key, value = (torch.randn(1, heads, size, 16, dtype=torch.float64) for heads in (4, 2, 2))
    layer = torch.nn.Module()
    layer.num_key_value_groups = 2
    given, _ = tree_attention(layer, query, key, value, None, packed, scaling=0.3)
    mask = packed.block_mask()
    seen = create_mask(mask.mask_mod, None, None, size, size, device="cpu")
    repeated = (key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))
    dense = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=seen, scale=0.3)
    torch.testing.assert_close(given, dense.transpose(1, 2), rtol=1e-12, atol=1e-12)
    with pytest.warns(UserWarning, match="without torch.compile"):
        flexed = flex_attention(query, key, value, block_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(given, flexed.transpose(1, 2), rtol=1e-6, atol=1e-6)


# The same numbers.


def double_head(hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, *_: Any) -> tuple[Any, ...]:
    """Compute what TRL's chunked head does, in the precision of the model."""
    logps = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return logps.gather(1, labels[:, None])[:, 0], -(logps.exp() * logps).sum(-1), None, None, None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's own doing
@pytest.mark.parametrize("lora", [False, True])
def test_in_double_precision_packed_rows_are_flat_rows(monkeypatch: Any, tokenizer: Any, lora: bool) -> None:
    """Log-probabilities, entropies and every gradient of both agree to 1e-10.

    TRL's head and Llama's norm count in float32 whatever the model, and positions of padded rows begin after the
    padding, which costs the rotary embedding digits; these stand aside here.
    """
    monkeypatch.setattr(trl.trainer.utils._ChunkedLogProbFunction, "apply", double_head)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda norm, x: torch.rms_norm(x, x.shape[-1:], norm.weight, 1e-6))
    base = model = build_model(tokenizer, SHAPE, seed=0).double()
    add_fused_lm_head(base, temperature=0.7, outputs=("log_probs", "entropy"))
    if lora:
        model = pytest.importorskip("peft").get_peft_model(base, adapter()).double()
    prepare_model(model)
    packed, ids, mask, scored = packed_batch()
    labels = ids.masked_fill(mask == 0, -100)
    weights = torch.randn(2, *scored.shape, dtype=torch.float64) * scored
    found = []
    for inputs in (
        {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1, "labels": labels},
        packed.model_inputs(flex=False),
    ):
        model.zero_grad()
        outputs = model(**inputs, fused_lm_head=True)
        columns = [outputs.log_probs, outputs.entropy]
        to_rows = packed.to_rows if "packed_rows" in inputs else lambda x: x[:, -scored.size(1) :]
        logps, entropies = (to_rows(column) * scored for column in columns)
        (logps * weights[0] + entropies * weights[1]).sum().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        found.append(grads | {"logps": logps.detach(), "entropies": entropies.detach()})
    flat, merged = found
    assert distance(merged, flat) < 1e-10


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[Tensors] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def train_on(
    make_trainer: MakeTrainer, trees: tuple[RolloutTree, ...] = TREES, **options: Any
) -> tuple[Any, Gradients]:
    """Train on given trees instead of collected ones."""
    gradients = Gradients()
    trainer = make_trainer(callbacks=[gradients], **options)
    counts = np.array([len(grown.leaves()) for grown in trees])
    cost = sum((Cost.of(grown) for grown in trees), Cost())
    trainer._collect = lambda task_ids: Collection(trees, np.full(len(trees), 0.5), counts, cost, {"generate": 0.0})
    trainer.train()
    return trainer, gradients


def assert_same_training(make_trainer: MakeTrainer, tolerance: float = 1e-5, **options: Any) -> Any:
    """Train packed and flat; return the packed trainer."""
    flat, expected = train_on(make_trainer, packing=False, **options)
    packed, given = train_on(make_trainer, **options)
    assert len(given.steps) == len(expected.steps) > 0
    for mine, theirs in zip(given.steps, expected.steps, strict=True):
        assert distance(mine, theirs) < tolerance
    for mine, theirs in zip(packed.state.log_history, flat.state.log_history, strict=True):
        for name in {"loss", "entropy", "kl", "clip_ratio/region_mean"} & set(theirs):
            assert mine[name] == pytest.approx(theirs[name], rel=tolerance, abs=1e-6), name
    return packed


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_every_gradient_are_those_of_flat_rows(make_trainer: MakeTrainer, loss_type: str) -> None:
    """Uneven trees, singletons and masked observations, each token computed once: 1e-5 in float32."""
    trainer = assert_same_training(make_trainer, loss_type=loss_type)
    log = trainer.state.log_history[0]
    assert log["tree/forward_tokens"] < 0.7 * log["tree/row_tokens"]
    assert log["tree/forward_passes"] == 1 and log["tree/cut"] == 0


def test_old_and_reference_log_probabilities_are_those_of_flat_rows(make_trainer: MakeTrainer) -> None:
    """Several passes over a batch, a KL term, an entropy bonus and a temperature; the prefix trains once."""
    assert_same_training(
        make_trainer,
        peft_config=adapter(),
        beta=0.5,
        num_iterations=2,
        max_steps=2,
        temperature=0.7,
        entropy_coef=0.1,
        mask_prefix=True,
        optim="sgd",
    )


def test_an_adapter_trains_packed_as_it_trains_flat(make_trainer: MakeTrainer) -> None:
    assert_same_training(make_trainer, peft_config=adapter())


def test_activation_checkpointing_changes_nothing(make_trainer: MakeTrainer) -> None:
    assert_same_training(make_trainer, activation_checkpointing=True)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_tree_too_large_is_cut_without_changing_the_gradient(make_trainer: MakeTrainer, loss_type: str) -> None:
    """More parts than micro-batches of TRL's loop: several go into one, and memory holds one at a time."""
    trainer = assert_same_training(make_trainer, loss_type=loss_type, max_batch_tokens=40)
    log = trainer.state.log_history[0]
    assert log["tree/cut"] >= 2
    assert log["tree/forward_passes"] > trainer.args.gradient_accumulation_steps
    assert all(len(batches) >= 1 for batches in trainer._buffered_inputs)


# What cannot be packed, and what must not be trained on.


def tiny(name: str, **options: Any) -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "intermediate_size": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    attention = options.pop("attention", "sdpa")
    config = transformers.AutoConfig.for_model(name, **sizes, **options)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny("llama"), None),
        (lambda: tiny("qwen3"), None),
        (lambda: tiny("qwen2", attention="flex_attention"), None),
        (lambda: tiny("llama", attention="eager"), "attention is 'eager'; load it with attn_implementation="),
        (lambda: tiny("mistral", sliding_window=8), "sliding window"),
        (lambda: tiny("gemma3_text"), "layers of .*sliding_attention"),
        (lambda: tiny("mamba", attention="eager"), "attention is|in its own way"),
    ],
)
def test_models_that_cannot_take_packed_rows_are_known(model: Any, reason: str | None) -> None:
    found = why_not_packed(model())
    assert found is None if reason is None else re.search(reason, found)


def test_a_model_that_cannot_take_packed_rows_trains_on_flat_ones_and_says_so(
    make_trainer: MakeTrainer, model: Any
) -> None:
    _, expected = train_on(make_trainer)
    model.set_attn_implementation("eager")
    with pytest.warns(UserWarning, match="Trees train as flat rows: the model's attention is 'eager'"):
        trainer, given = train_on(make_trainer, model=model)
    log = trainer.state.log_history[0]
    assert log["tree/forward_tokens"] >= log["tree/row_tokens"]
    assert distance(given.steps[0], expected.steps[0]) < 1e-5


def test_a_model_can_be_given_to_a_second_trainer(make_trainer: MakeTrainer, model: Any) -> None:
    """It is prepared once; generation and flat calls are as before."""
    ids = torch.tensor([[5, 6, 7, 8]])
    before = model(ids).logits
    add_fused_lm_head(model)
    prepare_model(model)
    prepare_model(model)
    assert torch.equal(model(ids).logits, before)
    assert len(model.base_model._forward_hooks) == 1
