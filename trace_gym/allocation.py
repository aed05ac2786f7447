"""Where the rollouts of a step go: Stage 1 over prompts, Stage 2 over one rollout's prefixes.

TRACE (arXiv 2606.11119) spends its budget on anchors whose leaves most likely hold both outcomes.

- Stage 1: ``m`` rollouts of a prompt that succeeds with probability ``v`` show both outcomes with
  probability ``f(m) = 1 - v^m - (1-v)^m``; maximise the sum under the budget, each count 0 or at
  least 2.
- Stage 2: a continuation repeats the known outcome with probability ``q``; ``k`` of them show the
  other one with probability ``1 - q^k``; maximise the sum over the prefixes of one rollout.

Both are solved exactly. Arrays in, arrays out; no model and no environment in sight. Left out:
pooling the Stage 2 budget over rollouts, the nested objective (an opposite outcome also mixes every
ancestor), costs.

Letters: B prompts, T prefixes of one rollout, M root budget, N expansion budget (both in rollouts).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trace_gym.errors import BadInputError, unknown_name

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

MAX_PER_ROOT = 16
EPS = 0.02

# v and 1 - v must tie although 1 - .85 != .15 in floating point: values are compared on this grid.
_DECIMALS = 12
# Below this many candidate units Stage 2 sorts them all; above, it brackets the threshold first.
_SORT_ALL = 4096


def root_contrast(values: ArrayLike, counts: ArrayLike) -> FloatArray:
    """Probability that a prompt's rollouts show both outcomes, ``f(m, v)``.

    Args:
        values: Success probability of each prompt, ``[B]`` in [0, 1].
        counts: Rollouts of each prompt, ``[B]``. A count of 0 is worth 0; the closed form would say
            -1.

    Returns:
        ``1 - v^m - (1-v)^m``, ``[B]``.
    """
    v = _probabilities(values, 0.0)
    m = np.asarray(counts, dtype=np.int64)
    return np.where(m >= 2, 1.0 - v**m - (1.0 - v) ** m, 0.0).astype(np.float64)


def prefix_contrast(values: ArrayLike, reward: float, counts: ArrayLike) -> FloatArray:
    """Probability that continuations of a prefix show the outcome its rollout did not have.

    Args:
        values: Success probability at each prefix, ``[T]`` in [0, 1].
        reward: Outcome of the rollout, 0 or 1.
        counts: Continuations at each prefix, ``[T]``.

    Returns:
        ``1 - q^k``, ``[T]``, where q is the probability that one continuation repeats the outcome.
    """
    q = _repeat(values, reward, 0.0)
    return (1.0 - q ** np.asarray(counts, dtype=np.int64)).astype(np.float64)


def allocate_roots(
    values: ArrayLike,
    budget: int,
    max_per_root: int = MAX_PER_ROOT,
    rng: np.random.Generator | None = None,
    *,
    eps: float = EPS,
    spend_all: bool = False,
) -> IntArray:
    """Stage 1: divide root rollouts over prompts so that most of them are expected to be mixed.

    Maximises ``sum_i f(m_i, v_i)`` under ``sum_i m_i <= budget`` and ``m_i = 0`` or ``2 <= m_i <=
    max_per_root``, exactly (TRACE, Stage 1). With ``w = v(1-v)`` the gains of single units are ``0,
    2w, w, w(1-2w), ...``: not concave. So the M largest units are taken from the concave envelope
    ``w, w, w, w(1-2w), ...``; at most one prompt is then left with a single unit, and that unit is
    placed anew: with an active prompt, or here if another prompt gives a second one.

    Args:
        values: Predicted success probability of each prompt, ``[B]`` in [0, 1].
        budget: Root rollouts to give, M.
        max_per_root: Most rollouts of one prompt. Below 2 nothing can be allocated.
        rng: Breaks ties by a random permutation; None breaks them by file order, which is a
            curriculum.
        eps: Values are clipped to [eps, 1 - eps] first: a prompt predicted at exactly 0 or 1 would
            never be played again, so its error would never be noticed. At 0 such prompts get what
            is worthless elsewhere.
        spend_all: Solve for ``sum_i m_i = budget`` wherever that is possible. It differs only where
            every played prompt is at its cap and one unit is left: that unit is then spent at a
            loss.

    Returns:
        Rollouts of each prompt, ``[B]``. The sum is below the budget by more than one unit only if
        every prompt is at its cap; what is left is the caller's to carry over.

    Raises:
        BadInputError: If a value is NaN or outside [0, 1], or a number is out of range.
    """
    v = _probabilities(values, eps)
    budget = _natural("budget", budget)
    depth = min(_natural("max_per_root", max_per_root), budget)
    order = np.arange(v.size) if rng is None else rng.permutation(v.size)
    counts = np.zeros(v.size, dtype=np.int64)
    if v.size and depth >= 2:
        counts[order] = _solve_roots(v[order], budget, depth, -math.inf if spend_all else 0.0)
    return counts


def _solve_roots(v: FloatArray, budget: int, depth: int, idle: float) -> IntArray:
    """Solve Stage 1 for clipped values; ties go to the lower index."""
    near = np.minimum(v, 1.0 - v).round(_DECIMALS)
    w = near * (1.0 - near)
    gains = _envelope(w, depth)
    if budget >= gains.size:
        return np.full(v.size, depth, dtype=np.int64)
    # The M-th largest unit is the price. Gains fall with depth, so the units above it are the first
    # ones of each prompt; units exactly at it are dealt in order, which keeps the equal first three
    # of a prompt together.
    price = np.partition(gains.ravel(), gains.size - budget)[gains.size - budget]
    counts: IntArray = np.count_nonzero(gains > price, axis=0).astype(np.int64)
    tied = np.count_nonzero(gains >= price, axis=0).astype(np.int64) - counts
    before = np.cumsum(tied) - tied
    counts += np.clip(budget - int(counts.sum()) - before, 0, tied)
    orphans = np.flatnonzero(counts == 1)
    if orphans.size:
        counts[orphans] = 0
        _place_orphan(counts, gains, 2.0 * w, int(orphans[0]), idle)
    return counts


def _envelope(w: FloatArray, depth: int) -> FloatArray:
    """Return the gain of each unit of the concave envelope, ``[depth, B]``."""
    gains = np.empty((depth, w.size))
    gains[:3] = w
    # p_m = v^m + (1-v)^m = p_{m-1} - w p_{m-2}; unit m >= 4 gains w p_{m-2}.
    earlier, later = np.ones_like(w), 1.0 - 2.0 * w
    for unit in range(3, depth):
        np.multiply(w, later, out=gains[unit])
        earlier, later = later, later - w * earlier
    return gains


def _place_orphan(counts: IntArray, gains: FloatArray, pairs: FloatArray, orphan: int, idle: float) -> None:
    """Place the one unit that was illegal where it was: a prompt cannot have a single rollout.

    The design note lets the unit idle only if it fits nowhere. But where all active prompts are at
    their cap, opening the orphan can cost more than it brings (values .5, .1 and budget 4 at a cap
    of 3: 3, 0 is worth .75 and 2, 2 only .68), so idling competes with the other two.
    """
    active = np.flatnonzero(counts >= 2)
    growing = active[counts[active] < len(gains)]
    paying = active[counts[active] >= 3]
    grow = pay = -math.inf
    if growing.size:  # one more unit for a prompt that already has some
        offers = gains[counts[growing], growing]
        grow = float(offers.max())
    if paying.size:  # open the orphan with two units, one of them taken from another prompt
        prices = gains[counts[paying] - 1, paying]
        pay = float(pairs[orphan] - prices.min())
    if max(grow, pay) <= idle:
        return
    if grow >= pay:
        counts[growing[np.argmax(offers)]] += 1
    else:
        counts[orphan] = 2
        counts[paying[prices.size - 1 - np.argmin(prices[::-1])]] -= 1


def allocate_prefixes(
    values: ArrayLike,
    reward: float,
    budget: int,
    rng: np.random.Generator | None = None,
    *,
    eps: float = EPS,
) -> IntArray:
    """Stage 2: divide the continuations of one finished rollout over its prefixes.

    Maximises ``sum_t 1 - q_t^k_t`` under ``sum_t k_t <= budget`` (TRACE, Stage 2). Unit ``k+1`` of
    a prefix gains ``q^k (1-q)``, which falls with k, so taking the largest units is exact.

    Args:
        values: Predicted success probability at each qualifying prefix, ``[T]`` in [0, 1].
        reward: Outcome of the rollout, 0 or 1: the binary verdict, not a shaped reward.
        budget: Continuations to give, N.
        rng: Breaks ties by a random permutation, so that equal predictions branch at uniformly
            random prefixes; None prefers the earlier prefix.
        eps: Values are clipped to [eps, 1 - eps] first, as in Stage 1.

    Returns:
        Continuations at each prefix, ``[T]``; they sum to the budget if there is a prefix at all.

    Raises:
        BadInputError: If a value is NaN or outside [0, 1], or the reward is not an outcome.
    """
    q = _repeat(values, reward, eps)
    budget = _natural("budget", budget)
    order = np.arange(q.size) if rng is None else rng.permutation(q.size)
    counts = np.zeros(q.size, dtype=np.int64)
    if q.size and budget:
        counts[order] = _solve_prefixes(q[order], budget)
    return counts


def _solve_prefixes(q: FloatArray, budget: int) -> IntArray:
    """Solve Stage 2 for clipped repeat probabilities; ties go to the lower index."""
    # Logarithms, because q^k underflows at large budgets. At eps = 0 a q of 0 or 1 needs finite
    # stand-ins.
    first = np.log(np.maximum(1.0 - q, 1e-300))
    slope = np.log(np.clip(q, 1e-300, 1.0 - 1e-16))
    low = np.zeros(q.size, dtype=np.int64)
    high = np.full(q.size, budget, dtype=np.int64)
    if q.size * budget > _SORT_ALL:
        low, high = _bracket(first, slope, budget)
    width = high - low
    prefix = np.repeat(np.arange(q.size), width)
    unit = np.arange(prefix.size) - np.repeat(np.cumsum(width) - width - low, width)
    gains = first[prefix] + unit * slope[prefix]
    best = np.argsort(-gains, kind="stable")[: budget - int(low.sum())]
    return low + np.bincount(prefix[best], minlength=q.size)


def _bracket(first: FloatArray, slope: FloatArray, budget: int) -> tuple[IntArray, IntArray]:
    """Return counts that the optimum certainly has, and counts it certainly does not exceed."""

    def counts_at(price: float) -> FloatArray:
        """Count the units of each prefix whose log gain is at least the price."""
        return np.clip(np.floor((price - first) / slope) + 1.0, 0.0, budget)

    # Above every first unit nothing is bought; at the last unit of the flattest prefix all of the
    # budget is.
    dear, cheap = float(first.max()) + 1.0, float((first + budget * slope).max()) - 1.0
    for _ in range(64):
        middle = 0.5 * (dear + cheap)
        bought = counts_at(middle).sum()
        if bought >= budget:
            cheap = middle
        if bought <= budget:
            dear = middle
        if bought == budget:
            break
    # One unit of slack each way: the division above may round a count that lies exactly on the
    # price.
    low = np.maximum(counts_at(dear) - 1.0, 0.0)
    high = np.minimum(counts_at(cheap) + 1.0, float(budget))
    return low.astype(np.int64), high.astype(np.int64)


def uniform_roots(
    num_prompts: int, budget: int, rng: np.random.Generator | None = None, *, min_per_root: int = 2
) -> IntArray:
    """Divide root rollouts equally, as GRPO does.

    Args:
        num_prompts: Prompts in the batch, B.
        budget: Root rollouts to give, M.
        rng: Chooses who gets the remainder; None takes file order.
        min_per_root: Least rollouts of a prompt that is played at all. The default of 2 plays fewer
            prompts rather than a single rollout of many, because a lone rollout has no baseline and
            teaches nothing.

    Returns:
        Rollouts of each prompt, ``[B]``. They differ by at most one among the prompts that are
        played, and sum to the budget unless it is below `min_per_root` or there is no prompt.

    Raises:
        BadInputError: If a number is out of range.
    """
    size, budget = _natural("num_prompts", num_prompts), _natural("budget", budget)
    if _natural("min_per_root", min_per_root) < 1:
        raise BadInputError(f"min_per_root is {min_per_root}; it must be at least 1. Give 1 or 2.")
    counts = np.zeros(size, dtype=np.int64)
    order = np.arange(size) if rng is None else rng.permutation(size)
    played = order[: min(size, budget // min_per_root)]
    if played.size:
        counts[played] = budget // played.size
        counts[played[: budget % played.size]] += 1
    return counts


def random_prefixes(num_prefixes: int, budget: int, rng: np.random.Generator) -> IntArray:
    """Branch at uniformly random prefixes: TreePO (arXiv 2508.17445) as TRACE compares against it.

    Args:
        num_prefixes: Qualifying prefixes of the rollout, T.
        budget: Continuations to give, N.
        rng: Draws each continuation's prefix, independently and with replacement, as Tree-GRPO
            does.

    Returns:
        Continuations at each prefix, ``[T]``.

    Raises:
        BadInputError: If a number is out of range.
    """
    size, budget = _natural("num_prefixes", num_prefixes), _natural("budget", budget)
    if size == 0:
        return np.zeros(0, dtype=np.int64)
    return np.bincount(rng.integers(size, size=budget), minlength=size).astype(np.int64)


class RootRule(Protocol):
    """A Stage 1 rule; `allocate_roots` is one."""

    def __call__(self, values: FloatArray, budget: int, max_per_root: int, rng: np.random.Generator, /) -> IntArray:
        """Return the rollouts of each prompt, ``[B]``."""
        ...


class PrefixRule(Protocol):
    """A Stage 2 rule; `allocate_prefixes` is one."""

    def __call__(self, values: FloatArray, reward: float, budget: int, rng: np.random.Generator, /) -> IntArray:
        """Return the continuations at each prefix, ``[T]``."""
        ...


@dataclass(frozen=True)
class Allocator:
    """One rule for each stage; an ablation mixes the rules of two allocators.

    Attributes:
        root_rule: Divides root rollouts over prompts.
        prefix_rule: Divides continuations over the prefixes of one rollout.
        max_per_root: Most root rollouts of one prompt; the uniform rule has no use for it.
    """

    root_rule: RootRule
    prefix_rule: PrefixRule
    max_per_root: int = MAX_PER_ROOT

    def roots(self, values: ArrayLike, budget: int, rng: np.random.Generator) -> IntArray:
        """Divide `budget` root rollouts over prompts with predicted `values`, ``[B]``."""
        return self.root_rule(_probabilities(values, 0.0), budget, self.max_per_root, rng)

    def prefixes(self, values: ArrayLike, reward: float, budget: int, rng: np.random.Generator) -> IntArray:
        """Divide `budget` continuations over the prefixes of a rollout, ``[T]``."""
        return self.prefix_rule(_probabilities(values, 0.0), reward, budget, rng)


def _uniform_rule(values: FloatArray, budget: int, max_per_root: int, rng: np.random.Generator) -> IntArray:
    return uniform_roots(values.size, budget, rng)


def _random_rule(values: FloatArray, reward: float, budget: int, rng: np.random.Generator) -> IntArray:
    return random_prefixes(values.size, budget, rng)


def _no_prefixes(values: FloatArray, reward: float, budget: int, rng: np.random.Generator) -> IntArray:
    return np.zeros(values.size, dtype=np.int64)


ALLOCATORS: dict[str, Allocator] = {
    "trace": Allocator(allocate_roots, allocate_prefixes),
    "uniform": Allocator(_uniform_rule, _no_prefixes),
    "treepo": Allocator(_uniform_rule, _random_rule),
}


def get_allocator(name: str, max_per_root: int | None = None) -> Allocator:
    """Return an allocator by name.

    Args:
        name: ``"trace"`` (active roots and prefixes), ``"uniform"`` (flat GRPO: equal counts, no
            expansions) or ``"treepo"`` (equal counts, random prefixes).
        max_per_root: Most root rollouts of one prompt; None keeps the default of 16.

    Raises:
        BadInputError: If there is no such allocator.
    """
    if name not in ALLOCATORS:
        raise unknown_name("allocator", name, ALLOCATORS)
    allocator = ALLOCATORS[name]
    if max_per_root is None:
        return allocator
    return replace(allocator, max_per_root=_natural("max_per_root", max_per_root))


def _natural(what: str, given: int) -> int:
    """Return a non-negative integer, or say what is wrong with it."""
    if isinstance(given, bool) or not isinstance(given, int | np.integer) or given < 0:
        raise BadInputError(f"{what} is {given!r}; it must be an integer of at least 0. Round it first.")
    return int(given)


def _probabilities(values: ArrayLike, eps: float) -> FloatArray:
    """Check probabilities and clip them to [eps, 1 - eps]."""
    if not 0.0 <= eps < 0.5:
        raise BadInputError(f"eps is {eps!r}; it must be in [0, 0.5). The default is {EPS}.")
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise BadInputError(f"values has shape {array.shape}; it must be one-dimensional. Flatten the batch first.")
    allowed = (array >= 0.0) & (array <= 1.0)  # False for NaN
    if not allowed.all():
        worst = int(np.argmin(allowed))
        raise BadInputError(
            f"values[{worst}] is {array[worst]}; a success probability must lie in [0, 1]. "
            "Check the predictor, or give the batch mean where it has no opinion."
        )
    return np.clip(array, eps, 1.0 - eps)


def _repeat(values: ArrayLike, reward: float, eps: float) -> FloatArray:
    """Return the probability that a continuation repeats the outcome, ``[T]``."""
    v = _probabilities(values, eps)
    if reward not in (0, 1):
        raise BadInputError(
            f"reward is {reward!r}; it must be the rollout's binary outcome, 0 or 1. Give the "
            "verdict rather than a shaped reward, and do not expand a rollout that failed."
        )
    return v if reward else 1.0 - v
