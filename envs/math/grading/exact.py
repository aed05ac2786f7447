"""Exact real numbers: sums of rational multiples of roots of primes and powers of pi.

A number is a map from a monomial, ``pi**k * p1**e1 * p2**e2 * ...`` with distinct primes and exponents
``0 < e < 1``, to its rational coefficient. Products of such roots are linearly independent over the rationals
(A. S. Besicovitch, "On the linear independence of fractional powers of integers", 1940) and pi is
transcendental, so two numbers are equal exactly if their maps are: no rounding, no tolerance.

Left out: logarithms, trigonometric values, complex numbers, roots of a sum, and quotients by a sum that contains pi
or a root other than a square root. They raise `UnsupportedError`; numbers beyond the caps raise `TooLargeError`. The
caps bound the time of every operation; a process that can be killed may raise `MAX_BITS`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

MAX_BITS = 4096  # of a numerator or denominator
MAX_TERMS = 16
MAX_ROOT = 64  # largest index of a root
_ROOT_BITS = 128  # of a number under a root
_DIGITS = Context(prec=60)
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
_TRIAL_LIMIT = 5000
_SMALL_PRIMES = tuple(n for n in range(2, _TRIAL_LIMIT) if all(n % d for d in range(2, math.isqrt(n) + 1)))

Monomial = tuple[int, tuple[tuple[int, Fraction], ...]]
"""Power of pi, then (prime, exponent) pairs in increasing order of the prime."""

_ONE: Monomial = (0, ())


class ExactError(ArithmeticError):
    """A value cannot be held exactly; the message says why."""


class UnsupportedError(ExactError):
    """The value is of a kind that this module does not hold."""


class TooLargeError(ExactError):
    """The value is beyond the caps."""


class UndefinedError(ExactError):
    """There is no such value: a division by zero."""


@dataclass(frozen=True)
class Exact:
    """An exact real number; compare with ``==``.

    Attributes:
        terms: Coefficient of each monomial; no coefficient is 0.
    """

    terms: Mapping[Monomial, Fraction]

    @staticmethod
    def of(value: Fraction | int) -> Exact:
        """Return the rational number as an exact one."""
        return _build({_ONE: Fraction(value)})

    @staticmethod
    def pi() -> Exact:
        """Return pi."""
        return Exact({(1, ()): Fraction(1)})

    @property
    def rational(self) -> Fraction | None:
        """The value if it is rational, else None."""
        if not self.terms:
            return Fraction(0)
        return self.terms[_ONE] if len(self.terms) == 1 and _ONE in self.terms else None

    def __add__(self, other: Exact) -> Exact:
        """Return the sum."""
        terms = dict(self.terms)
        for key, value in other.terms.items():
            terms[key] = terms.get(key, Fraction(0)) + value
        return _build(terms)

    def __neg__(self) -> Exact:
        """Return the negative."""
        return Exact({key: -value for key, value in self.terms.items()})

    def __mul__(self, other: Exact) -> Exact:
        """Return the product."""
        terms: dict[Monomial, Fraction] = {}
        for left, a in self.terms.items():
            for right, b in other.terms.items():
                key, factor = _merge(left, right)
                terms[key] = terms.get(key, Fraction(0)) + a * b * factor
        return _build(terms)

    def inverse(self) -> Exact:
        """Return the reciprocal.

        Raises:
            UndefinedError: If the number is 0.
            UnsupportedError: If it is a sum with pi or with roots that are not square roots.
        """
        if not self.terms:
            raise UndefinedError("division by zero")
        if len(self.terms) == 1:
            (((powers, roots), value),) = self.terms.items()
            flipped = tuple((prime, 1 - exponent) for prime, exponent in roots)
            scale = math.prod((prime for prime, _ in roots), start=1)
            return _build({(-powers, flipped): 1 / (value * scale)})
        numerator, denominator = Exact.of(1), self
        while denominator.rational is None:
            conjugate = _conjugate(denominator)
            numerator, denominator = numerator * conjugate, denominator * conjugate
        rest = denominator.rational
        return numerator * Exact.of(1 / rest)

    def power(self, exponent: Fraction) -> Exact:
        """Return the number to a rational power.

        Raises:
            UndefinedError: For 0 to a negative power.
            UnsupportedError: For a root of a sum or of a negative number.
            TooLargeError: If the result is beyond the caps.
        """
        if exponent.denominator != 1:
            return self._root(exponent.denominator).power(Fraction(exponent.numerator))
        count = abs(exponent.numerator)
        if len(self.terms) > 1 and count > 32:
            raise TooLargeError("the exponent is too large")
        bits = max((_bits(value) for value in self.terms.values()), default=0)
        if count > MAX_BITS or (bits > 1 and (bits - 1) * count > MAX_BITS):
            value = self.rational
            if value is None or abs(value) > 1 or value.denominator > 1:
                raise TooLargeError("the power is too large")
            count = min(count, 2 + count % 2)  # 0, 1 and -1 only need the parity
        result, square = Exact.of(1), self
        while count:
            if count & 1:
                result = result * square
            count >>= 1
            if count:
                square = square * square
        return result if exponent >= 0 else result.inverse()

    def _root(self, index: int) -> Exact:
        if len(self.terms) > 1:
            raise UnsupportedError("a root of a sum")
        if self.rational is not None:
            return root(self.rational, index)
        (((powers, roots), value),) = self.terms.items()
        if powers % index or index > MAX_ROOT:
            raise UnsupportedError("a root of pi")
        halves = tuple((prime, exponent / index) for prime, exponent in roots)
        return root(value, index) * _build({(powers // index, halves): Fraction(1)})

    def approximate(self) -> Decimal:
        """Return the value to about 60 digits of its largest term."""
        total = Decimal(0)
        for (powers, roots), value in self.terms.items():
            part = _DIGITS.divide(Decimal(value.numerator), Decimal(value.denominator))
            part = _DIGITS.multiply(part, _DIGITS.power(_PI, powers))
            for prime, exponent in roots:
                share = _DIGITS.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
                part = _DIGITS.multiply(part, _DIGITS.power(Decimal(prime), share))
            total = _DIGITS.add(total, part)
        return total


def root(value: Fraction, index: int) -> Exact:
    """Return the real root of a rational number.

    Args:
        value: What stands under the root.
        index: 2 for a square root, and so on.

    Raises:
        UnsupportedError: For an even root of a negative number.
        TooLargeError: If the index or the number is beyond the caps, or its prime factors are not found.
    """
    if not 1 <= index <= MAX_ROOT:
        raise TooLargeError(f"the index of a root must be from 1 to {MAX_ROOT}")
    if value < 0:
        if index % 2 == 0:
            raise UnsupportedError("an even root of a negative number")
        return -root(-value, index)
    if value == 0:
        return Exact.of(0)
    top, bottom = _whole_root(value.numerator, index), _whole_root(value.denominator, index)
    if top is not None and bottom is not None:
        return Exact.of(Fraction(top, bottom))
    exponents = factors(value.numerator)
    for prime, count in factors(value.denominator).items():
        exponents[prime] = exponents.get(prime, 0) - count
    coefficient = Fraction(1)
    roots = []
    for prime in sorted(exponents):
        whole, rest = divmod(exponents[prime], index)
        coefficient *= Fraction(prime) ** whole
        if rest:
            roots.append((prime, Fraction(rest, index)))
    return _build({(0, tuple(roots)): coefficient})


def _build(terms: Mapping[Monomial, Fraction]) -> Exact:
    kept = {key: value for key, value in terms.items() if value}
    if len(kept) > MAX_TERMS or any(_bits(value) > MAX_BITS for value in kept.values()):
        raise TooLargeError("the number is too long")
    if any(abs(key[0]) > MAX_ROOT for key in kept):
        raise TooLargeError("the power of pi is too large")
    return Exact(kept)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _merge(left: Monomial, right: Monomial) -> tuple[Monomial, int]:
    """Multiply two monomials; whole powers of primes come back as an integer factor."""
    exponents = dict(left[1])
    factor = 1
    for prime, exponent in right[1]:
        total = exponents.pop(prime, Fraction(0)) + exponent
        if total >= 1:
            factor *= prime
            total -= 1
        if total:
            exponents[prime] = total
    return (left[0] + right[0], tuple(sorted(exponents.items()))), factor


def _conjugate(number: Exact) -> Exact:
    """Flip the sign of one square root, so that the product with `number` no longer has it."""
    for powers, roots in number.terms:
        if powers or any(exponent != Fraction(1, 2) for _, exponent in roots):
            raise UnsupportedError("a quotient by a sum that is not of square roots")
    prime = max(prime for _, roots in number.terms for prime, _ in roots)
    flipped = {
        (powers, roots): -value if any(p == prime for p, _ in roots) else value
        for (powers, roots), value in number.terms.items()
    }
    return Exact(flipped)


def _whole_root(n: int, index: int) -> int | None:
    """Return the integer root if n is a perfect power, else None."""
    if index == 2:
        guess = math.isqrt(n)
        return guess if guess * guess == n else None
    if n.bit_length() > 4 * _ROOT_BITS:
        raise TooLargeError("the number under the root is too long")
    low, high = 1, 1 << (n.bit_length() // index + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**index < n:
            low = middle + 1
        else:
            high = middle
    return low if low**index == n else None


def factors(n: int) -> dict[int, int]:
    """Return the prime factors of a positive integer and how often each occurs.

    Raises:
        TooLargeError: If it is too long or they are not found by trial division.
    """
    if n.bit_length() > _ROOT_BITS:
        raise TooLargeError("the number under the root is too long")
    found: dict[int, int] = {}
    for prime in _SMALL_PRIMES:
        if prime * prime > n:
            break
        while n % prime == 0:
            found[prime] = found.get(prime, 0) + 1
            n //= prime
    if n > 1:
        if n >= _TRIAL_LIMIT**2:
            raise TooLargeError("the number under the root has no small factors")
        found[n] = found.get(n, 0) + 1
    return found
