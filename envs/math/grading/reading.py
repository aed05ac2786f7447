r"""Makes a shape of an answer: a list, an interval, a relation, a number with a unit, or one expression."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

from trace_gym.envs.math.grading.evaluate import names_in
from trace_gym.envs.math.grading.expression import Node, number, parse
from trace_gym.envs.math.grading.judge import Leaf
from trace_gym.envs.math.grading.shapes import (
    Based,
    Clock,
    Date,
    Group,
    Infinity,
    Matrix,
    Named,
    Quantity,
    Ratio,
    Relation,
    Shape,
    Union,
    Unread,
    Words,
)
from trace_gym.envs.math.grading.split import UnbalancedError, cut, enclosing
from trace_gym.envs.math.grading.tokens import SyntaxProblem
from trace_gym.envs.math.grading.units import DEGREES, split_unit
from trace_gym.envs.math.grading.words import canonical_words, clock_time, date, is_known_phrase, number_word

_OR = frozenset({'"or"', '"OR"'})
_COMMAS = frozenset({",", ";", '"and"'})
_UNIONS = frozenset({"\\cup", "\\setminus"})
_SIGNS = frozenset({"=", "<", ">", "\\le", "\\ge", "\\ne", "\\in", "\\approx", "\\equiv", "\\subseteq"})
_FLIPPED = {">": "<", "\\ge": "\\le"}
_MAX_DEPTH = 12
_MAX_CHOICES = 3  # plus-minus signs in one expression
_INFINITY = re.compile(r"([-+]?)\s*\\infty")
_BASED = re.compile(r"\(?([0-9A-Za-z]*[0-9][0-9A-Za-z]*|[A-F]+)\)? ?_ ?\{? ?\(?([0-9]{1,2})\)? ?\}?")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{(?P<kind>[pbB]?matrix|smallmatrix|array|tabular)\}\s*(?:\{[lcr|\s]*\})?(?P<rows>.*)\\end\{(?P=kind)\}\s*[)\]]?",
    re.DOTALL,
)
_CASES = re.compile(r"\\begin\{(?P<kind>cases|aligned|align\*?)\}(?P<rows>.*)\\end\{(?P=kind)\}", re.DOTALL)
_ROW = re.compile(r"\\\\|\\cr")
_CALL = re.compile(r"(?P<name>[A-Za-z_.]+)\s*\((?P<inside>.*)\)", re.DOTALL)
_ARRAYS = frozenset("Matrix sympy.Matrix ImmutableDenseMatrix ImmutableMatrix array np.array numpy.array".split())
_INTERVALS = {"Interval": "[]", "Interval.open": "()", "Interval.Lopen": "(]", "Interval.Ropen": "[)"}
_CALLED = _ARRAYS | _INTERVALS.keys() | {"FiniteSet", "set", "frozenset", "Union", "Eq", "Ne"}
_NAME = re.compile(
    r"""
    \"[^\"]+\"                                                            # a word
    | (?:\\angle[ ]?)?[A-Z]{1,4}                                        # A, AB, \angle ABC
    | \\?[A-Za-z]+(?:_(?:[A-Za-z0-9]|\{[^{}]*\}))?'*(?:\^\{-1\})?        # x, \alpha, a_1, f', f^{-1} ...
      (?:\(\\?[A-Za-z0-9_]+(?:,[ ]?\\?[A-Za-z0-9_]+)*\))?                # ... of (x, y)
    | \\(?:sin|cos|tan)[ ]?\\?[A-Za-z]+
    | \([ ]?(?:\\?[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?(?:[ ]?,[ ]?|[ ])?)+\)  # (x, y)
    """,
    re.VERBOSE,
)
GROUPED = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")
"""Digits in groups of three: a number, or a list of numbers."""
_NUMBERED = re.compile(r"[xz]_[0-9]")
_ROMAN = re.compile(r"[IVX]{2,5}")
_TO = re.compile(r' "?to"? ')
_MIXED_UNITS = re.compile(r"(.*[A-Za-z\"])\s*([0-9.]+)", re.DOTALL)
_CUP = re.compile(r"(?<=[)\]}]) ?U ?(?=[(\[{\\])")
_BUILDER = re.compile(r"\\?[A-Za-z](?: ?\\in ?\\Reals)? ?(?:\||\\mid|:) ?(?P<condition>.*[<>=\\].*)", re.DOTALL)
_TUPLES = re.compile(r"\)\s*\(")
_TRIGONOMETRY = re.compile(r"sin|cos|tan|cot|sec|csc")
_WORDY = re.compile(r"[A-Za-z]{2}")


def read(text: str, *, thousands: bool = True) -> Shape:
    """Read an answer.

    Args:
        text: In the notation of `trace_gym.envs.math.grading.notation`.
        thousands: Whether ``1,234`` is a number rather than a list.

    Returns:
        Its shape; `Unread` if it is nothing this grader knows.
    """
    if thousands:
        text = GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    try:
        return _Reader().read(text, 0)
    except UnbalancedError:
        return Unread(text)


class _Reader:
    """Recursive descent over the outer structure of a text; the innermost parts are expressions."""

    def read(self, text: str, depth: int) -> Shape:
        text = text.strip().removeprefix("=").removeprefix("\\approx ").strip()
        if depth > _MAX_DEPTH or not text:
            return Unread(text)
        known = _read_words(text)
        if known is not None:
            return known
        parts, joints = cut(text, _OR)
        if joints:
            return _join([self.read(part, depth + 1) for part in parts], is_choice=True)
        cases = _CASES.fullmatch(text)
        if cases is not None:
            rows = [row.replace("&", " ").strip(" ,") for row in _ROW.split(cases["rows"]) if row.strip()]
            return _join([self.read(row, depth + 1) for row in rows])
        parts = self._commas(text)
        if len(parts) != 1:
            return _join([self.read(part, depth + 1) for part in parts])
        return self._one(parts[0], depth)

    def _commas(self, text: str) -> list[str]:
        return [part for part in cut(text, _COMMAS)[0] if part]

    def _one(self, text: str, depth: int) -> Shape:
        """Read what is no list."""
        text = _CUP.sub(r" \\cup ", text)
        parts, signs = cut(text, _SIGNS)
        if signs and (signs[0] in ("=", "\\in") or "\\cup" not in text):
            return self._relation(parts, signs, depth)
        sets, joints = cut(text, _UNIONS)
        if joints:
            return self._union(sets, joints, depth)
        if signs:
            return self._relation(parts, signs, depth)
        matrix = _MATRIX.fullmatch(text)
        if matrix is not None:
            return self._matrix(matrix["rows"], depth)
        for reader in (self._bracketed, self._called, self._several):
            shape = reader(text, depth)
            if shape is not None:
                return shape
        return self._atom(text)

    def _relation(self, parts: list[str], signs: list[str], depth: int) -> Shape:
        if signs[0] in ("=", "\\in", "\\approx") and _NAME.fullmatch(parts[0]) and (len(signs) == 1 or signs[0] == "="):
            rest = self._relation(parts[1:], signs[1:], depth) if len(signs) > 1 else self.read(parts[1], depth + 1)
            if signs[0] == "\\in" and isinstance(rest, Group) and rest.opening != "{":
                rest = Union((rest,))
            return rest if isinstance(rest, Unread) else Named(_plain_name(parts[0]), rest)
        sides = [self.read(part, depth + 1) for part in parts]
        if signs == ["="] and _NAME.fullmatch(parts[1]) and isinstance(sides[0], Leaf) and not names_in(sides[0].node):
            return Named(_plain_name(parts[1]), sides[0])  # 2 = x
        if any(isinstance(side, Unread) for side in sides):
            return Unread(" ".join(itertools.chain(*itertools.zip_longest(parts, signs, fillvalue=""))))
        if all(sign in (">", "\\ge") for sign in signs):
            sides, signs = sides[::-1], [_FLIPPED[sign] for sign in reversed(signs)]
        return Relation(tuple(signs), tuple(sides))

    def _union(self, parts: list[str], signs: list[str], depth: int) -> Shape:
        sets = [self.read(part, depth + 1) for part in parts]
        if any(isinstance(part, Unread | Leaf) for part in sets):
            return Unread(" ".join(parts))
        kept = [part for part, sign in zip(sets, ["\\cup", *signs], strict=True) if sign == "\\cup"]
        holes = [part for part, sign in zip(sets, ["\\cup", *signs], strict=True) if sign != "\\cup"]
        return Union(tuple(kept), tuple(holes))

    def _matrix(self, text: str, depth: int) -> Shape:
        rows = [row for row in _ROW.split(text.replace("\\hline", " ")) if row.strip()]
        cells = tuple(tuple(self.read(cell, depth + 1) for cell in row.split("&")) for row in rows)
        if any(isinstance(cell, Unread) for row in cells for cell in row) or len({len(row) for row in cells}) != 1:
            return Unread(text)
        return Matrix(cells)

    def _bracketed(self, text: str, depth: int) -> Shape | None:
        around = enclosing(text)
        if around is None:
            if _TUPLES.search(text) and "," in text:
                return self._row_of_tuples(text, depth)
            return None
        opening, inside, closing = around
        if not inside:
            return Words("no solution") if opening in ("{", "{}", "[") else None
        built = _BUILDER.fullmatch(inside) if opening == "{" else None
        if built is not None:
            return self.read(built["condition"], depth + 1)
        parts = self._commas(inside)
        if opening == "{}":
            return self.read(inside, depth + 1) if len(parts) == 1 else self._group("{", "}", parts, depth)
        if opening == "(" and closing == ")" and len(cut(inside, frozenset({",", ";"}))[0]) == 1:
            return self.read(inside, depth + 1)
        if len(parts) == 1 and (opening, closing) not in (("{", "}"), ("[", "]")):
            return None
        if opening == "(" and "\\pm" in text:
            return self._several(text, depth)
        return self._group(opening, closing, parts, depth)

    def _group(self, opening: str, closing: str, parts: list[str], depth: int) -> Shape:
        items: list[Shape] = []
        for part in parts:
            item = self.read(part, depth + 1)
            if isinstance(item, Group) and item.is_bare:
                items.extend(item.items)
            else:
                items.append(item)
        if any(isinstance(item, Unread) for item in items):
            return Unread(f"{opening} {', '.join(parts)} {closing}")
        if opening == "{" and all(isinstance(item, Named) for item in items):
            return _join(items)
        return Group(opening, closing, tuple(items))

    def _row_of_tuples(self, text: str, depth: int) -> Shape | None:
        items = [self.read(part, depth + 1) for part in _TUPLES.sub(")\0(", text).split("\0")]
        return _join(items) if all(isinstance(item, Group) and item.opening == "(" for item in items) else None

    def _called(self, text: str, depth: int) -> Shape | None:
        """Read what sympy and numpy print as a call."""
        match = _CALL.fullmatch(text)
        if match is None or match["name"] not in _CALLED:
            return None
        name, inside = match["name"], match["inside"]
        if name in _ARRAYS:
            return self.read(inside, depth + 1)
        parts, _ = cut(inside, frozenset({","}))
        if name in _INTERVALS and len(parts) == 2:
            return self._group(_INTERVALS[name][0], _INTERVALS[name][1], parts, depth)
        if name in ("FiniteSet", "set", "frozenset"):
            return self._group("{", "}", parts, depth)
        if name == "Union":
            return self._union(parts, ["\\cup"] * (len(parts) - 1), depth)
        sign = {"Eq": "=", "Ne": "\\ne"}.get(name)
        return self._relation(parts, [sign], depth) if sign and len(parts) == 2 else None

    def _several(self, text: str, depth: int) -> Shape | None:
        """Read an expression with plus-minus signs as all its values."""
        count = text.count("\\pm")
        if not count:
            return None
        if count > _MAX_CHOICES:
            return Unread(text)
        first, *pieces = text.split("\\pm")
        linked = "\\mp" in text
        values = []
        for signs in itertools.product("+-", repeat=1 if linked else count):
            chosen = signs * count if linked else signs
            version = first + "".join(sign + piece for sign, piece in zip(chosen, pieces, strict=True))
            values.append(self.read(version.replace("\\mp", "-" if signs[0] == "+" else "+"), depth + 1))
        return _join(values)

    def _atom(self, text: str) -> Shape:
        infinite = _INFINITY.fullmatch(text)
        if infinite is not None:
            return Infinity(-1 if infinite[1] == "-" else 1)
        if text == "\\Reals":
            return Words("all reals")
        if text == "\\ldots" or _ROMAN.fullmatch(text):
            return Words(text)
        based = _BASED.fullmatch(text.replace('"', "")) if "_" in text else None
        if based is not None and _is_numeral(based[1], int(based[2])):
            return Based(based[1].lstrip("0").upper() or "0", int(based[2]))
        ratio = self._ratio(text)
        if ratio is not None:
            return ratio
        node = self._expression(text)
        if node is not None and '"' not in text:
            return Leaf(text, node)
        return self._quantity(text) or _wordy(text)

    def _ratio(self, text: str) -> Shape | None:
        parts, signs = cut(_TO.sub(":", text), frozenset({":"}))
        nodes = [self._expression(part) for part in parts]
        if not signs or any(node is None for node in nodes):
            return None
        return Ratio(tuple(Leaf(part, node) for part, node in zip(parts, nodes, strict=True) if node is not None))

    def _quantity(self, text: str) -> Quantity | None:
        found = split_unit(text)
        if found is None and "^\\circ" in text:
            found = text.replace("^\\circ", ""), Fraction(1), DEGREES  # inside a fraction, say
        if found is None:
            return None
        value, scale, unit = found
        node = self._expression(value)
        if node is not None and names_in(node) and '"' not in text:
            return None  # a product, or a sentence
        if node is not None:
            return Quantity(Leaf(value, node), scale, unit)
        mixed = _MIXED_UNITS.fullmatch(value)  # 2 hours 30 minutes
        larger = None if mixed is None else self._quantity(mixed[1])
        node = None if mixed is None else self._expression(mixed[2])
        if larger is None or node is None or larger.unit.measures != unit.measures:
            return None
        factor = number(larger.scale * larger.unit.factor / unit.factor)
        return Quantity(Leaf("", Node("add", (Node("multiply", (factor, larger.value.node)), node))), scale, unit)

    def _expression(self, text: str) -> Node | None:
        if "^\\circ" in text and not _TRIGONOMETRY.search(text):
            return None
        try:
            return parse(text)
        except SyntaxProblem:
            return None


def read_quantity(text: str) -> Quantity | None:
    """Read ``3 L`` as three litres where it may as well be 3 times L."""
    return _Reader()._quantity(text) if any(map(str.isalpha, text)) else None


def _read_words(text: str) -> Shape | None:
    """Read times, dates and well-known phrases, which have commas and colons of their own."""
    if is_known_phrase(text):
        return Words(canonical_words(text))
    count = number_word(text)
    if count is not None:
        return Leaf(str(count), number(count))
    clock = clock_time(text)
    if clock is not None:
        return Clock(*clock)
    day = date(text)
    return None if day is None else Date(day)


def _wordy(text: str) -> Shape:
    bare = text.replace('"', " ")
    if "\\" not in bare and _WORDY.search(bare) and not set(bare) & set("=^{}[]<>+*/|"):
        return Words(canonical_words(text))
    return Unread(text)


def _is_numeral(digits: str, base: int) -> bool:
    if not 2 <= base <= 36 or digits.isalpha():
        return False
    try:
        return int(digits, base) >= 0
    except ValueError:
        return False


def _plain_name(text: str) -> str:
    return re.sub(r"[\s{}\"\\]", "", text)


def _parts(item: Shape, is_choice: bool) -> tuple[Shape, ...]:
    """Return the items of a bare list, but keep conditions together that hold together."""
    if not isinstance(item, Group) or not item.is_bare:
        return (item,)
    if is_choice and any(isinstance(part, Relation) for part in item.items):
        return (item,)
    return item.items


def _join(items: list[Shape], is_choice: bool = False) -> Shape:
    """Make a bare list; lists in it are opened, and names are taken out of it.

    ``n = 2, 3`` names all its values; ``x = 1, y = 2`` is one pair named ``(x,y)``.
    """
    flat: list[Shape] = []
    for item in items:
        flat.extend(_parts(item, is_choice))
    unread = next((item for item in flat if isinstance(item, Unread)), None)
    if unread is not None:
        return Unread(" , ".join(item.text if isinstance(item, Unread) else "?" for item in flat))
    if not flat:
        return Unread(",")
    if len(flat) == 1:
        return flat[0]
    named = [item for item in flat if isinstance(item, Named)]
    if named[:1] == flat[:1] and len(named) == 1 and not any(isinstance(item, Relation) for item in flat):
        return Named(named[0].name, _join([named[0].value, *flat[1:]], is_choice))
    if len(named) < len(flat):
        return Group("", "", tuple(flat), is_choice)
    if all(_NUMBERED.fullmatch(item.name) for item in named):  # x_1 and x_2 are two values of x
        named = [Named(item.name[0], item.value) for item in named]
    names = list(dict.fromkeys(item.name for item in named))
    if len(names) == 1:
        return Named(names[0], _join([item.value for item in named], is_choice))
    size = len(names)
    rows = [named[start : start + size] for start in range(0, len(named), size)]
    if any([item.name for item in row] != names for row in rows):
        return Group("", "", tuple(flat), is_choice)
    tuples = [Group("(", ")", tuple(item.value for item in row)) for row in rows]
    return Named(f"({','.join(names)})", tuples[0] if len(tuples) == 1 else Group("", "", tuple(tuples), is_choice))
