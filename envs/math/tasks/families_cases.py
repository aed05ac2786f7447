"""Families over lists of cases: digits, divisors, simultaneous congruences."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from trace_gym.envs.math.tasks.families_plan import Draft, Step, cell, choose, pick, step, worded

_SMALL_SUMS = tuple(sum(map(int, str(n))) for n in range(1000))


def _digit_sum(n: int) -> int:
    return _SMALL_SUMS[n] if n < 1000 else sum(map(int, str(n)))


def digit_sum(rng: np.random.Generator, difficulty: int) -> Draft:
    """Digit sums of a number, of a product and of a power; the hardest level searches by digit sum."""
    if difficulty == 1:
        return _digits_of_number(rng)
    if difficulty == 4:
        a, k = pick(rng, 11, 300), pick(rng, 3, 6)
        # A remainder of 0 would be common (a divisible by 9) and easy to guess.
        return _power_by_digit_sum(a, k) if a**k % _digit_sum(a**k) else digit_sum(rng, difficulty)
    if difficulty == 5:
        return _digit_search(rng)
    a, b = pick(rng, 11, 200), pick(rng, 11, 200)
    value = a * b
    answer = _digit_sum(value)
    if difficulty == 2:
        slips = [
            (cell("x", f"{a} * {b}"), value),
            (cell("x", f"len(str({a} * {b}))"), len(str(value))),
            (cell("x", f"sum(map(int, str({a} + {b})))"), _digit_sum(a + b)),
        ]
        code = cell("x", f"sum(map(int, str({a} * {b})))")
        only = step(answer, code, slips, cell("x", f"sum(map(int, {a} * {b}))"))
        said = f"the digit sum of {a} * {b}"
        return Draft(worded(rng, f"What is {said}?", f"Find {said}."), str(answer), (only,))
    slips = [
        (cell("x", f"{a} + {b}"), _digit_sum(a + b)),
        (cell("x", f"{a} * {b + 1}"), _digit_sum(a * (b + 1))),
        (cell("x", f"{a + 1} * {b}"), _digit_sum((a + 1) * b)),
    ]
    first = step(answer, cell("x", f"{a} * {b}"), slips, f"x = {a} * {b}\ny")
    question = f"Multiply {a} by {b}. What is the digit sum of the product?"
    return Draft(question, str(answer), (first, _digit_step(answer, value, lambda total: total)))


def _digits_of_number(rng: np.random.Generator) -> Draft:
    n = pick(rng, 100, 99999)
    text, answer = str(n), _digit_sum(n)
    slips = [
        (cell("x", f'len("{text}")'), len(text)),
        (cell("x", f'max(map(int, "{text}"))'), max(map(int, text))),
        (cell("x", f'sum(map(int, "{text[:-1]}"))'), answer - int(text[-1])),
        (cell("x", f'sum(map(int, "{text}1"))'), answer + 1),
    ]
    code, broken = cell("x", f'sum(map(int, "{text}"))'), cell("x", f"sum(map(int, {text}))")
    question = worded(rng, f"What is the digit sum of {n}?", f"Find the digit sum of {n}.")
    return Draft(question, str(answer), (step(answer, code, slips, broken),))


def _digit_step(answer: int, x: int, finish: Callable[[int], int]) -> Step:
    slips = [
        (cell("y", "len(str(x))"), finish(len(str(x)))),
        (cell("y", "max(map(int, str(x)))"), finish(max(map(int, str(x))))),
        (cell("y", "sum(map(int, str(x))) + 1"), finish(_digit_sum(x) + 1)),
    ]
    return step(answer, cell("y", "sum(map(int, str(x)))"), slips, cell("y", "sum(map(int, x))"))


def _power_by_digit_sum(a: int, k: int) -> Draft:
    value = a**k
    total = _digit_sum(value)
    answer = value % total
    slips = [
        (cell("x", f"{a} * {k}"), a * k % _digit_sum(a * k)),
        (cell("x", f"{a} ** {k + 1}"), value * a % _digit_sum(value * a)),
        (cell("x", f"{k} ** {a}"), k**a % _digit_sum(k**a)),
    ]
    first = step(answer, cell("x", f"{a} ** {k}"), slips, f"x = {a} ** {k}\ny")
    second = _digit_step(answer, value, lambda y: value % y)
    slips = [
        (cell("z", "x // y"), value // total),
        (cell("z", "y % x"), total % value),
        (cell("z", "x % 10"), value % 10),
    ]
    last = step(answer, cell("z", "x % y"), slips, cell("z", "x % s"))
    question = f"Let s be the digit sum of {a}^{k}. Find the remainder of {a}^{k} divided by s."
    return Draft(question, str(answer), (first, second, last))


_ENDINGS: dict[str, Callable[[list[int]], int]] = {"sum": sum, "max": max}


def _digit_search(rng: np.random.Generator) -> Draft:
    low, high, target = pick(rng, 10, 200), pick(rng, 300, 900), pick(rng, 4, 16)
    ending = choose(rng, ("sum", "max"))
    total = _ENDINGS[ending]

    def found(lo: int, hi: int, wanted: int) -> list[int]:
        return [n for n in range(lo, hi) if _digit_sum(n) == wanted]

    def code(lo: int, hi: int, wanted: int, test: str = "s") -> str:
        return f"A = [n for n in range({lo}, {hi}) if {test}(n) == {wanted}]\nlen(A)"

    values = found(low, high, target)
    answer = total(values)
    first = step(
        answer,
        f"s = lambda n: sum(map(int, str(n)))\ns({low})",
        [
            (f"s = lambda n: sum(map(int, str(n))) + 1\ns({low})", total(found(low, high, target - 1))),
            (f"s = lambda n: sum(map(int, str(n))) - 1\ns({low})", total(found(low, high, target + 1))),
        ],
        f"s = lambda n: sum(map(int, n))\ns({low})",
    )
    bounds = ((low, high, target + 1), (low, high, target - 1), (0, high, target), (low, high + 99, target))
    slips = [(code(*bound), total(found(*bound))) for bound in bounds]
    second = step(answer, code(low, high, target), slips, code(low, high, target, "S"))
    endings = {"sum": sum(values), "max": max(values), "len": len(values), "min": min(values)}
    slips = [(cell("x", f"{name}(A)"), value) for name, value in endings.items()]
    third = step(answer, cell("x", f"{ending}(A)"), slips, cell("x", f"{ending}(a)"))
    asked = {"sum": "What is the sum of all n", "max": "Which is the largest n"}
    question = f"{asked[ending]} with {low} <= n < {high} and digit sum {target}?"
    return Draft(question, str(answer), (first, second, third))


def divisors(rng: np.random.Generator, difficulty: int) -> Draft:
    """Divisors of a number: how many, their sum, a best factor pair, those that pass a condition."""
    n = pick(rng, 12, 999) if difficulty <= 2 else 6 * pick(rng, 5, 160)
    m = pick(rng, 2, 9)
    if difficulty == 3:
        return _best_factors(n, m)
    if difficulty == 4:
        return _divisors_without(n, m)
    if difficulty == 5:
        return _common_divisors(n, 6 * pick(rng, 5, 160), m)
    word, total = ("len", len) if difficulty == 1 else ("sum", sum)
    if difficulty == 1:
        question = worded(rng, f"How many divisors does {n} have?", f"Count the divisors of {n}.")
    else:
        question = worded(rng, f"What is the sum of the divisors of {n}?", f"Add all divisors of {n}.")
    answer = total(_divisors_of(n))
    return Draft(question, str(answer), (_divisor_list(answer, n, total, word),))


def _divisors_of(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _divisor_list(answer: int, n: int, finish: Callable[[list[int]], int], show: str = "len") -> Step:
    def code(low: int, end: str, condition: str = f"{n} % d == 0") -> str:
        return f"D = [d for d in range({low}, {end}) if {condition}]\n{show}(D)"

    found = _divisors_of(n)
    slips = [(code(1, f"{n}"), finish(found[:-1])), (code(2, f"{n} + 1"), finish(found[1:]))]
    if len(found) > 3:
        rest = [d for d in range(2, n) if n % d == 1]
        slips.append((code(1, f"{n} + 1", f"{n} % d == 1"), finish(rest)))
        slips.append((code(1, f"{n} // 2"), finish([d for d in found if d < n // 2])))
    return step(answer, code(1, f"{n} + 1"), slips, code(1, f"{n} + 1", "n % d == 0"))


def _best_factors(n: int, m: int) -> Draft:
    found = _divisors_of(n)

    def least(values: list[int]) -> int:
        return min(m * d + n // d for d in values)

    answer = least(found)
    slips = [
        (cell("x", f"max({m} * d + {n} // d for d in D)"), max(m * d + n // d for d in found)),
        (cell("x", f"min({m} + d + {n} // d for d in D)"), min(m + d + n // d for d in found)),
        (cell("x", f"min(d + {n} // d for d in D)"), min(d + n // d for d in found)),
    ]
    broken = cell("x", f"min({m} * d + {n} // d for e in D)")
    last = step(answer, cell("x", f"min({m} * d + {n} // d for d in D)"), slips, broken)
    question = f"Positive integers a, b have a * b = {n}. Find the least {m} * a + b."
    return Draft(question, str(answer), (_divisor_list(answer, n, least), last))


def _divisors_without(n: int, m: int) -> Draft:
    found = _divisors_of(n)

    def total(values: list[int]) -> int:
        return sum(d for d in values if d % m > 0)

    answer = total(found)
    slips = [
        (cell("x", f"sum(d for d in D if d % {m} == 0)"), sum(found) - answer),
        (cell("x", f"len([d for d in D if d % {m} > 0])"), sum(d % m > 0 for d in found)),
        (cell("x", "sum(D)"), sum(found)),
    ]
    broken = cell("x", f"sum(d for d in E if d % {m} > 0)")
    last = step(answer, cell("x", f"sum(d for d in D if d % {m} > 0)"), slips, broken)
    question = f"What is the sum of the divisors of {n} that are not divisible by {m}?"
    return Draft(question, str(answer), (_divisor_list(answer, n, total), last))


def _common_divisors(n: int, other: int, m: int) -> Draft:
    found = _divisors_of(n)
    common = [d for d in found if other % d == 0]

    def total(values: list[int]) -> int:
        return sum(d for d in values if other % d == 0) * m

    answer = total(found)
    slips = [
        (f"C = [d for d in D if {other} % d > 0]\nlen(C)", (sum(found) - sum(common)) * m),
        (f"C = D + [{other}]\nlen(C)", (sum(found) + other) * m),
        ("C = D\nlen(C)", sum(found) * m),
    ]
    broken = f"C = [d for d in D if {other} % c == 0]\nlen(C)"
    second = step(answer, f"C = [d for d in D if {other} % d == 0]\nlen(C)", slips, broken)
    slips = [
        (cell("x", f"sum(D) * {m}"), sum(found) * m),
        (cell("x", f"len(C) * {m}"), len(common) * m),
        (cell("x", f"max(C) * {m}"), max(common) * m),
        (cell("x", "sum(C)"), sum(common)),
    ]
    third = step(answer, cell("x", f"sum(C) * {m}"), slips, cell("x", f"sum(c) * {m}"))
    question = f"Add the common divisors of {n} and {other}, then multiply by {m}."
    return Draft(question, str(answer), (_divisor_list(answer, n, total), second, third))


def congruences(rng: np.random.Generator, difficulty: int) -> Draft:
    """Find the least number that leaves given remainders; each further condition is a cell."""
    high = (20, 15, 12, 9, 9)[difficulty - 1]
    count = (1, 2, 2, 3, 3)[difficulty - 1]
    low = pick(rng, 2, 300) if difficulty in (1, 3, 5) else 0
    moduli: list[int] = []
    while len(moduli) < count:
        m = pick(rng, 3, high)
        if all(math.gcd(m, other) == 1 for other in moduli):
            moduli.append(m)
    rests = [pick(rng, 1, m - 1) for m in moduli]
    span = math.prod(moduli)
    top = f"{low} + {' * '.join(map(str, moduli))}" if low else " * ".join(map(str, moduli))
    full = list(range(low, low + span))

    def final(values: list[int], done: int) -> int | None:
        for m, r in list(zip(moduli, rests, strict=True))[done:]:
            values = [n for n in values if n % m == r]
        return min(values) if values else None

    answer = final(full, 0)
    if answer is None:  # coprime moduli always have a solution; this tells the type checker
        raise AssertionError("congruences without a solution")
    steps, now = [], full
    for index, (m, r) in enumerate(zip(moduli, rests, strict=True)):
        name = "ABC"[index]
        source = f"range({low}, {top})" if index == 0 else "ABC"[index - 1]
        show = f"min({name})" if index == count - 1 else f"len({name})"
        options = [
            (source, now, m, r + 1),
            (source, now, m, 0),
            (source, now, m + 1, r),
            (source, now, r, m % r),
        ]
        if index == 0 and low:
            options.append((f"range({top})", list(range(low + span)), m, r))
        slips = []
        for text, values, mod, rest in options:
            end = final([n for n in values if n % mod == rest], index + 1)
            if end is not None and mod > 1:
                slips.append((_sieve(name, text, mod, rest, show), end))
        good = _sieve(name, source, m, r, show)
        broken = good.replace("n %", "m %") if index == 0 else good.replace(source, source.lower())
        steps.append(step(answer, good, slips, broken))
        now = [n for n in now if n % m == r]
    said = [f"n % {m} = {r}" for m, r in zip(moduli, rests, strict=True)]
    joined = said[0] if count == 1 else ", ".join(said[:-1]) + f" and {said[-1]}"
    question = worded(
        rng,
        f"Find the least n >= {low} with {joined}.",
        f"What is the least n >= {low} with {joined}?",
    )
    return Draft(question, str(answer), tuple(steps))


def _sieve(name: str, source: str, m: int, r: int, show: str) -> str:
    return f"{name} = [n for n in {source} if n % {m} == {r}]\n{show}"
