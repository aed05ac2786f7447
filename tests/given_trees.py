"""Trees by hand for a trainer, and what it made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from trace_gym.budget import Cost
from trace_gym.collect import Collection
from trace_gym.messages import Failure, Message
from trace_gym.training import TraceGRPOTrainer
from trace_gym.tree import NO_PARENT, ROOT, Node, RolloutTree

MakeTrainer = Callable[..., TraceGRPOTrainer]


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor | None]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: None if p.grad is None else p.grad.clone() for name, p in named})


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_close(given: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert given.keys() == expected.keys()
    for name, value in given.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def tree(task_id: str, outcomes: list[float | None], alike: bool = False) -> RolloutTree:
    """Return a tree of one-turn rollouts, of different lengths unless alike; None is a failed rollout."""
    prompt = Node(NO_PARENT, (Message("user", task_id),), (7, 8, 9), (False,) * 3, (0.0,) * 3, value=0.5)
    grown = RolloutTree("test", task_id, prompt)
    for i, outcome in enumerate(outcomes):
        if outcome is None:
            grown.add(Node(ROOT, (), status="failed", failure=Failure("sandbox_died", "it died")))
            continue
        ids = tuple(range(20 + i, 24 + i if alike else 22 + 2 * i))
        flags = tuple(k != 1 for k in range(len(ids)))  # the second token is not the policy's
        grown.add(
            Node(
                ROOT,
                (Message("assistant", "x"),),
                ids,
                flags,
                (-0.5,) * len(ids),
                status="terminal",
                reward=outcome,
                num_generated=sum(flags),
            )
        )
    return grown


def collection(*trees: RolloutTree) -> Collection:
    cost = sum((Cost.of(grown) for grown in trees), Cost())
    counts = np.array([len(grown.leaves()) for grown in trees])
    return Collection(trees, np.full(len(trees), 0.5), counts, cost, {"generate": 0.0})


def train_on(make_trainer: MakeTrainer, *collections: Collection, **options: Any) -> tuple[Any, Gradients]:
    """Train one step per collection, on given trees instead of collected ones."""
    gradients, waiting = Gradients(), list(collections)
    options = {"advantage": "grpo", "max_steps": len(collections)} | options
    trainer = make_trainer(callbacks=[gradients], **options)
    trainer._collect = lambda task_ids: waiting.pop(0)
    trainer.train()
    return trainer, gradients
