"""What the main job can be asked for. Light to import, so that ``trace-gym --help`` needs no model library."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import gymnasium

from trace_gym.advantages import ADVANTAGES
from trace_gym.errors import BadInputError, require, unknown_name
from trace_gym.predictor import MODEL_PREDICTORS, PREDICTORS
from trace_gym.training.policy import PolicyShape

# What the default policy, a million parameters, learns in minutes; the environment offers more. Most problems take two
# or three cells that depend on each other, so that there are prefixes worth a second try.
FAMILIES = ("arithmetic", "chain", "counting", "digit_sum", "divisors", "gcd_lcm", "linear", "power")
METHODS = ("trace", "treepo", "uniform")
MIXTURE = "trace_gym/Mixture-v0"
MATH, SEARCH, BFCL = "trace_gym/MathCode-v0", "trace_gym/HotpotQASearch-v0", "trace_gym/BFCLMultiTurn-v0"


@dataclass(frozen=True)
class Recipe:
    """What the default policy needs in an environment.

    Attributes:
        env_kwargs: Arguments of the environment, unless others are given.
        warm_kwargs: Further ones during the warm start.
        shape: Size of the policy.
        copying: See `trace_gym.training.warm_start.WarmStart`.
        batch_size: Demonstrations per update of the warm start.
        learning_rate: Peak learning rate of the warm start.
        options: Fields of `TrainConfig` that are other than usual, unless they are given.
    """

    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    warm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    shape: PolicyShape = field(default_factory=PolicyShape)
    copying: bool = False
    batch_size: int = 32
    learning_rate: float = 3e-3
    options: Mapping[str, Any] = field(default_factory=dict)


RECIPES: Mapping[str, Recipe] = {
    # The first 6,000 tasks are demonstrated, the others trained on: what a policy learned by heart it need not explore.
    MATH: Recipe({"families": list(FAMILIES), "difficulties": [2, 3, 4], "size": 9_000, "max_turns": 7}),
    # Chains of two passages, one short passage for a query. The warm start sees other names in every episode, lest it
    # learn them by heart; training sees the true ones of the same tasks.
    SEARCH: Recipe(
        {
            "tool_format": "react",
            "prompt": "{question}",
            "topk": 1,
            "observation_chars": 200,
            "difficulties": [3],
            "max_turns": 6,
        },
        warm_kwargs={"renamed": True},
        shape=PolicyShape(layers=3, mlp=256, vocabulary=4096),
        copying=True,
        learning_rate=6e-3,
        options={"skill": 0.9, "warm_epochs": 3.2, "token_budget": 200_000},
    ),
    # Every scenario of the training split is shown twice in a pass. Tools and answers make conversations long, and an
    # episode has some ten steps, so there are fewer of everything.
    BFCL: Recipe(
        {"subset": "base", "tool_doc": "compact", "max_turns": 60},
        shape=PolicyShape(layers=3, vocabulary=4096, context=1024),
        batch_size=8,
        options={
            "token_budget": 60_000,
            "candidates": 8,
            "root_budget": 24,
            "max_turn_tokens": 80,
            "batch_size": 16,
            "eval_tasks": 40,
            "curve_tasks": 40,
            "demonstrations": 320,
            "warm_epochs": 24.0,
        },
    ),
    MIXTURE: Recipe(shape=PolicyShape(layers=3, vocabulary=4096, context=1024), copying=True),
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
    env: str = _option(MATH, "id of the environment; several, with commas, are mixed")
    weights: tuple[float, ...] = _option((), "share of each of several environments; equal ones by default")
    env_kwargs: dict[str, Any] | None = field(
        default=None,
        metadata={
            "help": "arguments of the environment, as JSON, of several by id; default: tasks that the default policy "
            "can learn (the config.json of a run shows them), none of which is kept if others are given"
        },
    )
    tasks: str | None = _option(
        None,
        "train on these only: a file with a task id a line, or ids such as chain-2-train-{000000..999999}; default: "
        "all that no demonstration showed",
    )
    model: str | None = _option(None, "model name or folder; default: a small Llama, warm-started on the spot")
    methods: tuple[str, ...] = _option(("trace", "uniform"), "who gets the rollouts: trace, treepo, uniform")
    token_budget: int = _option(130_000, "tokens that each method may generate")
    candidates: int = _option(32, "prompts looked at per step (B)")
    root_budget: int = _option(128, "rollouts from prompts per step (M)")
    expansions: int = _option(2, "continuations per rollout (N); uniform spends M(1 + N/2) on rollouts instead")
    advantage: str = _option("tree_grpo", "advantage rule of tree methods: tree_grpo, treepo, grpo; uniform uses grpo")
    predictor: str = _option("text", "success predictor: text, posterior, hidden or value_head")
    learning_rate: float = _option(4e-4, "highest learning rate; it rises for a tenth of the tokens, then falls to 0")
    temperature: float = _option(1.0, "sampling temperature, in training and evaluation")
    max_turn_tokens: int = _option(32, "longest answer in one turn, in tokens")
    batch_size: int = _option(64, "most leaves in one forward pass; bounds memory")
    updates_per_step: int = _option(4, "optimizer steps per batch of trees")
    lora_rank: int = _option(0, "train LoRA adapters of this rank; 0 trains all weights")
    eval_tasks: int = _option(600, "held-out tasks for the accuracy before and after training")
    eval_every: int = _option(16, "optimizer steps between points of the learning curve")
    curve_tasks: int = _option(200, "held-out tasks per point of the learning curve")
    patience: int = _option(
        0, "points of the learning curve in a row without a new best after which training stops; 0 never stops"
    )
    save_every: int = _option(20, "optimizer steps between checkpoints")
    trees_every: int = _option(1, "write the trees of every n-th batch to trees.jsonl")
    pages_every: int = _option(10, "write a page of the trees of every n-th batch; 0 writes none")
    report_to: tuple[str, ...] = _option(
        (), "where else metrics go: tensorboard, wandb, trackio, none; default: tensorboard if it is installed"
    )
    trainer: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "more options of TraceGRPOConfig, as JSON; they win over the others"}
    )
    demonstrations: int = _option(6_000, "demonstrations the default policy is warm-started on")
    skill: float = _option(0.75, "share of right steps in those demonstrations")
    warm_epochs: float = _option(
        4.5, "most passes over the demonstrations; the warm start stops once it solves half of the tasks"
    )
    seed: int = _option(0, "seed of everything random")
    threads: int = _option(0, "torch threads; 0 takes one per core")

    def __post_init__(self) -> None:
        """Fill in the environment's arguments; refuse what cannot work before anything heavy starts."""
        if "," in self.env:
            self._mix()
        elif self.weights:
            raise BadInputError(f"weights are {self.weights}, but {self.env} is a single environment. Leave them out.")
        if self.tasks is not None and self.env == MIXTURE:
            raise BadInputError("tasks are of one environment; give each source of the mixture its own, as 'tasks'.")
        if self.env_kwargs is None:
            object.__setattr__(self, "env_kwargs", dict(recipe(self.env).env_kwargs))
        for method in self.methods:
            if method not in METHODS:
                raise unknown_name("method", method, METHODS)
        for what, given, allowed in (
            ("advantage", self.advantage, ADVANTAGES),
            ("predictor", self.predictor, (*PREDICTORS, *MODEL_PREDICTORS)),
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
            "trees_every": 1,
            "pages_every": 0,
            "patience": 0,
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

    def _mix(self) -> None:
        """Turn several environments into the sources of a mixture."""
        ids = [name for name in self.env.split(",") if name]
        weights = self.weights or (1.0,) * len(ids)
        given = self.env_kwargs or {}
        for name in given:
            if name not in ids:
                raise unknown_name("environment in env_kwargs", name, ids)
        if len(weights) != len(ids):
            raise BadInputError(f"There are {len(weights)} weights for {len(ids)} environments; give one for each.")
        sources = [
            {"env": name, "weight": weight, "kwargs": given.get(name, dict(recipe(name).env_kwargs))}
            for name, weight in zip(ids, weights, strict=True)
        ]
        for name, value in (("env", MIXTURE), ("weights", ()), ("env_kwargs", {"sources": sources})):
            object.__setattr__(self, name, value)

    @classmethod
    def make(cls, given: Mapping[str, Any]) -> TrainConfig:
        """Return a configuration with the recipe of its environment wherever nothing is given.

        Raises:
            BadInputError: As the class does.
        """
        return cls(**{**recipe(given.get("env", MATH)).options, **given})

    @classmethod
    def read(cls, path: str | Path) -> dict[str, Any]:
        """Return the options that a file holds, TOML or JSON by its ending.

        Raises:
            BadInputError: If it cannot be read, or an option does not exist or has a value of another kind.
        """
        path = Path(path)
        try:
            text = path.read_text()
            data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise BadInputError(f"Cannot read the configuration {path}: {error}") from error
        hints = get_type_hints(cls)
        found = {}
        for name, value in data.items():
            if name not in hints:
                raise unknown_name(f"option in {path}", name, hints)
            value = tuple(value) if isinstance(value, list) else value
            kinds = tuple(get_origin(kind) or kind for kind in get_args(hints[name]) or (hints[name],))
            if get_origin(hints[name]) in (tuple, dict):
                kinds = (get_origin(hints[name]),)
            if isinstance(value, bool) or not isinstance(value, (*kinds, int) if float in kinds else kinds):
                raise BadInputError(f"{path}: {name} cannot be {value!r}; see trace-gym train --help.")
            found[name] = value
        return found

    @classmethod
    def load(cls, folder: str | Path) -> TrainConfig:
        """Read the configuration of a run.

        Raises:
            BadInputError: If there is no readable configuration.
        """
        path = Path(folder) / "config.json"
        try:
            data = json.loads(path.read_text())
            lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
            return cls(**{**data, **lists, "out": str(folder)})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BadInputError(f"Cannot resume: {path} is no configuration of a run ({error}).") from error
