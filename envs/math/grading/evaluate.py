"""The exact value of an expression, with its symbols bound to rational numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction

from trace_gym.envs.math.grading import exact
from trace_gym.envs.math.grading.exact import Exact, TooLargeError, UndefinedError, UnsupportedError
from trace_gym.envs.math.grading.expression import BOUND, Node, number

_MAX_WORK = 4000  # term products of one evaluation, see Exact
_MAX_FALLING = 64  # factors of a binomial coefficient of what is no whole number
_ON_WHOLE = frozenset({"factorial", "factorial2", "binomial", "gcd", "lcm"})
_REAL = frozenset({"e", "i", "x", "y", "z", "t", "u", "v", "w", "theta", "phi", "omega"})
_NEAR = Decimal("1e-30")


def exact_value(node: Node, bindings: Mapping[str, Fraction] | None = None) -> Exact:
    """Evaluate an expression.

    Args:
        node: The expression.
        bindings: Values of its symbols; the constant e counts as one.

    Raises:
        UnsupportedError: If a part is not held exactly, or a symbol is not bound.
        UndefinedError: If there is no value.
        TooLargeError: If a value is beyond the caps.
    """
    return _Evaluation(bindings or {}).value(node)


def names_in(node: Node) -> frozenset[str]:
    """Return the free symbols of an expression; the constants e and i are among them as ``e`` and ``i``."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        part = waiting.pop()
        waiting.extend(part.args)
        if part.head == "symbol" or (part.head == "constant" and part.name != "pi"):
            found.add(part.name)
    return frozenset(name for name in found if not name.startswith(BOUND))


def calls_in(node: Node) -> frozenset[str]:
    """Return the functions that an expression calls."""
    below = frozenset[str]().union(*map(calls_in, node.args)) if node.args else frozenset[str]()
    return below | {node.name} if node.head == "call" else below


def whole_names(node: Node) -> frozenset[str]:
    """Return the symbols that stand for whole numbers by where they stand: in ``n!``, ``(-1)^n`` or ``floor(n/2)``.

    In an exponent and in a floor, x, y and the like are real numbers all the same.
    """
    found = frozenset[str]().union(*map(whole_names, node.args))
    if node.head == "call" and (node.name in _ON_WHOLE or node.name.endswith("_")):
        return found | names_in(node) - {"e", "i"}
    if node.head in ("sum", "prod"):
        return found | names_in(node.args[0]) | names_in(node.args[1])
    if node.head == "call" and node.name in ("floor", "ceiling"):
        return found | names_in(node) - _REAL
    return found | names_in(node.args[1]) - _REAL if node.head == "power" else found


def numerator(node: Node) -> Node:
    """Return the numerator of an expression brought over one denominator, so ``y - 1/x`` becomes ``xy - 1``."""
    return _over_one(node)[0]


def _over_one(node: Node) -> tuple[Node, Node]:
    if node.head == "negate":
        top, bottom = _over_one(node.args[0])
        return Node("negate", (top,)), bottom
    if node.head == "invert":
        top, bottom = _over_one(node.args[0])
        return bottom, top
    if node.head == "multiply":
        parts = [_over_one(part) for part in node.args]
        return Node("multiply", tuple(top for top, _ in parts)), Node("multiply", tuple(bottom for _, bottom in parts))
    if node.head == "add":
        parts = [_over_one(part) for part in node.args]
        bottoms = [bottom for _, bottom in parts]
        tops = [
            Node("multiply", (top, *bottoms[:place], *bottoms[place + 1 :])) for place, (top, _) in enumerate(parts)
        ]
        return Node("add", tuple(tops)), Node("multiply", tuple(bottoms))
    return node, number(1)


class _Evaluation:
    def __init__(self, bindings: Mapping[str, Fraction]) -> None:
        self._bindings = bindings
        self._work = 0

    def value(self, node: Node) -> Exact:
        parts = node.args
        if node.head == "number":
            return Exact.of(node.value)
        if node.head == "symbol" or node.name == "e":
            return self._bound(node.name)
        if node.head == "constant":
            if node.name != "pi":
                raise UnsupportedError("a complex number")
            return Exact.pi()
        if node.head == "add":
            total = Exact.of(0)
            for part in parts:
                total = total + self.value(part)
            return total
        if node.head == "negate":
            return -self.value(parts[0])
        if node.head == "multiply":
            product = Exact.of(1)
            for part in parts:
                product = self._times(product, self.value(part))
            return product
        if node.head == "invert":
            inverse = self.value(parts[0])
            self._spend(16 * len(inverse.terms))
            return inverse.inverse()
        if node.head == "degrees":
            return self._times(self.value(parts[0]) * Exact.of(Fraction(1, 180)), Exact.pi())
        if node.head in ("power", "root"):
            return self._power(node)
        if node.head in ("sum", "prod"):
            raise UnsupportedError("a sum of many")
        return self._call(node.name, [self.value(part) for part in parts])

    def _bound(self, name: str) -> Exact:
        if name not in self._bindings:
            raise UnsupportedError(f"the symbol {name}")
        return Exact.of(self._bindings[name])

    def _times(self, left: Exact, right: Exact) -> Exact:
        self._spend(len(left.terms) * len(right.terms))
        return left * right

    def _power(self, node: Node) -> Exact:
        base, exponent = self.value(node.args[0]), self.value(node.args[1]).rational
        if exponent is None:
            raise UnsupportedError("an irrational exponent")
        if node.head == "root":
            if exponent.denominator != 1 or exponent < 1:
                raise UnsupportedError("an unusual root")
            exponent = 1 / exponent
        self._spend(8 * len(base.terms) ** 2 * (1 if len(base.terms) == 1 else 8))
        return base.power(exponent)

    def _call(self, name: str, values: list[Exact]) -> Exact:
        if name == "abs":
            return -values[0] if _is_negative(values[0]) else values[0]
        if name in ("floor", "ceiling"):
            return Exact.of(_floor(values[0]) if name == "floor" else -_floor(-values[0]))
        numbers = [value.rational for value in values]
        rationals = [value for value in numbers if value is not None]
        function = _FUNCTIONS.get(name)
        if function is None or len(rationals) < len(numbers):
            raise UnsupportedError(f"{name.removeprefix('apply ')} of this")
        return Exact.of(function(*rationals))

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise TooLargeError("too many operations")


def _is_negative(value: Exact) -> bool:
    near = value.approximate()
    if value.terms and abs(near) < _NEAR:
        raise UnsupportedError("the sign of a tiny number")
    return near < 0


def _floor(value: Exact) -> int:
    if value.rational is not None:
        return math.floor(value.rational)
    near = value.approximate()
    below = near.to_integral_value(ROUND_FLOOR)
    if min(near - below, below + 1 - near) < _NEAR or abs(near) > Decimal("1e20"):
        raise UnsupportedError("the whole part of a number too near to a whole one")
    return int(below)


def _whole(value: Fraction) -> int:
    if value.denominator != 1:
        raise UnsupportedError("a function of whole numbers")
    return value.numerator


def _factorial(value: Fraction) -> Fraction:
    n = _whole(value)
    if n < 0:
        raise UndefinedError("the factorial of a negative number")
    if n > exact.MAX_BITS or math.lgamma(n + 1) > exact.MAX_BITS * math.log(2):
        raise TooLargeError("the factorial is too large")
    return Fraction(math.factorial(n))


def _double_factorial(value: Fraction) -> Fraction:
    n = _whole(value)
    if not 0 <= n <= 300:
        raise UnsupportedError("this double factorial")
    return Fraction(math.prod(range(n, 0, -2)))


def _binomial(upper: Fraction, lower: Fraction) -> Fraction:
    k = _whole(lower)
    if k < 0:
        return Fraction(0)
    if upper.denominator == 1 and upper >= 0:
        n = upper.numerator
        k = min(k, n - k)
        if k < 0:
            return Fraction(0)
        if (n.bit_length() > 64 and k > _MAX_FALLING) or _log2_binomial(n, k) > exact.MAX_BITS:
            raise TooLargeError("the binomial coefficient is too large")
        return Fraction(math.comb(n, k))
    if k > _MAX_FALLING:
        raise TooLargeError("the binomial coefficient is too large")
    return math.prod(((upper - step) / (step + 1) for step in range(k)), start=Fraction(1))


def _log2_binomial(n: int, k: int) -> float:
    if k <= _MAX_FALLING:
        return k * n.bit_length()
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


def _log(value: Fraction, base: Fraction | None = None) -> Fraction:
    """Return the logarithm if it is rational: both are powers of one number, ``b^m`` and ``b^n``."""
    if value == 1:
        return Fraction(0)
    if base is None:
        raise UnsupportedError("a logarithm")
    if value <= 0 or base <= 0 or base == 1:
        raise UndefinedError("a logarithm that is no real number")
    powers, of_base = _prime_powers(value), _prime_powers(base)
    prime = next(iter(of_base))
    ratio = Fraction(powers.get(prime, 0), of_base[prime])
    if not powers or any(powers.get(p, 0) != ratio * of_base.get(p, 0) for p in powers.keys() | of_base.keys()):
        raise UnsupportedError("a logarithm")
    return ratio


def _prime_powers(value: Fraction) -> dict[int, int]:
    powers = exact.factors(value.numerator)
    for prime, count in exact.factors(value.denominator).items():
        powers[prime] = powers.get(prime, 0) - count
    return powers


_FUNCTIONS: Mapping[str, Callable[..., Fraction]] = {
    "factorial": _factorial,
    "factorial2": _double_factorial,
    "binomial": _binomial,
    "log": _log,
    "ln": _log,
    "lg": lambda value: _log(value, Fraction(10)),
    "gcd": lambda *values: Fraction(math.gcd(*map(_whole, values))),
    "lcm": lambda *values: Fraction(math.lcm(*map(_whole, values))),
    "max": max,
    "min": min,
}
