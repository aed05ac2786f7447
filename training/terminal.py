"""A run on a terminal: its progress, what it spends, where the time goes, and its latest tree, drawn in place.

`screen` is a pure function of what is shown; `TerminalView` draws it with rich, which comes with transformers. Where
the output is no terminal, progress is plain lines (see `trace_gym.training.run_log`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from trace_gym.errors import require
from trace_gym.tree import RolloutTree
from trace_gym.viewer import print_tree

_BAR = 30


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a run after a collection.

    Attributes:
        name: What the run is called.
        metrics: The line of ``metrics.jsonl``, with held-out accuracies when last measured.
        token_budget: Tokens it may generate.
        seconds: Since it was started or resumed.
        seconds_left: As far as can be told.
        tree: The most telling tree of the collection.
    """

    name: str
    metrics: Mapping[str, float]
    token_budget: int
    seconds: float
    seconds_left: float | None
    tree: RolloutTree | None


def screen(status: Status, width: int, height: int) -> str:
    """Return what a terminal of this size shows of a run; no line is longer, and there are no more of them."""
    metrics = status.metrics
    tokens = metrics["budget/tokens_total"]
    share = min(1.0, tokens / status.token_budget)
    bar = ("█" * round(share * _BAR)).ljust(_BAR, "░")
    left = "" if status.seconds_left is None else f", about {_duration(status.seconds_left)} left"
    lines = [
        f"{status.name}  step {metrics['step']:.0f}  {bar} {share:.0%}  {_duration(status.seconds)}{left}",
        _facts(
            ("tokens", f"{tokens:,.0f} of {status.token_budget:,}"),
            ("rollouts", _count(metrics, "budget/rollouts", "budget/continuations")),
            ("failed", f"{metrics.get('failures/count', 0):.0f}"),
            ("skipped", f"{metrics.get('failures/skipped_steps', 0):.0f}"),
        ),
        _outcomes(metrics),
        *(f"  {source}: {_outcomes(metrics, source)}" for source in _sources(metrics)),
        _facts(
            *(
                (name.removeprefix("time/").replace("_", " "), f"{seconds:.1f} s")
                for name, seconds in metrics.items()
                if name.startswith("time/")
            )
        ),
    ]
    if status.tree is not None:
        lines += ["", *print_tree(status.tree).splitlines()]
    cut = lines[:height]
    if len(lines) > height > 1:
        cut[-1] = f"… {len(lines) - height + 1} more lines"
    return "\n".join(line if len(line) <= width else line[: max(0, width - 1)] + "…" for line in cut)


class TerminalView:
    """Draws the latest status at the foot of a terminal; other lines scroll above it."""

    def __init__(self) -> None:
        """Take the terminal.

        Raises:
            MissingExtraError: If rich is not installed.
        """
        self._text = require("rich.text", "train").Text
        self._console = require("rich.console", "train").Console(highlight=False)
        self._live = require("rich.live", "train").Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> TerminalView:
        """Begin to draw."""
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the terminal back; the last status stays on it."""
        self._live.stop()

    def say(self, line: str) -> None:
        """Print a line above the status."""
        self._console.print(self._text(line), soft_wrap=True)

    def show(self, status: Status) -> None:
        """Draw a status in place of the last one."""
        width, height = self._console.size
        self._live.update(self._text(screen(status, width - 1, height - 2), no_wrap=True), refresh=True)


def can_draw() -> bool:
    """Return whether the standard output is a terminal that can be drawn on."""
    if not sys.stdout.isatty() or int(os.environ.get("RANK", 0)):  # of several processes the first draws
        return False
    try:
        return not require("rich.console", "train").Console().is_dumb_terminal
    except ImportError:
        return False


def _sources(metrics: Mapping[str, float]) -> list[str]:
    """Return the sources of a mixture."""
    names = ("tree/effective_ratio_candidates/", "eval/accuracy/")
    return sorted({key.removeprefix(name) for name in names for key in metrics if key.startswith(name)})


def _outcomes(metrics: Mapping[str, float], source: str = "") -> str:
    """Return what came of all prompts, or of those of a source."""
    of = f"/{source}" if source else ""
    return _facts(
        ("mixed prompts", _percent(metrics.get(f"tree/effective_ratio_selected{of}")) + " of those played"),
        ("", _percent(metrics.get(f"tree/effective_ratio_candidates{of}")) + " of all"),
        ("reward", _percent(metrics.get(f"reward/root_mean{of}"))),
        ("held out", _percent(metrics.get(f"eval/accuracy{of}"))),
    )


def _facts(*facts: tuple[str, str]) -> str:
    return "  ".join(f"{name} {value}".strip() for name, value in facts)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _count(metrics: Mapping[str, float], *names: str) -> str:
    return " + ".join(f"{metrics.get(name, 0):,.0f}" for name in names)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
