"""Advantages against numbers worked out by hand, and the laws that every rule obeys."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_gym.advantages import ADVANTAGES, get_advantage, grpo, tree_grpo, treepo, whiten
from trace_gym.errors import BadInputError

RULES = {
    **ADVANTAGES,
    "grpo unscaled": partial(grpo, scale_rewards="none"),
    "treepo by size": partial(treepo, weighting="group_size"),
}


def forest(seed: int, failures: float = 0.0):
    """A random prompt: bare rollouts with continuations at random depths, some leaves failed."""
    rng = np.random.default_rng(seed)
    returns, trees, paths, next_node = [], [], [], 1
    for tree in range(int(rng.integers(1, 5))):
        length = int(rng.integers(1, 6))
        bare = [0, *range(next_node, next_node + length)]
        next_node += length
        branches = [bare]
        for _ in range(int(rng.integers(0, 4)) if length > 1 else 0):
            start = int(rng.integers(1, length))
            extra = int(rng.integers(1, 4))
            branches.append([*bare[: start + 1], *range(next_node, next_node + extra)])
            next_node += extra
        for path in branches:
            failed = rng.random() < failures
            returns.append(np.nan if failed else float(rng.random() < 0.5))
            trees.append(tree)
            paths.append(path)
    return np.array(returns), np.array(trees), paths


def chains(returns):
    """Leaves without any sharing: one chain of two turns each."""
    return (
        returns,
        list(range(len(returns))),
        [[0, 2 * i + 1, 2 * i + 2] for i in range(len(returns))],
    )


def test_grpo_gives_the_numbers_worked_out_by_hand():
    """Returns 1, 0, 0, 1: mean .5, unbiased deviation 1/sqrt(3)."""
    unit = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert grpo(*chains([1, 0, 0, 1])) == pytest.approx([unit, -unit, -unit, unit], abs=1e-15)
    assert grpo(*chains([1, 0, 0, 0]), scale_rewards="none").tolist() == [0.75, -0.25, -0.25, -0.25]


def trl_advantages(torch, nanstd, rewards, scale_rewards):
    """The lines of TRL 1.16's GRPOTrainer that turn one group's rewards into advantages."""
    rewards = torch.tensor(rewards, dtype=torch.float64)
    num = len(rewards)
    mean = torch.nanmean(rewards.view(-1, num), dim=1).repeat_interleave(num, dim=0)
    if num > 1:
        std = nanstd(rewards.view(-1, num), dim=1).repeat_interleave(num, dim=0)
    else:
        std = torch.zeros_like(rewards)
    advantages = rewards - mean
    if scale_rewards != "none":
        advantages = advantages / (std + 1e-4)
    return torch.nan_to_num(advantages, nan=0.0).numpy()


@pytest.mark.slow
def test_grpo_equals_trl():
    """The same rewards get the same advantages as in TRL, failed and lone ones included."""
    torch = pytest.importorskip("torch")
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    rng = np.random.default_rng(0)
    for _ in range(300):
        rewards = rng.choice([0.0, 1.0, 0.3, np.nan], int(rng.integers(1, 9)))
        for scale in ("group", "none"):
            ours = grpo(*chains(rewards), scale_rewards=scale)
            theirs = trl_advantages(torch, nanstd, rewards, scale)
            # TRL computes Bessel's correction in float32 whatever the rewards are.
            np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-12)


def test_tree_grpo_adds_the_comparison_within_the_tree():
    """Two trees: leaves 1, 0, 1 and a lone 0. The lone leaf is compared between trees only."""
    returns, trees = [1, 0, 1, 0], [0, 0, 0, 1]
    paths = [[0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 5]]
    inter = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    deviation = math.sqrt(1 / 3) + 1e-6
    expected = [
        inter + (1 / 3) / deviation,
        -inter - (2 / 3) / deviation,
        inter + (1 / 3) / deviation,
        -inter,
    ]
    assert tree_grpo(returns, trees, paths) == pytest.approx(expected, abs=1e-12)


def test_tree_grpo_gives_a_singleton_tree_nothing_within_itself():
    """Without expansions only the comparison between trees is left."""
    returns, trees, paths = chains([1, 1, 0, 1])
    expected = (np.array(returns) - 0.75) / (0.5 + 1e-6)
    assert tree_grpo(returns, trees, paths) == pytest.approx(expected, abs=1e-12)


def test_treepo_averages_over_the_branchings_of_the_path():
    """Leaves a, b below node 2, c below node 1, d alone; a chain between 1 and 2 counts once."""
    returns, trees = [1, 0, 1, 0], [0, 0, 0, 1]
    paths = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6], [0, 1, 7], [0, 8, 9]]
    # Groups: all (mean .5), below 1 = {a, b, c} (2/3), below 2, 3, 4 = {a, b} (1/2).
    third = 1 / 3
    expected = [(0.5 + third + 0.5) / 3, (-0.5 - 2 * third - 0.5) / 3, (0.5 + third) / 2, -0.5]
    assert treepo(returns, trees, paths) == pytest.approx(expected, abs=1e-12)
    by_size = [
        (4 * 0.5 + 3 * third + 2 * 0.5) / 9,
        (-4 * 0.5 - 3 * 2 * third - 2 * 0.5) / 9,
        (4 * 0.5 + 3 * third) / 7,
        -0.5,
    ]
    assert treepo(returns, trees, paths, weighting="group_size") == pytest.approx(by_size, abs=1e-12)


def test_treepo_does_not_care_whether_paths_name_the_prompt():
    """The group of all leaves counts once, with or without the root node in the paths."""
    returns, trees, paths = forest(3)
    without = [path[1:] for path in paths]
    np.testing.assert_array_equal(treepo(returns, trees, paths), treepo(returns, trees, without))


def test_without_expansions_every_rule_is_a_baseline_over_the_prompt():
    """Flat rollouts: tree_grpo and treepo order leaves exactly as GRPO does."""
    returns, trees, paths = chains([1, 0, 1, 1, 0])
    unscaled = grpo(returns, trees, paths, scale_rewards="none")
    np.testing.assert_allclose(treepo(returns, trees, paths), unscaled, rtol=0, atol=1e-15)
    scaled = grpo(returns, trees, paths) * (np.std(returns, ddof=1) + 1e-4)
    np.testing.assert_allclose(scaled, unscaled, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_failed_leaves_leave_all_others_bit_identical(name, seed):
    """k failed leaves, wherever they hang, change no other advantage by a single bit."""
    rule = RULES[name]
    returns, trees, paths = forest(seed)
    rng = np.random.default_rng(seed)
    full, full_trees, full_paths = list(returns), list(trees), list(paths)
    for k in range(int(rng.integers(1, 5))):
        host = int(rng.integers(len(full)))
        at, cut = int(rng.integers(len(full) + 1)), int(rng.integers(1, len(full_paths[host]) + 1))
        tree = full_trees[host] if cut > 1 else 99 + k
        path = [*full_paths[host][:cut], 1000 + k]
        full.insert(at, np.nan)
        full_trees.insert(at, tree)
        full_paths.insert(at, path)
    scored = ~np.isnan(full)
    longer = rule(np.array(full), np.array(full_trees), full_paths)
    assert longer[scored].tobytes() == rule(returns, trees, paths).tobytes()
    assert (longer[~scored] == 0.0).all()


@pytest.mark.parametrize("name", RULES)
@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_rules_obey_their_invariances(name, seed):
    """Order and labels do not matter, a constant drops out, equal outcomes teach nothing."""
    rule = RULES[name]
    returns, trees, paths = forest(seed, failures=0.2)
    advantages = rule(returns, trees, paths)
    order = np.random.default_rng(seed).permutation(len(returns))
    relabelled = [[7 * node + 3 for node in paths[i]] for i in order]
    shuffled = rule(returns[order], 5 - trees[order], relabelled)
    np.testing.assert_allclose(shuffled, advantages[order], atol=1e-9)
    shifted = rule(returns + 2.0, trees, paths)
    np.testing.assert_allclose(shifted, advantages, atol=1e-9)
    assert (rule(np.where(np.isnan(returns), np.nan, 1.0), trees, paths) == 0.0).all()
    mirrored = rule(1.0 - returns, trees, paths)
    np.testing.assert_allclose(mirrored, -advantages, atol=1e-9)
    assert np.isfinite(advantages).all()


@pytest.mark.parametrize("name", ["grpo", "grpo unscaled", "tree_grpo"])
@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_advantages_over_groups_sum_to_zero(name, seed):
    """Standardised groups have mean 0, and so has their sum over a prompt."""
    assert RULES[name](*forest(seed, failures=0.2)).sum() == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("name", RULES)
def test_edges_give_zero(name):
    """No leaf, one leaf, only failed leaves."""
    rule = RULES[name]
    assert rule([], [], []).shape == (0,)
    assert rule([1.0], [0], [[0, 1]]).tolist() == [0.0]
    assert rule([np.nan, np.nan], [0, 1], [[0, 1], [0, 2]]).tolist() == [0.0, 0.0]
    assert rule([np.nan, 1.0], [0, 0], [[0, 1, 2], [0, 1, 3]]).tolist() == [0.0, 0.0]


def test_whitening_equals_whitening_over_tiled_tokens():
    """Weights by token count are the same as repeating every advantage."""
    rng = np.random.default_rng(1)
    advantages, tokens = rng.normal(size=20), rng.integers(1, 50, 20)
    tiled = np.repeat(advantages, tokens)
    expected = (advantages - tiled.mean()) / np.sqrt(tiled.var(ddof=1) + 1e-8)
    white = whiten(advantages, tokens)
    np.testing.assert_allclose(white, expected, atol=1e-12)
    assert np.repeat(white, tokens).mean() == pytest.approx(0, abs=1e-12)
    assert np.repeat(white, tokens).std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_whitening_ignores_leaves_that_are_not_trained():
    """Zero tokens: out of the statistics, and left as they are; equal advantages become 0."""
    full = whiten([1.0, 0.0, -1.0, 0.0], [3, 0, 3, 0])
    assert full[[1, 3]].tolist() == [0.0, 0.0]
    np.testing.assert_array_equal(full[[0, 2]], whiten([1.0, -1.0], [3, 3]))
    assert whiten([0.5, 0.5], [3, 4]).tolist() == [0.0, 0.0]
    assert whiten([0.5], [1]).tolist() == [0.5]
    assert whiten([], []).shape == (0,)


def test_bad_input_is_refused():
    """Lengths must agree, options and names must exist, returns are finite or NaN."""
    for rule in RULES.values():
        with pytest.raises(BadInputError, match="one return, tree and path per leaf"):
            rule([1.0, 0.0], [0], [[0, 1], [0, 2]])
        with pytest.raises(BadInputError, match=r"returns\[1\] is infinite"):
            rule([1.0, np.inf], [0, 0], [[0, 1], [0, 2]])
    with pytest.raises(BadInputError, match="scale_rewards"):
        grpo([1.0], [0], [[0, 1]], scale_rewards="batch")
    with pytest.raises(BadInputError, match="weighting"):
        treepo([1.0], [0], [[0, 1]], weighting="mean")
    with pytest.raises(BadInputError, match="token count"):
        whiten([1.0], [1, 2])
    with pytest.raises(BadInputError, match="Did you mean 'tree_grpo'"):
        get_advantage("treegrpo")


def test_every_rule_has_a_name():
    """The names of the table are the names of the functions."""
    assert {name: get_advantage(name).__name__ for name in ADVANTAGES} == {n: n for n in ADVANTAGES}
