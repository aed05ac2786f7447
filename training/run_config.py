"""What the main job can be asked for. Light to import, so that ``trace-gym --help`` needs no model library."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium

from trace_gym.advantages import ADVANTAGES
from trace_gym.errors import BadInputError, require, unknown_name
from trace_gym.predictor import PREDICTORS

# What the default policy, a million parameters, learns in minutes; the environment offers more. Most problems take two
# or three cells that depend on each other, so that there are prefixes worth a second try.
FAMILIES = ("arithmetic", "chain", "counting", "digit_sum", "divisors", "gcd_lcm", "linear", "power")
METHODS = ("trace", "treepo", "uniform")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """What `train` does; every field is an option of ``trace-gym train``.

    Raises:
        BadInputError: If a value is out of range or two contradict each other.
    """

    out: str = _option("runs/train", "folder of the run; must be new or empty unless it is resumed")
    env: str = _option("trace_gym/MathCode-v0", "id of the environment")
    env_kwargs: dict[str, Any] = field(
        default_factory=lambda: {"families": list(FAMILIES), "difficulties": [2, 3, 4], "max_turns": 7},
        metadata={"help": "arguments of the environment, as JSON"},
    )
    model: str | None = _option(None, "model name or folder; default: a small Llama, warm-started on the spot")
    methods: tuple[str, ...] = _option(("trace", "uniform"), "who gets the rollouts: trace, treepo, uniform")
    token_budget: int = _option(130_000, "tokens that each method may generate")
    candidates: int = _option(32, "prompts looked at per step (B)")
    root_budget: int = _option(128, "rollouts from prompts per step (M)")
    expansions: int = _option(2, "continuations per rollout (N); uniform spends M(1 + N/2) on rollouts instead")
    advantage: str = _option("tree_grpo", "advantage rule of tree methods: tree_grpo, treepo, grpo; uniform uses grpo")
    predictor: str = _option("text", "success predictor: text or posterior")
    learning_rate: float = _option(6e-4, "learning rate of the policy")
    temperature: float = _option(1.0, "sampling temperature, in training and evaluation")
    max_turn_tokens: int = _option(32, "longest answer in one turn, in tokens")
    batch_size: int = _option(64, "most leaves in one forward pass; bounds memory")
    updates_per_step: int = _option(1, "optimizer steps per batch of trees")
    lora_rank: int = _option(0, "train LoRA adapters of this rank; 0 trains all weights")
    eval_tasks: int = _option(600, "held-out tasks for the accuracy before and after training")
    eval_every: int = _option(10, "steps between points of the learning curve")
    curve_tasks: int = _option(200, "held-out tasks per point of the learning curve")
    save_every: int = _option(10, "steps between checkpoints")
    demonstrations: int = _option(6_000, "demonstrations the default policy is warm-started on")
    skill: float = _option(0.75, "share of right steps in those demonstrations")
    warm_epochs: float = _option(
        4.5, "most passes over the demonstrations; the warm start stops once it solves half of the tasks"
    )
    seed: int = _option(0, "seed of everything random")
    threads: int = _option(0, "torch threads; 0 takes one per core")

    def __post_init__(self) -> None:
        """Refuse what cannot work before anything heavy starts."""
        for method in self.methods:
            if method not in METHODS:
                raise unknown_name("method", method, METHODS)
        for what, given, allowed in (
            ("advantage", self.advantage, ADVANTAGES),
            ("predictor", self.predictor, PREDICTORS),
        ):
            if given not in allowed:
                raise unknown_name(what, given, allowed)
        if not self.methods or len(set(self.methods)) != len(self.methods):
            raise BadInputError(f"Name each method once, and at least one of {', '.join(METHODS)}.")
        least = {
            "token_budget": 1,
            "candidates": 1,
            "root_budget": 2,
            "eval_tasks": 1,
            "eval_every": 1,
            "curve_tasks": 1,
            "updates_per_step": 1,
            "batch_size": 1,
            "expansions": 0,
            "demonstrations": 1,
            "save_every": 1,
            "max_turn_tokens": 1,
            "lora_rank": 0,
            "seed": 0,
            "threads": 0,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise BadInputError(f"{name} must be at least {value}; got {getattr(self, name)}.")
        for name in ("learning_rate", "temperature", "warm_epochs"):
            if not getattr(self, name) > 0:
                raise BadInputError(f"{name} must be above 0; got {getattr(self, name)}.")
        if not 0 <= self.skill <= 1:
            raise BadInputError(f"skill must be in [0, 1]; got {self.skill}.")
        if self.lora_rank:
            require("peft", "train")
        if self.env not in gymnasium.registry:
            raise unknown_name("environment", self.env, gymnasium.registry)

    @classmethod
    def load(cls, folder: str | Path) -> TrainConfig:
        """Read the configuration of a run.

        Raises:
            BadInputError: If there is no readable configuration.
        """
        path = Path(folder) / "config.json"
        try:
            data = json.loads(path.read_text())
            return cls(**{**data, "methods": tuple(data["methods"]), "out": str(folder)})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadInputError(f"Cannot resume: {path} is no configuration of a run ({error}).") from error
