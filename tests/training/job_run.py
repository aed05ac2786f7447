"""The main job on a game that takes no time, as a command: ``python job_run.py train …``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium
import torch

sys.path.insert(0, str(Path(__file__).parent))
from conftest import SHAPE, GuessEnv
from process_run import ParityEnv

from trace_gym.training.policy import build_model, build_tokenizer

ENV_ID = "trace_gym_tests/Job-v0"


class JobEnv(ParityEnv):
    """Half of the tasks are held out."""

    def __init__(self, split: str = "train", **options: Any) -> None:
        super().__init__(**options)
        self.split = split
        half = len(GuessEnv.task_ids) // 2
        self.task_ids = GuessEnv.task_ids[half:] if split == "eval" else GuessEnv.task_ids[:half]

    def _twin(self) -> JobEnv:
        return JobEnv(self.split, failing=self.failing, max_turns=self.max_turns)


def save_policy(folder: Path) -> None:
    """Save a policy of random weights, which wins half of the games."""
    tokenizer = build_tokenizer(["guess", "higher", "lower", *GuessEnv.task_ids], SHAPE)
    build_model(tokenizer, SHAPE, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def register() -> None:
    """Make the environment known."""
    gymnasium.register(id=ENV_ID, entry_point=JobEnv)


if __name__ == "__main__":
    from trace_gym.cli import main

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    register()
    sys.exit(main(sys.argv[1:]))
