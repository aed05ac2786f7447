"""Writes what a training run does to ``metrics.jsonl``, shows its progress, and evaluates along the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trace_gym.budget import Cost
from trace_gym.evaluate import Report
from trace_gym.training.report import eval_metrics, read_jsonl


class RunLog(TrainerCallback):
    """One line of metrics per step, one line of progress, a point of the learning curve every few steps.

    Args:
        path: The metrics file.
        name: What the run is called in progress lines.
        token_budget: Tokens the run may generate.
        every: Steps between evaluations.
        evaluate: Evaluates the model.
        progress: Called with one line at a time.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        token_budget: int,
        *,
        every: int,
        evaluate: Callable[[Any], Report],
        progress: Callable[[str], None],
    ) -> None:
        """Store the parts; nothing is written yet."""
        self.path = path
        self.name = name
        self.token_budget = token_budget
        self.every = every
        self.evaluate = evaluate
        self.progress = progress

    def rewind(self, step: int) -> None:
        """Drop the lines after a step, which a resumed run will write again."""
        kept = [line for line in read_jsonl(self.path) if line["step"] <= step]
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        part.replace(self.path)  # in one piece: an interrupt loses no line

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Write the metrics of a step and show the most telling ones."""
        if not logs or "train_runtime" in logs:
            return  # the summary at the end of a run
        line = {"step": state.global_step, **{name: float(value) for name, value in logs.items()}}
        # A later update of a step collected nothing, so it knows nothing of rollouts.
        is_first = "budget/tokens_total" in line
        line.setdefault("budget/tokens_total", float(state.num_input_tokens_seen))
        if state.global_step % self.every == 0:
            report = self.evaluate(kwargs["model"])
            line |= eval_metrics(report)
            self.progress(f"{self.name}: step {state.global_step}: {report.pass_at_1:.1%} of held-out tasks solved")
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if not is_first:
            return
        share = min(1.0, line["budget/tokens_total"] / self.token_budget)
        self.progress(
            f"{self.name}: step {state.global_step}, {share:.0%} of the tokens, "
            f"reward {line.get('reward/root_mean', float('nan')):.2f}, "
            f"mixed prompts {line['tree/effective_ratio_candidates']:.0%}, "
            f"{sum(value for name, value in line.items() if name.startswith('time/')):.1f} s"
        )

    def totals(self) -> dict[str, Any]:
        """Return what the whole run spent and its mean effective ratios."""
        lines = read_jsonl(self.path)
        total = {name: sum(line.get(f"budget/{name}", 0) for line in lines) for name in _COUNTED}
        seconds = sum(value for line in lines for name, value in line.items() if name.startswith("time/"))
        cost = Cost(**{name: int(value) for name, value in total.items()}, seconds=seconds)
        collections = [line for line in lines if "tree/effective_ratio_candidates" in line]
        ratios = {
            short: sum(line.get(f"tree/effective_ratio_{long}", 0.0) for line in collections) / max(1, len(collections))
            for short, long in (("effective_selected", "selected"), ("effective_candidates", "candidates"))
        }
        return {"cost": asdict(cost), **ratios}


_COUNTED = ("rollouts", "continuations", "turns", "tokens", "tool_calls")
