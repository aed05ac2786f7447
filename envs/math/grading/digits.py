"""The value of an expression in many digits, with mpmath. For a process that can be killed: nothing bounds the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from trace_gym.envs.math.grading.evaluate import exact_value
from trace_gym.envs.math.grading.exact import ExactError
from trace_gym.envs.math.grading.expression import Node
from trace_gym.envs.math.grading.judge import UndefinedAnswerError, points

SPARE = 20  # digits lost to rounding, at most
_MAX_TERMS = 2000
_NEAR = 1e-30
_MAX_EXPONENT = 10_000_000  # digits before or after the point of any value


class TooLargeAnswerError(UndefinedAnswerError):
    """A value has more digits than the cap, whatever they are."""


class Evaluation:
    """Evaluates one expression with mpmath's current precision.

    Attributes:
        largest: The largest term of any sum so far.
        swallowed: Whether a term was lost beside a much larger one.
        is_real: Whether no part had an imaginary value so far.
    """

    def __init__(self, point: Mapping[str, Fraction], log_base: str = "e") -> None:
        """Bind the symbols."""
        self._point = point
        self._base = log_base
        self.largest = mpmath.mpf(0)
        self.swallowed = False
        self.is_real = True

    def value(self, node: Node) -> Any:
        """Return the value as an mpmath number.

        Raises:
            UndefinedAnswerError: If there is none, or it is beyond the caps.
        """
        value = self._value(node)
        if not mpmath.isfinite(value):
            raise UndefinedAnswerError("it divides by zero")
        self.is_real = self.is_real and not mpmath.im(value)
        return value

    def _value(self, node: Node) -> Any:
        parts = node.args
        if node.head == "number":
            return to_mpf(node.value)
        if node.head == "symbol":
            return to_mpf(self._point[node.name])
        if node.head == "constant":
            return {"pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1)}[node.name] * 1
        if node.head == "add":
            return self._sum([self.value(part) for part in parts])
        if node.head == "negate":
            return -self.value(parts[0])
        if node.head == "multiply":
            return math.prod((self.value(part) for part in parts), start=mpmath.mpf(1))
        if node.head == "invert":
            value = self.value(parts[0])
            if not value:
                raise UndefinedAnswerError("it divides by zero")
            return 1 / value
        if node.head == "degrees":
            return self.value(parts[0]) * mpmath.pi / 180
        if node.head in ("sum", "prod"):
            return self._repeated(node)
        if node.head == "root":
            return _root(self.value(parts[0]), _exact(parts[1]), self.value(parts[1]))
        if node.head == "power":
            return _power(self.value(parts[0]), _exact(parts[1]), self.value(parts[1]))
        return self._call(node.name, [self.value(part) for part in parts])

    def _repeated(self, node: Node) -> Any:
        low, high = (self.value(part) for part in node.args[:2])
        if any(mpmath.im(bound) or abs(bound - mpmath.nint(bound)) > _NEAR for bound in (low, high)):
            raise UndefinedAnswerError("the bounds of a sum are no whole numbers")
        if abs(low) > 10**9 or high - low > _MAX_TERMS:
            raise TooLargeAnswerError("a sum has too many terms")
        outside, terms = self._point, []
        for step in range(int(mpmath.nint(low)), int(mpmath.nint(high)) + 1):
            self._point = {**outside, node.name: Fraction(step)}
            terms.append(self.value(node.args[2]))
        self._point = outside
        if node.head == "sum":
            return self._sum(terms) if terms else mpmath.mpf(0)
        return math.prod(terms, start=mpmath.mpf(1))

    def _sum(self, terms: list[Any]) -> Any:
        total = mpmath.mpf(0)
        for term in terms:
            total += term
        high = max(map(abs, terms))
        self.largest = max(self.largest, high)
        low = high * mpmath.mpf(10) ** (SPARE - mpmath.mp.dps)
        self.swallowed = self.swallowed or any(term and abs(term) < low for term in terms)
        return total

    def _call(self, name: str, values: list[Any]) -> Any:
        if name.startswith("apply "):
            return _unknown(name, values)
        if name == "log":
            base = values[1] if len(values) == 2 else mpmath.mpf(10) if self._base == "10" else mpmath.e
            return _log(values[0]) / _log(base)
        try:
            return _FUNCTIONS[name](*values)
        except (ValueError, ZeroDivisionError, OverflowError, TypeError) as problem:
            raise UndefinedAnswerError(f"{name} has no value there") from problem


def to_mpf(value: Fraction) -> Any:
    """Return a fraction as an mpmath number."""
    return mpmath.mpf(value.numerator) / value.denominator


def _exact(node: Node) -> Fraction | None:
    """Return a constant exponent as a fraction, which says whether a root is odd."""
    try:
        return exact_value(node).rational
    except ExactError:
        return None


def _root(value: Any, index: Fraction | None, near: Any) -> Any:
    if not near:
        raise UndefinedAnswerError("a root with index 0")
    return _power(value, None if index is None else 1 / index, 1 / near)


def _power(base: Any, exponent: Fraction | None, near: Any) -> Any:
    if not base:
        if mpmath.re(near) < 0:
            raise UndefinedAnswerError("it divides by zero")
        return mpmath.mpf(0 if near else 1)
    if abs(near) * abs(mpmath.log10(abs(base))) > _MAX_EXPONENT or abs(near) > 10**15:
        raise TooLargeAnswerError("a power has too many digits")
    if exponent is not None and exponent.denominator % 2 and not mpmath.im(base) and mpmath.re(base) < 0:
        size = mpmath.power(-base, near)
        return -size if exponent.numerator % 2 else size
    return mpmath.power(base, near)


def _log(value: Any) -> Any:
    if not value:
        raise UndefinedAnswerError("the logarithm of 0")
    return mpmath.log(value)


def _unknown(name: str, values: list[Any]) -> Any:
    """Return the value of an unknown function: always the same for the same arguments."""
    text = " ".join(mpmath.nstr(value, 30) for value in values)
    return to_mpf(next(iter(points(frozenset({f"{name}({text})"}), frozenset())[0].values()))) / 10**5


def _factorial(value: Any) -> Any:
    if abs(value) > 10**6:
        raise TooLargeAnswerError("a factorial has too many digits")
    return mpmath.factorial(value)


def _binomial(upper: Any, lower: Any) -> Any:
    if abs(upper) > 10**6 or abs(lower) > 10**6:
        raise TooLargeAnswerError("a binomial coefficient has too many digits")
    return mpmath.binomial(upper, lower)


def _double_factorial(value: Any) -> Any:
    if abs(value) > 10**6:
        raise TooLargeAnswerError("a factorial has too many digits")
    return mpmath.fac2(value)


def _floor(value: Any) -> Any:
    if mpmath.im(value):
        raise UndefinedAnswerError("the whole part of a complex number")
    nearest = mpmath.nint(value)
    return nearest if abs(value - nearest) < mpmath.mpf(10) ** (SPARE - mpmath.mp.dps) else mpmath.floor(value)


def _whole(value: Any) -> int:
    if mpmath.im(value) or value != mpmath.nint(value):
        raise UndefinedAnswerError("a function of whole numbers")
    return int(value)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(mpmath, name) for name in "sin cos tan cot sec csc asin acos atan acot asec acsc".split()},
    **{name: getattr(mpmath, name) for name in "sinh cosh tanh coth asinh acosh atanh".split()},
    **{"ln": _log, "lg": lambda value: _log(value) / _log(mpmath.mpf(10)), "abs": abs},
    **{"floor": _floor, "ceiling": lambda value: -_floor(-value)},
    **{"factorial": _factorial, "factorial2": _double_factorial, "binomial": _binomial},
    "gcd": lambda *values: mpmath.mpf(math.gcd(*map(_whole, values))),
    "lcm": lambda *values: mpmath.mpf(math.lcm(*map(_whole, values))),
    "max": max,
    "min": min,
}
