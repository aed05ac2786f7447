r"""The grader's arithmetic: exact numbers, the expression parser, and the two judges of equality."""

from __future__ import annotations

import random
from decimal import Decimal
from fractions import Fraction

import pytest

from trace_gym.envs.math.grading.evaluate import exact_value, names_in
from trace_gym.envs.math.grading.exact import Exact, TooLargeError, UndefinedError, UnsupportedError, root
from trace_gym.envs.math.grading.expression import parse
from trace_gym.envs.math.grading.judge import Judge, Leaf, UndecidedError
from trace_gym.envs.math.grading.tokens import SyntaxProblem


def leaf(text: str) -> Leaf:
    return Leaf(text, parse(text))


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
    assert root(Fraction(12), 4) == (Exact.of(2) * root(Fraction(3), 2)).power(Fraction(1, 2))
    with pytest.raises(UnsupportedError):
        root(Fraction(-4), 2)
    with pytest.raises(TooLargeError):
        root(Fraction((10**9 + 7) * (10**9 + 9)), 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1+2*3", 7),
        ("-2^2", -4),
        ("2^-1", Fraction(1, 2)),
        ("2^3^2", 512),
        ("8/2/2", 2),
        ("1/2(3)", Fraction(3, 2)),
        (r"2\frac12", Fraction(5, 2)),
        (r"\frac9{19}", Fraction(9, 19)),
        ("(2)(3)", 6),
        ("3!", 6),
        ("|2-5|", 3),
        (r"\lfloor -3/2 \rfloor", -2),
        (r"\lceil \pi \rceil", 4),
        (r"\binom{5}{2}", 10),
        (r"\log_2 8", 3),
        (r"\log_{27} 9", Fraction(2, 3)),
        (r"\gcd(12, 18)", 6),
        (r"4^{\frac12}", 2),
        ("1.5e2", 150),
        (r"0.1\overline{6}", Fraction(1, 6)),
    ],
)
def test_expressions_have_the_value_that_precedence_gives_them(text: str, value: int | Fraction) -> None:
    """Sums are weaker than products, products than signs, signs than powers; powers group to the right."""
    assert exact_value(parse(text)).rational == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2 3",
        "(1",
        "1)",
        "1 +",
        "* 2",
        "2 @ 3",
        "[2",
        r"\frac{1}",
        "{}",
        "a word",
        r"\unknown",
        "1!!!!!",
        "sin",
        r"\sum_{k} k",
    ],
)
def test_texts_that_are_no_expressions_are_refused(text: str) -> None:
    """The grammar is strict: a text is read to its end, and nothing is guessed."""
    with pytest.raises(SyntaxProblem):
        parse(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [("2ab", "a b"), ("sinx", "x"), (r"\alpha^2", "alpha"), ("e^x", "e x"), ("x_1 + x_2", "x_1 x_2")],
)
def test_letters_are_symbols_and_known_words_are_names(text: str, names: str) -> None:
    """A short run of letters is a product; e and i are constants with a name."""
    assert names_in(parse(text)) == set(names.split())


def test_what_exact_arithmetic_cannot_hold_says_so() -> None:
    """An undefined value, a kind it does not know and a number beyond the caps are three different things."""
    for text, problem in (("1/0", UndefinedError), (r"\sin 1", UnsupportedError), ("9^9^9^9", TooLargeError)):
        with pytest.raises(problem):
            exact_value(parse(text))


@pytest.mark.parametrize("degree", range(1, 6))
def test_random_polynomials_equal_their_expanded_form_and_no_other(degree: int) -> None:
    """Evaluation at random points tells polynomials apart that differ in one coefficient."""
    rng = random.Random(degree)
    for _ in range(10):
        roots = [rng.randint(-9, 9) for _ in range(degree)]
        coefficients = [1]
        for value in roots:
            shifted = [*coefficients, 0]
            coefficients = [one - value * other for one, other in zip(shifted, [0, *coefficients], strict=True)]
        factored = "".join(f"(x-({value}))" for value in roots)
        terms = [f"({c})x^{degree - k}" for k, c in enumerate(coefficients)]
        assert Judge().equal(leaf(factored), leaf("+".join(terms)))
        other = [*terms[:-1], f"({coefficients[-1] + 1})"]
        assert not Judge().equal(leaf(factored), leaf("+".join(other)))


def test_the_exact_judge_does_not_guess() -> None:
    """What it cannot hold exactly, it leaves to another judge."""
    with pytest.raises(UndecidedError):
        Judge().equal(leaf(r"\sin 1"), leaf("1"))


@pytest.fixture(scope="module")
def numeric_judge():
    pytest.importorskip("mpmath")
    from trace_gym.envs.math.grading.numeric import NumericJudge

    return NumericJudge()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"\sin^2 x + \cos^2 x", "1", True),
        (r"\sin 3x", r"3\sin x - 4\sin^3 x", True),
        (r"e^{x+y}", "e^x e^y", True),
        (r"\ln(xy)", r"\ln x + \ln y", True),
        (r"\sqrt{x^2}", "x", False),
        (r"\sqrt[3]{x^3}", "x", True),
        (r"\arctan x + \arctan \frac1x", r"\frac{\pi}{2}", False),
        (r"\cos n\pi", "(-1)^n", True),
        (r"\frac{(2n)!}{n!n!}", r"\binom{2n}{n}", True),
        (r"\sum_{k=1}^{n} k^2", r"\frac{n(n+1)(2n+1)}{6}", True),
        (r"\prod_{k=1}^{n} k", "n!", True),
        (r"e^{\pi\sqrt{163}}", "262537412640768744", False),
        (r"\frac{\ln 3}{\ln 2}", r"\log_2 3", True),
        ("f(x+1)", "f(1+x)", True),
        ("f(x)", "f(2x)", False),
    ],
)
def test_identities_hold_in_many_digits_or_not(numeric_judge, one: str, other: str, same: bool) -> None:
    """An identity holds at every point where both sides are real, also at negative ones."""
    assert numeric_judge.equal(leaf(one), leaf(other)) is same
    assert numeric_judge.equal(leaf(other), leaf(one)) is same


def test_a_term_below_all_digits_is_noticed(numeric_judge) -> None:
    """Numbers that agree in 420 digits are not called equal if a sum swallowed a term."""
    with pytest.raises(UndecidedError, match="rounded"):
        numeric_judge.equal(leaf("e + e^{-5000}"), leaf("e + e^{-6000}"))
