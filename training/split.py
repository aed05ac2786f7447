"""Rows to forward passes: what trains together, and how much at a time.

Invariants:

- All rows of a prompt train in the same optimizer step.
- How an update is cut into micro-batches changes neither loss nor gradient: `MicroBatch.share` says how much of the
  update's mean a micro-batch is. A tree that is cut has the path above the cut in both parts.
- A micro-batch exceeds a limit only if it is a single row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from trace_gym.training.packing import common_prefix
from trace_gym.training.tree_batch import Row


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass.

    Attributes:
        rows: The rows; at least one.
        share: Share of the update's rows that stand here.
        count: Micro-batches of this update.
        tokens: Tokens of the forward pass: unique ones where rows are packed, else padding included.
    """

    rows: tuple[Row, ...]
    share: float
    count: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What one forward pass may hold.

    Attributes:
        rows: Most rows.
        tokens: Most tokens, counted as in `MicroBatch.tokens`.
        packed: Whether rows are packed, so that what they begin with alike counts once.
    """

    rows: int
    tokens: int
    packed: bool


def split_rows(rows: Sequence[Row], updates: int, limits: Limits, rng: np.random.Generator) -> list[list[MicroBatch]]:
    """Divide rows over optimizer steps and micro-batches.

    Args:
        rows: All rows of a step.
        updates: Optimizer steps.
        limits: What a micro-batch may hold.
        rng: Decides which prompts train together.

    Returns:
        The micro-batches of each update, as few as the limits allow; none where it has no row. Flat rows are in order
        of length, so that little is padded; packed ones in order of their ids, so that trees stay together.
    """
    dealt: list[list[Row]] = [[] for _ in range(updates)]
    prompts = sorted({row.tree for row in rows})
    for place in rng.permutation(len(prompts)):
        least = min(dealt, key=len)
        least += [row for row in rows if row.tree == prompts[place]]
    found = []
    for mine in dealt:
        parts = list(_trees(mine, limits) if limits.packed else _rectangles(mine, limits))
        found.append([MicroBatch(tuple(part), len(part) / len(mine), len(parts), size) for part, size in parts])
    return found


def num_cut(updates: Sequence[Sequence[MicroBatch]]) -> int:
    """Return the number of trees that stand in several micro-batches."""
    homes = [tree for update in updates for batch in update for tree in {row.tree for row in batch.rows}]
    return len(homes) - len(set(homes))


def _rectangles(rows: Sequence[Row], limits: Limits) -> Iterator[tuple[list[Row], int]]:
    """Yield rows of like length, and the size of the rectangle that holds them."""
    part: list[Row] = []
    prompt = completion = 0
    for row in sorted(rows, key=lambda row: (len(row.completion), row.tree)):
        wide = max(prompt, len(row.prompt)), max(completion, len(row.completion))
        if part and (len(part) == limits.rows or (len(part) + 1) * sum(wide) > limits.tokens):
            yield part, len(part) * (prompt + completion)
            part, wide = [], (len(row.prompt), len(row.completion))
        part.append(row)
        prompt, completion = wide
    if part:
        yield part, len(part) * (prompt + completion)


def _trees(rows: Sequence[Row], limits: Limits) -> Iterator[tuple[list[Row], int]]:
    """Yield rows of whole trees, cut where a tree alone is too large, and the number of their unique tokens."""
    part: list[Row] = []
    size = 0
    ordered = sorted(rows, key=lambda row: (row.prompt, row.tree, row.completion))
    ids = [np.array(row.prompt + row.completion) for row in ordered]
    shared = [0] + [common_prefix(a, b) for a, b in pairwise(ids)]
    for _, group in groupby(range(len(ordered)), key=lambda i: ordered[i].tree):
        tree = list(group)
        new = sum(len(ids[i]) - shared[i] for i in tree)
        fits = size + new <= limits.tokens and len(part) + len(tree) <= limits.rows
        for i in tree:
            grown = size + len(ids[i]) - shared[i]
            if part and (not fits or grown > limits.tokens or len(part) == limits.rows):
                yield part, size
                part, grown, fits = [], len(ids[i]), True
            part.append(ordered[i])
            size = grown
    if part:
        yield part, size
