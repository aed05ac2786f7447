"""Rows to forward passes: what trains together, and how much at a time.

Invariants:

- All rows of a prompt train in the same optimizer step.
- How an update is cut into micro-batches changes neither loss nor gradient: `MicroBatch.share` says how much of the
  update's mean a micro-batch is. A tree that is cut has the path above the cut in both parts.
- A micro-batch exceeds a limit only if it is a single row; `fitting_rows` leaves out those that would.
- All rows of a prompt train in the same process.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from trace_gym.processes import deal
from trace_gym.training.packing import common_prefix
from trace_gym.training.tree_batch import Row


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass.

    Attributes:
        rows: The rows; at least one.
        share: Share of the update's rows that stand here.
        count: Micro-batches of this update, in all processes.
        tokens: Tokens of the forward pass: unique ones where rows are packed, else padding included.
        process: Where it trains.
    """

    rows: tuple[Row, ...]
    share: float
    count: int
    tokens: int
    process: int = 0


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


def fitting_rows(rows: Sequence[Row], tokens: int) -> tuple[list[Row], int]:
    """Return the rows that fit into one forward pass, and how many do not.

    Warns of them: a run whose long conversations are never trained should not go unnoticed.
    """
    fitting = [row for row in rows if len(row.prompt) + len(row.completion) <= tokens]
    if left_out := len(rows) - len(fitting):
        warnings.warn(
            f"{left_out} of {len(rows)} rows of a step have more than max_batch_tokens={tokens} tokens and were not "
            "trained. Raise it, or lower max_context_tokens.",
            stacklevel=2,
        )
    return fitting, left_out


def split_rows(
    rows: Sequence[Row], updates: int, limits: Limits, rng: np.random.Generator, processes: int = 1
) -> list[list[MicroBatch]]:
    """Divide rows over optimizer steps, processes and micro-batches.

    Args:
        rows: All rows of a step.
        updates: Optimizer steps.
        limits: What a micro-batch may hold.
        rng: Decides which prompts train together.
        processes: Processes that train; they get about equally many tokens.

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
    cut = _trees if limits.packed else _rectangles
    for mine in dealt:
        shares = enumerate(_shares(mine, processes, limits.packed))
        parts = [(tuple(part), size, rank) for rank, share in shares for part, size in cut(share, limits)]
        found.append([MicroBatch(part, len(part) / len(mine), len(parts), size, rank) for part, size, rank in parts])
    return found


def _shares(rows: Sequence[Row], processes: int, packed: bool) -> list[list[Row]]:
    """Return the rows of each process: whole trees, and about equally many tokens."""
    trees = [list(tree) for _, tree in groupby(sorted(rows, key=lambda row: row.tree), key=lambda row: row.tree)]
    shares: list[list[Row]] = [[] for _ in range(processes)]
    for tree, rank in zip(trees, deal([_tokens(tree, packed) for tree in trees], processes), strict=True):
        shares[rank] += tree
    return shares


def _tokens(rows: Sequence[Row], packed: bool) -> int:
    """Return the tokens of a tree, shared ones counted once where it is packed."""
    total = sum(len(row.prompt) + len(row.completion) for row in rows)
    return sum(size for _, size in _trees(rows, Limits(len(rows), total, packed))) if packed else total


def passes_of(process: int, update: Sequence[MicroBatch], filler: MicroBatch) -> list[MicroBatch]:
    """Return a process's micro-batches of an update, after as many fillers as it has fewer than another."""
    mine = [batch for batch in update if batch.process == process]
    most = max(Counter(batch.process for batch in update).values(), default=0)
    return [filler] * (most - len(mine)) + mine


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
