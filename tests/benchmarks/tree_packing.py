"""Packed trees against flat rows: ``python tests/benchmarks/tree_packing.py [--quick]``.

Forward and backward of the log-probabilities of all rows, with what the trainer uses for both: TRL's fused head, the
same division into forward passes, the same models (weights are random; they do not change the cost).

- prefix: 8 branches of 128 tokens over a prefix of 1,024, SmolLM2-135M's shape with fewer layers and, in the same
  proportion, a smaller vocabulary.
- mathcode: the rows of one step of the main job (`mathcode_rows.json`: 20 trees with contrast, 240 leaves), its policy.
- bfcl: a tree of 4 rollouts with 2 continuations each, 6 turns, over a prompt of 10,000 tokens, two layers.
- chains: rows that share nothing, the main job's policy.

Time is seconds of processor time, the best of some rounds, so that a busy machine changes little. Memory is the peak
beyond what the loaded model takes. Every way runs in a process of its own, and what it returned is compared. The last
line is one JSON object: ``*_speedup`` is flat time / packed time, ``*_memory`` is packed peak / flat peak.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from trl.trainer.utils import add_fused_lm_head

from trace_gym.training.packing import pack_rows, prepare_model
from trace_gym.training.split import Limits, split_rows
from trace_gym.training.tree_batch import Row, pad_rows

POLICY = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}


@dataclass(frozen=True)
class Case:
    """What is compared.

    Attributes:
        name: Key of the ratios.
        rows: The rows of one optimizer step.
        shape: Fields of the model's configuration.
        dtype: Name of the torch type of weights and activations.
        most_rows: Most rows of a forward pass.
        most_tokens: Most tokens of a forward pass.
        rounds: How often it is timed.
    """

    name: str
    rows: Sequence[Row]
    shape: dict[str, int]
    dtype: str = "float32"
    most_rows: int = 64
    most_tokens: int = 16_384
    rounds: int = 3


def row(tree: int, prompt: Sequence[int], completion: Sequence[int], trained: Sequence[bool]) -> Row:
    """Return a row whose advantage is 1."""
    return Row(tree, 1, tuple(prompt), tuple(completion), tuple(trained), (-1.0,) * len(completion), 1.0)


def branches(prefix: int, count: int, size: int, vocabulary: int) -> list[Row]:
    """Return rows that share a prefix only, all of it prompt."""
    rng = np.random.default_rng(0)
    shared = rng.integers(vocabulary, size=prefix).tolist()
    return [row(0, shared, rng.integers(vocabulary, size=size).tolist(), [True] * size) for _ in range(count)]


def long_tree(prompt: int, rollouts: int, continuations: int, turns: int, turn: int, vocabulary: int) -> list[Row]:
    """Return the rows of rollouts and their continuations, whose turns are a third sampled and vary by a quarter."""
    rng = np.random.default_rng(0)
    shared = rng.integers(vocabulary, size=prompt).tolist()

    def play(count: int) -> list[list[int]]:
        sizes = rng.integers(turn * 3 // 4, turn * 5 // 4, count)
        return [rng.integers(vocabulary, size=size).tolist() for size in sizes]

    rows = []
    for _ in range(rollouts):
        bare = play(turns)
        cuts = rng.integers(1, turns, continuations).tolist()
        for path in [bare, *(bare[:cut] + play(turns - cut) for cut in cuts)]:
            ids = [token for part in path for token in part]
            rows.append(row(0, shared, ids, [k < len(part) // 3 for part in path for k in range(len(part))]))
    return rows


def chains(count: int, vocabulary: int) -> list[Row]:
    """Return rows of different prompts, of lengths as on MathCode."""
    rng = np.random.default_rng(0)
    found = []
    for tree in range(count):
        prompt, size = rng.integers(20, 60), rng.integers(30, 160)
        ids = rng.integers(vocabulary, size=prompt + size).tolist()
        found.append(row(tree, ids[:prompt], ids[prompt:], [k % 40 < 25 for k in range(size)]))
    return found


def recorded() -> list[Row]:
    """Return rows of a real step: tree, prompt length, tokens shared with the row before, new ids and flags."""
    rows, ids, flags = [], [], ""
    for tree, prompt, shared, new_ids, new_flags in json.loads(
        Path(__file__).with_name("mathcode_rows.json").read_text()
    ):
        ids, flags = ids[:shared] + new_ids, flags[:shared] + new_flags
        rows.append(row(tree, ids[:prompt], ids[prompt:], [flag == "1" for flag in flags[prompt:]]))
    return rows


def cases(quick: bool) -> list[Case]:
    """Return what is compared."""
    layers, vocabulary = (1, 1_638) if quick else (10, 16_384)
    prefix = branches(1024, 8, 128, vocabulary)
    shape = {**SMOLLM2, "num_hidden_layers": layers, "vocab_size": vocabulary}
    policy = {**POLICY, "vocab_size": 768}
    two = {**policy, "num_hidden_layers": 2}
    prompt, turn = (2_000, 40) if quick else (10_000, 200)
    return [
        Case("prefix_bf16", prefix, shape, "bfloat16", rounds=2 if quick else 3),
        Case("prefix_fp32", prefix, shape, rounds=1 if quick else 3),
        Case("mathcode", recorded()[: 120 if quick else None], policy, rounds=1 if quick else 3),
        Case("bfcl", long_tree(prompt, 4, 2, 6, turn, 768), two, most_tokens=200_000, rounds=1),
        Case("chains", chains(32 if quick else 128, 768), policy),
    ]


def build(case: Case) -> Any:
    """Return the model of a case, as TRL's trainer has it."""
    config = transformers.LlamaConfig(max_position_embeddings=16_384, tie_word_embeddings=True, **case.shape)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM._from_config(
        config, attn_implementation="sdpa", dtype=getattr(torch, case.dtype)
    )
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def step(model: Any, case: Case, packed: bool) -> list[float]:
    """Take the gradient of the log-probabilities of all sampled tokens; return their sum, and its length."""
    model.zero_grad()
    total = 0.0
    limits = Limits(case.most_rows, case.most_tokens, packed)
    for batch in split_rows(case.rows, 1, limits, np.random.default_rng(0))[0]:
        tensors = pad_rows(batch.rows, 0)
        ids = torch.cat([tensors["prompt_ids"], tensors["completion_ids"]], dim=1)
        mask = torch.cat([tensors["prompt_mask"], tensors["completion_mask"]], dim=1)
        scored = tensors["tool_mask"]
        if packed:
            layout = pack_rows(ids, mask, scored)
            logps = layout.to_rows(model(**layout.model_inputs(flex=False), fused_lm_head=True).log_probs)
        else:  # as TRL has it
            labels = ids.masked_fill(mask == 0, -100)
            labels[:, : -scored.size(1)] = -100
            outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
            logps = outputs.log_probs[:, -scored.size(1) :]
        loss = (logps * scored).sum()
        loss.backward()
        total += loss.item()
    return [total, float(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm())]


def measure(case: Case, packed: bool, answer: Any) -> None:
    """Send the best time, the peak memory in MB and what the step returned."""
    model = build(case)
    if packed:
        prepare_model(model)
    loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(case.rounds):
        start = time.process_time()
        found = step(model, case, packed)
        times.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - loaded
    answer.send((min(times), peak / 1024, found))


def compare(case: Case) -> tuple[float, float]:
    """Print a row of the table; return flat time / packed time and packed peak / flat peak."""
    found = []
    for packed in (False, True):
        receive, answer = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=measure, args=(case, packed, answer))
        child.start()
        answer.close()
        found.append(receive.recv())
        child.join()
    (flat_s, flat_mb, flat), (packed_s, packed_mb, packed) = found
    if not np.allclose(flat, packed, rtol=5e-2 if case.dtype == "bfloat16" else 1e-4):
        raise SystemExit(f"{case.name}: flat rows gave {flat}, packed ones {packed}.")
    speedup, memory = flat_s / packed_s, packed_mb / flat_mb
    seconds, megabytes = f"{flat_s:9.2f} {packed_s:9.2f}", f"{flat_mb:9.0f} {packed_mb:9.0f}"
    print(f"{case.name:12} {seconds} {speedup:8.2f} {megabytes} {memory:8.2f}", flush=True)
    return speedup, memory


def main() -> None:
    """Print the table and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models and fewer rounds; ends within 50 s")
    parser.add_argument("--only", help="name of one case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'':12} {'flat s':>9} {'packed s':>9} {'speedup':>8} {'flat MB':>9} {'packed MB':>9} {'memory':>8}")
    ratios = {}
    for case in cases(options.quick):
        if options.only in (None, case.name):
            speedup, memory = compare(case)
            ratios |= {f"{case.name}_speedup": round(speedup, 2), f"{case.name}_memory": round(memory, 2)}
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
