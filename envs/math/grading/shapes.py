"""What an answer can be, as frozen values: the shapes that `reading` makes of a text and `compare` compares."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from trace_gym.envs.math.grading.judge import Leaf
from trace_gym.envs.math.grading.units import Unit


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of something; ``scale`` is the factor of a word such as million."""

    value: Leaf
    scale: Fraction
    unit: Unit


@dataclass(frozen=True, slots=True)
class Group:
    """Several things: ``(1, 2)``, ``[1, 2)``, ``{1, 2}``; a bare list has no brackets.

    Attributes:
        opening: ``(``, ``[``, ``{``, ``<`` or nothing.
        closing: Its counterpart.
        items: The parts, in the order written.
        is_choice: Whether a bare list is joined by "or".
    """

    opening: str
    closing: str
    items: tuple[Shape, ...]
    is_choice: bool = False

    @property
    def is_bare(self) -> bool:
        """Whether it has no brackets."""
        return not self.opening

    @property
    def is_set(self) -> bool:
        """Whether neither order nor repetition matters."""
        return self.opening == "{" or self.is_choice


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of equal length."""

    rows: tuple[tuple[Shape, ...], ...]


@dataclass(frozen=True, slots=True)
class Infinity:
    """Plus or minus infinity."""

    sign: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """``3 : 2`` and longer ones."""

    items: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class Based:
    """Digits in a base, ``52_8``."""

    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Clock:
    """A time of day, in seconds, and which half of the day was said: ``am``, ``pm``, ``24`` (after noon) or nothing."""

    seconds: int
    half: str


@dataclass(frozen=True, slots=True)
class Date:
    """A date that names its month."""

    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Words:
    """An answer in words, in canonical form."""

    text: str


@dataclass(frozen=True, slots=True)
class Named:
    """A value with a name: ``x = 3``, ``f(x) = x^2``, ``(x, y) = (1, 2)``, ``x in [0, 1]``."""

    name: str
    value: Shape


@dataclass(frozen=True, slots=True)
class Relation:
    """``a < b <= c``: sides and the signs between them."""

    signs: tuple[str, ...]
    sides: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """A union of sets, without the points in ``holes``."""

    parts: tuple[Shape, ...]
    holes: tuple[Shape, ...] = ()


@dataclass(frozen=True, slots=True)
class Unread:
    """What this grader does not read; another may."""

    text: str


Value = Leaf | Quantity | Infinity | Ratio | Based | Clock | Date | Words
Shape = Value | Group | Matrix | Named | Relation | Union | Unread
