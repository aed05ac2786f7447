"""Laws of what a run tells: its metrics file, its lines, its pages, its screen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trace_gym.messages import Message
from trace_gym.training.report import read_jsonl
from trace_gym.training.run_log import RunLog
from trace_gym.training.terminal import Status, can_draw, screen
from trace_gym.tree import NO_PARENT, ROOT, Node, RolloutTree


def tree(step: int = 0, text: str = "4") -> RolloutTree:
    grown = RolloutTree("env", "task", Node(NO_PARENT, (Message("user", "2 + 2"),)), step)
    for reward in (0.0, 1.0):
        grown.add(Node(ROOT, (Message("assistant", text),), status="terminal", reward=reward))
    return grown


def play(log: RunLog, steps: int, updates: int) -> None:
    """Log as the trainer does: what a collection measured stands in the first of its updates only."""
    for step in range(1, steps + 1):
        logs: dict[str, float] = {"loss": 0.1, "time/policy_update": 1.0}
        tokens = 10 * -(-step // updates)
        if (step - 1) % updates == 0:
            logs |= {"budget/tokens_total": tokens, "budget/tokens": 10, "tree/effective_ratio_candidates": 0.5}
            logs |= {"tree/effective_ratio_candidates/math": 0.5, "reward/root_mean/search": step / 8}
        if step % 2 == 0:
            logs["eval/accuracy"] = 0.25
        state = SimpleNamespace(global_step=step, num_input_tokens_seen=tokens, is_world_process_zero=True)
        log.on_log(None, state, None, logs, model=None)
    log.on_log(None, SimpleNamespace(global_step=steps), None, {"train_runtime": 1.0})


@pytest.mark.parametrize("updates", [1, 2])
def test_every_update_is_a_line_and_every_collection_is_told(tmp_path: Path, updates: int) -> None:
    """Also the later updates of a collection, which generated nothing; the final summary is no step."""
    told: list[str] = []
    log = RunLog(tmp_path / "metrics.jsonl", "trace", 100, progress=told.append)
    play(log, steps=4, updates=updates)
    lines: list[dict[str, Any]] = read_jsonl(log.path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["budget/tokens_total"] == 10 * 4 / updates
    assert len(told) == 4 / updates and "mixed prompts 50%" in told[0]
    totals = log.totals()
    assert totals["effective_candidates"] == 0.5
    assert totals["sources"]["math"]["effective_candidates"] == 0.5 and list(totals["sources"]) == ["math"]
    assert (totals["cost"]["tokens"], totals["cost"]["seconds"]) == (40 / updates, 4.0)


def test_rewinding_drops_the_lines_after_a_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "metrics.jsonl", "trace", 100, progress=lambda line: None)
    play(log, steps=4, updates=1)
    log.rewind(2)
    assert [line["step"] for line in read_jsonl(log.path)] == [1, 2]


def test_every_nth_collection_has_a_page_and_who_watches_gets_no_lines(tmp_path: Path) -> None:
    told: list[str] = []
    seen: list[Status] = []
    steps = iter(range(4))
    log = RunLog(
        tmp_path / "metrics.jsonl",
        "trace",
        100,
        progress=told.append,
        watch=seen.append,
        latest=lambda: [tree(next(steps))],
        pages=tmp_path / "pages",
        pages_every=2,
    )
    play(log, steps=4, updates=1)
    assert sorted(page.name for page in (tmp_path / "pages").iterdir()) == ["step-00000.html", "step-00002.html"]
    assert not told and [status.metrics.get("eval/accuracy") for status in seen] == [None, 0.25, 0.25, 0.25]
    assert seen[-1].seconds_left is not None and seen[0].seconds_left is None


def test_the_screen_fits_and_shows_what_matters() -> None:
    """Hostile text in a tree cannot move the cursor; long lines and long trees are cut."""
    metrics = {
        "step": 3, "budget/tokens_total": 50.0, "budget/rollouts": 8, "budget/continuations": 4, "time/generate": 1.5,
        "tree/effective_ratio_selected": 0.7, "tree/effective_ratio_candidates": 0.4, "reward/root_mean": 0.3,
        "eval/accuracy": 0.52, "eval/accuracy/search": 0.11, "tree/effective_ratio_candidates/math": 0.22,
    }  # fmt: skip
    status = Status("trace", metrics, 200, 65.0, 3700.0, tree(text="\x1b[2J" + "x" * 500))
    shown = screen(status, width=100, height=40)
    for fact in ("25%", "1:05, about 1:01:40 left", "50 of 200", "70% of those played", "40% of all", "52%", "1.5 s"):
        assert fact in shown, fact
    lines = [line.split()[:2] + line.split()[-2:] for line in shown.splitlines()]
    assert ["search:", "mixed", "out", "11%"] in lines and ["math:", "mixed", "out", "–"] in lines
    assert "2 leaves: " in shown and "\x1b" not in shown
    small = screen(status, width=30, height=6).splitlines()
    assert len(small) == 6 and max(map(len, small)) <= 30 and "more lines" in small[-1]


def test_what_is_no_terminal_is_not_drawn_on() -> None:
    assert not can_draw()
