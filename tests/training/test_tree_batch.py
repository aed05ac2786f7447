"""Laws of the way from trees to padded rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trace_gym.advantages import get_advantage
from trace_gym.errors import BadInputError
from trace_gym.messages import Failure, Message
from trace_gym.training.tree_batch import (
    Row,
    num_trained,
    pad_rows,
    predictor_pairs,
    tree_advantages,
    tree_rows,
    whiten_rows,
)
from trace_gym.tree import NO_PARENT, ROOT, Node, RolloutTree


def turn(parent: int, ids: tuple[int, ...], *, birth: int = ROOT, reward: float | None = None) -> Node:
    """Return a turn that sampled all of its ids but the last, which the environment added."""
    sampled = (True,) * (len(ids) - 1) + (False,)
    return Node(
        parent,
        (Message("assistant", "x"),),
        ids,
        sampled,
        tuple(-0.1 * i if flag else 0.0 for i, flag in zip(ids, sampled, strict=True)),
        status="open" if reward is None else "terminal",
        reward=reward,
        birth=birth,
        num_generated=len(ids) - 1,
    )


@pytest.fixture
def grown() -> RolloutTree:
    """Two bare rollouts; the first (1, 2, 3) was continued after its first turn (4) and failed once (5)."""
    tree = RolloutTree("test", "task", Node(NO_PARENT, (), (1, 2), (False, False), (0.0, 0.0), value=0.5))
    tree.add(turn(ROOT, (10, 11, 12)))
    tree.add(turn(1, (13, 14)))
    tree.add(turn(2, (15, 16), reward=1.0))
    tree.add(turn(1, (17, 18, 19), birth=1, reward=0.0))
    tree.add(Node(1, (), status="failed", failure=Failure("deadline", "late"), birth=1))
    tree.add(turn(ROOT, (20, 21), reward=0.0))
    return tree


def rows_of(tree: RolloutTree, **options: Any) -> list[Row]:
    return tree_rows([tree], [tree_advantages(tree, get_advantage("grpo"))], **options)


def row(tree: int, length: int, advantage: float = 1.0) -> Row:
    ids = tuple(range(length))
    return Row(tree, 1, (7,), ids, (True,) * length, (-1.0,) * length, advantage)


def test_a_row_is_the_path_to_a_leaf_as_it_was_sampled(grown: RolloutTree) -> None:
    """Prompt and completion are the tree's own ids; every valid leaf has one row, a failed leaf none."""
    rows = rows_of(grown)
    assert [r.leaf for r in rows] == [3, 4, 6]
    for r in rows:
        assert list(r.prompt + r.completion) == grown.token_ids(r.leaf)
    assert rows[0].completion == (10, 11, 12, 13, 14, 15, 16)
    assert rows[0].trained == (True, True, False, True, False, True, False)
    assert rows[1].completion == (10, 11, 12, 17, 18, 19)


def test_a_masked_prefix_trains_once_with_the_rollout_it_came_from(grown: RolloutTree) -> None:
    plain, masked = rows_of(grown), rows_of(grown, mask_prefix=True)
    assert masked[0] == plain[0] and masked[2] == plain[2]
    assert masked[1].trained == (False, False, False, True, True, False)


@pytest.mark.parametrize("rule", ["grpo", "tree_grpo", "treepo"])
def test_a_failed_leaf_is_in_no_baseline(grown: RolloutTree, rule: str) -> None:
    """Without the failed leaf, all advantages are the same."""
    clean = RolloutTree("test", "task", grown.nodes[0])
    for i in (1, 2, 3, 4, 6):
        clean.add(grown.nodes[i])
    given, expected = (tree_advantages(tree, get_advantage(rule)) for tree in (grown, clean))
    assert [given[leaf] for leaf in (3, 4, 6)] == [expected[leaf] for leaf in (3, 4, 5)]


def test_prompts_without_contrast_have_no_rows(grown: RolloutTree) -> None:
    alike = RolloutTree("test", "alike", grown.nodes[0])
    unset = RolloutTree("test", "unset", Node(NO_PARENT, (), status="failed", failure=Failure("x", "y")))
    alike.add(turn(ROOT, (5, 6), reward=1.0))
    alike.add(turn(ROOT, (7, 8), reward=1.0))
    trees = [alike, RolloutTree("test", "unplayed", grown.nodes[0]), unset, grown]
    rows = tree_rows(trees, [tree_advantages(tree, get_advantage("grpo")) for tree in trees])
    assert {r.tree for r in rows} == {3}


def test_an_agent_without_token_ids_cannot_be_trained() -> None:
    tree = RolloutTree("test", "task", Node(NO_PARENT, (), (1,), (False,), (0.0,)))
    for reward in (0.0, 1.0):
        tree.add(Node(ROOT, (), status="terminal", reward=reward, num_generated=3))
    with pytest.raises(BadInputError, match="needs an agent that returns token_ids"):
        rows_of(tree)


def test_a_leaf_in_which_the_policy_said_nothing_has_no_row() -> None:
    """A prompt that fills the context leaves no room: that is an outcome, but nothing to train."""
    tree = RolloutTree("test", "task", Node(NO_PARENT, (), (1,), (False,), (0.0,)))
    tree.add(turn(ROOT, (2, 3), reward=1.0))
    tree.add(Node(ROOT, (), status="terminal", reward=0.0))
    assert [r.leaf for r in rows_of(tree)] == [1]


def test_prompts_are_padded_left_and_completions_right() -> None:
    rows = [
        Row(0, 1, (1, 2), (3, 4, 5), (True, False, True), (-0.5, 0.0, -1.5), 2.0),
        Row(0, 2, (6,), (7,), (True,), (-2.5,), -1.0),
    ]
    batch = pad_rows(rows, pad_id=99)
    expected = {
        "prompt_ids": [[1, 2], [99, 6]],
        "prompt_mask": [[1, 1], [0, 1]],
        "completion_ids": [[3, 4, 5], [7, 99, 99]],
        "completion_mask": [[1, 1, 1], [1, 0, 0]],
        "tool_mask": [[1, 0, 1], [1, 0, 0]],
        "sampling_per_token_logps": [[-0.5, 0.0, -1.5], [-2.5, 0.0, 0.0]],
        "advantages": [2.0, -1.0],
    }
    assert {name: tensor.tolist() for name, tensor in batch.items()} == expected
    assert num_trained(rows) == int(batch["tool_mask"].sum()) == 3
    wide = pad_rows(rows, pad_id=99, pad_to=4)
    assert wide["prompt_ids"].shape == wide["completion_ids"].shape == torch.Size([2, 4])


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens() -> None:
    rows = whiten_rows([row(0, 3, 1.0), row(0, 5, -2.0), row(1, 2, 4.0)])
    tokens = np.repeat([r.advantage for r in rows], [3, 5, 2])
    assert tokens.mean() == pytest.approx(0.0) and tokens.std(ddof=1) == pytest.approx(1.0)


def test_the_predictor_learns_each_prefix_from_what_was_played_from_there_on(grown: RolloutTree) -> None:
    """branch_point: the continuation says nothing of the prompt. recursive: all leaves below count."""
    prefixes, successes, counts = predictor_pairs([grown], "branch_point")
    assert [prefix.turn for prefix in prefixes] == [0, 1, 2]
    assert successes.tolist() == [1, 1, 1] and counts.tolist() == [2, 2, 1]
    _, successes, counts = predictor_pairs([grown], "recursive")
    assert successes.tolist() == [1, 1, 1] and counts.tolist() == [3, 2, 1]
    prefixes, successes, counts = predictor_pairs([], "branch_point")
    assert prefixes == [] and successes.shape == counts.shape == (0,)
