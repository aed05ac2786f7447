"""Short training runs, played by one process or by several that a launcher started; each writes what came of it.

Usage: python process_run.py FOLDER [NAME …], with names of `RUNS`.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import torch

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SHAPE, GuessEnv

from trace_gym.agents.transformers import TransformersAgent
from trace_gym.envs.text_env import Episode, TurnResult
from trace_gym.errors import TraceGymError
from trace_gym.messages import Message
from trace_gym.training import TraceGRPOConfig, TraceGRPOTrainer
from trace_gym.training.policy import build_model, build_tokenizer
from trace_gym.training.processes import launched

ENV_ID = "trace_gym_tests/Parity-v0"
# Two updates per collection, each of two iterations; more forward passes than one process has trees.
MANY: dict[str, Any] = {"updates_per_step": 2, "num_iterations": 2, "beta": 0.1, "max_batch_tokens": 64}
MANY |= {"max_steps": 8, "predictor": "posterior", "root_budget": 22, "candidates": 5}
SAVED = {"save_strategy": "steps", "save_steps": 3}
READING = {"max_steps": 5, "updates_per_step": 2, "root_budget": 16}
RUNS: dict[str, dict[str, Any]] = {
    "packed": {"max_grad_norm": 0.1},
    "flat": {"packing": False, "loss_type": "grpo", "per_device_train_batch_size": 5, "max_steps": 2},
    "one prompt": {"candidates": 1, "root_budget": 6, "allocator": "treepo", "max_steps": 1},
    "whole": MANY | SAVED,
    "resumed": MANY | {"checkpoint": "whole/checkpoint-3"},
    # Predictors that read with a language model; saved amid the updates of a step.
    "hidden": READING | SAVED | {"predictor": "hidden"},
    "hidden, resumed": READING | {"predictor": "hidden", "checkpoint": "hidden/checkpoint-3"},
    "value_head": READING | SAVED | {"predictor": "value_head"},
    "value_head, resumed": READING | {"predictor": "value_head", "checkpoint": "value_head/checkpoint-3"},
    # Only the last process sees a loss that is too large.
    "diverging": {"max_loss": (1e3, 1e-9)},
    # From here on weights are sharded.
    "sharded": MANY | SAVED | {"fsdp": True},
    "sharded, resumed": MANY | {"fsdp": True, "checkpoint": "sharded/checkpoint-3"},
    "hidden, sharded": READING | {"predictor": "hidden", "fsdp": True},
}


class ParityEnv(GuessEnv):
    """Two turns; what was said in the last must have an even sum of characters, so that any policy wins half."""

    def _play(self, episode: Episode, action: str) -> TurnResult:
        if episode.turn < self.max_turns:
            return TurnResult((Message("user", "higher" if len(action) % 2 else "lower"),), episode.world)
        won = sum(map(ord, action)) % 2 == 0
        verdict = {"verdict": "correct" if won else "wrong", "reason": "parity"}
        return TurnResult((), episode.world, float(won), verdict)

    def _twin(self) -> ParityEnv:
        return ParityEnv(self.failing, self.max_turns)


def shard_on_cpu() -> None:
    """Let accelerate use FSDP from now on; it offers that on accelerators only, torch on a CPU too."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
    os.environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    set_device = PartialState.set_device

    def pretend(self: Any) -> None:
        set_device(self)
        self.distributed_type = DistributedType.MULTI_GPU

    PartialState.set_device = pretend


def run(folder: Path, name: str) -> None:
    """Train and write ``result-RANK.pt``."""
    options = dict(RUNS[name])
    if "max_loss" in options:
        options["max_loss"] = options["max_loss"][launched().rank]
    if options.pop("fsdp", False) and "ACCELERATE_USE_FSDP" not in os.environ:
        shard_on_cpu()
    checkpoint = options.pop("checkpoint", None)
    tokenizer = build_tokenizer(["guess", "higher", "lower", *GuessEnv.task_ids], SHAPE)
    defaults = {
        "output_dir": str(folder / name),
        "env_id": ENV_ID,
        "candidates": 6,
        "root_budget": 24,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "max_turn_tokens": 4,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "trees_path": str(folder / name / "trees.jsonl"),
        "use_cpu": True,
    }
    if launched().rank == 0:
        build_model(tokenizer, SHAPE, seed=0).save_pretrained(folder / name / "start")
    launched().gather("written")
    trainer = TraceGRPOTrainer(
        str(folder / name / "start"),
        TraceGRPOConfig(**(defaults | options)),
        agent_factory=TransformersAgent,
        processing_class=tokenizer,
    )
    error = ""
    try:
        trainer.train(resume_from_checkpoint=checkpoint and str(folder / checkpoint))
    except TraceGymError as raised:
        error = str(raised)
    result = {
        "error": error,
        "weights": {
            key: getattr(value, "full_tensor", lambda value=value: value)().detach().clone()
            for key, value in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        },
        "predictor": trainer.predictor.get_state(),
        "counts": trainer.last_collection.counts.tolist() if trainer.last_collection else None,
        "tokens": trainer.tokens_total,
        "logs": trainer.state.log_history,
        "model": type(trainer.model_wrapped).__name__,
    }
    torch.save(result, folder / name / f"result-{trainer.processes.rank}.pt")


def main(folder: Path, names: list[str]) -> None:
    """Register the environment and play the runs."""
    torch.set_num_threads(1)
    gc.freeze()  # every run collects garbage when it begins
    gymnasium.register(id=ENV_ID, entry_point=ParityEnv)
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        run(folder, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
