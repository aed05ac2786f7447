"""Trees to padded rows.

Invariants:

- One leaf is one row: the prompt's ids, then the ids along the path, exactly as they were sampled. A token
  that several leaves share stands in all their rows (TRACE.md section 6.3: full rows).
- Rows exist for prompts with contrast only. Failed leaves have no row; nothing stands in their place.

Letters: B rows, P prompt tokens, T completion tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trace_gym.advantages import AdvantageRule, whiten
from trace_gym.errors import BadInputError
from trace_gym.targets import branch_point_targets, recursive_targets
from trace_gym.tree import ROOT, Prefix, RolloutTree


@dataclass(frozen=True, slots=True)
class Row:
    """One leaf of a tree as a sequence to train on.

    Attributes:
        tree: Index of the tree among those of the step.
        leaf: Index of the leaf among the tree's nodes.
        prompt: Token ids of the prompt, [P].
        completion: Token ids after the prompt, [T].
        trained: Whether the token is trained, [T]; never one that the policy did not sample.
        logprobs: Log-probability under the sampling distribution, [T].
        advantage: Advantage of every trained token.
    """

    tree: int
    leaf: int
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    trained: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantage: float


def tree_advantages(tree: RolloutTree, rule: AdvantageRule) -> dict[int, float]:
    """Return the advantage of each leaf of one prompt, by node index; 0 where it failed."""
    leaves = tree.leaves()
    paths = [tree.path(leaf) for leaf in leaves]
    values = rule(tree.returns()[leaves], [path[1] for path in paths], paths)
    return dict(zip(leaves, values.tolist(), strict=True))


def predictor_pairs(
    trees: Sequence[RolloutTree], target: str
) -> tuple[list[Prefix], NDArray[np.float64], NDArray[np.float64]]:
    """Return what the predictor learns from a step: prefixes, successes and counts, one of each.

    Args:
        trees: The trees of a step.
        target: ``"branch_point"`` or ``"recursive"``, see `trace_gym.predictor`.
    """
    prefixes: list[Prefix] = []
    successes, counts = [np.zeros(0)], [np.zeros(0)]
    for tree in trees:
        if target == "recursive":
            nodes, won, played = recursive_targets(tree.parents(), tree.returns())
        else:
            nodes, won, played = branch_point_targets(tree.parents(), tree.births(), tree.returns())
        prefixes += [tree.prefix(node) for node in nodes.tolist()]
        successes.append(won)
        counts.append(played)
    return prefixes, np.concatenate(successes), np.concatenate(counts)


def tree_rows(
    trees: Sequence[RolloutTree], advantages: Sequence[Mapping[int, float]], mask_prefix: bool = False
) -> list[Row]:
    """Return the rows of all trees with contrast, tree by tree.

    Args:
        trees: The trees of a step.
        advantages: For each tree, the advantage of its valid leaves by node index.
        mask_prefix: Train of a continuation only what it added to its prefix (TRACE.md section 6.3).

    Raises:
        BadInputError: If a leaf to train on has no token ids.
    """
    rows = []
    for index, (tree, values) in enumerate(zip(trees, advantages, strict=True)):
        if not tree.is_mixed():
            continue
        returns = tree.returns()
        valid = [leaf for leaf in tree.leaves() if not np.isnan(returns[leaf])]
        rows += [row for leaf in valid if (row := _row(index, tree, leaf, values[leaf], mask_prefix))]
    return rows


def _row(index: int, tree: RolloutTree, leaf: int, advantage: float, mask_prefix: bool) -> Row | None:
    """Return a leaf's row; None if the policy had no room to say anything."""
    path = tree.path(leaf)[1:]
    turns = [tree.nodes[i] for i in path]
    if any(sum(node.sampled) != node.num_generated for node in turns):
        raise BadInputError(
            f"Leaf {leaf} of task {tree.task_id!r} has turns whose sampled token ids are not known. Training "
            "needs an agent that returns token_ids with its completions."
        )
    birth = tree.nodes[leaf].birth if mask_prefix else ROOT
    row = Row(
        tree=index,
        leaf=leaf,
        prompt=tree.nodes[ROOT].token_ids,
        completion=tuple(token for node in turns for token in node.token_ids),
        trained=tuple(flag and i > birth for i, node in zip(path, turns, strict=True) for flag in node.sampled),
        logprobs=tuple(value for node in turns for value in node.logprobs),
        advantage=float(advantage),
    )
    return row if any(row.trained) else None


def whiten_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with advantages of mean 0 and deviation 1 over all their trained tokens."""
    values = whiten([row.advantage for row in rows], [sum(row.trained) for row in rows])
    return [replace(row, advantage=float(value)) for row, value in zip(rows, values, strict=True)]


def pad_rows(rows: Sequence[Row], pad_id: int, pad_to: int | None = None) -> dict[str, torch.Tensor]:
    """Return rows as the padded tensors of TRL's loss.

    Args:
        rows: At least one row.
        pad_id: Token id of the padding.
        pad_to: Make the number of prompt and of completion columns a multiple of this.

    Returns:
        ``prompt_ids``, ``prompt_mask`` [B, P], padded on the left; ``completion_ids``, ``completion_mask``,
        ``tool_mask`` (1 = trained), ``sampling_per_token_logps`` [B, T], padded on the right;
        ``advantages`` [B].
    """
    prompts = [row.prompt for row in rows]
    completions = [row.completion for row in rows]

    def pad(columns: Sequence[Sequence[Any]], value: Any, dtype: torch.dtype, left: bool = False) -> torch.Tensor:
        width = max(len(column) for column in columns)
        width += -width % (pad_to or 1)
        padded = torch.full((len(columns), width), value, dtype=dtype)
        for i, column in enumerate(columns):
            start = width - len(column) if left else 0
            padded[i, start : start + len(column)] = torch.tensor(column, dtype=dtype)
        return padded

    return {
        "prompt_ids": pad(prompts, pad_id, torch.long, left=True),
        "prompt_mask": pad([[1] * len(ids) for ids in prompts], 0, torch.long, left=True),
        "completion_ids": pad(completions, pad_id, torch.long),
        "completion_mask": pad([[1] * len(ids) for ids in completions], 0, torch.long),
        "tool_mask": pad([row.trained for row in rows], 0, torch.long),
        "sampling_per_token_logps": pad([row.logprobs for row in rows], 0.0, torch.float32),
        "advantages": torch.tensor([row.advantage for row in rows], dtype=torch.float32),
    }


def num_trained(rows: Sequence[Row]) -> int:
    """Return the number of tokens that are trained."""
    return sum(sum(row.trained) for row in rows)
