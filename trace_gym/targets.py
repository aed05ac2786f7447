"""What a predictor learns from a tree, and how well its ranks agree with what came true.

`branch_point_targets` and `recursive_targets` turn a tree into pairs (prefix, s successes of n).

Letters: N prefixes, n nodes of a tree, k nodes that have a pair.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trace_gym.errors import BadInputError
from trace_gym.tree import NO_PARENT, ROOT

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def branch_point_targets(
    parents: ArrayLike, births: ArrayLike, returns: ArrayLike
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Training pairs of one tree that stay unbiased although branches start at chosen prefixes.

    A continuation is a fair draw at the prefix where it was born and below, but not at the
    prefixes above: those were passed because of what the tree had shown. So a leaf counts for the
    prefixes of its path from its birth on, and the prompt itself only gets bare rollouts.

    Args:
        parents: Parent of each node, ``[n]``; -1 for the prompt, node 0.
        births: Anchor where each node's branch was started, ``[n]``; 0 for bare rollouts.
        returns: Outcome in [0, 1] of each leaf, ``[n]``; NaN for inner nodes and failed leaves.

    Returns:
        Node indices in ascending order, successes and counts, ``[k]`` each, for all prefixes that
        have a pair. Leaves have none: their outcome is known.

    Raises:
        BadInputError: If the arrays describe no tree.
    """
    return _targets(parents, births, returns)


def recursive_targets(parents: ArrayLike, returns: ArrayLike) -> tuple[IntArray, FloatArray, FloatArray]:
    """Training pairs of one tree by recursive backup: every prefix gets all leaves below it.

    The target as TRACE (arXiv 2606.11119) publishes it, in counts. It is biased at the ancestors of
    a branch whose place was chosen by an outcome; see `branch_point_targets`.

    Args:
        parents: Parent of each node, ``[n]``; -1 for the prompt, node 0.
        returns: Outcome in [0, 1] of each leaf, ``[n]``; NaN for inner nodes and failed leaves.

    Returns:
        Node indices in ascending order, successes and counts, ``[k]`` each.

    Raises:
        BadInputError: If the arrays describe no tree.
    """
    return _targets(parents, np.full(np.shape(parents), ROOT), returns)


def _targets(parents: ArrayLike, births: ArrayLike, returns: ArrayLike) -> tuple[IntArray, FloatArray, FloatArray]:
    """Credit each scored leaf to the prefixes from its parent up to its birth."""
    up, born = np.asarray(parents, dtype=np.int64), np.asarray(births, dtype=np.int64)
    ends = np.asarray(returns, dtype=np.float64)
    if up.ndim != 1 or not up.shape == born.shape == ends.shape:
        raise BadInputError(
            f"parents, births and returns have shapes {up.shape}, {born.shape}, {ends.shape}; give "
            "one of each per node."
        )
    if up.size == 0 or up[0] != NO_PARENT or (up[1:] >= np.arange(1, up.size)).any():
        raise BadInputError(
            f"parents {up[:8].tolist()} describe no tree: node 0 has parent {NO_PARENT}, every other "
            "node one with a smaller index. List nodes in the order they were added."
        )
    successes, counts = np.zeros(up.size), np.zeros(up.size)
    for leaf in np.flatnonzero(~np.isnan(ends)).tolist():
        node = leaf
        while node != born[leaf]:
            node = int(up[node])
            if node < 0:
                raise BadInputError(
                    f"births[{leaf}] is {born[leaf]}, which is not above node {leaf}. A branch is "
                    "born at an ancestor of its nodes."
                )
            successes[node] += ends[leaf]
            counts[node] += 1.0
    nodes = np.flatnonzero(counts)
    return nodes, successes[nodes], counts[nodes]


def spearman(predicted: ArrayLike, observed: ArrayLike) -> float:
    """Rank correlation with average ranks for ties.

    Args:
        predicted: Predictions, ``[N]``.
        observed: Observed rates, ``[N]``.

    Returns:
        The correlation in [-1, 1]; NaN where either side is constant or N < 2.

    Raises:
        BadInputError: If the lengths differ.
    """
    x, y = np.asarray(predicted, dtype=np.float64), np.asarray(observed, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape:
        raise BadInputError(f"Shapes {x.shape} and {y.shape} differ; give one pair per prefix.")
    ranks = []
    for values in (x, y):
        _, place, ties = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(ties) - 0.5 * (ties - 1))[place])
    a, b = (r - r.mean() if r.size else r for r in ranks)
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm > 0.0 else float("nan")
