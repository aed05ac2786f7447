"""Stage 1 and Stage 2 against test vectors, brute force, dynamic programming and their laws."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_gym.allocation import (
    ALLOCATORS,
    allocate_prefixes,
    allocate_roots,
    get_allocator,
    prefix_contrast,
    random_prefixes,
    root_contrast,
    uniform_roots,
)
from trace_gym.errors import BadInputError

STAGE_1 = [
    # values, budget, max_per_root, counts, value
    ([0.5, 0.5], 4, 3, [2, 2], 1.0),
    ([0.5, 0.5], 4, 8, [2, 2], 1.0),
    ([0.5, 0.3], 5, 8, [3, 2], 1.17),
    ([0.5, 0.5, 0.5], 7, 2, [2, 2, 2], 1.5),
    ([0.5, 0.4, 0.3], 7, 8, [3, 2, 2], 1.65),
    ([0.5, 0.1], 7, 8, [4, 3], 1.145),
    ([0.05], 20, 8, [8], 0.336580),
    ([0.3, 0.3, 0.3, 0.3], 9, 3, [3, 3, 3, 0], 1.89),
    ([0.9, 0.5, 0.2, 0.02], 10, 8, [2, 4, 4, 0], 1.6438),
    ([0.2, 0.6], 1, 8, [0, 0], 0.0),
    ([0.5, 0.45, 0.4, 0.35, 0.3], 13, 8, [3, 3, 3, 2, 2], 3.0875),
    ([0.85, 0.15, 0.5], 16, 16, [6, 6, 4], 2.120678),
]
STAGE_2 = [
    # values, reward, budget, counts, value
    ([0.7], 1, 2, [2], 0.51),
    ([0.5, 0.6, 0.9], 1, 2, [1, 1, 0], 0.9),
    ([0.5, 0.6, 0.9], 0, 2, [0, 1, 1], 1.5),
    ([0.2, 0.8], 1, 3, [2, 1], 1.16),
    ([0.02, 0.9, 0.95], 1, 6, [1, 5, 0], 1.38951),
]


def draw_values(rng: np.random.Generator, size: int) -> np.ndarray:
    """Values of four kinds: U-shaped, uniform, coarse (many ties), extreme."""
    kind = rng.integers(4)
    if kind == 0:
        return rng.beta(0.4, 0.4, size)
    if kind == 1:
        return rng.random(size)
    if kind == 2:
        return rng.choice([0.1, 0.3, 0.5, 0.7, 0.9], size)
    return rng.choice([0.0, 0.02, 0.5, 0.98, 1.0], size)


def best_by_dynamic_programming(values: np.ndarray, budget: int, cap: int, *, exactly: bool = False) -> float:
    """Best Stage 1 objective for values inside the clip range; -inf if `exactly` cannot be met."""
    best = np.full(budget + 1, -np.inf)
    best[0] = 0.0
    for v in values:
        improved = best.copy()
        for m in range(2, min(cap, budget) + 1):
            gain = 1.0 - v**m - (1.0 - v) ** m
            improved[m:] = np.maximum(improved[m:], best[: budget + 1 - m] + gain)
        best = improved
    return float(best[budget] if exactly else best.max())


@pytest.mark.parametrize(("values", "budget", "cap", "counts", "value"), STAGE_1)
def test_stage_1_gives_the_counts_of_the_test_vectors(values, budget, cap, counts, value):
    """The worked examples of the design note come out, ties in file order included."""
    given_counts = allocate_roots(values, budget, cap)
    assert given_counts.tolist() == counts
    assert root_contrast(values, given_counts).sum() == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(("values", "reward", "budget", "counts", "value"), STAGE_2)
def test_stage_2_gives_the_counts_of_the_test_vectors(values, reward, budget, counts, value):
    """The worked examples of the design note come out."""
    given_counts = allocate_prefixes(values, reward, budget)
    assert given_counts.tolist() == counts
    assert prefix_contrast(values, reward, given_counts).sum() == pytest.approx(value, abs=1e-9)


def test_stage_1_equals_brute_force_on_small_instances():
    """No legal counts beat the solver: 2,000 random instances, all counts enumerated."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        size, cap, budget = rng.integers(1, 5), int(rng.integers(2, 6)), int(rng.integers(0, 15))
        values = draw_values(rng, size)
        counts = allocate_roots(values, budget, cap, rng)
        legal = [0, *range(2, cap + 1)]
        table = root_contrast(np.repeat(np.clip(values, 0.02, 0.98), len(legal)), np.tile(legal, size)).reshape(
            size, -1
        )
        options = np.array(list(itertools.product(range(len(legal)), repeat=size)))
        cost = np.array(legal)[options].sum(axis=1)
        gain = table[np.arange(size), options].sum(axis=1)
        achieved = root_contrast(np.clip(values, 0.02, 0.98), counts).sum()
        assert counts.sum() <= budget and set(counts.tolist()) <= set(legal)
        assert achieved == pytest.approx(gain[cost <= budget].max(), abs=1e-10)
        if (cost == budget).any():
            counts = allocate_roots(values, budget, cap, rng, spend_all=True)
            achieved = root_contrast(np.clip(values, 0.02, 0.98), counts).sum()
            assert counts.sum() == budget
            assert achieved == pytest.approx(gain[cost == budget].max(), abs=1e-10)


def test_stage_1_equals_dynamic_programming_on_larger_instances():
    """The same against dynamic programming with up to 60 prompts and counts up to 16."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        size, cap = int(rng.integers(1, 61)), int(rng.integers(2, 17))
        budget = int(rng.integers(0, 3 * size + 4))
        values = np.clip(draw_values(rng, size), 0.02, 0.98)
        counts = allocate_roots(values, budget, cap, rng)
        achieved = root_contrast(values, counts).sum()
        assert achieved == pytest.approx(best_by_dynamic_programming(values, budget, cap), abs=1e-9)
        exact = best_by_dynamic_programming(values, budget, cap, exactly=True)
        if np.isfinite(exact):
            counts = allocate_roots(values, budget, cap, rng, spend_all=True)
            achieved = root_contrast(values, counts).sum()
            assert counts.sum() == budget and achieved == pytest.approx(exact, abs=1e-9)


@given(
    st.lists(st.floats(0, 1), max_size=40),
    st.integers(0, 200),
    st.integers(0, 20),
    st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_stage_1_counts_are_legal(values, budget, cap, seed):
    """Counts are 0 or 2..cap, within the budget; units idle only where no prompt can take them."""
    counts = allocate_roots(values, budget, cap, np.random.default_rng(seed))
    assert counts.shape == (len(values),) and counts.sum() <= budget
    assert all(m == 0 or 2 <= m <= cap for m in counts)
    idle = budget - counts.sum()
    if cap >= 2 and idle >= 1:
        assert not ((counts >= 2) & (counts < cap)).any()
    if cap >= 2 and idle >= 2:
        assert (counts == cap).all()


def test_a_unit_idles_rather_than_cost_more_than_it_brings():
    """With every played prompt at its cap, opening another can lose: then the unit is left over."""
    assert allocate_roots([0.5, 0.1], 4, 3).tolist() == [3, 0]
    assert allocate_roots([0.5, 0.1], 4, 3, spend_all=True).tolist() == [2, 2]
    assert root_contrast([0.5, 0.1], [3, 0]).sum() > root_contrast([0.5, 0.1], [2, 2]).sum()


def test_selected_prompts_get_three_except_at_most_two():
    """The third unit is as good as the first two: at most two prompts of an optimum stay at 2."""
    rng = np.random.default_rng(2)
    for _ in range(300):
        values = draw_values(rng, int(rng.integers(1, 50)))
        counts = allocate_roots(values, int(rng.integers(0, 150)), 16, rng)
        assert (counts == 2).sum() <= 2


def test_a_large_pool_degenerates_to_three_rollouts_each():
    """With M/3 prompts in (.1464, .8536) the optimum is 3 rollouts of those closest to a half."""
    for values in (
        np.random.default_rng(3).random(2048),
        np.random.default_rng(3).beta(2, 2, 1024),
    ):
        counts = allocate_roots(values, 1024)
        kinds, sizes = np.unique(counts, return_counts=True)
        assert dict(zip(kinds.tolist(), sizes.tolist(), strict=True)) == {
            0: values.size - 342,
            2: 2,
            3: 340,
        }
        assert np.abs(values - 0.5)[counts > 0].max() <= np.abs(values - 0.5)[counts == 0].min()


def test_selected_prompts_follow_the_threshold_form():
    """Among selected prompts the extreme ones get most: 10, 12, 9, 7, 6 at a price of .03."""
    values = [0.05, 0.1, 0.2, 0.3, 0.5]
    assert allocate_roots(values, 10 + 12 + 9 + 7 + 6).tolist() == [10, 12, 9, 7, 6]


@given(st.floats(0, 1), st.integers(2, 40))
@settings(deadline=None)
def test_contrast_is_symmetric_and_its_gains_fall_from_the_third_rollout(v, m):
    """f(m, v) = f(m, 1-v), and a further rollout gains ever less but never nothing negative."""
    f = [float(root_contrast([v], [k])[0]) for k in range(m + 2)]
    assert f[0] == f[1] == 0.0
    assert f[m] == pytest.approx(float(root_contrast([1 - v], [m])[0]), abs=1e-12)
    assert f[2] == pytest.approx(2 * v * (1 - v), abs=1e-12)
    gain, later = f[m] - f[m - 1], f[m + 1] - f[m]
    assert later >= -1e-12
    if m >= 3:
        assert later <= gain + 1e-12


def test_both_tails_tie():
    """v and 1-v are equally good, so neither is preferred although 1 - .85 != .15 in floats."""
    firsts = [int(np.argmax(allocate_roots([0.15, 0.85], 3, 3, np.random.default_rng(s)))) for s in range(200)]
    assert 60 < sum(firsts) < 140
    assert allocate_roots([0.85, 0.15], 3, 3).tolist() == [3, 0]
    assert allocate_roots([0.15, 0.85], 3, 3).tolist() == [3, 0]


def test_ties_are_dealt_uniformly_and_repeatably():
    """Equal prompts are chosen by the rng: a seed repeats, and over seeds all get the same."""
    total = np.zeros(10)
    for seed in range(600):
        counts = allocate_roots(np.full(10, 0.4), 9, 3, np.random.default_rng(seed))
        again = allocate_roots(np.full(10, 0.4), 9, 3, np.random.default_rng(seed))
        assert (counts == again).all() and sorted(counts.tolist()) == [0] * 7 + [3] * 3
        total += counts
    assert np.abs(total / 600 - 0.9).max() < 0.25


@pytest.mark.parametrize("budget", [0, 1])
def test_budgets_below_two_play_nothing(budget):
    """A single rollout has no contrast, so a budget of 1 stays idle."""
    assert allocate_roots([0.5, 0.4], budget).tolist() == [0, 0]


def test_edges_of_the_shape():
    """No prompt, no prefix, no room: empty or zero counts, never an error."""
    rng = np.random.default_rng(0)
    assert allocate_roots([], 10, rng=rng).shape == (0,)
    assert allocate_roots([0.5, 0.5], 10, 1).tolist() == [0, 0]
    assert allocate_roots([0.5, 0.1], 1000, 4).tolist() == [4, 4]
    assert allocate_roots([0.5, 0.5, 0.5], 5, 2).sum() == 4
    assert allocate_prefixes([], 1, 4, rng).shape == (0,)
    assert allocate_prefixes([0.5, 0.2], 1, 0).tolist() == [0, 0]
    assert random_prefixes(0, 4, rng).shape == (0,)
    assert uniform_roots(0, 4, rng).shape == (0,)


def test_clipping_keeps_saturated_prompts_alive():
    """A prompt predicted at 1 is still played if the budget reaches it; at eps = 0 it is not."""
    assert allocate_roots([1.0, 0.5], 20, 16).min() > 0
    assert allocate_roots([1.0, 0.5], 16, 16, eps=0.0).tolist() == [0, 16]


@pytest.mark.parametrize("bad", [np.nan, -0.1, 1.5, np.inf])
def test_values_that_are_no_probabilities_are_refused(bad):
    """The error says which value, what is allowed and what to do."""
    for call in (
        lambda: allocate_roots([0.5, bad], 4),
        lambda: allocate_prefixes([0.5, bad], 1, 4),
        lambda: get_allocator("uniform").roots([0.5, bad], 4, np.random.default_rng(0)),
    ):
        with pytest.raises(BadInputError, match=r"values\[1\] is .*\[0, 1\].*Check the predictor"):
            call()


def test_other_bad_input_is_refused():
    """Budgets are integers of at least 0, rewards are outcomes, arrays are flat, names exist."""
    with pytest.raises(BadInputError, match="budget is -1"):
        allocate_roots([0.5], -1)
    with pytest.raises(BadInputError, match=r"budget is 2\.5"):
        allocate_prefixes([0.5], 1, 2.5)
    with pytest.raises(BadInputError, match="max_per_root"):
        allocate_roots([0.5], 4, -2)
    for reward in (0.5, np.nan, 2):
        with pytest.raises(BadInputError, match="binary outcome"):
            allocate_prefixes([0.5], reward, 4)
    with pytest.raises(BadInputError, match="shape"):
        allocate_roots([[0.5]], 4)
    with pytest.raises(BadInputError, match="eps"):
        allocate_roots([0.5], 4, eps=0.5)
    with pytest.raises(BadInputError, match="Did you mean 'trace'"):
        get_allocator("trac")


def best_by_heap(q: np.ndarray, budget: int) -> float:
    """Stage 2 by the textbook heap."""
    heap = [(-(1.0 - p), p) for p in q]
    heapq.heapify(heap)
    total = 0.0
    for _ in range(budget if len(q) else 0):
        gain, p = heap[0]
        total -= gain
        heapq.heapreplace(heap, (gain * p, p))
    return total


def test_stage_2_equals_brute_force_on_small_instances():
    """No counts beat the solver, all counts enumerated; the budget is always spent."""
    rng = np.random.default_rng(4)
    for _ in range(500):
        size, budget, reward = (
            int(rng.integers(1, 5)),
            int(rng.integers(0, 7)),
            int(rng.integers(2)),
        )
        values = np.clip(draw_values(rng, size), 0.02, 0.98)
        counts = allocate_prefixes(values, reward, budget, rng)
        options = np.array([c for c in itertools.product(range(budget + 1), repeat=size) if sum(c) <= budget])
        q = values if reward else 1 - values
        assert counts.sum() == budget
        achieved = prefix_contrast(values, reward, counts).sum()
        assert achieved == pytest.approx((1 - q**options).sum(axis=1).max(), abs=1e-10)


@pytest.mark.parametrize(("size", "budget"), [(2000, 3), (3000, 9000), (7, 5000), (1, 10**6), (20000, 10)])
def test_stage_2_equals_the_heap_at_size(size, budget):
    """Bracketing the price gives what a heap gives, also with ties and where q^k underflows."""
    rng = np.random.default_rng(size)
    for values in (rng.random(size), rng.choice([0.1, 0.5, 0.9], size), np.full(size, 0.3)):
        values = np.clip(values, 0.02, 0.98)
        counts = allocate_prefixes(values, 1, budget)
        assert counts.sum() == budget and counts.min() >= 0
        achieved = prefix_contrast(values, 1, counts).sum()
        assert achieved == pytest.approx(best_by_heap(values, min(budget, 10**5)), rel=1e-9)


def test_stage_2_serves_the_most_surprising_prefix_first():
    """The first unit goes where the outcome was least expected."""
    values = [0.3, 0.6, 0.45]
    assert allocate_prefixes(values, 1, 1).tolist() == [1, 0, 0]
    assert allocate_prefixes(values, 0, 1).tolist() == [0, 1, 0]


def test_equal_predictions_branch_at_random_prefixes():
    """A predictor without an opinion leaves Stage 2 uniformly random instead of always early."""
    rng = np.random.default_rng(5)
    total = sum(allocate_prefixes(np.full(4, 0.3), 1, 2, rng) for _ in range(2000))
    assert np.abs(total / 2000 - 0.5).max() < 0.05
    assert allocate_prefixes(np.full(4, 0.3), 1, 2).tolist() == [1, 1, 0, 0]


def test_stage_2_value_is_stage_1_with_one_rollout_paid():
    """Averaged over the outcome, k continuations are worth f(k+1)."""
    for v, k in itertools.product([0.1, 0.4, 0.5, 0.9], range(6)):
        mean = v * prefix_contrast([v], 1, [k]) + (1 - v) * prefix_contrast([v], 0, [k])
        assert mean == pytest.approx(root_contrast([v], [k + 1]), abs=1e-12)


@given(st.integers(0, 30), st.integers(0, 100), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_uniform_counts_are_equal_up_to_one(size, budget, least, seed):
    """Whoever is played gets the same up to one, at least the minimum; the budget is spent."""
    counts = uniform_roots(size, budget, np.random.default_rng(seed), min_per_root=least)
    played = counts[counts > 0]
    assert counts.sum() == (budget if size and budget >= least else 0)
    if played.size:
        assert played.min() >= least and played.max() - played.min() <= 1
    if budget >= size * least:
        assert played.size == size or budget == 0


def test_uniform_never_gives_a_lone_rollout_unless_asked():
    """A budget below two per prompt plays fewer prompts; with a minimum of 1 it plays all."""
    assert uniform_roots(4, 5).tolist() == [3, 2, 0, 0]
    assert uniform_roots(4, 5, min_per_root=1).tolist() == [2, 1, 1, 1]
    assert uniform_roots(4, 1).tolist() == [0, 0, 0, 0]
    with pytest.raises(BadInputError, match="min_per_root"):
        uniform_roots(4, 5, min_per_root=0)


def test_random_prefixes_are_uniform():
    """Each of N continuations picks its prefix independently."""
    rng = np.random.default_rng(6)
    counts = random_prefixes(5, 50000, rng)
    assert counts.sum() == 50000 and np.abs(counts - 10000).max() < 400


def test_allocators_by_name_do_what_they_say():
    """trace: both active. uniform: equal, no expansions. treepo: equal, random prefixes."""
    assert set(ALLOCATORS) == {"trace", "uniform", "treepo"}
    values, rng = [0.5, 0.9, 0.02], np.random.default_rng(7)
    assert get_allocator("uniform").roots(values, 12, rng).tolist() == [4, 4, 4]
    assert get_allocator("treepo").roots(values, 12, rng).tolist() == [4, 4, 4]
    assert get_allocator("trace").roots(values, 12, rng).tolist() == allocate_roots(values, 12).tolist()
    assert get_allocator("trace", max_per_root=4).roots(values, 12, rng).tolist() == [4, 4, 4]
    assert get_allocator("uniform").prefixes(values, 1, 2, rng).tolist() == [0, 0, 0]
    assert get_allocator("treepo").prefixes(values, 1, 2, rng).sum() == 2
    assert get_allocator("trace").prefixes(values, 1, 2, rng).tolist() == [1, 0, 1]


def test_stages_can_be_mixed_for_an_ablation():
    """Active roots with random prefixes is one line."""
    mixed = replace(get_allocator("trace"), prefix_rule=get_allocator("treepo").prefix_rule)
    rng = np.random.default_rng(8)
    assert mixed.roots([0.5, 0.02], 3, rng).tolist() == [3, 0]
    picked = sum(mixed.prefixes([0.9, 0.1], 1, 1, rng) for _ in range(400))
    assert 140 < picked[0] < 260


def test_active_roots_raise_the_number_of_mixed_prompts():
    """At B=256, M=1024, U-shaped values: about 119 mixed prompts expected, equal counts 103."""
    rng = np.random.default_rng(9)
    values = rng.beta(0.4, 0.4, (20, 256))
    active = np.mean([root_contrast(v, allocate_roots(v, 1024, 16, rng)).sum() for v in values])
    equal = np.mean([root_contrast(v, uniform_roots(256, 1024, rng)).sum() for v in values])
    assert 115 < active < 123 and 100 < equal < 107
