"""What a step is worth knowing for: metrics of a `Collection`, computed before any update.

Units: a *budget unit* is one rollout of nominal cost, so a step of M rollouts with N expansions each has
``M (1 + N/2)`` units (see `trace_gym.budget`). Ratios are in [0, 1], times in seconds.

The effective ratio is given over selected prompts (those that got rollouts) and over all candidates: a
useless predictor still shows a good ratio over what it selected (TRACE.md section 8).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trace_gym.collect import Collection
from trace_gym.errors import InfrastructureError
from trace_gym.mixture import source_of
from trace_gym.targets import branch_point_targets, spearman
from trace_gym.training.split import MicroBatch, num_cut
from trace_gym.tree import ROOT, RolloutTree

Pairs = list[tuple[float, float]]

MIN_VALID_LEAVES = 0.5  # share of the leaves of a step
MIN_PAIRS = 3  # a rank correlation of fewer pairs says nothing


def step_metrics(collection: Collection, nominal_rollouts: float, mixed: bool = False) -> dict[str, float]:
    """Return the metrics of one step.

    Args:
        collection: What was collected, with the predictions made before anything was played.
        nominal_rollouts: Nominal cost of the step, in budget units.
        mixed: Whether the tasks are those of a mixture; ratios and rewards of each source are then added, as
            ``NAME/SOURCE``.

    Returns:
        Finite numbers by name; what is undefined in this step (a mean of nothing) is left out.
    """
    trees, cost = collection.trees, collection.cost
    contrast = sum(tree.is_mixed() for tree in trees)
    anchors = sum(len(tree.mixed_anchors()) for tree in trees)
    valid, failed = leaf_counts(trees)
    prompts, prefixes = prediction_pairs(trees)
    found = {
        **_outcomes(trees, collection.counts),
        "tree/mixed_prompts_per_1k": 1000 * contrast / nominal_rollouts,
        "tree/mixed_anchors_per_1k": 1000 * anchors / nominal_rollouts,
        "tree/selected_prompts": int(np.count_nonzero(collection.counts)),
        "tree/max_rollouts_per_prompt": int(collection.counts.max(initial=0)),
        "tree/leaves": valid + failed,
        "budget/rollouts": cost.rollouts,
        "budget/continuations": cost.continuations,
        "budget/turns": cost.turns,
        "budget/tokens": cost.tokens,
        "budget/tool_calls": cost.tool_calls,
        "failures/count": failed,
        "predictor/spearman_prompt": _rank_correlation(prompts),
        "predictor/spearman_prefix": _rank_correlation(prefixes),
        **{f"time/{phase}": seconds for phase, seconds in collection.seconds.items()},
    }
    if mixed:
        sources = np.array([source_of(tree.task_id) for tree in trees])
        for source in np.unique(sources):
            own = np.flatnonzero(sources == source)
            outcomes = _outcomes([trees[i] for i in own], collection.counts[own])
            found |= {f"{name}/{source}": value for name, value in outcomes.items()}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _outcomes(trees: Sequence[RolloutTree], counts: NDArray[np.int64]) -> dict[str, float]:
    """Return what came of some of the candidates; NaN where nothing did."""
    mixed, selected = sum(tree.is_mixed() for tree in trees), np.count_nonzero(counts)
    return {
        "tree/effective_ratio_selected": mixed / selected if selected else math.nan,
        "tree/effective_ratio_candidates": mixed / len(trees) if trees else math.nan,
        "reward/mean": _mean([_valid(tree) for tree in trees]),
        "reward/root_mean": _mean([_valid(tree, born_at=ROOT) for tree in trees]),
    }


def batch_metrics(updates: Sequence[Sequence[MicroBatch]]) -> dict[str, float]:
    """Return what the rows of a step cost to train: tokens in rows against tokens in forward passes."""
    batches = [batch for update in updates for batch in update]
    rows = [row for batch in batches for row in batch.rows]
    return {
        "tree/trained_rows": len(rows),
        "tree/row_tokens": sum(len(row.prompt) + len(row.completion) for row in rows),
        "tree/forward_tokens": sum(batch.tokens for batch in batches),
        "tree/forward_passes": len(batches),
        "tree/cut": num_cut(updates),
    }


def leaf_counts(trees: Sequence[RolloutTree]) -> tuple[int, int]:
    """Return how many leaves have an outcome and how many failed; a prompt that could not be set up failed once."""
    statuses = [tree.nodes[leaf].status for tree in trees for leaf in (ROOT, *tree.leaves())]
    failed = statuses.count("failed")
    return len(statuses) - statuses.count("open") - failed, failed


def refuse_mass_failure(collection: Collection) -> None:
    """Refuse to train where most leaves failed: what is left was chosen by the fault, not by the policy.

    Raises:
        InfrastructureError: Of the most frequent kind and reason, with the numbers.
    """
    valid, failed = leaf_counts(collection.trees)
    if failed == 0 or valid >= MIN_VALID_LEAVES * (valid + failed):
        return
    failures = [node.failure for tree in collection.trees for node in tree.nodes if node.failure is not None]
    (kind, reason), count = Counter((failure.kind, failure.reason) for failure in failures).most_common(1)[0]
    raise InfrastructureError(
        kind,
        f"{failed} of {valid + failed} rollouts of this step failed, {count} of them with: {reason}. "
        "Training on the rest would follow the fault. Cure it and resume from the last checkpoint.",
    )


def prediction_pairs(trees: Sequence[RolloutTree]) -> tuple[Pairs, Pairs]:
    """Return (prediction, success rate) of prompts that were played and of prefixes that were continued.

    Rates are over unbiased outcomes only: bare rollouts for a prompt; for a prefix the rollout that passed it
    and the continuations born there, at least two in all. See `trace_gym.targets.branch_point_targets`.
    """
    prompts: Pairs = []
    prefixes: Pairs = []
    for tree in trees:
        targets = branch_point_targets(tree.parents(), tree.births(), tree.returns())
        for node, won, played in zip(*(column.tolist() for column in targets), strict=True):
            value = tree.nodes[node].value
            if value is not None and (node == ROOT or played >= 2):
                (prompts if node == ROOT else prefixes).append((value, won / played))
    return prompts, prefixes


def _valid(tree: RolloutTree, born_at: int | None = None) -> NDArray[np.float64]:
    returns = tree.returns()
    kept = ~np.isnan(returns)
    if born_at is not None:
        kept &= tree.births() == born_at
    return returns[kept]


def _mean(rewards: Sequence[NDArray[np.float64]]) -> float:
    together = np.concatenate([np.empty(0), *rewards])
    return float(together.mean()) if together.size else math.nan


def _rank_correlation(pairs: Pairs) -> float:
    if len(pairs) < MIN_PAIRS:
        return math.nan
    predictions, outcomes = zip(*pairs, strict=True)
    return spearman(predictions, outcomes)
