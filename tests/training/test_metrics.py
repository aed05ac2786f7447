"""Laws of a step's metrics."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trace_gym.budget import Cost
from trace_gym.collect import Collection
from trace_gym.errors import InfrastructureError
from trace_gym.messages import Failure
from trace_gym.training.metrics import leaf_counts, prediction_pairs, refuse_mass_failure, step_metrics
from trace_gym.tree import NO_PARENT, ROOT, Node, RolloutTree


def tree(outcomes: list[float | None], value: float = 0.5) -> RolloutTree:
    """Return a tree of two-turn bare rollouts; None stands for a failed one."""
    grown = RolloutTree("test", "task", Node(NO_PARENT, (), value=value))
    for outcome in outcomes:
        middle = grown.add(Node(ROOT, (), value=0.25, num_generated=3, num_tool_calls=1))
        if outcome is None:
            grown.add(Node(middle, (), status="failed", failure=Failure("deadline", "late")))
        else:
            grown.add(Node(middle, (), status="terminal", reward=outcome, num_generated=2))
    return grown


def collection(trees: list[RolloutTree], counts: list[int]) -> Collection:
    values = np.array([grown.nodes[0].value for grown in trees], dtype=np.float64)
    cost = sum((Cost.of(grown) for grown in trees), Cost())
    return Collection(tuple(trees), values, np.array(counts, dtype=np.int64), cost, {"generate": 1.5})


def test_ratios_and_contrast_per_unit_are_those_counted_by_hand() -> None:
    """Two of three selected and of four candidates are mixed; 10 units make 200 mixed prompts per 1,000."""
    trees = [tree([1, 0, 0]), tree([0, 1]), tree([1, 1]), tree([])]
    trees[0].add(Node(1, (), status="terminal", reward=0.0, birth=1))  # below node 1: 1 and 0
    found = step_metrics(collection(trees, [3, 2, 2, 0]), nominal_rollouts=10.0)
    assert found["tree/effective_ratio_selected"] == pytest.approx(2 / 3)
    assert found["tree/effective_ratio_candidates"] == pytest.approx(2 / 4)
    assert found["tree/mixed_prompts_per_1k"] == 200.0
    assert found["tree/mixed_anchors_per_1k"] == 300.0
    assert (found["tree/selected_prompts"], found["tree/max_rollouts_per_prompt"]) == (3, 3)
    assert (found["budget/rollouts"], found["budget/continuations"], found["budget/turns"]) == (7, 1, 15)
    assert (found["budget/tokens"], found["budget/tool_calls"]) == (35, 7)
    assert found["reward/mean"] == pytest.approx(4 / 8)
    assert found["reward/root_mean"] == pytest.approx(4 / 7)
    assert found["time/generate"] == 1.5


def test_failed_leaves_are_counted_apart_and_change_nothing_else() -> None:
    with_failures = step_metrics(collection([tree([1, 0, None]), tree([None])], [3, 1]), 4.0)
    without = step_metrics(collection([tree([1, 0]), tree([])], [3, 1]), 4.0)
    assert leaf_counts([tree([1, 0, None]), tree([None])]) == (2, 2)
    assert (with_failures["failures/count"], without["failures/count"]) == (2, 0)
    for name in (
        "reward/mean",
        "reward/root_mean",
        "tree/mixed_prompts_per_1k",
        "tree/effective_ratio_selected",
    ):
        assert with_failures[name] == without[name]


def test_prompts_that_could_not_be_set_up_count_as_failures() -> None:
    """Once each, although they have no leaves; if there is nothing else, the step is refused."""
    failure = Failure("index", "unreachable")
    broken = RolloutTree("test", "task", Node(NO_PARENT, (), status="failed", failure=failure, value=0.5))
    assert leaf_counts([tree([1, 0]), broken, broken]) == (2, 2)
    refuse_mass_failure(collection([tree([1, 0]), broken], [2, 0]))
    with pytest.raises(InfrastructureError, match="2 of 2"):
        refuse_mass_failure(collection([broken, broken], [0, 0]))


def test_what_is_undefined_is_left_out_and_everything_else_is_finite() -> None:
    """Loggers do not take NaN: a step in which nothing was played has no mean and no correlation."""
    found = step_metrics(collection([tree([])], [0]), 4.0)
    assert "reward/mean" not in found and "predictor/spearman_prompt" not in found
    assert all(math.isfinite(value) for value in found.values())


def test_predictions_are_compared_with_unbiased_outcomes_only() -> None:
    """A prompt's rate comes from bare rollouts; a prefix needs a continuation of its own."""
    grown = tree([1, 0], value=0.75)
    grown.add(Node(1, (), status="terminal", reward=0.0, birth=1))
    prompts, prefixes = prediction_pairs([grown, tree([None], value=0.5)])
    assert prompts == [(0.75, 0.5)]
    assert prefixes == [(0.25, 0.5)]


def test_a_perfect_predictor_has_rank_correlation_1() -> None:
    trees = [tree([0, 0, 0], 0.1), tree([0, 1, 0], 0.3), tree([1, 1, 0], 0.6), tree([1, 1, 1], 0.9)]
    found = step_metrics(collection(trees, [3] * 4), 12.0)
    assert found["predictor/spearman_prompt"] == pytest.approx(1.0)
    assert "predictor/spearman_prefix" not in found
