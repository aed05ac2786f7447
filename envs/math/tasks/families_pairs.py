"""The family of pairs: a search over two variables, sieved cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trace_gym.envs.math.tasks.families_plan import Draft, cell, pick, step, worded

Pairs = list[tuple[int, int]]


@dataclass(frozen=True)
class _Condition:
    """A condition on a pair, as code, as it is said, and a plausible wrong version."""

    code: str
    said: str
    test: Callable[[int, int], bool]
    wrong_code: str
    wrong_test: Callable[[int, int], bool]

    def keep(self, pairs: Pairs) -> Pairs:
        return [(a, b) for a, b in pairs if self.test(a, b)]

    def keep_wrong(self, pairs: Pairs) -> Pairs:
        return [(a, b) for a, b in pairs if self.wrong_test(a, b)]


def pairs(rng: np.random.Generator, difficulty: int) -> Draft:
    """Count ordered pairs below a limit that pass conditions on their sum and product."""
    limit = pick(rng, 6, (30, 40, 25, 30, 30)[difficulty - 1])
    if difficulty <= 2:
        return _at_once(rng, difficulty, limit)
    conditions = _remainders(rng) if difficulty == 5 else _bounds(rng, limit)
    return _sieved(limit, *conditions, merged=difficulty == 3)


def _bounds(rng: np.random.Generator, limit: int) -> tuple[_Condition, _Condition]:
    high, low = pick(rng, limit // 2, limit), pick(rng, 2, 2 * limit)
    return (
        _Condition(
            f"a + b < {high}",
            f"a + b < {high}",
            lambda a, b: a + b < high,
            f"a + b > {high}",
            lambda a, b: a + b > high,
        ),
        _Condition(
            f"a * b > {low}",
            f"a * b > {low}",
            lambda a, b: a * b > low,
            f"a * b < {low}",
            lambda a, b: a * b < low,
        ),
    )


def _remainders(rng: np.random.Generator) -> tuple[_Condition, _Condition]:
    m, k = pick(rng, 3, 12), pick(rng, 3, 12)
    r, t = pick(rng, 0, m - 1), pick(rng, 0, k - 1)
    return (
        _Condition(
            f"(a + b) % {m} == {r}",
            f"(a + b) % {m} = {r}",
            lambda a, b: (a + b) % m == r,
            f"a + b % {m} == {r}",
            lambda a, b: a + b % m == r,
        ),
        _Condition(
            f"a * b % {k} == {t}",
            f"a * b % {k} = {t}",
            lambda a, b: a * b % k == t,
            f"a + b % {k} == {t}",
            lambda a, b: a + b % k == t,
        ),
    )


def _below(limit: int) -> Pairs:
    return [(a, b) for a in range(limit) for b in range(limit)]


def _build(size: int, inner: str = "R") -> str:
    return f"R = range({size})\nP = [(a, b) for a in R for b in {inner}]\nlen(P)"


def _sieve(name: str, source: str, condition: str) -> str:
    return f"{name} = [(a, b) for a, b in {source} if {condition}]\nlen({name})"


def _sieved(limit: int, one: _Condition, other: _Condition, *, merged: bool) -> Draft:
    whole = _below(limit)
    kept = one.keep(whole)
    answer = len(other.keep(kept))

    def count(start: Pairs) -> int:
        return len(other.keep(one.keep(start)))

    first = step(
        answer,
        _build(limit),
        [
            (_build(limit + 1), count(_below(limit + 1))),
            (_build(limit, "range(a)"), count([(a, b) for a, b in whole if b < a])),
        ],
        _build(limit).split("\n", 1)[1],
    )
    only_other = len(other.keep(whole))
    question = f"How many pairs (a, b) with 0 <= a, b < {limit} have {one.said} and {other.said}?"
    if merged:
        slips = [
            (_sieve("Q", "P", f"{one.code} or {other.code}"), len(kept) + only_other - answer),
            (_sieve("Q", "P", other.code), only_other),
            (_sieve("Q", "P", one.code), len(kept)),
        ]
        both = f"{one.code} and {other.code}"
        last = step(answer, _sieve("Q", "P", both), slips, _sieve("Q", "p", both))
        return Draft(question, str(answer), (first, last))
    slips = [
        (_sieve("Q", "P", one.wrong_code), len(other.keep(one.keep_wrong(whole)))),
        ("Q = P\nlen(Q)", only_other),
    ]
    second = step(answer, _sieve("Q", "P", one.code), slips, _sieve("Q", "p", one.code))
    slips = [
        (_sieve("S", "Q", other.wrong_code), len(other.keep_wrong(kept))),
        (_sieve("S", "P", other.code), only_other),
        ("S = Q\nlen(S)", len(kept)),
    ]
    third = step(answer, _sieve("S", "Q", other.code), slips, _sieve("S", "q", other.code))
    return Draft(question, str(answer), (first, second, third))


def _at_once(rng: np.random.Generator, difficulty: int, limit: int) -> Draft:
    sign, other = ("*", "+") if rng.random() < 0.5 else ("+", "*")
    total, m = pick(rng, 3, 2 * limit), pick(rng, 3, 12)
    if sign == "*":
        total = pick(rng, 2, limit - 1) * pick(rng, 1, 6)

    def passes(a: int, b: int, op: str) -> bool:
        value = a * b if op == "*" else a + b
        return value == total if difficulty == 1 else value % m == 0

    def count(size: int, op: str, low: int = 0) -> int:
        return sum(passes(a, b, op) for a in range(low, size) for b in range(low, size))

    def code(size: int, op: str, low: str = "", inner: str = "R") -> str:
        left = f"a {op} b" if difficulty == 1 or op == "*" else f"(a {op} b)"
        test = f"{left} == {total}" if difficulty == 1 else f"{left} % {m} == 0"
        return cell("x", f"sum({test} for a in R for b in {inner})", f"R = range({low}{size})")

    answer = count(limit, sign)
    half = sum(passes(a, b, sign) for a in range(limit) for b in range(a))
    slips = [
        (code(limit, other), count(limit, other)),
        (code(limit + 1, sign), count(limit + 1, sign)),
        (code(limit, sign, "1, "), count(limit, sign, 1)),
        (code(limit, sign, inner="range(a)"), half),
    ]
    only = step(answer, code(limit, sign), slips, code(limit, sign).split("\n", 1)[1])
    have = f"a {sign} b = {total}" if difficulty == 1 else f"a {sign} b divisible by {m}"
    question = worded(
        rng,
        f"How many pairs (a, b) with 0 <= a, b < {limit} have {have}?",
        f"Count the pairs (a, b) with 0 <= a, b < {limit} and {have}.",
    )
    return Draft(question, str(answer), (only,))
