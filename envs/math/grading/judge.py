"""Are two expressions equal? The quick half of the answer, by exact arithmetic.

Numbers are compared exactly. Expressions with symbols (and e, which is transcendental like one) are evaluated
exactly at a few points with large random coordinates: one difference proves them different, and agreement at all
points proves them equal but for a chance of about (degree / 10^6)^points (J. T. Schwartz, "Fast probabilistic
algorithms for verification of polynomial identities", 1980; R. Zippel, 1979). Where a symbol stands in an exponent,
under a factorial or in a floor, the points are whole numbers.

What this arithmetic cannot hold raises `UndecidedError`: another judge, in a process that can be killed, goes on
there (see `trace_gym.envs.math.grading.numeric`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from trace_gym.envs.math.grading.evaluate import exact_value, names_in, whole_names
from trace_gym.envs.math.grading.exact import Exact, ExactError, UndefinedError, UnsupportedError
from trace_gym.envs.math.grading.expression import Node, rename

DOUBLE_DIGITS = 12
DOUBLE_TOLERANCE = Fraction(1, 10**12)
INTEGER_TOLERANCE = Fraction(1, 10**6)
_VECTOR_DIGITS = 6
_NUM_POINTS = 3
_WHOLE_RANGE = 13  # a prime
_WHOLE_POINTS = _WHOLE_RANGE + 2
_DECIMAL = re.compile(r"(?<![\w.])([0-9]*\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]{1,3})?")
_LONE_DECIMAL = re.compile(r"[-+]?" + _DECIMAL.pattern)
_PYTHON_NAMES = {"I": "i", "j": "i", "E": "e"}


class UndecidedError(Exception):
    """This judge cannot tell; the message says why."""


class UndefinedAnswerError(Exception):
    """An expression has no value: it divides by zero, say."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An expression and the text it was read from, which tells how a decimal was written."""

    text: str
    node: Node


def share_names(left: Node, right: Node) -> tuple[Node, Node]:
    """Read ``I``, ``j`` and ``E`` as Python's and sympy's constants where the other side has no such symbol."""
    names = names_in(left), names_in(right)
    changes: tuple[dict[str, Node], dict[str, Node]] = ({}, {})
    for name, constant in _PYTHON_NAMES.items():
        for side in (0, 1):
            if name in names[side] and name not in names[1 - side]:
                changes[side][name] = Node("constant", name=constant)
    return rename(left, changes[0]) if changes[0] else left, rename(right, changes[1]) if changes[1] else right


def is_double(text: str) -> bool:
    """Whether a decimal in the text is long enough to be a printed double."""
    return any(len(match[1].replace(".", "").lstrip("0")) >= DOUBLE_DIGITS for match in _DECIMAL.finditer(text))


def rounding(text: str, is_fraction: bool) -> Fraction | None:
    """Return half a unit in the last place of a decimal that may stand for what rounds to it, else None.

    Args:
        text: The decimal; of three digits (``33.3``) it stands for fractions only, as ``12.5`` may well be exact.
        is_fraction: Whether a fraction is to be compared with it.
    """
    half, digits = _half_unit(text)
    return half if digits >= (3 if is_fraction else 4) else None


def are_rounded(answers: Sequence[Leaf], rights: Sequence[Leaf]) -> bool:
    """Whether printed doubles round to the decimals of one vector, which has six digits or more altogether."""
    units = [_half_unit(right.text) for right in rights]
    if sum(digits for _, digits in units) < _VECTOR_DIGITS or not all(half for half, _ in units):
        return False
    return all(
        is_double(answer.text)
        and _LONE_DECIMAL.fullmatch(answer.text) is not None
        and abs(Fraction(answer.text) - Fraction(right.text)) <= half
        for answer, right, (half, _) in zip(answers, rights, units, strict=True)
    )


def _half_unit(text: str) -> tuple[Fraction, int]:
    """Return half a unit in the last place of a decimal, and its number of digits; zeros if it is none."""
    match = _LONE_DECIMAL.fullmatch(text)
    if match is None or "." not in match[1]:
        return Fraction(0), 0
    exponent = int(Decimal(text).as_tuple().exponent)
    return Fraction(1, 2) * Fraction(10) ** exponent, len(match[1].replace(".", "").lstrip("0"))


class Judge:
    """Compares expressions exactly."""

    def equal(self, answer: Leaf, right: Leaf) -> bool:
        """Whether an answer has the value of the right one.

        Raises:
            UndecidedError: If exact arithmetic does not reach.
            UndefinedAnswerError: If the answer has no value.
        """
        left, wanted = share_names(answer.node, right.node)
        if left == wanted:
            return True
        names = names_in(left) | names_in(wanted)
        if names - {"i"}:
            if self._equal_at_points(left, wanted, names):
                return True
            if is_double(answer.text) or is_double(right.text) or rounding(right.text, False) is not None:
                raise UndecidedError("a decimal may stand for it")
            return False
        value = self.value(left)
        if value is None:
            raise UndefinedAnswerError("it divides by zero")
        gold = self.value(wanted)
        if gold is None:
            raise UndecidedError("the right answer divides by zero")
        return value == gold or self._nearly(answer.text, value, right.text, gold)

    def ratio(self, left: Node, right: Node) -> Fraction | None:
        """Return the constant c with ``left = c * right``, or None if there is none; 0 if both vanish."""
        left, right = share_names(left, right)
        names = names_in(left) | names_in(right)
        found: set[Fraction] = set()
        defined = 0
        for point in points(names, whole_names(left) | whole_names(right)):
            value, other = self.value(left, point), self.value(right, point)
            if value is None or other is None:
                continue
            defined += 1
            if not value.terms and not other.terms:
                continue
            if not value.terms or not other.terms:
                return None
            quotient = self._quotient(value, other)
            found.add(quotient)
            if len(found) > 1:
                return None
        if not defined:
            raise UndecidedError("no point at which both sides have a value")
        return found.pop() if found else Fraction(0)

    def order(self, left: Node, right: Node) -> int:
        """Return -1, 0 or 1 as a constant is less than another, equal or greater."""
        difference = self.value(Node("add", (left, Node("negate", (right,)))))
        if difference is None:
            raise UndecidedError("a bound has no value")
        if not difference.terms:
            return 0
        return -1 if difference.approximate() < 0 else 1

    def value(self, node: Node, point: Mapping[str, Fraction] | None = None) -> Exact | None:
        """Return the exact value, or None if there is none."""
        try:
            return _constant(node) if not point else exact_value(node, point)
        except UndefinedError:
            return None
        except ExactError as problem:
            raise UndecidedError(str(problem)) from problem

    def _quotient(self, value: Exact, other: Exact) -> Fraction:
        try:
            quotient = (value * other.inverse()).rational
        except ExactError as problem:
            raise UndecidedError(str(problem)) from problem
        if quotient is None:
            raise UndecidedError("an irrational factor")
        return quotient

    def _equal_at_points(self, left: Node, right: Node, names: frozenset[str]) -> bool:
        agreed = 0
        for point in points(names, whole_names(left) | whole_names(right)):
            try:
                value, other = exact_value(left, point), exact_value(right, point)
            except UndefinedError:
                continue
            except UnsupportedError as problem:
                if agreed >= 2 and min(point.values()) < 0:  # a root of a negative number
                    continue
                raise UndecidedError(str(problem)) from problem
            except ExactError as problem:
                raise UndecidedError(str(problem)) from problem
            if value != other:
                return False
            agreed += 1
        if agreed < 2:
            raise UndecidedError("too few points at which both sides have a value")
        return True

    def _nearly(self, answer: str, value: Exact, right: str, gold: Exact) -> bool:
        if value.rational is not None and gold.rational is not None:
            near, wanted = value.rational, gold.rational
        else:
            near, wanted = Fraction(value.approximate()), Fraction(gold.approximate())
        whole = any(side.rational is not None and side.rational.denominator == 1 for side in (value, gold))
        return is_near(answer, near, right, wanted, whole=whole, is_fraction=value.rational is not None)


def is_near(
    answer: str, value: Fraction, right: str, gold: Fraction, *, whole: bool = False, is_fraction: bool = False
) -> bool:
    """Whether two numbers are equal as far as their decimals can say.

    Args:
        answer: Text of the answer.
        value: Its value.
        right: Text of the right answer.
        gold: Its value.
        whole: Whether one of the two is an integer, which leaves less room.
        is_fraction: Whether the answer's value is rational.
    """
    difference = abs(value - gold)
    long = is_double(answer)
    if long or is_double(right):
        allowed = DOUBLE_TOLERANCE * max(abs(gold), abs(value))
        if difference <= (min(allowed, INTEGER_TOLERANCE) if whole else allowed):
            return True
    half = rounding(right, is_fraction and not long)
    return half is not None and difference <= half and (long or not _is_short(value))


def _is_short(value: Fraction) -> bool:
    """Whether a number is a decimal of few digits, and so not the longer truth behind a rounded one."""
    return Fraction(round(value * 10**DOUBLE_DIGITS), 10**DOUBLE_DIGITS) == value


def points(names: frozenset[str], whole: frozenset[str]) -> list[dict[str, Fraction]]:
    """Return points to evaluate expressions at; the same ones in every process.

    Args:
        names: The symbols.
        whole: Those that are whole numbers: from 2 to 14, each symbol in its own order, then larger.
    """
    if whole:
        return [
            {name: Fraction(_whole(name, k) if name in whole else Fraction(_draw(name, k, 2, 99), 7)) for name in names}
            for k in range(_WHOLE_POINTS)
        ]
    found = []
    for k in range(_NUM_POINTS):
        found.append({name: Fraction(_draw(name, k, 10**5, 10**6)) for name in names})
    found.append({name: Fraction(_draw(name, 7, 1, 996), 997) for name in names})
    found.append({name: -Fraction(_draw(name, 8, 10**5, 10**6)) for name in names})
    return found


def _whole(name: str, k: int) -> int:
    if k >= _WHOLE_RANGE:
        return _draw(name, k, 15, 40)
    return 2 + (_draw(name, 0, 1, 12) * k + _draw(name, 1, 0, 12)) % _WHOLE_RANGE


@lru_cache(maxsize=4096)
def _draw(name: str, k: int, low: int, high: int) -> int:
    return random.Random(f"{name}/{k}").randint(low, high)


@lru_cache(maxsize=4096)
def _constant(node: Node) -> Exact:
    return exact_value(node)
