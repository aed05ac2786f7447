"""Are two shapes the same answer?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from trace_gym.envs.math.grading.evaluate import names_in, numerator
from trace_gym.envs.math.grading.expression import Node, number, parse, rename
from trace_gym.envs.math.grading.judge import Judge, Leaf, UndefinedAnswerError, are_rounded
from trace_gym.envs.math.grading.reading import read_quantity
from trace_gym.envs.math.grading.sets import is_set_like, same_sets, to_set
from trace_gym.envs.math.grading.shapes import (
    Based,
    Clock,
    Group,
    Infinity,
    Matrix,
    Named,
    Quantity,
    Ratio,
    Relation,
    Shape,
    Words,
)
from trace_gym.envs.math.grading.tokens import SyntaxProblem
from trace_gym.envs.math.grading.units import UNITLESS

_FUNCTION = re.compile(r"([A-Za-z]+'*(?:_\w+)?)\(([A-Za-z](?:,[A-Za-z])*)\)")
_HALF_DAY = 12 * 3600


class Comparison:
    """Compares an answer with the right one; symmetric but for what a rounded right answer may stand for."""

    def __init__(self, judge: Judge, *, percent_asked: bool = False) -> None:
        """Compare expressions with a judge.

        Args:
            judge: Decides about expressions.
            percent_asked: Whether the question asks for a percentage, so that ``20`` and ``20%`` are one.
        """
        self._judge = judge
        self._percent_asked = percent_asked

    def same(self, answer: Shape, right: Shape) -> bool:
        """Whether two shapes are the same answer.

        Raises:
            UndecidedError: If the judge cannot tell.
            UndefinedAnswerError: If an expression of the answer has no value.
        """
        answer, right = _unwrap(answer), _unwrap(right)
        if answer == right:
            return True
        if isinstance(answer, Named) and isinstance(right, Named):
            return self._same_named(answer, right)
        if isinstance(answer, Relation) or isinstance(right, Relation):
            answer, right = self._settle(answer, False, False), self._settle(right, False, True)
        if is_set_like(answer) or is_set_like(right):
            sets = to_set(answer, self._judge), to_set(right, self._judge)
            if sets[0] is not None and sets[1] is not None:
                return same_sets(sets[0], sets[1], self._judge, self.same)
        for named, other in ((answer, right), (right, answer)):
            if isinstance(named, Named) and isinstance(other, Relation):
                return self._same_equation(named, other)
        answer = self._settle(answer.value, True, False) if isinstance(answer, Named) else answer
        right = self._settle(right.value, True, True) if isinstance(right, Named) else right
        if isinstance(answer, Relation) and isinstance(right, Relation):
            return self._same_relation(answer, right)
        answer, right = _unwrap(answer), _unwrap(right)
        if isinstance(answer, Group) and answer.is_choice and not isinstance(right, Group):
            return all(self.same(item, right) for item in answer.items)
        if isinstance(right, Group) and right.is_choice and not isinstance(answer, Group):
            return all(self.same(answer, item) for item in right.items)
        return self._same_values(answer, right)

    def _same_values(self, answer: Shape, right: Shape) -> bool:
        if isinstance(answer, Quantity | Leaf) and isinstance(right, Quantity | Leaf):
            return self._same_numbers(answer, right)
        if isinstance(answer, Group | Matrix) and isinstance(right, Group | Matrix):
            return self._same_groups(answer, right)
        if isinstance(answer, Ratio | Clock) or isinstance(right, Ratio | Clock):
            return self._same_ratios(answer, right)
        for based, other in ((answer, right), (right, answer)):
            if isinstance(based, Based) and isinstance(other, Leaf):
                return other.text.strip("() ").lstrip("0").upper() == based.digits
            if isinstance(based, Infinity) and isinstance(other, Words):
                return based.sign > 0 and other.text == "infinite"
        return answer == right

    def _same_numbers(self, answer: Quantity | Leaf, right: Quantity | Leaf) -> bool:
        """Compare numbers; ``3 L`` may be three litres as well as 3 times L."""
        quantities = [read_quantity(side.text) if isinstance(side, Leaf) else None for side in (answer, right)]
        if any(quantities) and self._same_quantities(quantities[0] or answer, quantities[1] or right):
            return True
        return self._same_quantities(answer, right)

    def _same_quantities(self, answer: Quantity | Leaf, right: Quantity | Leaf) -> bool:
        units = [
            side.unit if isinstance(side, Quantity) and side.unit != UNITLESS else None for side in (answer, right)
        ]
        mine, theirs = units
        factors = [side.scale if isinstance(side, Quantity) else Fraction(1) for side in (answer, right)]
        if mine is not None and theirs is not None and (mine.measures or theirs.measures):
            if mine.measures != theirs.measures:
                return False
            factors = [factors[0] * mine.factor, factors[1] * theirs.factor]
        elif mine is not None and theirs is not None and mine.nouns and theirs.nouns:
            if not set(mine.nouns) & set(theirs.nouns):
                return False
        elif not self._percent_asked:
            factors = [
                factor / 100 if unit is not None and unit.is_percent else factor
                for factor, unit in zip(factors, units, strict=True)
            ]
        leaves = [side.value if isinstance(side, Quantity) else side for side in (answer, right)]
        if factors[0] != factors[1]:
            leaves = [_scaled(leaf, factor) for leaf, factor in zip(leaves, factors, strict=True)]
        return self._judge.equal(leaves[0], leaves[1])

    def _same_ratios(self, answer: Shape, right: Shape) -> bool:
        if isinstance(answer, Clock) and isinstance(right, Clock):
            apart, halves = answer.seconds - right.seconds, {answer.half, right.half}
            return apart == 0 or ("" in halves and "24" not in halves and apart % _HALF_DAY == 0)
        mine, theirs = _terms(answer), _terms(right)
        if mine is None or theirs is None or len(mine) != len(theirs) or {type(answer), type(right)} == {Clock, Ratio}:
            return False
        return all(
            self._judge.equal(Leaf("", _product(one, theirs[0])), Leaf("", _product(other, mine[0])))
            for one, other in zip(mine[1:], theirs[1:], strict=True)
        )

    def _same_groups(self, answer: Group | Matrix, right: Group | Matrix) -> bool:
        if isinstance(answer, Matrix) or isinstance(right, Matrix):
            mine, theirs = _rows(answer, right), _rows(right, answer)
            return (
                mine is not None
                and theirs is not None
                and len(mine) == len(theirs)
                and all(self._in_order(row, other) for row, other in zip(mine, theirs, strict=True))
            )
        dotted = Words("\\ldots") in (*answer.items, *right.items)
        if answer.is_bare or right.is_bare:
            if {answer.opening + answer.closing, right.opening + right.closing} & {"()", "<>"} or dotted:
                return not (answer.is_choice or right.is_choice) and self._in_order(answer.items, right.items)
            if _is_half_open(answer) or _is_half_open(right) or _is_interval(right):
                return False
            return self._in_any_order(answer.items, right.items, answer.is_set or right.is_set)
        if answer.is_set or right.is_set:
            pair = len(answer.items) == len(right.items) == 2
            kinds = {answer.opening, right.opening}
            if kinds != {"{"} and (kinds != {"{", "["} or pair):
                return False
            if not dotted:
                return self._in_any_order(answer.items, right.items, True)
            return self._in_order(answer.items, right.items)
        brackets = (answer.opening, answer.closing), (right.opening, right.closing)
        if brackets[0] != brackets[1] and len(answer.items) == 2 and ("<", ">") not in brackets:
            return False
        return self._in_order(answer.items, right.items)

    def _in_order(self, answers: Sequence[Shape], rights: Sequence[Shape]) -> bool:
        if len(answers) != len(rights):
            return False
        if all(map(self.same, answers, rights)):
            return True
        pairs = [(one, other) for one, other in zip(answers, rights, strict=True) if isinstance(one, Leaf)]
        numbers = [(one, other) for one, other in pairs if isinstance(other, Leaf)]
        return len(numbers) == len(answers) > 1 and are_rounded(*zip(*numbers, strict=True))

    def _in_any_order(self, answers: Sequence[Shape], rights: Sequence[Shape], as_sets: bool) -> bool:
        if not as_sets and len(answers) != len(rights):
            return False
        waiting = list(rights)
        for answer in answers:
            place = next((place for place, right in enumerate(waiting) if self._matches(answer, right)), None)
            if place is not None:
                del waiting[place]
            elif not as_sets or not any(self._matches(answer, right) for right in rights):
                return False
        return all(any(self._matches(answer, right) for answer in answers) for right in waiting)

    def _matches(self, answer: Shape, right: Shape) -> bool:
        try:
            return self.same(answer, right)
        except UndefinedAnswerError:
            return False

    def _same_named(self, answer: Named, right: Named) -> bool:
        if answer.name == right.name:
            return self.same(answer.value, right.value)
        names = answer.name.strip("()").split(","), right.name.strip("()").split(",")
        if sorted(names[0]) == sorted(names[1]) and isinstance(answer.value, Group) and len(names[0]) > 1:
            order = [names[0].index(name) for name in names[1]]
            moved = _reordered(answer.value, order)
            return moved is not None and self.same(moved, right.value)
        functions = _FUNCTION.fullmatch(answer.name), _FUNCTION.fullmatch(right.name)
        if functions[0] and functions[1]:
            return functions[0][1] == functions[1][1] and self.same(
                _renamed(answer.value, functions[0][2].split(","), functions[1][2].split(",")), right.value
            )
        if "y" in (answer.name, right.name) and (functions[0] or functions[1]):
            return self.same(answer.value, right.value)
        mine, theirs = _equation(answer), _equation(right)
        if mine is None or theirs is None or len(names_in(mine)) < 2 or names_in(mine) != names_in(theirs):
            return False
        return self._vanish_together(mine, theirs)

    def _same_equation(self, named: Named, other: Relation) -> bool:
        """Compare ``y = 3x - 1`` with ``3x - y = 1``; in one unknown only a solved equation is an answer."""
        mine, theirs = _equation(named), _equation(other)
        if mine is None or theirs is None or len(names_in(theirs) - {"e", "i"}) < 2:
            return False
        return self._vanish_together(mine, theirs)

    def _vanish_together(self, mine: Node, theirs: Node) -> bool:
        """Whether two expressions differ by a factor, once they have no denominators."""
        return bool(self._judge.ratio(mine, theirs) or self._judge.ratio(numerator(mine), numerator(theirs)))

    def _same_relation(self, answer: Relation, right: Relation) -> bool:
        if answer.signs != right.signs:
            return False
        if len(answer.signs) == 1:
            mine, theirs = _equation(answer), _equation(right)
            if mine is None or theirs is None:
                return self._in_order(answer.sides, right.sides)
            if (to_set(answer, self._judge) is None) != (to_set(right, self._judge) is None) and len(
                names_in(theirs) - {"e", "i"}
            ) < 2:
                return False
            if answer.signs[0] in ("=", "\\ne", "\\approx", "\\equiv"):
                return self._vanish_together(mine, theirs)
            ratio = self._judge.ratio(mine, theirs)
            return ratio is not None and ratio > 0
        return self._in_order(answer.sides, right.sides)

    def _settle(self, shape: Shape, is_named: bool, is_trusted: bool) -> Shape:
        """Return the value of a chain: the last member of ``2 + 3 = 5``, the exact one of ``pi = 3.14...``.

        In a chain that is not trusted all constants must be equal, or it would be several answers in one. Only behind
        a name (``A = ab/2 = 6``) may there be symbols; else it is an equation.
        """
        if not isinstance(shape, Relation) or not {"=", "\\approx"}.issuperset(shape.signs):
            return shape
        exact = shape.sides[: (*shape.signs, "\\approx").index("\\approx") + 1]
        members = [side for side in exact if isinstance(side, Quantity | Leaf)]
        value = members[-1] if members else None
        if value is None or len(members) < len(exact) or (not is_named and any(map(_symbols, members))):
            return shape
        alike = [side for side in members[:-1] if bool(_symbols(side)) == bool(_symbols(value))]
        if not is_trusted and not all(self._same_quantities(side, value) for side in alike):
            raise UndefinedAnswerError("it says that different numbers are equal")
        return value


def _is_half_open(group: Group) -> bool:
    return {group.opening, group.closing} in ({"[", ")"}, {"(", "]"})


def _is_interval(group: Group) -> bool:
    return group.opening == "[" and len(group.items) == 2 and not any(isinstance(item, Group) for item in group.items)


def _unwrap(shape: Shape) -> Shape:
    """Take the only item out of ``[4]`` or ``{2}``."""
    while isinstance(shape, Group) and len(shape.items) == 1:
        shape = shape.items[0]
    return shape


def _symbols(side: Quantity | Leaf) -> frozenset[str]:
    leaf = side.value if isinstance(side, Quantity) else side
    return names_in(leaf.node) - {"e", "i"}


def _scaled(leaf: Leaf, factor: Fraction) -> Leaf:
    return Leaf("", _product(number(factor), leaf.node))


def _product(left: Node, right: Node) -> Node:
    return Node("multiply", (left, right))


def _terms(shape: Shape) -> list[Node] | None:
    """Return the terms of a ratio; a fraction is one of two terms, so is what may also be a time."""
    if isinstance(shape, Ratio):
        return [leaf.node for leaf in shape.items]
    if isinstance(shape, Leaf):
        return [shape.node, number(1)]
    if not isinstance(shape, Clock) or shape.half not in ("", "24"):
        return None
    hours, seconds = divmod(shape.seconds, 3600)
    return None if seconds % 60 or seconds < 600 else [number(hours), number(seconds // 60)]


def _rows(shape: Group | Matrix, model: Group | Matrix) -> tuple[tuple[Shape, ...], ...] | None:
    """Read rows; a flat list is a column beside a column, and a row beside a row."""
    if isinstance(shape, Matrix):
        return shape.rows
    if shape.is_bare or shape.is_set:
        return None
    if all(isinstance(item, Group) and item.opening in ("[", "(") for item in shape.items):
        return tuple(item.items for item in shape.items if isinstance(item, Group))
    if isinstance(model, Matrix) and len(model.rows[0]) == 1:
        return tuple((item,) for item in shape.items)
    return (shape.items,)


def _reordered(group: Group, order: list[int]) -> Shape | None:
    """Put the parts of a named tuple, or of every tuple in a list, in another order."""
    if group.is_bare:
        moved = [_reordered(item, order) if isinstance(item, Group) else None for item in group.items]
        items = tuple(item for item in moved if item is not None)
        return Group("", "", items, group.is_choice) if len(items) == len(moved) else None
    if len(group.items) != len(order):
        return None
    return Group(group.opening, group.closing, tuple(group.items[place] for place in order))


def _renamed(shape: Shape, names: list[str], others: list[str]) -> Shape:
    """Rename the arguments of a function in its value."""
    if not isinstance(shape, Leaf) or len(names) != len(others):
        return shape
    changes = {name: Node("symbol", name=other) for name, other in zip(names, others, strict=True)}
    return Leaf(shape.text, rename(shape.node, changes))


def _equation(shape: Named | Relation) -> Node | None:
    """Return the left side minus the right side."""
    if isinstance(shape, Named):
        try:
            left = parse(shape.name)
        except SyntaxProblem:
            return None
        right: Shape = shape.value
    else:
        sides = shape.sides
        if len(sides) != 2 or not isinstance(sides[0], Leaf):
            return None
        left, right = sides[0].node, sides[1]
    return Node("add", (left, Node("negate", (right.node,)))) if isinstance(right, Leaf) else None
