"""What stops a run before it harms the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trace_gym.errors import TraceGymError


def refuse_divergence(loss: torch.Tensor, most: float, batch: dict[str, Any], folder: Path, step: int) -> None:
    """Refuse to train on a loss that is not finite or too large, and keep the rows that gave it.

    Args:
        loss: Part of an update's loss, before any gradient is taken of it.
        most: Largest magnitude that is let pass.
        batch: The tensors of the forward pass.
        folder: Where to save them.
        step: Optimizer steps made so far.

    Raises:
        TraceGymError: With the loss, the file and what to try.
    """
    value = float(loss.detach())
    if abs(value) <= most:
        return
    path = folder / f"diverged-{step}.pt"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(batch, path)
    raise TraceGymError(
        f"The loss is {value:g} after {step} optimizer steps; max_loss is {most:g}. Nothing was trained on it, and its "
        f"rows are in {path} (torch.load). Resume from a checkpoint with a lower learning_rate, or raise max_loss."
    )
