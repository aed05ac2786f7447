"""Writes what a training run does to ``metrics.jsonl``, shows its progress, and keeps pages of its trees."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from trace_gym.budget import Cost
from trace_gym.training.report import read_jsonl
from trace_gym.training.terminal import Status
from trace_gym.tree import RolloutTree
from trace_gym.viewer import most_telling, write_html

_COUNTED = ("rollouts", "continuations", "turns", "tokens", "tool_calls")
_RATIO = "tree/effective_ratio_candidates"
_MEANS = {"effective_selected": "tree/effective_ratio_selected", "effective_candidates": _RATIO}
_MEANS |= {"reward": "reward/root_mean"}


class RunLog(TrainerCallback):
    """One line of metrics per step; what is most telling in it is shown.

    Args:
        path: The metrics file.
        name: What the run is called in progress lines.
        token_budget: Tokens the run may generate.
        progress: Called with one line per collection, unless it is watched.
        watch: Called with the state of the run after every collection.
        latest: Returns the trees of the latest collection.
        pages: Folder for pages of trees; made when it is needed.
        pages_every: Collections between pages; 0 for none.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        token_budget: int,
        *,
        progress: Callable[[str], None],
        watch: Callable[[Status], None] | None = None,
        latest: Callable[[], Sequence[RolloutTree]] = tuple,
        pages: Path | None = None,
        pages_every: int = 0,
    ) -> None:
        """Store the parts; nothing is written yet."""
        self.path = path
        self.name = name
        self.token_budget = token_budget
        self.progress = progress
        self.watch = watch
        self.latest = latest
        self.pages = pages
        self.pages_every = pages_every
        self._start = time.monotonic()
        self._share_at_start: float | None = None
        self._held_out: dict[str, float] = {}  # accuracies when last measured

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
        if not logs or "train_runtime" in logs or not state.is_world_process_zero:
            return  # the summary at the end of a run
        numbers = {name: float(value) for name, value in logs.items() if value is not None}
        line = {"step": state.global_step, **numbers}
        # A later update of a step collected nothing, so it knows nothing of rollouts.
        is_first = "budget/tokens_total" in line
        line.setdefault("budget/tokens_total", float(state.num_input_tokens_seen))
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._held_out |= {name: value for name, value in line.items() if name.startswith("eval/accuracy")}
        if is_first:
            self._show(line)

    def _show(self, line: Mapping[str, float]) -> None:
        share = min(1.0, line["budget/tokens_total"] / self.token_budget)
        if self._share_at_start is None:
            self._share_at_start, self._start = share, time.monotonic()
        trees = [tree for tree in self.latest() if len(tree) > 1]
        self._write_page(trees)
        if self.watch is not None:
            done = share - self._share_at_start
            seconds = time.monotonic() - self._start
            left = seconds / done * (1 - share) if done > 0 else None
            tree = most_telling(trees) if trees else None
            self.watch(Status(self.name, {**self._held_out, **line}, self.token_budget, seconds, left, tree))
            return
        if _RATIO not in line:
            self.progress(f"{self.name}: step {line['step']}: skipped, as the infrastructure failed")
            return
        self.progress(
            f"{self.name}: step {line['step']}, {share:.0%} of the tokens, "
            f"reward {line.get('reward/root_mean', float('nan')):.2f}, "
            f"mixed prompts {line[_RATIO]:.0%}, "
            f"{sum(value for name, value in line.items() if name.startswith('time/')):.1f} s"
        )

    def _write_page(self, trees: Sequence[RolloutTree]) -> None:
        if not trees or self.pages is None or not self.pages_every or trees[0].step % self.pages_every:
            return
        self.pages.mkdir(exist_ok=True)
        page = self.pages / f"step-{trees[0].step:05d}.html"
        write_html(trees, page, title=f"{self.name}: trees of step {trees[0].step}")

    def totals(self) -> dict[str, Any]:
        """Return what the whole run spent, its mean effective ratios and reward, and those of each source."""
        lines = read_jsonl(self.path)
        total = {name: sum(line.get(f"budget/{name}", 0) for line in lines) for name in _COUNTED}
        seconds = sum(value for line in lines for name, value in line.items() if name.startswith("time/"))
        cost = Cost(**{name: int(value) for name, value in total.items()}, seconds=seconds)
        collections = [line for line in lines if _RATIO in line]
        sources = sorted({name.removeprefix(f"{_RATIO}/") for line in lines for name in line if f"{_RATIO}/" in name})
        by_source = {source: _means(collections, f"/{source}") for source in sources}
        return {"cost": asdict(cost), **_means(collections), "sources": by_source}


def _means(lines: Sequence[Mapping[str, float]], of: str = "") -> dict[str, float]:
    """Return the mean effective ratios and reward of some collections; of nothing, 0."""
    found = {}
    for short, name in _MEANS.items():
        values = [line[name + of] for line in lines if name + of in line]
        found[short] = sum(values) / max(1, len(values))
    return found
