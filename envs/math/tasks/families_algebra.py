"""Families about unknowns and changing variables: equations, repeated rules, number bases."""

from __future__ import annotations

import numpy as np

from trace_gym.envs.math.tasks.families_plan import Draft, Step, cell, pick, step, worded


def linear(rng: np.random.Generator, difficulty: int) -> Draft:
    """Solve a linear equation with an integer solution; harder ones have the unknown on both sides."""
    if difficulty <= 3:
        return _one_sided(rng, difficulty)
    high = (0, 0, 0, 20, 60)[difficulty - 1]
    c = pick(rng, 2, 9)
    a = c + pick(rng, 2, 9)
    n, b = pick(rng, 2, high), pick(rng, 2, 50)
    d = b + (a - c) * n
    add = pick(rng, 2, 50)

    def final(value: int) -> int:
        return value**2 + add if difficulty == 5 else value

    answer = final(n)
    equation = f"{a}n + {b} = {c}n + {d}"
    if difficulty == 4:
        question = worded(rng, f"Solve {equation} for n.", f"For which n is {equation}?")
    else:
        question = f"If {equation}, what is n^2 + {add}?"
    first = step(
        answer,
        cell("x", f"{a} - {c}"),
        [
            (cell("x", f"{a} + {c}"), final((d - b) // (a + c))),
            (cell("x", f"{c} - {a}"), final((d - b) // (c - a)) if difficulty == 4 else answer),
            (cell("x", f"{a}"), final((d - b) // a)),
        ],
        cell("x", f"{a}n - {c}n"),
    )
    second = step(
        answer,
        cell("y", f"({d} - {b}) // x"),
        [
            (cell("y", f"({d} + {b}) // x"), final((d + b) // (a - c))),
            (cell("y", f"{d} - {b} // x"), final(d - b // (a - c))),
            (cell("y", f"{d} // x"), final(d // (a - c))),
        ],
        cell("y", f"({d} - {b}) // X"),
    )
    if difficulty == 4:
        return Draft(question, str(answer), (first, second))
    last = step(
        answer,
        cell("z", f"y ** 2 + {add}"),
        [
            (cell("z", f"y * 2 + {add}"), n * 2 + add),
            (cell("z", f"y ** 2 - {add}"), n**2 - add),
            (cell("z", f"x ** 2 + {add}"), (a - c) ** 2 + add),
        ],
        cell("z", f"n ** 2 + {add}"),
    )
    return Draft(question, str(answer), (first, second, last))


def _one_sided(rng: np.random.Generator, difficulty: int) -> Draft:
    plus = bool(rng.random() < 0.5)
    b = pick(rng, 2, (99, 50, 200)[difficulty - 1])
    n = pick(rng, 2, (99, 20, 60)[difficulty - 1])
    a = 1 if difficulty == 1 else pick(rng, 2, (9, 19)[difficulty - 2])
    c = a * n + b if plus else a * n - b
    sign, back, flip = ("+", "-", 1) if plus else ("-", "+", -1)
    left = "n" if a == 1 else f"{a}n"
    equation = f"{left} {sign} {b} = {c}"
    question = worded(rng, f"Solve {equation} for n.", f"For which n is {equation}?")
    moved, wrong = a * n, c + flip * b
    if difficulty == 1:
        slips = [
            (cell("x", f"{c} {sign} {b}"), wrong),
            (cell("x", f"{b} {back} {c}"), b - flip * c),
            (cell("x", f"{c} {back} {b + 1}"), moved - flip),
        ]
        only = step(n, cell("x", f"{c} {back} {b}"), slips, f"x = {c} {back} {b}\nn")
        return Draft(question, str(n), (only,))
    if difficulty == 2:
        slips = [
            (cell("x", f"({c} {sign} {b}) // {a}"), wrong // a),
            (cell("x", f"{c} {back} {b} // {a}"), c - flip * (b // a)),
            (cell("x", f"({c} {back} {b}) * {a}"), moved * a),
        ]
        only = step(n, cell("x", f"({c} {back} {b}) // {a}"), slips, f"x = ({c} {back} {b}) // n\nx")
        return Draft(question, str(n), (only,))
    first = step(
        n,
        cell("x", f"{c} {back} {b}"),
        [
            (cell("x", f"{c} {sign} {b}"), wrong // a),
            (cell("x", f"{b} {back} {c}"), (b - flip * c) // a),
        ],
        f"x = {c} {back} {b}\nn",
    )
    last = step(
        n,
        cell("y", f"x // {a}"),
        [
            (cell("y", f"x * {a}"), moved * a),
            (cell("y", f"x - {a}"), moved - a),
            (cell("y", f"x % {a}"), 0),
        ],
        cell("y", f"X // {a}"),
    )
    return Draft(question, str(n), (first, last))


def _loop(times: int, rule: str) -> str:
    return f"for i in range({times}): x = {rule}"


def _linear_times(x: int, times: int, m: int, c: int) -> int:
    for _ in range(times):
        x = m * x + c
    return x


def _square_times(x: int, times: int, m: int) -> int:
    for _ in range(times):
        x = x * x % m
    return x


def recurrence(rng: np.random.Generator, difficulty: int) -> Draft:
    """Repeat a rule; difficulty 3 has two variables, 4 and 5 continue where the last cell stopped."""
    if difficulty == 3:
        return _two_variables(rng)
    start = pick(rng, 1, (20, 30, 0, 20, 30)[difficulty - 1])
    m = pick(rng, 2, (3, 5, 0, 3, 4)[difficulty - 1])
    c = pick(rng, 1, (20, 30, 0, 20, 30)[difficulty - 1])
    times = pick(rng, *((2, 4), (3, 6), (0, 0), (3, 5), (3, 6))[difficulty - 1])
    squares, p = pick(rng, 2, 6), pick(rng, 11, (0, 0, 0, 99, 300)[difficulty - 1] or 11)
    again, d = pick(rng, 2, 4), pick(rng, 1, 20)

    def after_first(x: int) -> int:
        return x if difficulty <= 2 else after_second(_square_times(x, squares, p))

    def after_second(x: int) -> int:
        return x if difficulty <= 4 else _linear_times(x, again, 2, d)

    value = _linear_times(start, times, m, c)
    answer = after_first(value)
    rule = f"{m} * x + {c}"
    head = f"x = {start}\n"
    first = step(
        answer,
        f"{head}{_loop(times, rule)}\nx",
        [(f"{head}{_loop(n, rule)}\nx", after_first(_linear_times(start, n, m, c))) for n in (times + 1, times - 1)]
        + [(f"{head}x = {rule}\nx", after_first(m * start + c))]
        + [(f"{head}{_loop(times, f'x + {c}')}\nx", after_first(start + times * c))],
        f"{_loop(times, rule)}\ny",
    )
    question = f"Set x = {start}. Do {times} times: x = {rule}."
    if difficulty <= 2:
        return Draft(f"{question} What is x?", str(answer), (first,))
    question += f" Then {squares} times: x = x * x % {p}."
    reached = _square_times(value, squares, p)
    second = step(
        answer,
        f"{_loop(squares, f'x * x % {p}')}\nx",
        [
            (f"{_loop(n, f'x * x % {p}')}\nx", after_second(_square_times(value, n, p)))
            for n in (squares + 1, squares - 1)
        ]
        + [
            (f"x = x * x % {p}\nx", after_second(value * value % p)),
            (f"{_loop(squares, f'x + x % {p}')}\nx", after_second(_add_times(value, squares, p))),
        ],
        _loop(squares, f"x * X % {p}") + "\nx",
    )
    if difficulty == 4:
        return Draft(f"{question} What is x?", str(answer), (first, second))
    return Draft(
        f"{question} Then {again} times: x = 2 * x + {d}. What is x?",
        str(answer),
        (first, second, _last_loop(answer, reached, again, d)),
    )


def _add_times(x: int, times: int, m: int) -> int:
    for _ in range(times):
        x = x + x % m
    return x


def _last_loop(answer: int, x: int, times: int, d: int) -> Step:
    rule = f"2 * x + {d}"
    slips = [(f"{_loop(n, rule)}\nx", _linear_times(x, n, 2, d)) for n in (times + 1, times - 1)]
    slips.append((f"{_loop(times, f'x + {d}')}\nx", x + times * d))
    return step(answer, f"{_loop(times, rule)}\nx", slips, f"{_loop(times, rule)}\ny")


def _two_variables(rng: np.random.Generator) -> Draft:
    x, y, times = pick(rng, 1, 30), pick(rng, 1, 30), pick(rng, 3, 12)

    def run(a: int, b: int, count: int) -> int:
        for _ in range(count):
            a, b = b, a + b
        return a

    answer = run(x, y, times)
    rule = "x, y = y, x + y"

    def code(head: str, count: int, show: str = "x") -> str:
        return f"{head}\nfor i in range({count}): {rule}\n{show}"

    slips = [
        (code(f"x, y = {x}, {y}", times + 1), run(x, y, times + 1)),
        (code(f"x, y = {x}, {y}", times - 1), run(x, y, times - 1)),
        (code(f"x, y = {y}, {x}", times), run(y, x, times)),
        (code(f"x, y = {x}, {y}", times, "y"), run(x, y, times + 1)),
    ]
    only = step(answer, code(f"x, y = {x}, {y}", times), slips, code(f"x = {x}", times))
    question = f"Set x = {x}, y = {y}. Do {times} times: {rule}. What is x?"
    return Draft(question, str(answer), (only,))


def bases(rng: np.random.Generator, difficulty: int) -> Draft:
    """Read numbers written in a small base, then count binary ones or combine two of them."""
    length = (3, 4, 4, 3, 4)[difficulty - 1]
    p, q = pick(rng, 3, 9), pick(rng, 3, 9)
    a = _digits(rng, p, length)
    b = _digits(rng, q, length)

    def final(x: int, y: int) -> int:
        if difficulty <= 2:
            return x
        if difficulty == 3:
            return x.bit_count()
        return x * y if difficulty == 4 else (x * y).bit_count()

    x, y = int(a, p), int(b, q)
    answer = final(x, y)
    first = step(
        answer,
        cell("x", f'int("{a}", {p})'),
        [
            (cell("x", f'int("{a}", {p + 1})'), final(int(a, p + 1), y)),
            (cell("x", f'int("{a}")'), final(int(a), y)),
            (cell("x", f'int("{a[1:]}", {p})'), final(int(a[1:], p), y)),
            (cell("x", f'int("{a}1", {p})'), final(int(a + "1", p), y)),
        ],
        cell("x", f"int({a}, {p})"),
    )
    if difficulty <= 2:
        question = worded(rng, f"Write {a} in base {p} as a decimal number.", f"What is {a} in base {p}?")
        return Draft(question, str(answer), (first,))
    if difficulty == 3:
        question = f"How many binary ones has the number {a} in base {p}?"
        return Draft(question, str(answer), (first, _ones(answer, "y", "x", x)))
    second = step(
        answer,
        cell("y", f'int("{b}", {q})'),
        [
            (cell("y", f'int("{b}", {q + 1})'), final(x, int(b, q + 1))),
            (cell("y", f'int("{b}")'), final(x, int(b))),
            (cell("y", f'int("{b[1:]}", {q})'), final(x, int(b[1:], q))),
            (cell("y", f'int("{b}1", {q})'), final(x, int(b + "1", q))),
        ],
        cell("y", f"int({b}, {q})"),
    )
    if difficulty == 4:
        last = step(
            answer,
            cell("z", "x * y"),
            [(cell("z", "x + y"), x + y), (cell("z", "x * x"), x * x)],
            cell("z", "x * Y"),
        )
        question = f"Multiply {a} in base {p} by {b} in base {q}."
    else:
        last = _ones(answer, "z", "x * y", x * y)
        question = f"How many binary ones has {a} in base {p} times {b} in base {q}?"
    return Draft(question, str(answer), (first, second, last))


def _digits(rng: np.random.Generator, base: int, length: int) -> str:
    first = str(pick(rng, 1, base - 1))
    return first + "".join(str(pick(rng, 0, base - 1)) for _ in range(length - 1))


def _ones(answer: int, name: str, expression: str, value: int) -> Step:
    return step(
        answer,
        cell(name, f'bin({expression}).count("1")'),
        [
            (cell(name, f'bin({expression}).count("0")'), bin(value).count("0")),
            (cell(name, f"len(bin({expression}))"), len(bin(value))),
            (cell(name, f'str({expression}).count("1")'), str(value).count("1")),
        ],
        cell(name, f"bin({expression}).count(1)"),
    )
