"""Evaluation on held-out tasks while a run goes on: the learning curve, the best model, the early stop.

What was best, and how long ago, is read from the log history of the trainer's state, which checkpoints hold: a resumed
run stops where the uninterrupted one does.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.evaluate import Report
from trace_gym.training.report import eval_metrics

ACCURACY = "eval/accuracy"


class HeldOut(TrainerCallback):
    """Evaluates every few optimizer steps; the numbers go where the trainer's own metrics go.

    Args:
        trainer: The trainer; add the callback to it with `add_callback`.
        evaluate: Evaluates the trainer's policy, as it is, on held-out tasks.
        every: Optimizer steps between evaluations.
        patience: Evaluations in a row without a new best accuracy after which training stops; 0 for none.
        best: Folder for the best model so far; None keeps none.
        progress: Called with one line at a time.
        name: What the run is called in these lines.

    Raises:
        BadInputError: If a number is out of range.
    """

    def __init__(
        self,
        trainer: Any,
        evaluate: Callable[[], Report],
        *,
        every: int,
        patience: int = 0,
        best: Path | None = None,
        progress: Callable[[str], None] = print,
        name: str = "",
    ) -> None:
        """Store the parts."""
        if every < 1 or patience < 0:
            raise BadInputError(f"every must be at least 1 and patience not negative; got {every} and {patience}.")
        self.trainer = trainer
        self.evaluate = evaluate
        self.every = every
        self.patience = patience
        self.best = best
        self.progress = progress
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Stop at once if patience had ended when the run was interrupted."""
        known = [row[ACCURACY] for row in state.log_history if row.get(ACCURACY) is not None]
        if self.patience and known and evaluations_since_best(known) >= self.patience:
            control.should_training_stop = True
        return control

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Evaluate if it is time; keep the model if it is the best, stop if none was for long."""
        if state.global_step % self.every:
            return control
        start = time.perf_counter()
        try:
            report = self.evaluate()
        except InfrastructureError as error:  # says nothing about the policy; the next step has retries of its own
            self.progress(f"{self.name}: step {state.global_step}: not evaluated: {error}")
            return control
        metrics = {**eval_metrics(report), "eval/seconds": time.perf_counter() - start}
        if not math.isfinite(report.pass_at_1):
            self.progress(f"{self.name}: step {state.global_step}: no held-out episode had an outcome")
            return control
        for name, value in metrics.items():
            self.trainer._metrics["train"][name].append(value)
        before = [row[ACCURACY] for row in state.log_history if row.get(ACCURACY) is not None]
        waited = evaluations_since_best([*before, report.pass_at_1])
        note = " (the best so far)" if waited == 0 and before else ""
        self.progress(f"{self.name}: step {state.global_step}: {report.pass_at_1:.1%} of held-out tasks solved{note}")
        if waited == 0 and self.best is not None:
            self._keep(self.best, state.global_step, report)
        if self.patience and waited >= self.patience:
            self.progress(f"{self.name}: stopped, as {waited} evaluations in a row brought no new best")
            control.should_training_stop = True
        return control

    def _keep(self, folder: Path, step: int, report: Report) -> None:
        """Save the model in one piece: an interrupt leaves the old one or the new one."""
        part = folder.with_name(f"{folder.name}.part")
        is_first = self.trainer.is_world_process_zero()
        if is_first:
            shutil.rmtree(part, ignore_errors=True)
        self.trainer.save_model(str(part))
        if not is_first:
            return
        (part / "held_out.json").write_text(json.dumps({"step": step, **report.to_dict()}, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)


def evaluations_since_best(accuracies: Sequence[float]) -> int:
    """Return how many evaluations follow the best one, of equal ones the first; 0 if the last is a new best."""
    return len(accuracies) - 1 - max(range(len(accuracies)), key=lambda i: (accuracies[i], -i))
