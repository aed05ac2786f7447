"""A training step against TRL's own: ``python tests/benchmarks/trainer_step.py [--quick]``.

Both trainers get the same completions, eight of each prompt and no continuations, and the same small Llama: TRL's
`GRPOTrainer` by its ``rollout_func``, `TraceGRPOTrainer` as trees, packed and flat. A step is everything between two
generations: rows, advantages, forward, backward, optimizer. The three take turns, counted in seconds of processor
time, so that a busy machine changes little. That all three end with the same weights is checked first.

The last line is one JSON object: ``*_over_trl`` is time per step / TRL's, so 1 is as fast and less is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

from trace_gym.budget import Cost
from trace_gym.collect import Collection
from trace_gym.messages import Message
from trace_gym.training import TraceGRPOConfig, TraceGRPOTrainer
from trace_gym.training.policy import PolicyShape, build_model, build_tokenizer
from trace_gym.tree import NO_PARENT, ROOT, Node, RolloutTree

GROUP = 8
SHAPE = PolicyShape()
COMMON: dict[str, Any] = {
    "loss_type": "dapo",
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "bf16": False,
    "dataloader_pin_memory": False,
    "activation_checkpointing": False,
    "gradient_checkpointing": None,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "shuffle_dataset": False,
}


def grow(task_id: str, rng: np.random.Generator) -> RolloutTree:
    """Return eight rollouts of one prompt, of lengths as on MathCode; both outcomes occur."""
    ids = tuple(rng.integers(10, 250, int(rng.integers(20, 60))).tolist())
    tree = RolloutTree(
        "", task_id, Node(NO_PARENT, (Message("user", task_id),), ids, (False,) * len(ids), (0.0,) * len(ids))
    )
    for i in range(GROUP):
        size = int(rng.integers(30, 160))
        flags = tuple(bool(k % 40 < 25) for k in range(size))  # the rest are the tool's answers
        node = Node(
            ROOT,
            (Message("assistant", "x"),),
            tuple(rng.integers(10, 250, size).tolist()),
            flags,
            (-5.0,) * size,
            status="terminal",
            reward=float(i < 3),
            num_generated=sum(flags),
        )
        tree.add(node)
    return tree


class Clock(TrainerCallback):
    """Times steps in processor time; a step begins when its completions are there."""

    def __init__(self) -> None:
        self.start = 0.0
        self.steps: list[float] = []

    def begin(self) -> None:
        """Start the clock."""
        self.start = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop the clock."""
        self.steps.append(time.process_time() - self.start)


def train_trl(trees: list[RolloutTree], steps: int, folder: str, tokenizer: Any) -> tuple[Any, list[float]]:
    """Train TRL's trainer for some steps on the leaves of trees."""
    clock = Clock()

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        keys = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "won")
        found: dict[str, list[Any]] = {key: [] for key in keys}
        for tree in trees:
            for leaf in tree.leaves():
                node, prompt = tree.nodes[leaf], tree.nodes[ROOT]
                values = (prompt.token_ids, node.token_ids, node.logprobs, [int(f) for f in node.sampled], node.reward)
                for key, value in zip(keys, values, strict=True):
                    found[key].append(list(value) if isinstance(value, tuple) else value)
        clock.begin()
        return found

    args = trl.GRPOConfig(
        output_dir=folder,
        num_generations=GROUP,
        per_device_train_batch_size=len(trees) * GROUP,
        max_steps=steps,
        **COMMON,
    )
    trainer = trl.GRPOTrainer(
        build_model(tokenizer, SHAPE, seed=0),
        reward_funcs=lambda completions, won, **_: won,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [tree.task_id for tree in trees]}),
        processing_class=tokenizer,
        rollout_func=rollout,
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.model, clock.steps


def train_ours(
    trees: list[RolloutTree], steps: int, folder: str, tokenizer: Any, packing: bool
) -> tuple[Any, list[float]]:
    """Train our trainer for some steps on trees."""
    clock = Clock()
    cost = sum((Cost.of(tree) for tree in trees), Cost())
    counts = np.full(len(trees), GROUP)

    def collect(task_ids: list[str]) -> Collection:
        clock.begin()
        return Collection(tuple(trees), np.full(len(trees), 0.5), counts, cost, {"generate": 0.0})

    args = TraceGRPOConfig(
        output_dir=folder,
        candidates=len(trees),
        root_budget=len(trees) * GROUP,
        expansions=0,
        allocator="uniform",
        advantage="grpo",
        predictor="posterior",
        per_device_train_batch_size=len(trees) * GROUP,
        max_batch_tokens=10**6,
        packing=packing,
        max_steps=steps,
        **COMMON,
    )
    trainer = TraceGRPOTrainer(
        build_model(tokenizer, SHAPE, seed=0),
        args,
        agent_factory=lambda *_, **__: None,
        processing_class=tokenizer,
        train_dataset=[tree.task_id for tree in trees],
        callbacks=[clock],
    )
    trainer._collect = collect  # type: ignore[method-assign]
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.model, clock.steps


def distance(given: Any, expected: Any) -> float:
    """Return the largest relative L2 distance of any weight."""
    pairs = zip(given.parameters(), expected.parameters(), strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def main() -> None:
    """Print the table and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts and steps; ends within 50 s")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    tokenizer = build_tokenizer(["task", *map(str, range(64))], SHAPE)
    rng = np.random.default_rng(0)
    trees = [grow(f"task {i}", rng) for i in range(4 if quick else 16)]
    rounds, steps = (2, 3) if quick else (4, 6)
    times: dict[str, list[float]] = {}
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], tuple[Any, list[float]]]] = {
            "TRL": lambda: train_trl(trees, steps, folder, tokenizer),
            "ours, flat rows": lambda: train_ours(trees, steps, folder, tokenizer, packing=False),
            "ours, packed": lambda: train_ours(trees, steps, folder, tokenizer, packing=True),
        }
        for _ in range(rounds):
            for name, way in ways.items():
                models[name], taken = way()
                times.setdefault(name, []).extend(taken[1:])  # the first step warms up
    for name, model in models.items():
        if distance(model, models["TRL"]) > 1e-4:
            raise SystemExit(f"{name} ended with other weights than TRL: what was timed is not the same step.")
    print(f"{'seconds per step':20} {'min':>8} {'median':>8} {'x TRL':>8}")
    ratios = {}
    base = min(times["TRL"])
    for name, values in times.items():
        ratio = min(values) / base
        print(f"{name:20} {min(values):8.3f} {statistics.median(values):8.3f} {ratio:8.2f}")
        ratios[name] = round(ratio, 3)
    print(json.dumps({"packed_over_trl": ratios["ours, packed"], "flat_over_trl": ratios["ours, flat rows"]}))


if __name__ == "__main__":
    main()
