r"""Reads an expression such as ``3/4``, ``2\sqrt{3}``, ``-1 + exp(16)`` or ``\sin^2 x`` into a tree.

A recursive-descent parser over LaTeX, plain notation and what Python and sympy print; no text is ever given to
Python's own parser or evaluator, and nothing is guessed: a text is read to its end or refused. Precedence, from
weak to strong: ``+ -``, then ``* /`` and a product without a sign (left to right), sign, power (right to left).
An integer directly before ``\frac`` of two integers is a mixed number (``1\frac{1}{2}`` is 3/2). Brace-free
arguments take one digit (``\frac12``), as in TeX, but ``2^10`` is 1024. A function without parentheses takes the
product that follows, up to a sign or the next function (``\sin 2x \cos x``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from trace_gym.envs.math.grading.tokens import COMMANDS, FUNCTIONS, SyntaxProblem, Token, tokenize

MAX_CHARACTERS = 512
MAX_NESTING = 40
_MAX_ARGUMENTS = 3
CONSTANTS = ("pi", "e", "i")
BOUND = "#"  # begins the names of the variables that sums and products run over
_CLOSING = {"(": ")", "{": "}", "[": "]", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_BRACKET_CALLS = {"\\lfloor": "floor", "\\lceil": "ceiling"}
_TIMES = frozenset({"*", "\\cdot", "\\times", "\\ast"})
_DIVIDE = frozenset({"/", "\\div"})
_INVERSES = {name: f"a{name}" for name in ("sin", "cos", "tan", "cot", "sinh", "cosh", "tanh")}


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an expression.

    Attributes:
        head: ``number``, ``symbol``, ``constant`` (pi, e, i), ``add``, ``multiply``, ``negate``, ``invert`` (1/x),
            ``power``, ``root`` (radicand, index), ``degrees``, ``call``, ``sum`` or ``prod`` (from, to, of what).
        args: What it is made of.
        name: Of a symbol, a constant, a called function or a bound variable; a function that is not known is
            called ``apply f``, a sequence ``apply a_``.
        value: Of a number.
    """

    head: str
    args: tuple[Node, ...] = ()
    name: str = ""
    value: Fraction = Fraction(0)


def number(value: Fraction | int) -> Node:
    """Return a number as a node."""
    return Node("number", value=Fraction(value))


def rename(node: Node, names: Mapping[str, Node]) -> Node:
    """Put other nodes in the place of symbols."""
    if node.head in ("symbol", "constant"):
        return names.get(node.name, node)
    if not node.args:
        return node
    return Node(node.head, tuple(rename(part, names) for part in node.args), node.name, node.value)


def parse(text: str) -> Node:
    """Read an expression in the notation of `trace_gym.envs.math.grading.notation`.

    Raises:
        SyntaxProblem: If the text is no expression, or beyond the cap of nesting.
    """
    parser = _Parser(tokenize(text))
    node = parser.sum()
    parser.finish()
    return node


class _Parser:
    """Recursive descent; every method consumes tokens from the front."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        self._bars = 0

    def finish(self) -> None:
        if self._place < len(self._tokens):
            raise SyntaxProblem(f"unexpected {self._peek()!r}")

    def sum(self) -> Node:
        terms = [self._product()]
        while self._peek() in ("+", "-"):
            negative = self._next() == "-"
            term = self._product()
            terms.append(Node("negate", (term,)) if negative else term)
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def _product(self) -> Node:
        factors = [self._signed()]
        while True:
            token = self._peek()
            if token in _TIMES:
                self._next()
                factors.append(self._signed())
            elif token in _DIVIDE:
                self._next()
                factors.append(Node("invert", (self._signed(),)))
            elif self._starts_factor():
                factors.append(self._power())
            else:
                return factors[0] if len(factors) == 1 else Node("multiply", tuple(factors))

    def _starts_factor(self) -> bool:
        kind, token = self._kind(), self._peek()
        if kind == "name" or token in ("(", "{", "[") or token in _BRACKET_CALLS:
            return True
        return (token == "|" and not self._bars) or self._is_early_number()

    def _is_early_number(self) -> bool:
        """Whether a number follows what is not a number, as in ``x 2``; two numbers in a row are no product."""
        return self._kind() == "number" and self._place > 0 and self._tokens[self._place - 1].kind != "number"

    def _signed(self) -> Node:
        if self._peek() not in ("+", "-"):
            return self._power()
        negative = self._next() == "-"
        self._enter()
        node = self._signed()
        self._depth -= 1
        return Node("negate", (node,)) if negative else node

    def _power(self) -> Node:
        base = self._postfixed(self._atom())
        if self._peek() != "^":
            return base
        self._next()
        if self._is_degree():
            base = Node("degrees", (base,))
            return self._raised(base) if self._peek() == "^" else base
        return self._raise(base)

    def _raised(self, base: Node) -> Node:
        self._next()
        return self._raise(base)

    def _raise(self, base: Node) -> Node:
        self._enter()
        exponent = self._group() if self._peek() == "{" else self._signed()
        self._depth -= 1
        return self._postfixed(Node("power", (base, exponent)))

    def _is_degree(self) -> bool:
        """Consume the sign of degrees if it is next."""
        words = [token.text for token in self._tokens[self._place : self._place + 3]]
        size = 1 if words[:1] == ["\\circ"] else 3 if words == ["{", "\\circ", "}"] else 0
        self._place += size
        return size > 0

    def _postfixed(self, node: Node) -> Node:
        for _ in range(2):
            if self._peek() == "!":
                self._next()
                double = self._peek() == "!"
                if double:
                    self._next()
                node = Node("call", (node,), "factorial2" if double else "factorial")
        if self._peek() == "!":
            raise SyntaxProblem("too many factorials")
        return node

    def _atom(self) -> Node:
        token = self._peek()
        if token in _BRACKET_CALLS:
            return Node("call", (self._group(),), _BRACKET_CALLS[token])
        if token in _CLOSING:
            return self._group()
        if token == "|":
            return self._absolute()
        if self._kind() == "number":
            return self._number()
        if self._kind() == "name":
            return self._named(self._next())
        raise SyntaxProblem(f"expected a number, found {token or 'the end'!r}")

    def _absolute(self) -> Node:
        self._next()
        self._enter()
        self._bars += 1
        node = self.sum()
        self._bars -= 1
        self._depth -= 1
        if self._next() != "|":
            raise SyntaxProblem("expected '|'")
        return Node("call", (node,), "abs")

    def _number(self) -> Node:
        token = self._tokens[self._place]
        self._place += 1
        if token.text.isdigit() and self._peek() == "\\frac":
            return self._mixed(Fraction(token.text))
        if self._kind() == "number":
            raise SyntaxProblem("two numbers in a row")
        return number(token.value)

    def _mixed(self, whole: Fraction) -> Node:
        self._next()
        start = self._place
        part = self._fraction()
        used = self._tokens[start : self._place]
        if all(token.text.isdigit() or token.text in "{}" for token in used) and len(part.args) == 2:
            top, bottom = part.args[0].value, part.args[1].args[0].value
            if 0 < top < bottom:
                return number(whole + top / bottom)
        return Node("multiply", (number(whole), part))

    def _named(self, word: str) -> Node:
        if word == "\\frac":
            return self._fraction()
        if word == "\\sqrt":
            return self._root()
        if word == "\\binom":
            return Node("call", (self._argument(), self._argument()), "binomial")
        if word in ("\\sum", "\\prod"):
            return self._repeated(word[1:])
        if word in CONSTANTS:
            return Node("constant", name=word)
        if word in FUNCTIONS:
            return self._function(word)
        if word in COMMANDS:
            raise SyntaxProblem(f"unexpected {word!r}")
        return self._symbol(word)

    def _symbol(self, word: str) -> Node:
        if self._peek() == "_":
            self._next()
            index = self._raw_argument()
            place = _index(index)
            if place is not None:
                return Node("call", (place,), f"apply {word}_")
            word += "_" + index
        while self._peek() == "'":
            self._next()
            word += "'"
        if word[0] in "fgh" and word[1:2] in ("", "_", "'") and self._peek() == "(":
            return Node("call", tuple(self._arguments()), "apply " + word)
        return Node("symbol", name=word)

    def _raw_argument(self) -> str:
        """Return the text of a subscript."""
        if self._peek() != "{":
            return self._next()
        depth, words = 0, list[str]()
        while True:
            word = self._next()
            if not word:
                raise SyntaxProblem("expected '}'")
            depth += (word == "{") - (word == "}")
            if depth == 0:
                return "".join(words)
            if word != "{" or depth > 1:
                words.append(word)

    def _repeated(self, head: str) -> Node:
        """Read the bounds of a sum or product, and the term behind it."""
        self._expect("_", "{")
        bound = self._next()
        self._expect("=")
        self._enter()
        low = self.sum()
        self._expect("}", "^")
        high = self._argument()
        body = self._product()
        name = f"{BOUND}{self._depth}"
        self._depth -= 1
        return Node(head, (low, high, rename(body, {bound: Node("symbol", name=name)})), name)

    def _expect(self, *signs: str) -> None:
        for sign in signs:
            if self._next() != sign:
                raise SyntaxProblem(f"expected {sign!r}")

    def _fraction(self) -> Node:
        top = self._argument()
        return Node("multiply", (top, Node("invert", (self._argument(),))))

    def _root(self) -> Node:
        index = number(2)
        if self._peek() == "[":
            index = self._group()
        return Node("root", (self._argument(), index))

    def _function(self, name: str) -> Node:
        base: Node | None = None
        exponent: Node | None = None
        for _ in range(2):
            if self._peek() == "_" and name == "log":
                self._next()
                base = self._argument()
            elif self._peek() == "^":
                self._next()
                exponent = self._argument() if self._peek() != "-" else self._signed()
        inverse = exponent is not None and exponent == Node("negate", (number(1),))
        if inverse and name in _INVERSES:
            name, exponent = _INVERSES[name], None
        arguments = self._arguments() if self._peek() == "(" else [self._juxtaposed()]
        if base is not None:
            arguments.append(base)
        node = _call(name, arguments)
        return node if exponent is None else Node("power", (node, exponent))

    def _arguments(self) -> list[Node]:
        """Read ``(a, b)``."""
        self._next()
        self._enter()
        found = [self.sum()]
        while self._peek() == "," and len(found) < _MAX_ARGUMENTS:
            self._next()
            found.append(self.sum())
        self._depth -= 1
        if self._next() != ")":
            raise SyntaxProblem("expected ')'")
        return found

    def _juxtaposed(self) -> Node:
        """Read the argument of a function without parentheses."""
        self._enter()
        if self._peek() in ("+", "-"):
            factors = [self._signed()]
        else:
            grouped = self._peek() in _CLOSING
            factors = [self._power()]
            while not grouped and self._starts_factor() and self._peek() not in FUNCTIONS | _CLOSING.keys():
                factors.append(self._power())
        self._depth -= 1
        return factors[0] if len(factors) == 1 else Node("multiply", tuple(factors))

    def _argument(self) -> Node:
        """Read a group, or one digit, or one name, as TeX does."""
        if self._kind() == "number":
            token = self._tokens[self._place]
            if token.text.isdigit() and len(token.text) > 1:
                rest = token.text[1:]
                self._tokens[self._place] = Token("number", rest, Fraction(rest))
                return number(Fraction(token.text[0]))
            self._place += 1
            return number(token.value)
        self._enter()
        node = self._atom()
        self._depth -= 1
        return node

    def _group(self) -> Node:
        close = _CLOSING[self._next()]
        self._enter()
        node = self.sum()
        self._depth -= 1
        if self._next() != close:
            raise SyntaxProblem(f"expected {close!r}")
        return node

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise SyntaxProblem(f"more than {MAX_NESTING} levels of nesting")

    def _peek(self) -> str:
        return self._tokens[self._place].text if self._place < len(self._tokens) else ""

    def _kind(self) -> str:
        return self._tokens[self._place].kind if self._place < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self._place += 1
        return token


def _index(text: str) -> Node | None:
    """Read an index with letters, as in ``a_{n+1}``."""
    if not any(map(str.isalpha, text)):
        return None
    try:
        return parse(text)
    except SyntaxProblem:
        return None


def _call(name: str, arguments: list[Node]) -> Node:
    """Build a call; what is arithmetic in the clothes of a function becomes arithmetic."""
    allowed = FUNCTIONS[name]
    if len(arguments) not in allowed:
        raise SyntaxProblem(f"{name} with {len(arguments)} arguments")
    first = arguments[0]
    if name == "exp":
        return Node("power", (Node("constant", name="e"), first))
    if name in ("sqrt", "cbrt"):
        return Node("root", (first, number(2 if name == "sqrt" else 3)))
    if name == "rational":
        return Node("multiply", (first, Node("invert", (arguments[1],))))
    return Node("call", tuple(arguments), name)
