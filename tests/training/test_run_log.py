"""Laws of the metrics file of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trace_gym.evaluate import EpisodeResult, Report
from trace_gym.training.report import read_jsonl
from trace_gym.training.run_log import RunLog


def run_log(path: Path, every: int, told: list[str]) -> RunLog:
    report = Report.of([EpisodeResult("a", 0, 1.0)])
    return RunLog(path, "trace", 100, every=every, evaluate=lambda model: report, progress=told.append)


def play(log: RunLog, steps: int, updates: int) -> None:
    """Log as the trainer does: what a collection measured stands in the first of its updates only."""
    for step in range(1, steps + 1):
        logs: dict[str, float] = {"loss": 0.1, "time/policy_update": 1.0}
        tokens = 10 * -(-step // updates)
        if (step - 1) % updates == 0:
            logs |= {"budget/tokens_total": tokens, "budget/tokens": 10, "tree/effective_ratio_candidates": 0.5}
        state = SimpleNamespace(global_step=step, num_input_tokens_seen=tokens)
        log.on_log(None, state, None, logs, model=None)
    log.on_log(None, SimpleNamespace(global_step=steps), None, {"train_runtime": 1.0})


@pytest.mark.parametrize("updates", [1, 2])
def test_every_update_is_logged_and_evaluated_in_its_turn(tmp_path: Path, updates: int) -> None:
    """Also the later updates of a collection, which generated nothing; the final summary is no step."""
    told: list[str] = []
    log = run_log(tmp_path / "metrics.jsonl", 2, told)
    play(log, steps=4, updates=updates)
    lines: list[dict[str, Any]] = read_jsonl(log.path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert ["eval/accuracy" in line for line in lines] == [False, True, False, True]
    assert lines[-1]["budget/tokens_total"] == 10 * 4 / updates
    totals = log.totals()
    assert totals["effective_candidates"] == 0.5
    assert (totals["cost"]["tokens"], totals["cost"]["seconds"]) == (40 / updates, 4.0)


def test_rewinding_drops_the_lines_after_a_step(tmp_path: Path) -> None:
    log = run_log(tmp_path / "metrics.jsonl", 10, [])
    play(log, steps=4, updates=1)
    log.rewind(2)
    assert [line["step"] for line in read_jsonl(log.path)] == [1, 2]
