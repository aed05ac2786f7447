"""What the main job can be asked for. Light to import, so that ``trace-gym --help`` needs no model library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium

from trace_gym.advantages import ADVANTAGES
from trace_gym.errors import BadInputError, require, unknown_name
from trace_gym.predictor import PREDICTORS
from trace_gym.training.policy import PolicyShape

# What the default policy, a million parameters, learns in minutes; the environment offers more. Most problems take two
# or three cells that depend on each other, so that there are prefixes worth a second try.
FAMILIES = ("arithmetic", "chain", "counting", "digit_sum", "divisors", "gcd_lcm", "linear", "power")
METHODS = ("trace", "treepo", "uniform")
MATH, SEARCH = "trace_gym/MathCode-v0", "trace_gym/HotpotQASearch-v0"


@dataclass(frozen=True)
class Recipe:
    """What the default policy needs in an environment.

    Attributes:
        env_kwargs: Arguments of the environment, unless others are given.
        warm_kwargs: Further ones during the warm start.
        shape: Size of the policy.
        copying: See `trace_gym.training.warm_start.WarmStart`.
    """

    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    warm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    shape: PolicyShape = field(default_factory=PolicyShape)
    copying: bool = False


RECIPES: Mapping[str, Recipe] = {
    # The first 6,000 tasks are demonstrated, the others trained on: what a policy learned by heart it need not explore.
    MATH: Recipe({"families": list(FAMILIES), "difficulties": [2, 3, 4], "size": 9_000, "max_turns": 7}),
    # One short passage for a query. The warm start sees other names in every episode, lest it learn them by heart.
    SEARCH: Recipe(
        {
            "tool_format": "react",
            "prompt": "{question}",
            "topk": 1,
            "observation_chars": 120,
            "difficulties": [1, 3],
            "max_turns": 6,
        },
        warm_kwargs={"renamed": True},
        shape=PolicyShape(layers=3, mlp=256, vocabulary=4096),
        copying=True,
    ),
}


def recipe(env: str) -> Recipe:
    """Return what the default policy needs in an environment."""
    return RECIPES.get(env, Recipe())


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """What `train` does; every field is an option of ``trace-gym train``.

    Raises:
        BadInputError: If a value is out of range or two contradict each other.
    """

    out: str = _option("runs/train", "folder of the run; must be new or empty unless it is resumed")
    env: str = _option(MATH, "id of the environment")
    env_kwargs: dict[str, Any] | None = field(
        default=None,
        metadata={"help": "arguments of the environment, as JSON; default: tasks that the default policy can learn"},
    )
    model: str | None = _option(None, "model name or folder; default: a small Llama, warm-started on the spot")
    methods: tuple[str, ...] = _option(("trace", "uniform"), "who gets the rollouts: trace, treepo, uniform")
    token_budget: int = _option(130_000, "tokens that each method may generate")
    candidates: int = _option(32, "prompts looked at per step (B)")
    root_budget: int = _option(128, "rollouts from prompts per step (M)")
    expansions: int = _option(2, "continuations per rollout (N); uniform spends M(1 + N/2) on rollouts instead")
    advantage: str = _option("tree_grpo", "advantage rule of tree methods: tree_grpo, treepo, grpo; uniform uses grpo")
    predictor: str = _option("text", "success predictor: text or posterior")
    learning_rate: float = _option(4e-4, "highest learning rate; it rises for a tenth of the tokens, then falls to 0")
    temperature: float = _option(1.0, "sampling temperature, in training and evaluation")
    max_turn_tokens: int = _option(32, "longest answer in one turn, in tokens")
    batch_size: int = _option(64, "most leaves in one forward pass; bounds memory")
    updates_per_step: int = _option(4, "optimizer steps per batch of trees")
    lora_rank: int = _option(0, "train LoRA adapters of this rank; 0 trains all weights")
    eval_tasks: int = _option(600, "held-out tasks for the accuracy before and after training")
    eval_every: int = _option(16, "optimizer steps between points of the learning curve")
    curve_tasks: int = _option(200, "held-out tasks per point of the learning curve")
    save_every: int = _option(20, "optimizer steps between checkpoints")
    demonstrations: int = _option(6_000, "demonstrations the default policy is warm-started on")
    skill: float = _option(0.75, "share of right steps in those demonstrations")
    warm_epochs: float = _option(
        4.5, "most passes over the demonstrations; the warm start stops once it solves half of the tasks"
    )
    seed: int = _option(0, "seed of everything random")
    threads: int = _option(0, "torch threads; 0 takes one per core")

    def __post_init__(self) -> None:
        """Fill in the environment's arguments; refuse what cannot work before anything heavy starts."""
        if self.env_kwargs is None:
            object.__setattr__(self, "env_kwargs", dict(recipe(self.env).env_kwargs))
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
