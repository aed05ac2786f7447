"""Families of computations: from one line of arithmetic to a few cells that feed each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from trace_gym.envs.math.tasks.families_plan import Draft, Step, cell, choose, pick, step, worded

_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
_OTHER = {"+": "-", "-": "+", "*": "+"}
_WORDS = {"+": "add {}", "-": "subtract {}", "*": "multiply by {}"}


def _result(rng: np.random.Generator, expression: str) -> str:
    return worded(rng, f"What is {expression}?", f"Compute {expression}.")


def arithmetic(rng: np.random.Generator, difficulty: int) -> Draft:
    """Evaluate an expression; products first, each in a cell of its own from difficulty 3 on."""
    high = (50, 30, 50, 99, 300)[difficulty - 1]
    a, b, c, d = (pick(rng, 2, high) for _ in range(4))
    sign = choose(rng, ("+", "-"))
    if difficulty == 1:
        return _one_operation(rng, a, b)
    if difficulty == 2:
        return _product_and_term(rng, sign, (a, b, c))
    tail = pick(rng, 2, high) if difficulty == 5 else 0
    return _two_products(rng, difficulty, sign, (a, b, c, d, tail))


def _one_operation(rng: np.random.Generator, a: int, b: int) -> Draft:
    op = choose(rng, ("+", "-", "*"))
    value = _APPLY[op](a, b)
    slips = [
        (cell("x", f"{a} {_OTHER[op]} {b}"), _APPLY[_OTHER[op]](a, b)),
        (cell("x", f"{b} {op} {a}"), _APPLY[op](b, a)),
        (cell("x", f"{a + 1} {op} {b}"), _APPLY[op](a + 1, b)),
    ]
    only = step(value, cell("x", f"{a} {op} {b}"), slips, f"x = {a} {op} {b}\ny")
    return Draft(_result(rng, f"{a} {op} {b}"), str(value), (only,))


def _product_and_term(rng: np.random.Generator, sign: str, numbers: tuple[int, int, int]) -> Draft:
    a, b, c = numbers
    value = _APPLY[sign](a * b, c)
    slips = [
        (cell("x", f"{a} * {b} {_OTHER[sign]} {c}"), _APPLY[_OTHER[sign]](a * b, c)),
        (cell("x", f"{a} * ({b} {sign} {c})"), a * _APPLY[sign](b, c)),
        (cell("x", f"{a} * {b}"), a * b),
    ]
    only = step(value, cell("x", f"{a} * {b} {sign} {c}"), slips, f"x = {a} * {b} {sign} {c}\ny")
    return Draft(_result(rng, f"{a} * {b} {sign} {c}"), str(value), (only,))


def _two_products(
    rng: np.random.Generator, difficulty: int, sign: str, numbers: tuple[int, int, int, int, int]
) -> Draft:
    a, b, c, d, tail = numbers
    apply, other, swap = _APPLY[sign], _APPLY[_OTHER[sign]], _OTHER[sign]
    p, q = a * b, c * d
    value = apply(p, q) + tail

    def product(name: str, left: int, right: int, finish: Callable[[int], int]) -> Step:
        slips = [
            (cell(name, f"{left} + {right}"), finish(left + right)),
            (cell(name, f"{left} * {right + 1}"), finish(left * (right + 1))),
        ]
        broken = f"{name} = {left} * {right}\n{'y' if name == 'x' else 'z'}"
        return step(value, cell(name, f"{left} * {right}"), slips, broken)

    end = f" + {tail}" if tail else ""
    question = _result(rng, f"{a} * {b} {sign} {c} * {d}{end}")
    first = product("x", a, b, lambda x: apply(x, q) + tail)
    if difficulty == 3:
        slips = [
            (cell("y", f"x {swap} {c} * {d}"), other(p, q)),
            (cell("y", f"(x {sign} {c}) * {d}"), apply(p, c) * d),
            (cell("y", f"x {sign} {c}"), apply(p, c)),
        ]
        last = step(value, cell("y", f"x {sign} {c} * {d}"), slips, cell("y", f"X {sign} {c} * {d}"))
        return Draft(question, str(value), (first, last))
    second = product("y", c, d, lambda y: apply(p, y) + tail)
    slips = [
        (cell("z", f"x {swap} y{end}"), other(p, q) + tail),
        (cell("z", f"y {sign} x{end}"), apply(q, p) + tail),
        (cell("z", f"x {sign} y"), apply(p, q)),
    ]
    last = step(value, cell("z", f"x {sign} y{end}"), slips, cell("z", f"x {sign} Y{end}"))
    return Draft(question, str(value), (first, second, last))


def chain(rng: np.random.Generator, difficulty: int) -> Draft:
    """Start with a number and apply operations in the order they are said, one cell each."""
    high = (30, 30, 30, 60, 99)[difficulty - 1]
    count = (1, 2, 3, 3, 4)[difficulty - 1]
    start = pick(rng, 2, high)
    ops: list[tuple[str, int]] = []
    for index in range(count):
        op = choose(rng, ("+", "-", "*")) if index < 3 else choose(rng, ("+", "-"))
        ops.append((op, pick(rng, 2, 9 if op == "*" else high)))

    def finish(value: int, done: int) -> int:
        for op, number in ops[done:]:
            value = _APPLY[op](value, number)
        return value

    answer = finish(start, 0)
    values = [start]
    for op, number in ops:
        values.append(_APPLY[op](values[-1], number))
    steps = []
    for index, (op, number) in enumerate(ops[:3]):
        name = "xyz"[index]
        left = str(start) if index == 0 else "xyz"[index - 1]
        end = f" {ops[3][0]} {ops[3][1]}" if index == 2 and count == 4 else ""
        before = values[index]
        slips = [
            (cell(name, f"{left} {_OTHER[op]} {number}{end}"), _APPLY[_OTHER[op]](before, number)),
            (cell(name, f"{left} {op} {number + 1}{end}"), _APPLY[op](before, number + 1)),
        ]
        if index == 2:
            slips.append((cell(name, f"x {op} {number}{end}"), _APPLY[op](values[1], number)))
        finals = [(text, finish(value, index + 1)) for text, value in slips]
        wrong = f"{name} = {left} {op} {number}{end}\n{name.upper()}"
        steps.append(step(answer, cell(name, f"{left} {op} {number}{end}"), finals, wrong))
    said = ", ".join(_WORDS[op].format(number) for op, number in ops)
    question = worded(
        rng,
        f"Start with {start}, {said}. What is the result?",
        f"Take {start}, {said}. What do you get?",
    )
    return Draft(question, str(answer), tuple(steps))


def power(rng: np.random.Generator, difficulty: int) -> Draft:
    """Remainder of a power, alone or as a part of a second computation."""
    base_high, exponent_high, low, high = (
        (9, 9, 11, 60),
        (20, 20, 11, 99),
        (99, 50, 50, 300),
        (20, 30, 11, 60),
        (50, 50, 20, 300),
    )[difficulty - 1]
    a, k, m = pick(rng, 2, base_high), pick(rng, 3, exponent_high), pick(rng, low, high)
    b, j = pick(rng, 2, base_high), pick(rng, 3, exponent_high)
    add = pick(rng, 2, 50)
    r, s = pow(a, k, m), pow(b, j, m)
    if difficulty == 4:
        cube, text = r**3 + add, f"Let r be the remainder of {a}^{k} divided by {m}."
        first = _power_step(cube, "x", (a, k, m), lambda x: x**3 + add)
        slips = [
            (cell("y", f"x * 3 + {add}"), r * 3 + add),
            (cell("y", f"x ** 2 + {add}"), r**2 + add),
            (cell("y", "x ** 3"), r**3),
        ]
        last = step(cube, cell("y", f"x ** 3 + {add}"), slips, cell("y", f"r ** 3 + {add}"))
        return Draft(f"{text} Find r^3 + {add}.", str(cube), (first, last))
    if difficulty == 5:
        total = (r + s) % m
        first = _power_step(total, "x", (a, k, m), lambda x: (x + s) % m)
        second = _power_step(total, "y", (b, j, m), lambda y: (r + y) % m)
        slips = [
            (cell("z", "x + y"), r + s),
            (cell("z", f"x * y % {m}"), r * s % m),
            (cell("z", f"x + y % {m}"), r + s),
            (cell("z", f"(x + y) % {m + 1}"), (r + s) % (m + 1)),
        ]
        last = step(total, cell("z", f"(x + y) % {m}"), slips, cell("z", f"(x + Y) % {m}"))
        question = f"Find the remainder of {a}^{k} + {b}^{j} divided by {m}."
        return Draft(question, str(total), (first, second, last))
    question = worded(rng, f"Find the remainder of {a}^{k} divided by {m}.", f"What is {a}^{k} modulo {m}?")
    return Draft(question, str(r), (_power_step(r, "x", (a, k, m), lambda x: x),))


def _power_step(answer: int, name: str, numbers: tuple[int, int, int], finish: Callable[[int], int]) -> Step:
    a, k, m = numbers
    slips = [
        (cell(name, f"pow({k}, {a}, {m})"), finish(pow(k, a, m))),
        (cell(name, f"pow({a}, {k + 1}, {m})"), finish(pow(a, k + 1, m))),
        (cell(name, f"{a} * {k} % {m}"), finish(a * k % m)),
        (cell(name, f"pow({a}, {k}, {m + 1})"), finish(pow(a, k, m + 1))),
    ]
    return step(answer, cell(name, f"pow({a}, {k}, {m})"), slips, cell(name, f"power({a}, {k}, {m})"))


def gcd_lcm(rng: np.random.Generator, difficulty: int) -> Draft:
    """Greatest common divisors and least common multiples, one inside the other when harder."""
    high = (12, 24, 30, 40, 60)[difficulty - 1]
    g, h = pick(rng, 2, 12), pick(rng, 2, 12)
    a, b = (g * int(n) for n in rng.choice(np.arange(2, high + 1), 2, replace=False))
    if difficulty == 4:
        return _lcm_of_gcd(a, b, pick(rng, 4, 60))
    if difficulty == 5:
        return _lcm_of_gcds((a, b), (h * pick(rng, 2, high), h * pick(rng, 2, high)))
    if difficulty == 2:
        a, b = pick(rng, 4, 60), pick(rng, 4, 60)
    values = (a, b, g * pick(rng, 2, high)) if difficulty == 3 else (a, b)
    word = "lcm" if difficulty == 2 else "gcd"
    said = " and ".join(", ".join(map(str, values)).rsplit(", ", 1))
    question = worded(rng, f"What is the {word} of {said}?", f"Find the {word} of {said}.")
    answer = _COMMON[word](*values)
    return Draft(question, str(answer), (_common_step(answer, "x", word, values, lambda x: x),))


_COMMON = {"gcd": math.gcd, "lcm": math.lcm}


def _common_step(answer: int, name: str, word: str, values: tuple[int, ...], finish: Callable[[int], int]) -> Step:
    # The first cell imports both names; what it can forget is the import, a later cell the spelling.
    load = ("from math import gcd, lcm",) if name == "x" else ()
    wrong = "lcm" if word == "gcd" else "gcd"
    text, more = ", ".join(map(str, values)), (*values[:-1], values[-1] + 1)
    slips = [
        (cell(name, f"{wrong}({text})", *load), finish(_COMMON[wrong](*values))),
        (cell(name, f"{word}({', '.join(map(str, more))})", *load), finish(_COMMON[word](*more))),
        (cell(name, f"min({text})", *load), finish(min(values))),
    ]
    broken = cell(name, f"{word}({text})" if load else f"{word[::-1]}({text})")
    return step(answer, cell(name, f"{word}({text})", *load), slips, broken)


def _lcm_of_gcd(a: int, b: int, c: int) -> Draft:
    x = math.gcd(a, b)
    answer = math.lcm(x, c)
    first = _common_step(answer, "x", "gcd", (a, b), lambda value: math.lcm(value, c))
    slips = [
        (cell("y", f"gcd(x, {c})"), math.gcd(x, c)),
        (cell("y", f"x * {c}"), x * c),
        (cell("y", f"lcm({a}, {c})"), math.lcm(a, c)),
    ]
    last = step(answer, cell("y", f"lcm(x, {c})"), slips, cell("y", f"lcm(g, {c})"))
    question = f"Let g be the gcd of {a} and {b}. Find the lcm of g and {c}."
    return Draft(question, str(answer), (first, last))


def _lcm_of_gcds(left: tuple[int, int], right: tuple[int, int]) -> Draft:
    x, y = math.gcd(*left), math.gcd(*right)
    answer = math.lcm(x, y)
    first = _common_step(answer, "x", "gcd", left, lambda value: math.lcm(value, y))
    second = _common_step(answer, "y", "gcd", right, lambda value: math.lcm(x, value))
    slips = [
        (cell("z", "gcd(x, y)"), math.gcd(x, y)),
        (cell("z", "x * y"), x * y),
        (cell("z", "x + y"), x + y),
    ]
    last = step(answer, cell("z", "lcm(x, y)"), slips, cell("z", "lcm(x, z)"))
    question = f"Find the lcm of gcd({left[0]}, {left[1]}) and gcd({right[0]}, {right[1]})."
    return Draft(question, str(answer), (first, second, last))


def fractions(rng: np.random.Generator, difficulty: int) -> Draft:
    """Exact sums, differences, products and quotients of fractions, one cell for each operation."""
    high = (9, 9, 9, 9, 12)[difficulty - 1]
    count = (1, 1, 2, 3, 3)[difficulty - 1]

    def draw() -> tuple[int, int]:
        bottom = pick(rng, 2, high)
        return choose(rng, [top for top in range(1, high + 1) if top != bottom]), bottom

    start = draw()
    allowed = ("+",) if difficulty == 1 else ("-", "*", "/") if difficulty == 2 else tuple("+-*/")
    ops = [(choose(rng, allowed), draw()) for _ in range(count)]
    values = [Fraction(*start)]
    for op, number in ops:
        values.append(_exact(op, values[-1], Fraction(*number)))

    def finish(value: Fraction, done: int) -> Fraction:
        for op, number in ops[done:]:
            value = _exact(op, value, Fraction(*number))
        return value

    steps = []
    for index, (op, (top, bottom)) in enumerate(ops):
        name = "xyz"[index]
        left = f"F({start[0]}, {start[1]})" if index == 0 else "xyz"[index - 1]
        head = "from fractions import Fraction as F\n" if index == 0 else ""
        options = (
            (_OTHER_EXACT[op], top, bottom),
            (op, bottom, top),
            (op, top, bottom + 1),
        )
        finals = [
            (
                f"{head}{name} = {left} {sign} F({p}, {q})\nprint({name})",
                finish(_exact(sign, values[index], Fraction(p, q)), index + 1),
            )
            for sign, p, q in options
        ]
        code = f"{name} = {left} {op} F({top}, {bottom})\nprint({name})"
        # The first cell may forget the import, a later one the short name of Fraction.
        broken = code if head else code.replace("F(", "Frac(")
        steps.append(step(values[-1], head + code, finals, broken))
    return Draft(_fraction_question(start, ops), str(values[-1]), tuple(steps))


_OTHER_EXACT = {"+": "-", "-": "+", "*": "/", "/": "*"}


def _exact(op: str, left: Fraction, right: Fraction) -> Fraction:
    if op in "+-":
        return left + right if op == "+" else left - right
    return left * right if op == "*" else left / right


def _fraction_question(start: tuple[int, int], ops: list[tuple[str, tuple[int, int]]]) -> str:
    words = {**_WORDS, "/": "divide by {}"}
    if len(ops) == 1:
        op, (top, bottom) = ops[0]
        text = f"{start[0]}/{start[1]} {op} {top}/{bottom}"
        if op == "/":
            text = f"({start[0]}/{start[1]}) / ({top}/{bottom})"
        return f"What is {text} as a fraction?"
    said = ", ".join(words[op].format(f"{top}/{bottom}") for op, (top, bottom) in ops)
    return f"Start with {start[0]}/{start[1]}, {said}. Which fraction is it?"
