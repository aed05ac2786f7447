r"""The grader: exact, three-valued, unable to raise or to hang."""

from __future__ import annotations

import random
import time
from decimal import Decimal
from fractions import Fraction

import pytest

from trace_gym.envs.math.grading.exact import Exact, TooLargeError, UnsupportedError, root
from trace_gym.envs.math.grading.expression import SyntaxProblem, parse_exact
from trace_gym.envs.math.grading.grader import extract_answer, grade, normalize


def outcome(prediction: str, gold: str) -> str:
    return grade(prediction, gold).outcome


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}", "7"),
        (r"first \boxed{2}, no, \boxed{\frac{1}{3}} it is", r"\frac{1}{3}"),
        (r"I put it in \boxed as asked: \boxed{12}", "12"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{8}}", "8"),
        (r"an open brace { before \boxed{4}", "4"),
        (r"\boxed{1, and then \boxed{2}", "2"),
        (r"<think> \boxed{1} </think> \boxed{2}", "2"),
        (r"\boxed{}", ""),
        (r"\boxed{6} and then \boxed{7", None),
        (r"<think> \boxed{1} </think> nothing", None),
        (r"<think> still at it \boxed{1}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, answer: str | None) -> None:
    """The last box counts if it is closed; an earlier one never takes its place."""
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("42", "42"),
        ("042", "42"),
        ("+42", "42."),
        (" $42$ ", "42"),
        (r"\(42\)", "42"),
        ("$$42$$", "$42$"),
        ("$18", "18"),
        ("1,234,567", "1234567"),
        (r"1{,}234", "1234"),
        (r"1\,234", "1234"),
        (r"1,\!234", "1234"),
        ("0.50", "1/2"),
        (".5", r"\frac12"),
        (r"\dfrac{1}{2}", r"\tfrac{2}{4}"),
        (r"-\frac{3}{4}", r"\frac{-3}{4}"),
        (r"1\frac{1}{2}", "3/2"),
        ("2^10", "1024"),
        ("2**-3", "1/8"),
        (r"\left(2+3\right)\cdot 4", "20"),
        (r"7 \div 2", "3.5"),
        (r"\text{15}", "15"),
        (r"\frac{\mathrm{3,000}}{2}", "1500"),
        ("sqrt(8)", r"2\sqrt{2}"),
        (r"\sqrt2", r"\frac{2}{\sqrt{2}}"),
        (r"\frac{1}{\sqrt{3}-1}", r"\frac{1+\sqrt{3}}{2}"),
        (r"\sqrt[3]{54}", r"3\sqrt[3]2"),
        ("8^{1/3}", "2"),
        (r"\sqrt{0.25}", "0.5"),
        ("3*pi/4", r"\frac{3\pi}{4}"),
        (r"\pi \div 4 + 1 \div 2", r"0.5 + \frac{\pi}{4}"),
        ("2.645751311064591", r"\sqrt{7}"),
        ("0.1428571428571428", r"\frac{1}{7}"),
        ("0.30000000000000004", "0.3"),
        ("1.5e3", "1500"),
        ("x = 9", "9"),
        ("9", "$n = 9$"),
        ("25%", r"25\%"),
        ("p-q", "p - q"),
        ("(3, 4)", r"\left(3,4\right)"),
        (r"\text{blue}", "blue"),
        ("12 units", "12"),
        (r"\boxed{\text{B: both}}", "B"),
        ("(C)", "C"),
        (r"<answer>\(\boxed{70}\).</answer>", "70"),
        ("<answer>70</answer>", "70"),
    ],
)
def test_equal_answers_are_correct_both_ways(prediction: str, gold: str) -> None:
    """Notation does not matter, value does."""
    assert outcome(prediction, gold) == "correct"


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("4", "42"),
        ("", "42"),
        ("", "a poodle"),
        (r"\boxed{42", "42"),
        (r"\boxed{42} or \boxed{43", "42"),
        ("Let me think about the", "42"),
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
        ("0.333", "1/3"),
        ("0.3333333333", "1/3"),
        ("1234567890123.0", "1234567890124"),
        (r"3\sqrt{2}", r"\sqrt[3]{2}"),
        (r"4\sqrt(2)", "4"),
        ("50%", "50"),
        ("50%", "0.5"),
        ("1, 234", "1234"),
        ("0,123", "123"),
        ("3,5,7", "357"),
        ("10 million", "10"),
        ("10 cm", "10"),
        ("x + 3", "5"),
        ("1/0", "0"),
        ("0^-1", "0"),
        ("9^9^9^9", "5"),
        ("9" * 600, "10"),
        ("(" * 60 + "10" + ")" * 60, "10"),
        ("A", "B"),
        ("The answer: B or C", "B"),
        (r"\pi if __import__('os') else 0", r"\pi"),
        ("__import__('os').getcwd()", "7"),
        ("22/7", r"\pi"),
        ("3.141592653589", r"\pi + 1"),
    ],
)
def test_other_answers_are_wrong(prediction: str, gold: str) -> None:
    """A readable right answer settles the matter: no answer, no expression and too long are wrong too."""
    assert outcome(prediction, gold) == "wrong"


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("7", "all primes of the form 4k + 1"),
        ("11 + 9a", "9a + 11"),
        ("2, 1", "1, 2"),
        (r"\sin 1", "2"),
        (r"\log 100", "2"),
        ("5!", "120"),
        ("x = 9", "y = 9"),
        ("42", ""),
        ("42", r"\boxed{42"),
        ("1", r"(\sqrt{-1})^4"),
        ("1", "9^9^9^9"),
    ],
)
def test_what_it_cannot_tell_is_ungradable_and_not_wrong(prediction: str, gold: str) -> None:
    """An unreadable right answer, or one that needs symbolic work, is kept apart."""
    assert outcome(prediction, gold) == "ungradable"


def test_every_verdict_has_a_reason() -> None:
    """The reason says which rule decided."""
    assert grade("6/4", "1.5").reason == "the same number"
    assert "exact arithmetic" in grade(r"\ln 2", "1").reason
    assert "512" in grade("1" * 513, "1").reason


def test_normalizing_twice_changes_nothing() -> None:
    """A normal form is normal."""
    for text in (r"$\left( 3 , \dfrac{\pi}{2} \right)$.", r"\text{ 13 }", "90°", r"a \, b"):
        assert normalize(normalize(text)) == normalize(text)


def test_exact_numbers_obey_the_laws_of_arithmetic() -> None:
    """Sums, products and quotients of random surds agree with themselves computed another way."""
    rng = random.Random(0)

    def surd() -> Exact:
        total = Exact.of(rng.randint(-5, 5))
        for _ in range(2):
            scale = Exact.of(Fraction(rng.randint(1, 9), rng.randint(1, 9)))
            total = total + scale * root(Fraction(rng.randint(1, 30)), 2)
        return total

    for _ in range(100):
        a, b, c = surd(), surd(), surd()
        assert (a + b) * c == a * c + b * c
        assert a + -a == Exact.of(0)
        if b.terms:
            assert a * b * b.inverse() == a
            quotient = (a * b.inverse()).approximate() * b.approximate()
            assert abs(quotient - a.approximate()) < Decimal("1e-20")


def test_roots_are_taken_exactly_or_refused() -> None:
    """Perfect powers come out whole, square factors come out, hopeless numbers are refused."""
    assert root(Fraction(8, 27), 3).rational == Fraction(2, 3)
    assert root(Fraction(-8), 3).rational == -2
    assert root(Fraction(10**40), 2).rational == 10**20
    assert root(Fraction(12), 2) == Exact.of(2) * root(Fraction(3), 2)
    with pytest.raises(UnsupportedError):
        root(Fraction(-4), 2)
    with pytest.raises(TooLargeError):
        root(Fraction((10**9 + 7) * (10**9 + 9)), 2)


@pytest.mark.parametrize("text", ["", "2 3", "(1", "1)", "1 +", "* 2", "2 @ 3", "x", "[2]", r"\frac{1}", "{}"])
def test_texts_that_are_no_expressions_are_refused(text: str) -> None:
    """The grammar is strict: nothing is guessed."""
    with pytest.raises(SyntaxProblem):
        parse_exact(text)


HOSTILE = [
    "(" * 10**5,
    "-" * 512,
    "2^" * 255 + "2",
    "*".join(["9^1290"] * 70),
    "+".join(["1/9^1290"] * 55),
    "+".join(f"1/{k}^400" for k in range(3, 50)),
    "*".join([r"(1+\sqrt2+\sqrt3)"] * 25),
    "/".join([r"(\sqrt2+\sqrt3+\sqrt5+\sqrt7)"] * 16),
    r"(\sqrt2+\sqrt3+\sqrt5+\sqrt7)^32",
    "+".join(rf"\sqrt{{{99999989 + k}}}" for k in range(30)),
    r"\sqrt[3]{9^160}" * 30,
    "1e999",
    r"\boxed{" * 10**4,
    r"\boxed{" * 10**4 + "}" * 10**4,
    "<think>" * 10**4,
    r"\text{" * 80,
    "$" * 512,
    "\x00\ud800",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_answers_cost_milliseconds(text: str) -> None:
    """The caps bound the work: processor time, as the wall clock depends on the neighbours."""
    start = time.process_time()
    grade(text, "5")
    grade("5", text)
    assert time.process_time() - start < 0.1


def test_no_text_makes_the_grader_raise() -> None:
    """Random texts from the pieces of its own grammar get a verdict."""
    rng = random.Random(1)
    pieces = ["1", "23", r"\sqrt{", r"\frac", "}", "{", "(", ")", "+", "-", "*", "/", "^", "**", r"\pi", "!"]
    pieces += [
        ",",
        "1,000",
        ".5",
        "1e300",
        r"\sqrt[3]{",
        r"\boxed{",
        "x=",
        r"\left(",
        "[",
        "]",
        "%",
        "$",
        " ",
    ]
    for _ in range(3000):
        text = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 40)))
        assert outcome(text, "5") in ("correct", "wrong", "ungradable")
        assert outcome("7", text) in ("correct", "wrong", "ungradable")
        assert text.strip() == "" or "box" in text or outcome(text, text) != "wrong" or not normalize(text)
