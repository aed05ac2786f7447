r"""Reads an answer such as ``3/4``, ``2\sqrt{3}`` or ``\frac{1}{2^{99}}`` into an exact number.

A small recursive-descent parser over LaTeX and plain notation; no text is ever given to Python's own parser
or evaluator. Precedence, from weak to strong: ``+ -``, then ``* /`` and a product without a sign (left to
right), sign, power (right to left). An integer directly before ``\frac`` of two integers is a mixed number
(``1\frac{1}{2}`` is 3/2). Brace-free arguments take one digit (``\frac12``), as in TeX.
"""

from __future__ import annotations

import re
from fractions import Fraction

from trace_gym.envs.math.grading.exact import Exact, TooLargeError, UnsupportedError, root

MAX_CHARACTERS = 512
MAX_NESTING = 40
_MAX_WORK = 1500  # term products of one expression, see Exact

_TOKEN = re.compile(
    r"(?P<number>[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
    r"|\.[0-9]+)"
    r"|(?P<name>\\?[A-Za-z]+)"
    r"|(?P<sign>\*\*|[-+*/^(){}\[\]!])"
    r"|(?P<space>\s+)"
)
_PRODUCT = {"*", "/", "\\cdot", "\\times", "\\div"}
_FUNCTIONS = frozenset(
    "e i exp log ln lg sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh infty binom".split()
)
_OPEN = {"(": ")", "{": "}", "[": "]"}


class SyntaxProblem(ValueError):
    """The text is not an expression of this grammar."""


def parse_exact(text: str) -> Exact:
    """Return the exact value of an expression.

    Raises:
        SyntaxProblem: If the text is no expression, or has free variables.
        UnsupportedError: If it is an expression of a kind that is not held exactly.
        TooLargeError: If the text or a value in it is beyond the caps.
    """
    if len(text) > MAX_CHARACTERS:
        raise TooLargeError(f"more than {MAX_CHARACTERS} characters")
    parser = _Parser(_tokens(text))
    value = parser.sum()
    parser.finish()
    return value


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, place = [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise SyntaxProblem(f"unexpected {text[place]!r}")
        place = match.end()
        kind = match.lastgroup or ""
        if kind != "space":
            tokens.append((kind, "^" if match[0] == "**" else match[0]))
    if any(kind == "name" and not _known(word) for kind, word in tokens):
        raise SyntaxProblem("words or variables")
    return tokens


def _known(word: str) -> bool:
    bare = word.removeprefix("\\")
    return word in _PRODUCT or bare in {"frac", "sqrt", "pi"} or bare in _FUNCTIONS


class _Parser:
    """Recursive descent; every method consumes tokens from the front."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        self._work = 0

    def finish(self) -> None:
        if self._place < len(self._tokens):
            raise SyntaxProblem(f"unexpected {self._peek()!r}")

    def sum(self) -> Exact:
        total = self._product()
        while self._peek() in ("+", "-"):
            negative = self._next() == "-"
            term = self._product()
            total = total + (-term if negative else term)
        return total

    def _product(self) -> Exact:
        value = self._signed()
        while True:
            token = self._peek()
            if token in _PRODUCT:
                self._next()
                factor = self._signed()
                value = self._times(value, factor, token in ("/", "\\div"))
            elif token in ("(", "{") or self._kind() == "name":
                value = self._times(value, self._power(), False)
            else:
                return value

    def _times(self, left: Exact, right: Exact, divide: bool) -> Exact:
        self._spend(len(left.terms) * len(right.terms) * (16 if divide else 1))
        return left * (right.inverse() if divide else right)

    def _signed(self) -> Exact:
        if self._peek() not in ("+", "-"):
            return self._power()
        negative = self._next() == "-"
        self._enter()
        value = self._signed()
        self._depth -= 1
        return -value if negative else value

    def _power(self) -> Exact:
        base = self._atom()
        if self._peek() == "!":
            raise UnsupportedError("a factorial")
        if self._peek() != "^":
            return base
        self._next()
        self._enter()
        if self._peek() == "{":
            exponent = self._group()
        elif self._kind() == "name" and self._peek() == "\\circ":
            raise UnsupportedError("degrees")
        else:
            exponent = self._signed()
        self._depth -= 1
        value = exponent.rational
        if value is None:
            raise UnsupportedError("an irrational exponent")
        self._spend(8 * len(base.terms) ** 2 * (1 if len(base.terms) == 1 else 8))
        return base.power(value)

    def _atom(self) -> Exact:
        token = self._peek()
        if token in _OPEN and token != "[":
            return self._group()
        if self._kind() == "number":
            return self._number()
        if self._kind() == "name":
            return self._named(self._next())
        raise SyntaxProblem(f"expected a number, found {token or 'the end'!r}")

    def _number(self) -> Exact:
        whole = self._next()
        if whole.isdigit() and self._peek() == "\\frac":
            return self._mixed(Fraction(whole))
        if self._kind() == "number":
            raise SyntaxProblem("two numbers in a row")
        return Exact.of(Fraction(whole.replace(",", "")))

    def _mixed(self, whole: Fraction) -> Exact:
        self._next()
        start = self._place
        part = self._fraction()
        used = self._tokens[start : self._place]
        plain = all(kind == "number" or word in "{}" for kind, word in used)
        value = part.rational
        if plain and value is not None and 0 < value < 1:
            return Exact.of(whole + value)
        return self._times(Exact.of(whole), part, False)

    def _named(self, word: str) -> Exact:
        name = word.removeprefix("\\")
        if name == "pi":
            return Exact.pi()
        if name == "frac":
            return self._fraction()
        if name == "sqrt":
            return self._root(word)
        if name in _FUNCTIONS:
            raise UnsupportedError(f"{name} needs symbolic comparison")
        raise SyntaxProblem(f"unexpected {name!r}")

    def _fraction(self) -> Exact:
        top = self._argument()
        return self._times(top, self._argument(), True)

    def _root(self, word: str) -> Exact:
        index = Exact.of(2)
        if self._peek() == "[":
            index = self._group()
        inside = (self._argument() if word.startswith("\\") else self._atom()).rational
        count = index.rational
        if inside is None or count is None or count.denominator != 1:
            raise UnsupportedError("a nested root")
        self._spend(20)
        return root(inside, int(count))

    def _argument(self) -> Exact:
        """Read a group, or one digit, or one name, as TeX does."""
        if self._kind() == "number":
            digits = self._next()
            if len(digits) > 1:
                self._place -= 1
                self._tokens[self._place] = ("number", digits[1:])
            return Exact.of(Fraction(digits[0])) if digits[0].isdigit() else self._number()
        self._enter()
        value = self._atom()
        self._depth -= 1
        return value

    def _group(self) -> Exact:
        close = _OPEN[self._next()]
        self._enter()
        value = self.sum()
        self._depth -= 1
        if self._next() != close:
            raise SyntaxProblem(f"expected {close!r}")
        return value

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise TooLargeError(f"more than {MAX_NESTING} levels of nesting")

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > _MAX_WORK:
            raise TooLargeError("too many operations")

    def _peek(self) -> str:
        return self._tokens[self._place][1] if self._place < len(self._tokens) else ""

    def _kind(self) -> str:
        return self._tokens[self._place][0] if self._place < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._place += 1
        return token
