"""Families that search: counting with conditions, primes, digits, divisors, pairs, congruences.

Ranges are half open in the question as in the code (``10 <= n < 200`` is ``range(10, 200)``), so that a
number is copied, not changed by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from trace_gym.envs.math.tasks.families_plan import Draft, Step, Value, cell, choose, pick, step, worded

_IS_PRIME = "f = lambda n: all(n % d for d in range(2, n))"
_PRIMES = frozenset(n for n in range(2, 1200) if all(n % d for d in range(2, int(n**0.5) + 1)))


def _prime(n: int) -> bool:
    return n in _PRIMES


def _filtered(name: str, source: str, condition: str, show: str) -> str:
    return f"{name} = [n for n in {source} if {condition}]\n{show}"


def _show(function: str, name: str) -> str:
    return f"{function}({name})"


def counting(rng: np.random.Generator, difficulty: int) -> Draft:
    """Count or add up the numbers of a range that pass divisibility conditions, one cell for each."""
    high = (100, 300, 200, 500, 900)[difficulty - 1]
    low = 1 if difficulty == 1 else pick(rng, 2, high // 3)
    high = pick(rng, high // 2, high)
    a = pick(rng, 2, 20 if difficulty == 1 else 9)
    b, c = (choose(rng, [k for k in range(2, 10) if a % k > 0]) for _ in range(2))
    last_function, total = ("sum", sum) if difficulty == 5 else ("len", len)
    tests: list[tuple[str, Callable[[int], bool]]] = [
        (f"n % {a} == 0", lambda n: n % a == 0),
        (f"n % {b} > 0", lambda n: n % b > 0),
        (f"n % {c} > 0", lambda n: n % c > 0),
    ][: (1, 1, 2, 2, 3)[difficulty - 1]]
    wrong: list[tuple[str, Callable[[int], bool]]] = [
        (f"n % {a} > 0", lambda n: n % a > 0),
        (f"n % {b} == 0", lambda n: n % b == 0),
        (f"n % {c} == 0", lambda n: n % c == 0),
    ]

    def final(start: list[int], done: int) -> int:
        for _, keep in tests[done:]:
            start = [n for n in start if keep(n)]
        return total(start)

    whole = list(range(low, high))
    answer = final(whole, 0)
    if answer == 0 or (difficulty == 5 and b == c):
        return counting(rng, difficulty)
    steps, now = [], whole
    for index, (condition, keep) in enumerate(tests):
        name, source = "ABC"[index], f"range({low}, {high})" if index == 0 else "ABC"[index - 1]
        function = last_function if index == len(tests) - 1 else "len"
        show = _show(function, name)
        slips = [
            (
                _filtered(name, source, wrong[index][0], show),
                final([n for n in now if wrong[index][1](n)], index + 1),
            )
        ]
        if index == 0:
            for lo, hi in ((low, high + 1), (low + 1, high), (0, high)):
                kept = [n for n in range(lo, hi) if keep(n)]
                text = _filtered(name, f"range({lo}, {hi})", condition, show)
                slips.append((text, final(kept, 1)))
        if index == 2:
            kept = [n for n in whole if n % a == 0 and keep(n)]
            slips.append((_filtered(name, "A", condition, show), total(kept)))
        slips.append((f"{name} = list({source})\n{show}", final(now, index + 1)))
        broken = _filtered(name, source, condition.replace("n ", "m "), show)
        steps.append(step(answer, _filtered(name, source, condition, show), slips, broken))
        now = [n for n in now if keep(n)]
    question = _counting_question(rng, f"{low} <= n < {high}", (a, b, c)[: len(tests)])
    return Draft(question, str(answer), tuple(steps))


def _counting_question(rng: np.random.Generator, bounds: str, divisors: tuple[int, ...]) -> str:
    rules = f"divisible by {divisors[0]}" + "".join(f", not by {k}" for k in divisors[1:])
    if len(divisors) == 3:
        return f"What is the sum of all n with {bounds} that are {rules}?"
    return worded(rng, f"How many n with {bounds} are {rules}?", f"Count the n with {bounds} that are {rules}.")


def _prime_list(low: int, high: str, show: str, condition: str = "f(n)") -> str:
    return f"{_IS_PRIME}\n" + _filtered("P", f"range({low}, {high})", condition, show)


def primes(rng: np.random.Generator, difficulty: int) -> Draft:
    """Count, add or pick primes of a range; the hardest level asks for the widest gap as well."""
    if difficulty in (3, 4):
        return _kth_prime(rng, difficulty)
    low = pick(rng, 2, (40, 60, 0, 0, 200)[difficulty - 1])
    high = low + pick(rng, *((8, 60), (12, 60), (0, 0), (0, 0), (40, 150))[difficulty - 1])
    found = [n for n in range(low, high) if _prime(n)]
    if len(found) < 2:
        return primes(rng, difficulty)
    function, total = ("sum", sum) if difficulty == 2 else ("len", len)

    def final(values: list[int]) -> int:
        if difficulty < 5:
            return total(values)
        return max(values) + max(q - p for p, q in itertools.pairwise(values))

    answer = final(found)
    show = f"{function}(P)"
    slips: list[tuple[str, Value]] = []
    for lo, hi in ((low, high + 1), (low + 1, high), (2, high)):
        kept = [n for n in range(lo, hi) if _prime(n)]
        if len(kept) > 1:
            slips.append((_prime_list(lo, str(hi), show), final(kept)))
    odd = [n for n in range(low, high) if n % 2]
    slips.append((_prime_list(low, str(high), show, "n % 2"), final(odd)))
    code = _prime_list(low, str(high), show)
    first = step(answer, code, slips, code.removeprefix(_IS_PRIME + "\n"))
    bounds = f"{low} <= p < {high}"
    if difficulty == 1:
        question = worded(rng, f"How many primes p have {bounds}?", f"Count the primes p with {bounds}.")
        return Draft(question, str(answer), (first,))
    if difficulty == 2:
        return Draft(f"What is the sum of the primes p with {bounds}?", str(answer), (first,))
    question = f"Among the primes p with {bounds}, add the widest gap and the last prime."
    return Draft(question, str(answer), (first, *_gap_steps(answer, found)))


def _gap_steps(answer: int, found: list[int]) -> tuple[Step, Step]:
    gaps = [q - p for p, q in itertools.pairwise(found)]
    last = max(found)
    second = step(
        answer,
        cell("x", "max(q - p for p, q in zip(P, P[1:]))"),
        [
            (cell("x", "min(q - p for p, q in zip(P, P[1:]))"), min(gaps) + last),
            (cell("x", "P[1] - P[0]"), gaps[0] + last),
            (cell("x", "P[-1] - P[-2]"), gaps[-1] + last),
            (cell("x", "max(P) - min(P)"), 2 * last - min(found)),
        ],
        cell("x", "max(P[1:] - P)"),
    )
    third = step(
        answer,
        cell("y", "x + max(P)"),
        [
            (cell("y", "x + min(P)"), max(gaps) + min(found)),
            (cell("y", "x + len(P)"), max(gaps) + len(found)),
            (cell("y", "max(P)"), last),
        ],
        cell("y", "x + P"),
    )
    return second, third


def _kth_prime(rng: np.random.Generator, difficulty: int) -> Draft:
    low, k = pick(rng, 2, 200 if difficulty == 3 else 600), pick(rng, 2, 8)
    found = [n for n in range(low, low + 99) if _prime(n)]
    odd = [n for n in range(low, low + 99) if n % 2]
    late = [n for n in range(low + 1, low + 99) if _prime(n)]
    plus = [n for n in range(low + k, low + k + 99) if _prime(n)]

    def final(values: list[int]) -> int:
        return values[k - 1] if difficulty == 3 else sum(values[:k])

    answer = final(found)
    code = _prime_list(low, f"{low} + 99", "len(P)")
    first = step(
        answer,
        code,
        [
            (_prime_list(low, f"{low} + 99", "len(P)", "n % 2"), final(odd)),
            (_prime_list(low + 1, f"{low} + 99", "len(P)"), final(late)),
            (_prime_list(low + k, f"{low + k} + 99", "len(P)"), final(plus)),
        ],
        code.removeprefix(_IS_PRIME + "\n"),
    )
    if difficulty == 3:
        last = step(
            answer,
            cell("x", f"P[{k} - 1]"),
            [
                (cell("x", f"P[{k}]"), found[k]),
                (cell("x", f"P[{k} - 2]"), found[k - 2]),
                (cell("x", f"P[-{k}]"), found[-k]),
            ],
            cell("x", f"p[{k} - 1]"),
        )
        question = f"List the primes p >= {low}. Which is number {k}?"
    else:
        last = step(
            answer,
            cell("x", f"sum(P[:{k}])"),
            [
                (cell("x", f"sum(P[:{k} - 1])"), sum(found[: k - 1])),
                (cell("x", f"sum(P[{k}:])"), sum(found[k:])),
                (cell("x", f"P[{k}]"), found[k]),
            ],
            cell("x", f"sum(p[:{k}])"),
        )
        question = f"List the primes p >= {low}. What is the sum of the first {k}?"
    return Draft(question, str(answer), (first, last))


def largest_prime(rng: np.random.Generator, difficulty: int) -> Draft:
    """A prime defined in the question and what follows from it: a sum, then a number of divisors."""
    high = pick(rng, 10, (999, 200, 300, 300, 300)[difficulty - 1])
    second, k = pick(rng, 10, 200), pick(rng, 2, 50)
    p = _largest_below(high)
    if difficulty == 1:
        question = worded(
            rng,
            f"What is the largest prime below {high}?",
            f"Find the largest prime less than {high}.",
        )
        return Draft(question, str(p), (_largest_step(p, "p", high, lambda value: value),))
    if difficulty == 5:
        return _two_primes(high, second)
    finish = (lambda value: value) if difficulty == 2 else _divisor_count
    answer = finish(p + k)
    question = f"Let p be the largest prime below {high}. "
    question += f"What is p + {k}?" if difficulty == 2 else f"How many divisors has p + {k}?"
    first = _largest_step(answer, "p", high, lambda value: finish(value + k))
    if difficulty == 3:
        last = _divisor_step(answer, "x", f"p + {k}", p + k)
        return Draft(question, str(answer), (first, last))
    slips = [
        (cell("x", f"p - {k}"), finish(p - k) if p > k else answer),
        (cell("x", f"{k}"), finish(k)),
        (cell("x", f"p + {k + 1}"), finish(p + k + 1)),
    ]
    plus = step(answer, cell("x", f"p + {k}"), slips, cell("x", f"P + {k}"))
    if difficulty == 2:
        return Draft(question, str(answer), (first, plus))
    return Draft(question, str(answer), (first, plus, _divisor_step(answer, "y", "x", p + k)))


def _two_primes(high: int, second: int) -> Draft:
    p, q = _largest_below(high), _largest_below(second)
    answer = _divisor_count(p + q)
    first = _largest_step(answer, "p", high, lambda value: _divisor_count(value + q))
    middle = _largest_step(answer, "q", second, lambda value: _divisor_count(p + value))
    question = f"Let p, q be the largest primes below {high}, {second}. How many divisors has p + q?"
    return Draft(question, str(answer), (first, middle, _divisor_step(answer, "x", "p + q", p + q)))


def _largest_below(n: int) -> int:
    return max(prime for prime in _PRIMES if prime < n)


def _divisor_count(n: int) -> int:
    return sum(n % d == 0 for d in range(1, n + 1))


def _largest_step(answer: int, name: str, high: int, finish: Callable[[int], int]) -> Step:
    # The cell for p defines the test f that a later cell for q uses.
    head = f"{_IS_PRIME}\n" if name == "p" else ""

    def code(below: int, function: str = "max", test: str = "f") -> str:
        return f"{name} = {function}(n for n in range(2, {below}) if {test}(n))\n{name}"

    above = min(prime for prime in _PRIMES if prime >= high)
    slips = [
        (head + code(high, "min"), finish(2)),
        (f"{head}{name} = {high} - 1\n{name}", finish(high - 1)),
        (head + code(above + 1), finish(above)),
    ]
    return step(answer, head + code(high), slips, code(high, test="f" if head else "g"))


def _divisor_step(answer: int, name: str, text: str, value: int) -> Step:
    unknown = text.upper() if len(text) == 1 else text.replace("p", "P")
    whole = text if len(text) == 1 else f"({text})"
    end = f"{text} + 1"
    count = _divisor_count(value)
    return step(
        answer,
        cell(name, f"sum({whole} % d == 0 for d in range(1, {end}))"),
        [
            (cell(name, f"sum({whole} % d == 0 for d in range(1, {text}))"), count - 1),
            (cell(name, f"sum({whole} % d == 0 for d in range(2, {end}))"), count - 1),
            (cell(name, f"sum({whole} % d > 0 for d in range(1, {end}))"), value - count),
        ],
        cell(name, f"sum({whole} % d == 0 for d in range(1, {unknown} + 1))"),
    )
