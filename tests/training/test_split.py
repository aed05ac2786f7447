"""Laws of the way from rows to forward passes."""

from __future__ import annotations

import numpy as np
import pytest

from trace_gym.training.split import Limits, num_cut, split_rows
from trace_gym.training.tree_batch import Row


def row(tree: int, ids: tuple[int, ...]) -> Row:
    return Row(tree, 1, (100 + tree, 7), ids, (True,) * len(ids), (-1.0,) * len(ids), 1.0)


def leaves(tree: int, count: int) -> list[Row]:
    """Return a comb: each leaf leaves the first one a token later."""
    return [row(tree, (*range(k), 50 + k, 50 + k)) for k in range(count)]


def unique(rows: tuple[Row, ...]) -> int:
    """Count unique tokens the slow way: every prefix of every row is one."""
    paths = [row.prompt + row.completion for row in rows]
    return len({path[: i + 1] for path in paths for i in range(len(path))})


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize(
    ("most_rows", "most_tokens"), [(1, 1000), (4, 1000), (100, 1000), (100, 24), (3, 12), (100, 1)]
)
def test_every_row_is_dealt_once_within_the_limits(
    packed: bool, updates: int, most_rows: int, most_tokens: int
) -> None:
    """Prompts stay in one update, shares add up to 1, and only a single row may be larger than allowed."""
    rows = [row for tree in range(5) for row in leaves(tree, 2 + tree)]
    limits = Limits(most_rows, most_tokens, packed)
    found = split_rows(rows, updates, limits, np.random.default_rng(0))
    assert sorted(map(id, rows)) == sorted(id(r) for update in found for batch in update for r in batch.rows)
    assert sum(len({r.tree for batch in update for r in batch.rows}) for update in found) == 5
    for update in found:
        assert sum(batch.share for batch in update) == pytest.approx(1.0)
        assert {batch.count for batch in update} == {len(update)}
        for batch in update:
            width = max(len(r.prompt) for r in batch.rows) + max(len(r.completion) for r in batch.rows)
            assert batch.tokens == (unique(batch.rows) if packed else len(batch.rows) * width)
            assert len(batch.rows) == 1 or (len(batch.rows) <= most_rows and batch.tokens <= most_tokens)


def test_a_tree_is_cut_only_if_it_alone_is_too_large() -> None:
    """Trees of 10, 10 and 16 unique tokens under a limit of 12: the first two stay whole, the last is cut."""
    rows = leaves(0, 3) + leaves(1, 3) + leaves(2, 5)
    assert [unique(tuple(leaves(0, count))) for count in (3, 5)] == [10, 16]
    (update,) = split_rows(rows, 1, Limits(100, 12, packed=True), np.random.default_rng(0))
    assert [{r.tree for r in batch.rows} for batch in update] == [{0}, {1}, {2}, {2}]
    assert num_cut([update]) == 1


@pytest.mark.parametrize("packed", [True, False])
def test_trees_stay_whole_on_one_process_which_have_about_equally_many_tokens(packed: bool) -> None:
    """As even as whole trees allow: moving none of them would make the largest share smaller."""
    rows = [row for tree, count in enumerate((9, 2, 3, 2, 7, 3, 5)) for row in leaves(tree, count)]
    (update,) = split_rows(rows, 1, Limits(4, 40, packed), np.random.default_rng(0), processes=3)
    homes = {(r.tree, batch.process) for batch in update for r in batch.rows}
    assert len(homes) == 7, "each tree has one home, though it is cut"
    own = {tree: [r for r in rows if r.tree == tree] for tree in range(7)}
    tokens = {
        tree: unique(tuple(part)) if packed else sum(len(r.prompt) + len(r.completion) for r in part)
        for tree, part in own.items()
    }
    loads = [sum(tokens[tree] for tree, process in homes if process == rank) for rank in range(3)]
    smallest = {rank: min(tokens[tree] for tree, process in homes if process == rank) for rank in range(3)}
    most = max(range(3), key=loads.__getitem__)
    assert min(loads) + smallest[most] >= loads[most]
    assert sum(batch.share for batch in update) == pytest.approx(1.0)


def test_a_step_without_rows_has_no_micro_batches() -> None:
    assert split_rows([], 2, Limits(4, 10, packed=True), np.random.default_rng(0)) == [[], []]
