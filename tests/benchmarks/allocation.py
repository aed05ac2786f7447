"""Time the allocators against plain references in one run: ``python tests/benchmarks/allocation.py``.

The references are what one would write first: for Stage 1 a heap over envelope units (the same
algorithm in Python) and dynamic programming, for Stage 2 a heap. Every row checks that both reach
the same objective before it compares their times. The last line is one JSON object: ``*_ms`` are
milliseconds of the solver, ``*_ratio`` are reference time / solver time.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import time
from collections.abc import Callable

import numpy as np

from trace_gym.allocation import allocate_prefixes, allocate_roots, prefix_contrast, root_contrast

CAP = 16


def heap_roots(values: np.ndarray, budget: int) -> np.ndarray:
    """Stage 1 by a heap over the units of the concave envelope, then the one-unit repair."""
    counts = [0] * len(values)
    w = [v * (1 - v) for v in values.tolist()]

    def gain(i: int, unit: int) -> float:
        v = values[i]
        return w[i] if unit <= 3 else w[i] * (v ** (unit - 2) + (1 - v) ** (unit - 2))

    heap = [(-w[i], 0, i) for i in range(len(w))]
    heapq.heapify(heap)
    for _ in range(min(budget, CAP * len(w))):
        _, _, i = heapq.heappop(heap)
        counts[i] += 1
        if counts[i] < CAP:
            opened = -1 if counts[i] < 3 else 0  # an opened prompt finishes its first three
            heapq.heappush(heap, (-gain(i, counts[i] + 1), opened, i))
    if 1 in counts:
        orphan = counts.index(1)
        counts[orphan] = 0
        active = [i for i, m in enumerate(counts) if m >= 2]
        grow = max(((gain(i, counts[i] + 1), i) for i in active if counts[i] < CAP), default=None)
        pay = min(((gain(i, counts[i]), i) for i in active if counts[i] >= 3), default=None)
        best = max(grow[0] if grow else 0.0, 2 * w[orphan] - pay[0] if pay else 0.0)
        if grow and grow[0] == best:
            counts[grow[1]] += 1
        elif pay and best > 0.0:
            counts[orphan], counts[pay[1]] = 2, counts[pay[1]] - 1
    return np.array(counts)


def dynamic_programming(values: np.ndarray, budget: int) -> float:
    """Best Stage 1 objective, ``O(B M cap)``, vectorised over the budget."""
    best = np.full(budget + 1, -math.inf)
    best[0] = 0.0
    for v in values:
        improved = best.copy()
        for m in range(2, min(CAP, budget) + 1):
            np.maximum(improved[m:], best[: budget + 1 - m] + 1 - v**m - (1 - v) ** m, out=improved[m:])
        best = improved
    return float(best.max())


def heap_prefixes(values: np.ndarray, budget: int) -> np.ndarray:
    """Stage 2 after a success by a heap."""
    counts = [0] * len(values)
    heap = [(v - 1.0, i) for i, v in enumerate(values.tolist())]
    heapq.heapify(heap)
    for _ in range(budget):
        gain, i = heap[0]
        counts[i] += 1
        heapq.heapreplace(heap, (gain * values[i], i))
    return np.array(counts)


def best_ms(call: Callable[[], object], repeats: int) -> float:
    """Fastest of some calls, in milliseconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def same(reached: float, expected: float) -> None:
    """Stop if the solver and its reference disagree."""
    if not math.isclose(reached, expected, rel_tol=1e-9, abs_tol=1e-9):
        raise SystemExit(f"The solver reached {reached!r}, its reference {expected!r}: one is wrong.")


def main() -> None:
    """Run all comparisons and print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller references; ends within 50 s")
    quick = parser.parse_args().quick
    rng = np.random.default_rng(0)
    results: dict[str, float] = {}
    row = "{:<34}{:>12}{:>14}{:>10}".format
    print(row("problem", "solver ms", "reference ms", "ratio"))

    def report(name: str, key: str, solver: float, reference: float) -> None:
        print(row(name, f"{solver:.3f}", f"{reference:.2f}", f"{reference / solver:.0f}x"), flush=True)
        results[f"{key}_ms"] = round(solver, 4)
        results[f"{key}_ratio"] = round(reference / solver, 1)

    sizes = [(256, 1024), (4096, 4096), (100_000, 400_000)]
    for prompts, budget in sizes:
        values = np.clip(rng.beta(0.4, 0.4, prompts), 0.02, 0.98)
        ours = best_ms(lambda v=values, m=budget: allocate_roots(v, m, CAP), 20)
        reached = float(root_contrast(values, allocate_roots(values, budget, CAP)).sum())
        if prompts <= 4096 or not quick:
            same(reached, float(root_contrast(values, heap_roots(values, budget)).sum()))
        repeats = 3 if prompts <= 4096 else 1
        heap = best_ms(lambda v=values, m=budget: heap_roots(v, m), repeats)
        report(f"roots B={prompts} M={budget}, heap", f"roots_{prompts}_heap", ours, heap)
        if prompts <= (256 if quick else 4096):
            same(reached, dynamic_programming(values, budget))
            exact = best_ms(lambda v=values, m=budget: dynamic_programming(v, m), 1)
            report(f"roots B={prompts} M={budget}, DP", f"roots_{prompts}_dp", ours, exact)
    for prefixes, budget in [(5, 2), (30, 6), (1000, 4000), (100_000, 400_000)]:
        values = np.clip(rng.random(prefixes), 0.02, 0.98)
        ours = best_ms(lambda v=values, n=budget: allocate_prefixes(v, 1, n), 20)
        counts = allocate_prefixes(values, 1, budget)
        same(
            float(prefix_contrast(values, 1, counts).sum()),
            float(prefix_contrast(values, 1, heap_prefixes(values, budget)).sum()),
        )
        heap = best_ms(lambda v=values, n=budget: heap_prefixes(v, n), 3)
        report(f"prefixes T={prefixes} N={budget}, heap", f"prefixes_{prefixes}_heap", ours, heap)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
