r"""The grader against plain math-verify: time and verdicts on generated pairs of every kind, and hostile answers.

Run by hand: ``python tests/benchmarks/grading.py [--quick] [--data FOLDER]``. Both graders take turns on the same
pairs; what is right is known from how a pair was made. With ``--data`` every answer in the JSON and JSON Lines files of
a folder is graded against itself, and solutions that carry a judgement (``{"solution": ..., "is_correct": ...}``)
against the right one. The last line is one JSON object with the ratios.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import math_verify

from trace_gym.envs.math import grade
from trace_gym.envs.math.grading import close_grader

Pair = tuple[str, str, bool]
"""Answer, right answer, and whether they are the same."""


def integers(rng: random.Random) -> Pair:
    """Two integers, one of them sometimes with thousands separators."""
    n, same = rng.randint(1000, 10**6), rng.random() < 0.5
    return f"{n:,}", str(n if same else n + rng.choice((-1, 1, 10))), same


def fractions(rng: random.Random) -> Pair:
    """A fraction and a decimal."""
    top, bottom, same = rng.randint(1, 99), 2 ** rng.randint(1, 5), rng.random() < 0.5
    return repr(top / bottom), rf"\frac{{{top + (not same)}}}{{{bottom}}}", same


def surds(rng: random.Random) -> Pair:
    """Roots written in two ways."""
    a, b, same = rng.randint(2, 9), rng.choice((2, 3, 5, 7)), rng.random() < 0.5
    return f"sqrt({a * a * b})", rf"{a if same else a + 1}\sqrt{{{b}}}", same


def multiples_of_pi(rng: random.Random) -> Pair:
    """What sympy prints against LaTeX."""
    a, b, same = rng.randint(2, 9), rng.choice((5, 7, 11)), rng.random() < 0.5
    return f"{a}*pi/{b}", rf"\frac{{{a} \pi}}{{{b if same else b + 2}}}", same


def tiny(rng: random.Random) -> Pair:
    """Numbers near zero that differ by a factor of two."""
    n, same = rng.randint(60, 200), rng.random() < 0.5
    return rf"\frac{{1}}{{2^{{{n}}}}}", rf"\frac{{2}}{{2^{{{n + 1 if same else n}}}}}", same


def polynomials(rng: random.Random) -> Pair:
    """A product and its expansion."""
    a, b, same = rng.randint(1, 9), rng.randint(1, 9), rng.random() < 0.5
    return f"(x+{a})(x+{b})", f"x^2+{a + b}x+{a * b + (not same)}", same


def trigonometry(rng: random.Random) -> Pair:
    """An identity."""
    a, same = rng.randint(2, 9), rng.random() < 0.5
    return rf"\sin {2 * a}x", rf"2\sin {a}x {chr(92)}{'cos' if same else 'sin'} {a}x", same


def intervals(rng: random.Random) -> Pair:
    """An inequality and an interval."""
    a, b, same = rng.randint(1, 9), rng.randint(10, 19), rng.random() < 0.5
    return rf"{a} < x \le {b}", f"({a}, {b}{']' if same else ')'}", same


def tuples(rng: random.Random) -> Pair:
    """Points, in order or not."""
    a, b, same = rng.randint(1, 9), rng.randint(10, 19), rng.random() < 0.5
    return f"({a}, {b})", f"({a},{b})" if same else f"({b},{a})", same


def sets(rng: random.Random) -> Pair:
    """A set in another order, or a tuple in its place."""
    a, b, same = rng.randint(1, 9), rng.randint(10, 19), rng.random() < 0.5
    return f"({a}, {b})" if not same else rf"\{{{b}, {a}\}}", rf"\{{{a}, {b}\}}", same


def lists(rng: random.Random) -> Pair:
    """Solutions in another order, or one of them missing."""
    a, b, c = rng.sample(range(1, 50), 3)
    same = rng.random() < 0.5
    return f"x = {c} or x = {a} or x = {b}" if same else f"{a}, {b}", f"{a}, {b}, {c}", same


def units(rng: random.Random) -> Pair:
    """A unit left out, or contradicted."""
    n, same = rng.randint(2, 99), rng.random() < 0.5
    return f"{n}" if same else rf"{n} \text{{ cm}}", rf"{n} \text{{ m}}", same


def equations(rng: random.Random) -> Pair:
    """A line, multiplied by a factor or shifted."""
    a, b, c, same = rng.randint(2, 9), rng.randint(2, 9), rng.randint(1, 9), rng.random() < 0.5
    return f"{3 * a}x + {3 * b}y = {3 * c + (not same)}", f"{a}x + {b}y - {c} = 0", same


def matrices(rng: random.Random) -> Pair:
    """A Python list and LaTeX."""
    a, b, c, d = rng.sample(range(1, 50), 4)
    same = rng.random() < 0.5
    return f"[[{a}, {b}], [{c}, {d}]]", rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d if same else d + 1}\end{{pmatrix}}", same


def complex_numbers(rng: random.Random) -> Pair:
    """Python's and sympy's spelling of complex numbers."""
    a, b, same = rng.randint(2, 9), rng.randint(2, 9), rng.random() < 0.5
    return rng.choice((f"{a} + {b}*I", f"{a}+{b}j")), f"{a} {'+' if same else '-'} {b}i", same


KINDS: tuple[Callable[[random.Random], Pair], ...] = (
    *(integers, fractions, surds, multiples_of_pi, tiny, polynomials, trigonometry, intervals, tuples, sets, lists),
    *(units, equations, matrices, complex_numbers),
)
HOSTILE = {
    "tower 9^9^9^9": "9^9^9^9",
    "(10^9)!": "(10^9)!",
    "300 parentheses": "(" * 300 + "5" + ")" * 300,
    "2000 terms": "+".join(["1"] * 2000),
    "20 kB": "x" * 20_000,
    "sum of 10^9 terms": r"\sum_{k=1}^{10^9} k^k",
    "reduction modulo pi": r"\sin(10^{9999999})",
    "deep fractions": r"\frac{1}{" * 60 + "2" + "}" * 60,
}


def plain(answer: str, right: str) -> bool:
    """Grade with math-verify alone, as its documentation shows it."""
    return bool(math_verify.verify(math_verify.parse(f"${right}$"), math_verify.parse(f"${answer}$")))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call returns, and its milliseconds."""
    start = time.perf_counter()
    value = work()
    return value, 1000 * (time.perf_counter() - start)


def compare(rounds: int) -> dict[str, float]:
    """Grade `rounds` pairs of each kind with both graders, in turns; print a table and return the ratios."""
    print(f"{'kind':18} {'right':>7} {'math-verify':>12} {'agree':>7} {'ms':>8} {'math-verify':>12} {'ratio':>7}")
    ours_right, theirs_right, ratios, ours_ms = [], [], [], []
    for kind in KINDS:
        rng = random.Random(kind.__name__)
        rows = []
        for _ in range(rounds):
            answer, right, same = kind(rng)
            verdict, ms = timed(lambda a=answer, r=right: grade(a, r).outcome)
            other, other_ms = timed(lambda a=answer, r=right: plain(a, r))
            rows.append(((verdict == "correct") == same and verdict != "ungradable", other == same, ms, other_ms))
        good, theirs = (statistics.mean(row[k] for row in rows) for k in (0, 1))
        agree = statistics.mean(row[0] == row[1] for row in rows)
        ms, other_ms = (statistics.median(row[k] for row in rows) for k in (2, 3))
        name = kind.__name__.replace("_", " ")
        print(f"{name:18} {good:7.0%} {theirs:12.0%} {agree:7.0%} {ms:8.2f} {other_ms:12.2f} {other_ms / ms:7.1f}")
        ours_right.append(good)
        theirs_right.append(theirs)
        ratios.append(other_ms / ms)
        ours_ms.append(ms)
    return {
        "right": statistics.mean(ours_right),
        "math_verify_right": statistics.mean(theirs_right),
        "math_verify_over_ours_median": statistics.median(ratios),
        "math_verify_over_ours_min": min(ratios),
        "ours_ms_median": statistics.median(ours_ms),
    }


def endure() -> float:
    """Grade hostile answers, print a table and return the longest time in seconds."""
    print(f"\n{'hostile answer':24} {'outcome':>10} {'s':>7}  reason")
    longest = 0.0
    for name, text in HOSTILE.items():
        verdict, ms = timed(lambda text=text: grade(text, "5"))
        longest = max(longest, ms / 1000)
        print(f"{name:24} {verdict.outcome:>10} {ms / 1000:7.3f}  {verdict.reason[:60]}")
    return longest


def records(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the records of all data files in a folder, with the file's name."""
    for path in sorted((*folder.glob("*.jsonl"), *folder.glob("*.json"))):
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(row) for row in text.split("\n") if row]
        yield from ((path.name, row) for row in rows if isinstance(row, dict))


def check_data(folder: Path) -> dict[str, float]:
    """Grade right answers against themselves and judged solutions against the right answers."""
    counts: dict[str, Counter[str]] = {}
    times: list[float] = []
    judged: Counter[bool] = Counter()
    for name, row in records(folder):
        gold = row.get("answer", row.get("Answer", row.get("ground_truth")))
        if gold is None:
            continue
        gold = str(gold).rpartition("####")[2].strip()
        for solution in (value for value in row.values() if isinstance(value, dict) and "is_correct" in value):
            verdict = grade(solution["solution"], gold)
            judged[(verdict.outcome == "correct") == solution["is_correct"]] += 1
        verdict, ms = timed(lambda gold=gold: grade(gold, gold))
        counts.setdefault(name, Counter())[verdict.outcome] += 1
        times.append(ms)
        if verdict.outcome != "correct":
            print(f"{name}: {gold[:60]!r} is {verdict.outcome}: {verdict.reason}")
    print(f"\n{'file':40} {'answers':>8} {'correct':>9}")
    for name, count in counts.items():
        print(f"{name:40} {count.total():8} {count['correct'] / count.total():9.3%}")
    total = sum(counts.values(), Counter[str]())
    result = {"gold_against_gold": total["correct"] / max(1, total.total()), "gold_ms_median": statistics.median(times)}
    if judged:
        result["agreement_with_judged_solutions"] = judged[True] / judged.total()
        print(f"{judged.total()} judged solutions, agreement {result['agreement_with_judged_solutions']:.3%}")
    return result


def main() -> None:
    """Print the tables and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer pairs, under 50 seconds")
    parser.add_argument("--data", type=Path, help="a folder of JSON and JSON Lines files with right answers")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    grade(r"\sin 2x", r"2 \sin x \cos x", patient=True)  # starts the workers
    plain("1/2", "0.5")
    results = compare(10 if arguments.quick else 100)
    results["hostile_longest_s"] = endure()
    if arguments.data is not None:
        results |= check_data(arguments.data)
    close_grader()
    print(json.dumps({name: round(value, 4) for name, value in results.items()}))


if __name__ == "__main__":
    main()
