"""What stops a run before it harms the weights, and what keeps it going where nothing is wrong with it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trace_gym.collect import Collection
from trace_gym.errors import InfrastructureError, TraceGymError


class Retry:
    """Plays a step again whose infrastructure failed, then lets it be skipped.

    A step that is played again has the same seeds: unless it is skipped, the run goes on as if nothing had happened.

    Args:
        retries: Times a step is played again.
        most_skipped: Steps in a row that may be skipped; the next one ends the run.
    """

    def __init__(self, retries: int, most_skipped: int) -> None:
        """Start with no step skipped."""
        self.retries = retries
        self.most_skipped = most_skipped
        self._skipped = 0

    def __call__(
        self, collect: Callable[[], Collection], restart: Callable[[], None]
    ) -> tuple[Collection | None, dict[str, float]]:
        """Return what a step brought, None if it is to be skipped, and what that took.

        Args:
            collect: Plays the step.
            restart: Called before every further try, after a pause that grows: what broke may be on its way back.

        Raises:
            InfrastructureError: If too many steps in a row failed.
        """
        for tried in range(self.retries + 1):
            try:
                collection: Collection | None = collect()
                break
            except InfrastructureError as error:
                failure = error
                restart()
                time.sleep(min(2**tried - 1, 60) if tried < self.retries else 0)
        else:
            collection, tried = None, self.retries
            if self._skipped == self.most_skipped:
                raise failure
            warnings.warn(f"A step was skipped after {tried + 1} tries. {failure}", stacklevel=2)
        self._skipped = 0 if collection is not None else self._skipped + 1
        return collection, {"failures/retries": tried, "failures/skipped_steps": float(collection is None)}


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
