r"""Texts made to hurt: the grader answers them in time, without a word of them being run, and never kindly."""

from __future__ import annotations

import os
import random
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from trace_gym.envs.math import grade
from trace_gym.envs.math.grading import close_grader
from trace_gym.envs.math.grading.reading import read
from trace_gym.envs.math.grading.shapes import Unread

needs_workers = pytest.mark.skipif(find_spec("math_verify") is None, reason="the extra `math` is not installed")
PATIENCE_S = 20.0  # the promise is two seconds; a crowded machine may take its time to wake us


@pytest.fixture(scope="module", autouse=True)
def workers_end_with_the_module():
    grade(r"\sin 2x", r"2\sin x \cos x", patient=True)  # starts them
    yield
    close_grader()


HOSTILE = {
    "open brackets": "(" * 10**5,
    "nested brackets": "(" * 300 + "5" + ")" * 300,
    "nested fractions": r"\frac{1}{" * 60 + "2" + "}" * 60,
    "nested boxes": r"\boxed{" * 10**4 + "}" * 10**4,
    "open boxes": r"\boxed{" * 10**4,
    "open thoughts": "<think>" * 10**4,
    "signs": "-" * 512,
    "tower": "9^9^9^9",
    "long tower": "2^" * 255 + "2",
    "factorial": "(10^9)!",
    "factorials": "9!!" + "!" * 400,
    "huge product": "*".join(["9^1290"] * 70),
    "many denominators": "+".join(f"1/{k}^400" for k in range(3, 50)),
    "surds": "*".join([r"(1+\sqrt2+\sqrt3)"] * 25),
    "quotients of surds": "/".join([r"(\sqrt2+\sqrt3+\sqrt5+\sqrt7)"] * 16),
    "roots of primes": "+".join(rf"\sqrt{{{99999989 + k}}}" for k in range(30)),
    "polynomial": "+".join(f"x^{k}" for k in range(2, 110)),
    "symbols": "(x+y+z+a+b+c)^{99}" * 20,
    "digits": "9" * 20_000,
    "words": "so then " * 2500,
    "terms": "+".join(["1"] * 2000),
    "choices": r"\pm" * 200,
    "list": "1," * 255 + "1",
    "set": r"\{" + "1," * 250 + r"1\}",
    "tuples": "(1,2)" * 100,
    "unions": r"\cup".join(f"({k},{k + 1})" for k in range(40)),
    "names": "(" + "a " * 200 + "!) = 3",
    "long name": "f(" + "a" * 300 + "!) = 3",
    "matrix": r"\begin{pmatrix}" + "1&" * 200 + r"1\end{pmatrix}",
    "matrices": r"\begin{pmatrix}" * 30,
    "decimals": "1" * 255 + "." + "2" * 255 + "...",
    "spaces": "1" + " " * 400 + "2",
    "units": "5 " + "meters per " * 45,
    "texts": r"\text{" * 80,
    "dollars": "$" * 512,
    "nulls": "\x00\ud800",
    "huge exponent": "1e999",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("gold", ["5", "x^2+1", "(1, 2)", r"\{1, 2, 3\}", "x < 3", r"\begin{pmatrix}1\\2\end{pmatrix}"])
def test_hostile_answers_are_wrong_in_time(text: str, gold: str) -> None:
    """They cannot be right, and being hard to read is no excuse."""
    start = time.monotonic()
    verdict = grade(text, gold)
    assert time.monotonic() - start < PATIENCE_S
    assert verdict.outcome == "wrong" or verdict.reason.startswith(("timeout: the machine", "the comparison needs"))


@needs_workers
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_right_answers_end_in_time(text: str) -> None:
    """A right answer may be anything as well; nobody is to blame for it."""
    start = time.monotonic()
    assert grade("5", text).outcome in ("wrong", "ungradable")
    assert time.monotonic() - start < PATIENCE_S


@needs_workers
@pytest.mark.parametrize(
    "text",
    [
        *(r"\sin(9^9^9)", r"\sin(10^{9999999})", r"\sum_{k=1}^{1999} k^{k^2}", r"\gcd(10^{100}!, 3)"),
        *(r"\binom{10^9}{10^8}", r"\tan " * 39 + "x"),
    ],
)
def test_expensive_functions_are_wrong_or_cut_off(text: str) -> None:
    """What takes more than a second of CPU time is not an answer to a question whose answer is 5."""
    start = time.monotonic()
    verdict = grade(text, "5")
    assert time.monotonic() - start < PATIENCE_S
    assert verdict.outcome == "wrong" or "machine" in verdict.reason
    assert grade("4", "5").outcome == "wrong"


@pytest.mark.parametrize(
    "text",
    [
        "\\pi + open('canary', 'w').write('1')",
        'exec(\'import os; os.environ["CANARY"] = "1"\') or 7\\pi',
        "__import__('pathlib').Path('canary').touch()",
        "exec(\"open('canary', 'w')\")",
        "(lambda: open('canary', 'w'))()",
        "{{7*7}}",
        r"\input{/etc/passwd}",
    ],
)
def test_nothing_in_an_answer_is_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python in an answer is text like any other."""
    monkeypatch.chdir(tmp_path)
    for gold in (r"\pi", r"7\pi", "7"):
        assert grade(text, gold).outcome != "correct"
    assert not list(tmp_path.iterdir())
    assert "CANARY" not in os.environ


PIECES = [
    *r"1 23 \sqrt{ \frac } { ( ) + - * / ^ ** \pi ! , 1,000 .5 1e300 \sqrt[3]{ \boxed{ x= \left( [ ] % $".split(),
    *r"\text{ \} \{ ; : < \le \cup \pm \infty _ ' | & \\ \begin{pmatrix} \end{pmatrix} \in or and x y n".split(),
    *r"sin \log_ \sum_{k=1}^ \circ m cm Matrix( \mid = \binom{ \overline{ \ldots \setminus \Reals ####".split(),
    *("answer:", "<think>", "</think>", " ", '"', "\n", "\ud800"),
]


@pytest.mark.slow
def test_no_text_makes_the_grader_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random texts from the pieces of its own grammar get a verdict, whichever side they stand on."""
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 25)))
        for gold in ("5", "(1, x)", "x < 3"):
            assert grade(text, gold).outcome in ("correct", "wrong", "ungradable")
        assert grade("7", text).outcome in ("correct", "wrong", "ungradable")


BORDERS = [
    *r", ; ( ) [ ] { } \{ \} = < | or and \text{ or } \cup \pm & \\ \begin{cases} \end{cases} x 1 ' : %".split(),
    r"\text{ or }",
]


def test_no_short_text_stops_the_reader() -> None:
    """Lists without items, brackets around nothing and the like, which long random texts seldom hold."""
    rng = random.Random(3)
    for _ in range(30_000):
        text = "".join(rng.choice(BORDERS) for _ in range(rng.randint(1, 6)))
        read(text)
    assert isinstance(read("{,}"), Unread) and isinstance(read(r",\text{ or }"), Unread)


@needs_workers
def test_an_answer_cannot_escape_by_being_unreadable() -> None:
    """With a readable right answer, texts from the pieces of the grammar are never ungradable."""
    rng = random.Random(2)
    for _ in range(400):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))
        verdict = grade(text, "12345")
        assert verdict.outcome == "wrong" or "machine" in verdict.reason, (text, verdict)
