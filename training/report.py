"""What a training job leaves for people: learning curves and a table that compares methods by what they cost.

Pure functions of recorded metrics; nothing here knows a trainer or a model. Metrics are the lines of
``metrics.jsonl``, dicts with a ``step`` and whatever was measured in that step; a curve passes over the lines
that lack its keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_gym.budget import Cost
from trace_gym.errors import BadInputError, require
from trace_gym.evaluate import Report

# Okabe and Ito's colours differ under every common colour vision; markers do without colour.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A share of tasks solved, with its 95 % interval, all in [0, 1]."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return percentages, as in ``52.0 (45.1 to 58.8)``."""
        return f"{100 * self.mean:.1f} ({100 * self.low:.1f} to {100 * self.high:.1f})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What training reached, on all tasks or on those of a source.

    Attributes:
        before: Held-out accuracy before training.
        after: Held-out accuracy after training.
        effective_selected: Share of prompts with both outcomes among those that got rollouts.
        effective_candidates: The same among all candidate prompts; a method cannot raise it by picking few.
        reward: Mean reward of bare rollouts in training.
    """

    before: Accuracy
    after: Accuracy
    effective_selected: float
    effective_candidates: float
    reward: float


@dataclass(frozen=True, slots=True)
class MethodSummary:
    """What one method reached in a job, and what it spent.

    Attributes:
        method: Its name.
        outcome: What it reached.
        cost: What training spent, evaluation left out.
        sources: What it reached on each source of a mixture.
    """

    method: str
    outcome: Outcome
    cost: Cost
    sources: Mapping[str, Outcome] = field(default_factory=dict)


_REACHED = (
    "accuracy before, % (95 %)",
    "accuracy after, % (95 %)",
    "effective ratio selected / candidates",
    "reward",
)
_SPENT = ("rollouts", "continuations", "turns", "tokens", "tool calls", "seconds")


def comparison_table(rows: Sequence[MethodSummary]) -> str:
    """Return a Markdown table, one method a line, in the order given; after it one of the sources, if there are any.

    Raises:
        BadInputError: If there is no row.
    """
    if not rows:
        raise BadInputError("There is no method to compare; give at least one MethodSummary.")
    methods = [
        (row.method, *_reached(row.outcome), *(f"{n:,}" for n in _counts(row.cost)), f"{row.cost.seconds:,.0f}")
        for row in rows
    ]
    table = _table(("method", *_REACHED, *_SPENT), methods)
    sources = [(f"{row.method}: {name}", *_reached(part)) for row in rows for name, part in row.sources.items()]
    return f"{table}\n{_table(('method: source', *_REACHED), sources)}" if sources else table


def _reached(outcome: Outcome) -> tuple[str, ...]:
    ratios = f"{outcome.effective_selected:.2f} / {outcome.effective_candidates:.2f}"
    return str(outcome.before), str(outcome.after), ratios, f"{outcome.reward:.2f}"


def _table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    named = [(row[0].replace("|", "\\|").replace("\n", " "), *row[1:]) for row in cells]
    widths = [max(map(len, column)) for column in zip(head, *named, strict=True)]
    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in (head, *named)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:])) + "\n"


def plot_curves(runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path) -> None:
    """Draw learning curves into a PNG file.

    Three panels: held-out accuracy with its 95 % interval against generated tokens, the share of candidate
    prompts with both outcomes, and the mean reward of bare rollouts; the last two by step, smoothed over a
    tenth of the run.

    Args:
        runs: The lines of ``metrics.jsonl`` by method. Used keys: ``step``, ``budget/tokens_total`` (since
            the start), ``eval/accuracy``, ``eval/low``, ``eval/high``, ``tree/effective_ratio_candidates``,
            ``reward/root_mean``.
        path: The file to write.

    Raises:
        BadInputError: If there is no run.
        MissingExtraError: If matplotlib is not installed.
    """
    if not runs:
        raise BadInputError("There is no run to draw; give the metrics of at least one method.")
    figure = require("matplotlib.figure", "train").Figure(figsize=(13, 4.2), layout="constrained")
    accuracy, ratio, reward = figure.subplots(1, 3)
    for index, (method, lines) in enumerate(runs.items()):
        style = {"color": _COLOURS[index % len(_COLOURS)], "label": method, "zorder": 20 - index}
        _draw_accuracy(accuracy, lines, {**style, "marker": _MARKERS[index % len(_MARKERS)]})
        _draw_series(ratio, lines, "tree/effective_ratio_candidates", style)
        _draw_series(reward, lines, "reward/root_mean", style)
    _dress(accuracy, "Held-out accuracy, 95 % interval", "generated tokens (thousands)")
    _dress(ratio, "Candidate prompts with both outcomes", "training step")
    _dress(reward, "Mean reward of bare rollouts", "training step")
    figure.get_layout_engine().set(wspace=0.06)
    handles, labels = accuracy.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6), frameon=False)
    figure.savefig(path, dpi=150, format="png")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; a half-written last line, left by an interrupt, is passed over."""
    lines = path.read_text().split("\n") if path.exists() else []
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found += [json.loads(line)] if line else []
        except ValueError:
            if number < len(lines):
                raise
    return found


def eval_metrics(report: Report) -> dict[str, float]:
    """Return a point of the learning curve."""
    low, high = report.interval
    parts = {f"eval/accuracy/{name}": part.pass_at_1 for name, part in report.groups.items() if part.num_episodes}
    return {"eval/accuracy": report.pass_at_1, "eval/low": low, "eval/high": high, **parts}


def accuracy(report: Report) -> Accuracy:
    """Return what a report says of accuracy; NaN if every episode failed."""
    return Accuracy(report.pass_at_1, *report.interval)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the centred mean over about a tenth of a series, ``[T]``; at the ends over what is there."""
    half = len(values) // 20
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start = np.maximum(np.arange(len(values)) - half, 0)
    stop = np.minimum(np.arange(len(values)) + half + 1, len(values))
    smoothed: NDArray[np.float64] = (sums[stop] - sums[start]) / (stop - start)
    return smoothed


def _counts(cost: Cost) -> tuple[int, ...]:
    return cost.rollouts, cost.continuations, cost.turns, cost.tokens, cost.tool_calls


def _columns(lines: Sequence[Mapping[str, Any]], *keys: str) -> list[NDArray[np.float64]]:
    """Return one array a key, over the lines that have all of them."""
    rows = [[float(line[key]) for key in keys] for line in lines if all(line.get(key) is not None for key in keys)]
    return list(np.array(rows, dtype=np.float64).reshape(-1, len(keys)).T)


def _draw_accuracy(axes: Any, lines: Sequence[Mapping[str, Any]], style: Mapping[str, Any]) -> None:
    keys = ("budget/tokens_total", "eval/accuracy", "eval/low", "eval/high")
    tokens, mean, low, high = _columns(lines, *keys)
    margins = np.maximum([mean - low, high - mean], 0.0)
    axes.errorbar(tokens / 1000, mean, margins, capsize=3, linewidth=1.6, elinewidth=1, markersize=5, **style)


def _draw_series(axes: Any, lines: Sequence[Mapping[str, Any]], key: str, style: Mapping[str, Any]) -> None:
    steps, values = _columns(lines, "step", key)
    axes.plot(steps, values, color=style["color"], linewidth=0.8, alpha=0.25)
    axes.plot(steps, smooth(values), linewidth=1.8, **style)


def _dress(axes: Any, title: str, label: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(label)
    axes.set_ylim(0, 1)
    axes.set_yticks(np.linspace(0, 1, 6))
    axes.grid(axis="y", linewidth=0.6, alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
