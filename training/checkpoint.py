"""What a checkpoint holds beside the weights, and which of a run's checkpoints is whole.

A checkpoint is a folder that transformers writes (model, optimizer, schedule, random states, log). The trainer's own
state is the last file in it, written in one piece: where it stands, the checkpoint is complete.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trace_gym.errors import StateError

STATE_FILE = "trace_gym.pt"


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Complete a checkpoint with the trainer's state."""
    part = folder / f"{STATE_FILE}.part"
    torch.save(state, part)
    part.rename(folder / STATE_FILE)


def read_state(folder: Path) -> dict[str, Any]:
    """Return the trainer's state in a checkpoint.

    Raises:
        StateError: If it has none.
    """
    if not (folder / STATE_FILE).exists():
        raise StateError(f"{folder} has no {STATE_FILE}; it is incomplete or not of this trainer. Resume from another.")
    state: dict[str, Any] = torch.load(folder / STATE_FILE, map_location="cpu", weights_only=True)
    return state


def newest_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    found = [path for path in run.glob("checkpoint-*") if (path / STATE_FILE).exists()]
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path | None) -> int:
    """Return the optimizer steps made before a checkpoint; 0 before the first."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
