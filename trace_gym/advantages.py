"""From the outcomes of a prompt's leaves to one advantage per leaf.

A rule sees one prompt: the return of every leaf (NaN where the rollout failed), the tree each leaf
belongs to (the bare rollout it grew from) and each leaf's path of node indices. It returns one
number per leaf, to be tiled over the policy tokens of the leaf's whole path.

Invariant: a failed leaf is no outcome. It takes part in no statistic and its own advantage is 0, so
adding failed leaves leaves the advantages of all others bit-identical.

Left out: standard deviations over the batch, and the reward shaping of the cited papers.

Letters: L leaves of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trace_gym.errors import BadInputError, unknown_name

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# What each source adds to the standard deviation it divides by.
GRPO_EPS = 1e-4  # TRL's GRPOTrainer
TREE_GRPO_EPS = 1e-6  # Tree-GRPO
WHITEN_EPS = 1e-8  # masked whitening, added to the variance


class AdvantageRule(Protocol):
    """Turns the leaves of one prompt into advantages; `grpo` is one."""

    def __call__(self, returns: ArrayLike, trees: ArrayLike, leaf_paths: Sequence[Sequence[int]], /) -> FloatArray:
        """Return one advantage per leaf, ``[L]``; 0 where the return is NaN."""
        ...


def grpo(
    returns: ArrayLike,
    trees: ArrayLike,
    leaf_paths: Sequence[Sequence[int]],
    /,
    *,
    scale_rewards: Literal["group", "none"] = "group",
) -> FloatArray:
    """Compare every leaf with all leaves of its prompt.

    The formula of GRPO (arXiv 2402.03300) as TRL's ``GRPOTrainer`` writes it: ``(R - mean) / (std +
    1e-4)`` with the unbiased standard deviation. A lone leaf has advantage 0.

    Args:
        returns: Return of each leaf, ``[L]``; NaN where it failed.
        trees: Tree of each leaf, ``[L]``; this rule does not look at it.
        leaf_paths: Path of each leaf, ``[L]``; this rule does not look at it.
        scale_rewards: ``"group"`` divides by the standard deviation; ``"none"`` does not, as Dr.
            GRPO (arXiv 2503.20783) advises.

    Returns:
        Advantages, ``[L]``.

    Raises:
        BadInputError: If the arrays disagree in length or an option does not exist.
    """
    if scale_rewards not in ("group", "none"):
        raise unknown_name("scale_rewards", scale_rewards, ("group", "none"))
    values, _, scored = _leaves(returns, trees, leaf_paths)
    advantages = np.zeros(values.size)
    scale = scale_rewards == "group"
    advantages[scored] = _standardise(values[scored], GRPO_EPS) if scale else _centre(values[scored])
    return advantages


def tree_grpo(returns: ArrayLike, trees: ArrayLike, leaf_paths: Sequence[Sequence[int]], /) -> FloatArray:
    """Compare every leaf with its own tree and with all leaves of its prompt, and add both.

    Tree-GRPO (arXiv 2509.21240, eq. 6-7): ``A = A_intra + A_inter``, each ``(R - mean) / (std +
    1e-6)`` with the unbiased standard deviation. One difference: the published code gives a group
    of one mean 0 and deviation 1, hence the raw return; here it gives 0, because a bare rollout
    that was not expanded is compared with nobody inside its tree.

    Args:
        returns: Return of each leaf, ``[L]``; NaN where it failed.
        trees: Tree of each leaf, ``[L]``: any integer that leaves of one bare rollout share.
        leaf_paths: Path of each leaf, ``[L]``; this rule does not look at it.

    Returns:
        Advantages, ``[L]``.

    Raises:
        BadInputError: If the arrays disagree in length.
    """
    values, tree_of, scored = _leaves(returns, trees, leaf_paths)
    advantages = np.zeros(values.size)
    advantages[scored] = _standardise(values[scored], TREE_GRPO_EPS)
    for tree in np.unique(tree_of[scored]):
        group = scored[tree_of[scored] == tree]
        advantages[group] += _standardise(values[group], TREE_GRPO_EPS)
    return advantages


def treepo(
    returns: ArrayLike,
    trees: ArrayLike,
    leaf_paths: Sequence[Sequence[int]],
    /,
    *,
    weighting: Literal["average", "group_size"] = "average",
) -> FloatArray:
    """Compare every leaf with the leaves below each branching on its path, and average.

    TreePO (arXiv 2508.17445): ``A_d = R - mean over the leaves below the d-th ancestor``, averaged
    over the ancestors that have more than one leaf. In a tree of turns a chain without branching
    would repeat its group and over-weight it, so each distinct set of leaves counts once. TreePO
    whitens the result over the batch: see `whiten`.

    Args:
        returns: Return of each leaf, ``[L]``; NaN where it failed.
        trees: Tree of each leaf, ``[L]``; this rule does not look at it.
        leaf_paths: Path of each leaf, ``[L]``: node indices from the prompt to the leaf.
        weighting: ``"average"`` weights all groups equally (the released script); ``"group_size"``
            weights them by their number of leaves (the code's default).

    Returns:
        Advantages, ``[L]``.

    Raises:
        BadInputError: If the arrays disagree in length or an option does not exist.
    """
    if weighting not in ("average", "group_size"):
        raise unknown_name("weighting", weighting, ("average", "group_size"))
    values, _, scored = _leaves(returns, trees, leaf_paths)
    advantages = np.zeros(values.size)
    below: dict[int, list[int]] = {}
    for leaf in scored.tolist():
        for node in leaf_paths[leaf]:
            below.setdefault(node, []).append(leaf)
    means = {node: values[group].mean() for node, group in below.items() if len(group) > 1}
    whole = values[scored].mean() if scored.size else 0.0
    for leaf in scored.tolist():
        terms, sizes = [values[leaf] - whole], [scored.size]
        for node in leaf_paths[leaf]:
            size = len(below[node])
            if 1 < size < sizes[-1]:  # a smaller group than above: something branched off
                terms.append(values[leaf] - means[node])
                sizes.append(size)
        weights = sizes if weighting == "group_size" else [1] * len(sizes)
        advantages[leaf] = np.dot(weights, terms) / sum(weights)
    return advantages


def whiten(advantages: ArrayLike, num_tokens: ArrayLike) -> FloatArray:
    """Shift and scale advantages to mean 0 and deviation 1 over all trained tokens of a batch.

    The masked whitening that TreePO and REINFORCE++ apply after tiling a leaf's advantage over its
    policy tokens, without tiling: each leaf counts as often as it has tokens.

    Args:
        advantages: Advantage of each leaf of the whole batch, ``[L]``.
        num_tokens: Policy tokens of each leaf, ``[L]``; 0 for a leaf that is not trained, such as a
            failed one, whose advantage then stays as it is.

    Returns:
        ``(A - mean) / sqrt(var + 1e-8)`` with the unbiased variance over tokens, ``[L]``.

    Raises:
        BadInputError: If the arrays disagree in length or a count is negative.
    """
    values = np.array(advantages, dtype=np.float64)
    tokens = np.asarray(num_tokens, dtype=np.float64)
    if values.ndim != 1 or tokens.shape != values.shape or not (tokens >= 0).all():
        raise BadInputError(
            f"whiten needs one token count of at least 0 per advantage; got shapes {values.shape} "
            f"and {tokens.shape}. Give both per leaf."
        )
    trained = tokens > 0
    total = tokens.sum()
    if total < 2:
        return values
    kept, weight = values[trained], tokens[trained]
    centred = kept - np.dot(weight, kept) / total
    variance = np.dot(weight, centred**2) / (total - 1.0)
    values[trained] = centred / np.sqrt(variance + WHITEN_EPS)
    return values


def _centre(values: FloatArray) -> FloatArray:
    """Subtract the mean; a group of one gives 0."""
    return values - values.mean() if values.size else values


def _standardise(values: FloatArray, eps: float) -> FloatArray:
    """Subtract the mean and divide by the unbiased deviation; a group of one gives 0."""
    if values.size < 2:
        return np.zeros(values.size)
    return _centre(values) / (float(values.std(ddof=1)) + eps)


def _leaves(
    returns: ArrayLike, trees: ArrayLike, leaf_paths: Sequence[Sequence[int]]
) -> tuple[FloatArray, IntArray, IntArray]:
    """Check the description of the leaves; return returns, trees and the scored indices."""
    values = np.asarray(returns, dtype=np.float64)
    tree_of = np.asarray(trees, dtype=np.int64)
    if values.ndim != 1 or tree_of.shape != values.shape or len(leaf_paths) != values.size:
        raise BadInputError(
            f"An advantage rule needs one return, tree and path per leaf; got shapes "
            f"{values.shape} and {tree_of.shape} and {len(leaf_paths)} paths. "
            "Describe every leaf of the prompt once."
        )
    if np.isinf(values).any():
        raise BadInputError(
            f"returns[{int(np.argmax(np.isinf(values)))}] is infinite; a return is finite, or NaN "
            "for a failed leaf. Check the reward."
        )
    return values, tree_of, np.flatnonzero(~np.isnan(values))


ADVANTAGES: dict[str, AdvantageRule] = {"grpo": grpo, "tree_grpo": tree_grpo, "treepo": treepo}


def get_advantage(name: str) -> AdvantageRule:
    """Return an advantage rule by name.

    Args:
        name: ``"grpo"``, ``"tree_grpo"`` or ``"treepo"``.

    Raises:
        BadInputError: If there is no such rule.
    """
    if name not in ADVANTAGES:
        raise unknown_name("advantage", name, ADVANTAGES)
    return ADVANTAGES[name]
