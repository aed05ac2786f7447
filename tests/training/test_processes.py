"""Laws of several processes: whatever their number, a run is the same run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trace_gym.predictor import MODEL_PREDICTORS
from trace_gym.processes import deal
from trace_gym.record import read_trees

sys.path.insert(0, str(Path(__file__).parent))
import process_run

# Runs of two processes, and the run of one process that each must be equal to.
SAME = {name: name.partition(",")[0].replace("sharded", "whole") for name in process_run.RUNS if name != "diverging"}
SAME["resumed"] = "whole"


def test_the_largest_item_goes_first_to_whom_has_least() -> None:
    assert deal([1, 5, 2, 4], 2) == [0, 0, 1, 1]
    assert deal([3, 3], 1) == [0, 0]
    assert deal([], 2) == []


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the runs that two processes played."""
    folder = tmp_path_factory.mktemp("two")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, process_run.__file__, str(folder), *process_run.RUNS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same runs, played by a single process."""
    folder = tmp_path_factory.mktemp("one")
    process_run.main(folder, sorted(set(SAME.values())))
    return folder


def load(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / name / f"result-{rank}.pt")
    return found


def distance(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the distance of weights, relative to their length (L2)."""
    assert given.keys() == expected.keys()
    apart = sum(float((given[name] - expected[name]).square().sum()) for name in given)
    return (apart / sum(float(value.square().sum()) for value in expected.values())) ** 0.5


def assert_alike(given: Any, expected: Any) -> None:
    """Check that two states are equal, and numbers in them up to rounding."""
    if isinstance(expected, dict):
        assert given.keys() == expected.keys()
        for key in expected:
            assert_alike(given[key], expected[key])
    elif isinstance(expected, list) and all(isinstance(number, float) for number in expected):
        assert given == pytest.approx(expected, rel=1e-3, abs=1e-4)
    elif isinstance(expected, list | tuple):
        assert len(given) == len(expected)
        for a, b in zip(given, expected, strict=True):
            assert_alike(a, b)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-4)
    else:
        assert given == expected


@pytest.mark.slow
@pytest.mark.parametrize(("name", "reference"), SAME.items())
def test_two_processes_give_the_same_run_as_one(two: Path, one: Path, name: str, reference: str) -> None:
    """Allocation, trees, predictor and tokens are equal, weights to 1e-5; both processes end with the same."""
    expected = load(one, reference)
    for rank in range(2):
        given = load(two, name, rank)
        assert given["counts"] == expected["counts"]
        assert given["error"] == ""
        assert_alike(given["predictor"], expected["predictor"])
        assert given["tokens"] == expected["tokens"]
        assert distance(given["weights"], expected["weights"]) < 1e-5
    assert distance(load(two, name, 1)["weights"], given["weights"]) == 0


@pytest.mark.slow
def test_all_trees_are_written_once(two: Path, one: Path) -> None:
    """Process 0 writes the trees of both, in the order of the candidates."""
    for name in ("packed", "whole", "one prompt", *MODEL_PREDICTORS):
        given, expected = (list(read_trees(folder / name / "trees.jsonl")) for folder in (two, one))
        assert [tree.task_id for tree in given] == [tree.task_id for tree in expected]
        for a, b in zip(given, expected, strict=True):
            assert [node.token_ids for node in a.nodes] == [node.token_ids for node in b.nodes]
            assert [(node.birth, node.reward) for node in a.nodes] == [(node.birth, node.reward) for node in b.nodes]


@pytest.mark.slow
def test_the_weights_are_sharded_where_the_launcher_says_so(two: Path) -> None:
    assert load(two, "whole")["model"] == "DistributedDataParallel"
    assert load(two, "sharded")["model"] == "FSDPLlamaForCausalLM"


@pytest.mark.slow
def test_one_process_that_diverges_stops_both(two: Path) -> None:
    """Neither waits for the other, each keeps its rows, and no weight has changed."""
    given = [load(two, "diverging", rank) for rank in range(2)]
    for rank, run in enumerate(given):
        assert "The loss is" in run["error"] and f"diverged-0-rank{rank}.pt" in run["error"]
        saved = torch.load(two / "diverging" / f"diverged-0-rank{rank}.pt", weights_only=True)
        assert len(saved["passes"]) == len(saved["losses"]) > 0
        assert distance(run["weights"], load(two, "packed")["weights"]) > 1e-3
    assert distance(given[0]["weights"], given[1]["weights"]) == 0
