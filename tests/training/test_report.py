"""Laws of the report at the end of a training job."""

import sys

import numpy as np
import pytest

from trace_gym.budget import Cost
from trace_gym.errors import BadInputError, MissingExtraError
from trace_gym.training.report import Accuracy, MethodSummary, Outcome, comparison_table, plot_curves, smooth

OUTCOME = Outcome(Accuracy(0.31, 0.25, 0.37), Accuracy(0.56, 0.5, 0.62), 0.68, 0.41, 0.525)


def summary(method="trace", **options):
    cost = Cost(rollouts=960, continuations=480, turns=5200, tokens=312345, tool_calls=4100, seconds=812.3)
    return MethodSummary(method, OUTCOME, cost, **options)


def lines(steps):
    found = []
    for step in range(steps):
        line = {"step": step, "budget/tokens_total": 1000 * step, "reward/root_mean": 0.4}
        if step % 2:
            line["tree/effective_ratio_candidates"] = 0.5
        if step % 5 == 0:
            line |= {"eval/accuracy": 0.5, "eval/low": 0.4, "eval/high": 0.6}
        found.append(line)
    return found


def cells(line):
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_table_says_what_a_method_reached_and_what_it_cost():
    """One line a method, every cost beside every result."""
    head, _, row = comparison_table([summary()]).splitlines()
    shown = dict(zip(cells(head), cells(row), strict=True))
    assert shown == {
        "method": "trace",
        "accuracy before, % (95 %)": "31.0 (25.0 to 37.0)",
        "accuracy after, % (95 %)": "56.0 (50.0 to 62.0)",
        "effective ratio selected / candidates": "0.68 / 0.41",
        "reward": "0.53",
        "rollouts": "960",
        "continuations": "480",
        "turns": "5,200",
        "tokens": "312,345",
        "tool calls": "4,100",
        "seconds": "812",
    }


def test_each_source_of_a_mixture_has_a_line_of_its_own():
    """In a table below, without costs, which belong to the whole run."""
    whole, sources = comparison_table([summary(sources={"math": OUTCOME, "search": OUTCOME})]).split("\n\n")
    assert whole + "\n" == comparison_table([summary()])
    head, _, *rows = sources.splitlines()
    assert [cells(row)[0] for row in rows] == ["trace: math", "trace: search"]
    assert cells(rows[0])[1:] == cells(whole.splitlines()[2])[1:5] and len(cells(head)) == 5


def test_the_table_is_markdown_and_lines_up():
    """Readable raw and rendered; a name cannot add a column."""
    table = comparison_table([summary("a | long\nname"), summary()]).splitlines()
    assert len({len(line) for line in table}) == 1
    assert len(table) == 4
    assert r"a \| long name" in table[2]


def test_an_empty_report_is_refused():
    """Nothing to compare is a mistake of the caller."""
    with pytest.raises(BadInputError, match="at least one"):
        comparison_table([])
    with pytest.raises(BadInputError, match="at least one"):
        plot_curves({}, "never.png")


def test_smoothing_keeps_length_and_constants_and_touches_no_short_series():
    """A tenth of the run; under twenty steps nothing is averaged."""
    assert smooth(np.ones(100)) == pytest.approx(np.ones(100))
    short = np.arange(19.0)
    assert smooth(short) == pytest.approx(short)
    wave = np.tile([0.0, 1.0], 50)
    assert np.ptp(smooth(wave)[10:-10]) < 0.2
    assert smooth(np.array([])).shape == (0,)


@pytest.mark.slow
def test_curves_are_drawn_from_whatever_was_measured(tmp_path):
    """Runs of different length, steps without evaluation, and a run that never got to one."""
    plot_curves({"trace": lines(30), "uniform": lines(7), "broken": [{"step": 0}], "none": []}, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    """The table needs nothing; the plot says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"trace-gym\[train\]"):
        plot_curves({"trace": lines(3)}, "never.png")
