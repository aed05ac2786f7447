"""What stops a run before it harms the weights, and what keeps it going where nothing is wrong with it."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from trace_gym.collect import Collection
from trace_gym.errors import InfrastructureError, TraceGymError
from trace_gym.processes import ALONE, Processes

_NORMS = 64  # gradients that are remembered
_ENOUGH = 8  # of them to know what is usual


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


class Divergence:
    """Stops a run whose loss or gradient is no number or explodes, and keeps the rows that made it so.

    All processes stop together. Gradients are compared with the median of the last ones, which neither a single large
    one nor a growth over many updates moves much.

    Args:
        max_loss: Largest magnitude that is let pass of a part of an update's loss.
        max_grad_growth: Largest norm that is let pass of an update's gradient, in medians.
        folder: Where to save rows.
        processes: Who trains together.

    Attributes:
        norms: Norms of the last gradients; part of a checkpoint.
    """

    def __init__(self, max_loss: float, max_grad_growth: float, folder: Path, processes: Processes = ALONE) -> None:
        """Start with no gradient seen."""
        self.max_loss = max_loss
        self.max_grad_growth = max_grad_growth
        self.folder = folder
        self.processes = processes
        self.norms: deque[float] = deque(maxlen=_NORMS)
        self._passes: list[tuple[torch.Tensor, dict[str, Any]]] = []

    def watch(self, loss: torch.Tensor, batch: dict[str, Any]) -> None:
        """Note a forward pass of the coming update: its part of the loss, and its tensors."""
        self._passes.append((loss.detach(), batch))

    def check(self, norm: float | None, step: int) -> None:
        """Judge an update before it changes the weights; all processes must call it.

        Args:
            norm: Norm of its gradient before it is clipped; None if it is not known.
            step: Optimizer steps made so far.

        Raises:
            TraceGymError: With the number, the file and what to try.
        """
        losses = [float(loss) for loss, _ in self._passes]
        found = [problem for problem in self.processes.gather(self._problem(losses, norm)) if problem]
        if found:
            what, option = found[0]
            raise TraceGymError(
                f"{what} after {step} optimizer steps; {option} is {getattr(self, option):g}. No checkpoint holds what "
                f"comes of it, and its rows are in {self._save(losses, norm, step)} (torch.load). Resume from a "
                f"checkpoint with a lower learning_rate or max_grad_norm, or raise {option}."
            )
        self._passes.clear()
        if norm:  # an update without rows has none
            self.norms.append(norm)

    def _problem(self, losses: Sequence[float], norm: float | None) -> tuple[str, str] | None:
        """Return what is wrong, and the option that forbids it."""
        for loss in losses:
            if not abs(loss) <= self.max_loss:  # nor if it is no number
                return f"The loss is {loss:g}", "max_loss"
        if norm is None:
            return None
        if not math.isfinite(norm):
            return f"The gradient has a norm of {norm:g}", "max_grad_growth"
        usual = median(self.norms) if len(self.norms) >= _ENOUGH else math.inf
        if norm > usual * self.max_grad_growth:
            return f"The gradient has a norm of {norm:g}, where {usual:.2g} is usual,", "max_grad_growth"
        return None

    def _save(self, losses: Sequence[float], norm: float | None, step: int) -> Path:
        """Save what this process made of the update."""
        rank = f"-rank{self.processes.rank}" if self.processes.size > 1 else ""
        path = self.folder / f"diverged-{step}{rank}.pt"
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save({"passes": [batch for _, batch in self._passes], "losses": losses, "grad_norm": norm}, path)
        return path
