"""Sets of real numbers as unions of intervals: what ``x < 3``, ``(-oo, 3)`` and ``x in (-oo, 3)`` have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trace_gym.envs.math.grading.evaluate import names_in
from trace_gym.envs.math.grading.judge import Judge, Leaf
from trace_gym.envs.math.grading.shapes import Group, Infinity, Named, Relation, Shape, Union, Words

Bound = Leaf | Infinity
_LESS = frozenset({"<", "\\le"})
_BELOW, _ABOVE = Infinity(-1), Infinity(1)


@dataclass(frozen=True, slots=True)
class Piece:
    """An interval; a point is one whose bounds are the same."""

    low: Bound
    has_low: bool
    high: Bound
    has_high: bool

    @property
    def is_point(self) -> bool:
        """Whether it is written as a point."""
        return self.low is self.high


@dataclass(frozen=True, slots=True)
class RealSet:
    """A union of pieces.

    Attributes:
        name: What lies in it, if that was said.
        pieces: Its parts, in the order written.
    """

    name: str
    pieces: tuple[Piece, ...]


def is_set_like(shape: Shape) -> bool:
    """Whether a shape can be nothing but a set of numbers or a condition on one."""
    if isinstance(shape, Group):
        if {shape.opening, shape.closing} in ({"[", ")"}, {"(", "]"}):
            return True
        conditions = all(isinstance(item, Relation | Named) or is_set_like(item) for item in shape.items)
        return conditions and (shape.is_bare or shape.opening == "{")
    if isinstance(shape, Named):
        return is_set_like(shape.value)
    if isinstance(shape, Words):
        return shape.text == "all reals"
    return isinstance(shape, Union) or (isinstance(shape, Relation) and "=" not in shape.signs)


def to_set(shape: Shape, judge: Judge) -> RealSet | None:
    """Read a shape as a set of real numbers, if it can be one.

    Args:
        shape: An answer.
        judge: Says whether conditions exclude each other; then they are alternatives.
    """
    if isinstance(shape, Words) and shape.text == "all reals":
        return RealSet("", (Piece(_BELOW, False, _ABOVE, False),))
    if isinstance(shape, Named):
        inside = to_set(shape.value, judge) or _points([shape.value])
        return None if inside is None or inside.name else RealSet(shape.name, inside.pieces)
    if isinstance(shape, Union):
        return _union(shape, judge)
    if isinstance(shape, Relation):
        return _solved(shape)
    if isinstance(shape, Group):
        return _group(shape, judge)
    return None


def _group(group: Group, judge: Judge) -> RealSet | None:
    if group.opening == "{":
        return _points(group.items) or _group(Group("", "", group.items, is_choice=True), judge)
    if not group.is_bare:
        low, high = (group.items[0], group.items[-1]) if len(group.items) == 2 else (None, None)
        if not isinstance(low, Bound) or not isinstance(high, Bound) or group.opening == "<":
            return None
        has_low = group.opening == "[" and not isinstance(low, Infinity)
        return RealSet("", (Piece(low, has_low, high, group.closing == "]" and not isinstance(high, Infinity)),))
    sets = [to_set(item, judge) for item in group.items]
    found = [part for part in sets if part is not None]
    names = {part.name for part in found}
    if len(found) < len(sets) or len(names) > 1:
        return None
    pieces = [piece for part in found for piece in part.pieces]
    both = None if group.is_choice or len(pieces) != 2 else _overlap(pieces[0], pieces[1], judge)
    return RealSet(names.pop(), (both,) if both is not None else tuple(pieces))


def _overlap(left: Piece, right: Piece, judge: Judge) -> Piece | None:
    """Return ``a < x < b`` for the two rays ``a < x`` and ``x < b``, unless b is less than a."""
    for ray, other in ((left, right), (right, left)):
        if ray.low == _BELOW and ray.high == _ABOVE:
            return other
        if ray.high == _ABOVE and ray.low != _BELOW and other.low == _BELOW and other.high != _ABOVE:
            return (
                None
                if _is_less(other.high, ray.low, judge)
                else Piece(ray.low, ray.has_low, other.high, other.has_high)
            )
    return None


def _is_less(left: Bound, right: Bound, judge: Judge) -> bool:
    if (
        not isinstance(left, Leaf)
        or not isinstance(right, Leaf)
        or (names_in(left.node) | names_in(right.node)) - {"e"}
    ):
        return False
    return judge.order(left.node, right.node) < 0


def _points(items: Sequence[Shape]) -> RealSet | None:
    flat = [part for item in items for part in (item.items if isinstance(item, Group) and item.is_bare else (item,))]
    if not all(isinstance(item, Leaf) for item in flat):
        return None
    return RealSet("", tuple(Piece(item, True, item, True) for item in flat if isinstance(item, Leaf)))


def _union(union: Union, judge: Judge) -> RealSet | None:
    parts = [to_set(part, judge) for part in union.parts]
    holes = [to_set(part, judge) for part in union.holes]
    found = [part for part in (*parts, *holes) if part is not None]
    names = {part.name for part in found if part.name}
    if len(found) < len(parts) + len(holes) or len(names) > 1:
        return None
    name = names.pop() if names else ""
    pieces = [piece for part in found[: len(parts)] for piece in part.pieces]
    points = [piece for part in found[len(parts) :] for piece in part.pieces]
    if not all(piece.is_point for piece in points) or (points and len(pieces) != 1):
        return None
    return RealSet(name, _without(pieces[0], [piece.low for piece in points]) if points else tuple(pieces))


def _without(piece: Piece, holes: Sequence[Bound]) -> tuple[Piece, ...]:
    """Cut points, in the order given, out of an interval."""
    lows: list[Bound] = [piece.low, *holes]
    highs: list[Bound] = [*holes, piece.high]
    return tuple(
        Piece(low, piece.has_low and place == 0, high, piece.has_high and place == len(holes))
        for place, (low, high) in enumerate(zip(lows, highs, strict=True))
    )


def _solved(relation: Relation) -> RealSet | None:
    """Read a condition that is solved for one thing: ``x < 3``, ``1 <= f(x) < 2``, ``x != 0``."""
    sides = relation.sides
    if not all(isinstance(side, Bound) for side in sides) or len(sides) > 3:
        return None
    places = [place for place, side in enumerate(sides) if isinstance(side, Leaf) and _is_unknown(side)]
    middle = 1 if len(sides) == 3 else places[0] if len(places) == 1 else -1
    if middle not in places:
        return None
    unknown = sides[middle]
    bounds: list[Bound] = [side for place, side in enumerate(sides) if place != middle and isinstance(side, Bound)]
    if not isinstance(unknown, Leaf) or any(_mentions(bound, unknown) for bound in bounds):
        return None
    name = unknown.node.name if unknown.node.head == "symbol" else unknown.text.replace(" ", "")
    if relation.signs == ("\\ne",):
        return RealSet(name, _without(Piece(_BELOW, False, _ABOVE, False), bounds))
    low, has_low, high, has_high = _BELOW, False, _ABOVE, False
    signs = relation.signs
    if not _LESS.issuperset(signs):
        return None
    if middle > 0:
        low, has_low = bounds[0], signs[0] == "\\le"  # type: ignore[assignment]
    if middle < len(sides) - 1:
        high, has_high = bounds[-1], signs[-1] == "\\le"  # type: ignore[assignment]
    return RealSet(name, (Piece(low, has_low, high, has_high),))


def _is_unknown(leaf: Leaf) -> bool:
    return leaf.node.head == "symbol" or leaf.node.name.startswith("apply ")


def _mentions(bound: Bound, unknown: Leaf) -> bool:
    return isinstance(bound, Leaf) and bool(names_in(bound.node) & names_in(unknown.node))


def same_sets(left: RealSet, right: RealSet, judge: Judge, same: Callable[[Shape, Shape], bool]) -> bool:
    """Whether two sets have the same elements.

    Args:
        left: A set.
        right: Another.
        judge: Sorts the bounds.
        same: Compares two bounds.
    """
    if left.name and right.name and left.name != right.name:
        return False
    if _match(left.pieces, right.pieces, same):
        return True
    if any(names_in(bound.node) for part in (left, right) for bound in _leaves(part)):
        return False
    return _match(_merged(left, judge), _merged(right, judge), same)


def _leaves(part: RealSet) -> list[Leaf]:
    return [bound for piece in part.pieces for bound in (piece.low, piece.high) if isinstance(bound, Leaf)]


def _match(left: Sequence[Piece], right: Sequence[Piece], same: Callable[[Shape, Shape], bool]) -> bool:
    waiting = list(right)
    for piece in left:
        for place, other in enumerate(waiting):
            closed = (piece.has_low, piece.has_high) == (other.has_low, other.has_high)
            if closed and same(piece.low, other.low) and same(piece.high, other.high):
                del waiting[place]
                break
        else:
            return False
    return not waiting


def _merged(part: RealSet, judge: Judge) -> list[Piece]:
    """Sort the pieces and join those that touch or overlap."""

    def order(left: Bound, right: Bound) -> int:
        if isinstance(left, Infinity) or isinstance(right, Infinity):
            signs = [bound.sign if isinstance(bound, Infinity) else 0 for bound in (left, right)]
            return (signs[0] > signs[1]) - (signs[0] < signs[1])
        return judge.order(left.node, right.node)

    def first(left: Piece, right: Piece) -> int:
        return order(left.low, right.low) or right.has_low - left.has_low

    merged: list[Piece] = []
    for piece in sorted(part.pieces, key=functools.cmp_to_key(first)):
        last = merged[-1] if merged else None
        gap = 1 if last is None else order(piece.low, last.high)
        if last is None or gap > 0 or (gap == 0 and not (piece.has_low or last.has_high)):
            merged.append(piece)
            continue
        further = order(piece.high, last.high)
        longer = further > 0 or (further == 0 and piece.has_high)
        end = piece if longer else last
        merged[-1] = Piece(last.low, last.has_low, end.high, end.has_high)
    return merged
