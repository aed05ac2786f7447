"""Are two expressions equal? The thorough half of the answer, by arithmetic of 60 and then 420 digits.

For a process that can be killed: it has larger caps than the exact judge it begins with, and what it evaluates may
take long. Constants that differ in 60 digits differ. Those that agree are evaluated again with 420 digits, so that
``e + 1/2^99`` is not taken for ``e``; where a sum swallowed a term even then, the judge says that it cannot tell.
Expressions with symbols are compared at positive, negative and small points. Where the value is not real (the root of
a negative number) and no ``i`` is written, a point does not count, so ``sqrt(1/n)`` equals ``1/sqrt(n)`` but
``sqrt(x^2)`` is not ``x``. A logarithm without a base may be the natural or the decimal one.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import mpmath

from trace_gym.envs.math.grading.digits import SPARE, Evaluation, TooLargeAnswerError, to_mpf
from trace_gym.envs.math.grading.evaluate import calls_in, names_in, whole_names
from trace_gym.envs.math.grading.expression import Node
from trace_gym.envs.math.grading.judge import (
    DOUBLE_TOLERANCE,
    Judge,
    Leaf,
    UndecidedError,
    UndefinedAnswerError,
    is_double,
    is_near,
    points,
    share_names,
)

_DIGITS = 60
_MORE_DIGITS = 420
_MIN_POINTS = 2


class NumericJudge(Judge):
    """Compares expressions exactly where that is possible, else by their digits."""

    def equal(self, answer: Leaf, right: Leaf) -> bool:
        """Whether an answer has the value of the right one; see `Judge.equal`."""
        try:
            return super().equal(answer, right)
        except UndecidedError:
            pass
        left, wanted = share_names(answer.node, right.node)
        logs = ("e", "10") if "log" in calls_in(left) | calls_in(wanted) else ("e",)
        if names_in(left) | names_in(wanted) <= {"e", "i"}:
            return any(self._equal_constants(answer.text, left, right.text, wanted, base) for base in logs)
        tolerance = DOUBLE_TOLERANCE if is_double(answer.text) or is_double(right.text) else Fraction(0)
        return any(self._equal_at_samples(left, wanted, base, tolerance) for base in logs)

    def ratio(self, left: Node, right: Node) -> Fraction | None:
        """Return the constant c with ``left = c * right``; an irrational one comes back rounded."""
        try:
            return super().ratio(left, right)
        except UndecidedError:
            pass
        left, right = share_names(left, right)
        with mpmath.workdps(_DIGITS):
            tiny = mpmath.mpf(10) ** (SPARE - _DIGITS)
            samples = self._samples(left, right, "e")
            pairs = [pair for pair in samples if max(abs(pair[0]), abs(pair[1])) > tiny * pair[2]]
            if len(pairs) < _MIN_POINTS:
                self._answer_lacks_a_value(right, "e")
                return None
            if any(min(abs(pair[0]), abs(pair[1])) <= tiny * pair[2] for pair in pairs):
                return None
            found = [value / other for value, other, _ in pairs]
            steady = all(abs(value - found[0]) <= abs(found[0]) * tiny for value in found)
            return _fraction(found[0]) if steady and not mpmath.im(found[0]) else None

    def order(self, left: Node, right: Node) -> int:
        """Return -1, 0 or 1 as a constant is less than another, equal or greater."""
        try:
            return super().order(left, right)
        except UndecidedError:
            pass
        with mpmath.workdps(_DIGITS):
            value = Evaluation({}).value(Node("add", (left, Node("negate", (right,)))))
            if abs(value) < mpmath.mpf(10) ** (SPARE - _DIGITS):
                return 0
            return -1 if mpmath.re(value) < 0 else 1

    def _equal_constants(self, answer: str, left: Node, right: str, wanted: Node, base: str) -> bool:
        for digits in (_DIGITS, _MORE_DIGITS):
            with mpmath.workdps(digits):
                evaluation = Evaluation({}, base)
                gold = _right(evaluation, wanted)
                value = evaluation.value(left)
                scale = max(abs(value), abs(gold), evaluation.largest)
                if abs(value - gold) > scale * mpmath.mpf(10) ** (SPARE - digits):
                    return _is_near_complex(answer, value, right, gold)
        if evaluation.swallowed:
            raise UndecidedError(f"the numbers agree in {_MORE_DIGITS} digits, but were rounded before")
        return True

    def _equal_at_samples(self, left: Node, right: Node, base: str, tolerance: Fraction) -> bool:
        with mpmath.workdps(_DIGITS):
            samples = self._samples(left, right, base)
            allowed = max(to_mpf(tolerance), mpmath.mpf(10) ** (SPARE - _DIGITS))
            if any(abs(value - other) > scale * allowed for value, other, scale in samples):
                return False
        if len(samples) < _MIN_POINTS:
            return self._answer_lacks_a_value(right, base)
        return True

    def _answer_lacks_a_value(self, right: Node, base: str) -> bool:
        """Return False if the right answer alone has values at enough points, so that the other one has none."""
        needed = _MIN_POINTS if names_in(right) - {"e", "i"} else 1
        with mpmath.workdps(_DIGITS):
            if len(self._samples(right, right, base)) < needed:
                raise UndecidedError("too few points at which the right answer has a value")
        return False

    def _samples(self, left: Node, right: Node, base: str) -> list[tuple[Any, Any, Any]]:
        """Return the values of both sides, and the largest of their terms, at every point where both have one."""
        names = names_in(left) | names_in(right)
        is_complex = "i" in names
        found = []
        for point in _places(names - {"e", "i"}, whole_names(left) | whole_names(right)):
            evaluation = Evaluation(point, base)
            try:
                value, other = evaluation.value(left), evaluation.value(right)
            except UndefinedAnswerError:
                continue
            if is_complex or evaluation.is_real:
                found.append((value, other, max(abs(value), abs(other), evaluation.largest)))
        return found


def places_for(node: Node) -> list[dict[str, Fraction]]:
    """Return points at which an expression may be evaluated."""
    return _places(names_in(node) - {"e", "i"}, whole_names(node))


def _places(names: frozenset[str], whole: frozenset[str]) -> list[dict[str, Fraction]]:
    if not names:
        return [{}]
    if whole:
        return points(names, whole)
    large = points(names, whole)
    scaled = [{name: value / 10**5 for name, value in point.items()} for point in large if min(point.values()) > 1]
    small = [{name: abs(value) / 10**6 for name, value in large[-1].items()}, large[-2]]
    return [*scaled, *small, {name: value / 10**6 for name, value in large[-1].items()}]


def _right(evaluation: Evaluation, node: Node) -> Any:
    try:
        return evaluation.value(node)
    except TooLargeAnswerError as problem:
        raise UndecidedError(f"the right answer: {problem}") from problem
    except UndefinedAnswerError as problem:
        raise UndecidedError(f"the right answer has no value: {problem}") from problem


def _fraction(value: Any) -> Fraction:
    sign, man, exp, _ = mpmath.mpf(mpmath.re(value))._mpf_
    size = Fraction(int(man)) * Fraction(2) ** int(exp)
    return -size if sign else size


def _is_near_complex(answer: str, value: Any, right: str, gold: Any) -> bool:
    """Compare as far as the decimals of the texts can say, the real and the imaginary part alone."""
    for part in (mpmath.re, mpmath.im):
        if abs(part(value)) > 1e300 or abs(part(gold)) > 1e300:
            return False
        ours, theirs = _fraction(part(value)), _fraction(part(gold))
        if abs(ours) < Fraction(1, 10**15) and abs(theirs) < Fraction(1, 10**15):
            continue
        if not is_near(answer, ours, right, theirs):
            return False
    return True
