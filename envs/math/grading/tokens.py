r"""Cuts an expression into tokens: numbers, names, signs.

Names are brought to one spelling here: ``\pi``, ``pi`` and ``Pi`` are one name, so are ``\arcsin``, ``arcsin`` and
``asin``. A run of letters that is no name is a product of letters if it is short, and not mathematics otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LETTERS = 3  # of a run that is read as a product
_MAX_DIGITS = 4000  # of a number; Python itself refuses to read more than 4300


class SyntaxProblem(ValueError):
    """The text is not an expression of this grammar."""


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of an expression.

    Attributes:
        kind: ``number``, ``name`` or ``sign``.
        text: Its spelling; of a name, the one all spellings share.
        value: Of a number.
    """

    kind: str
    text: str
    value: Fraction = Fraction(0)


FUNCTIONS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys("sin cos tan cot sec csc asin acos atan acot asec acsc".split(), (1,)),
    **dict.fromkeys("sinh cosh tanh coth asinh acosh atanh exp ln lg sqrt cbrt".split(), (1,)),
    **dict.fromkeys("abs floor ceiling factorial factorial2".split(), (1,)),
    **{"log": (1, 2), "binomial": (2,), "rational": (2,)},
    **dict.fromkeys(("gcd", "lcm", "max", "min"), (2, 3)),
}
"""How many arguments each function takes."""

_SPELLINGS = {
    **dict(zip(FUNCTIONS, FUNCTIONS, strict=True)),
    **{f"arc{name}": f"a{name}" for name in "sin cos tan cot sec csc sinh cosh tanh".split()},
    **{f"ar{name}": f"a{name}" for name in ("sinh", "cosh", "tanh")},
    **{"tg": "tan", "ctg": "cot", "cosec": "csc", "arctg": "atan", "arcctg": "acot", "log10": "lg"},
    **{"Abs": "abs", "ceil": "ceiling", "Rational": "rational", "Max": "max", "Min": "min"},
    **{"pi": "pi", "Pi": "pi", "PI": "pi", "e": "e", "i": "i", "imath": "i"},
}
_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar".split()
)
_SAME_GREEK = {"varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta"}
COMMANDS = frozenset(
    r"\frac \sqrt \binom \sum \prod \cdot \times \ast \div \circ \lfloor \rfloor \lceil \rceil".split()
)
_SIGNS = frozenset(r"\cdot \times \ast \div \circ \lfloor \rfloor \lceil \rceil".split())

_PIECE = re.compile(
    r"(?P<repeating>(?P<stem>[0-9]*\.[0-9]*)\\overline\{(?P<cycle>[0-9]{1,40})\})"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?)"
    r"|(?P<name>log(?:2|10)(?=\()|\\?[A-Za-z]+)"
    r"|(?P<sign>\*\*|[-+*/^(){}\[\]!|_',=])"
    r"|(?P<space>\s+)"
)


def tokenize(text: str) -> list[Token]:
    """Cut a text into tokens.

    Raises:
        SyntaxProblem: If there is anything else in it.
    """
    tokens: list[Token] = []
    place = 0
    while place < len(text):
        match = _PIECE.match(text, place)
        if match is None:
            raise SyntaxProblem(f"unexpected {text[place]!r}")
        kind, piece = match.lastgroup, match[0]
        if match["repeating"]:
            tokens.append(Token("number", piece, _repeating(match["stem"], match["cycle"])))
        elif kind == "number" and len(piece) > _MAX_DIGITS:
            raise SyntaxProblem("a number of too many digits")
        elif kind == "number":
            tokens.append(Token("number", piece, Fraction(piece)))
        elif kind == "name":
            tokens.extend(_names(piece))
        elif kind == "sign":
            tokens.append(Token("sign", "^" if piece == "**" else piece))
        place += len(piece)
    return tokens


def _repeating(stem: str, cycle: str) -> Fraction:
    places = len(stem) - stem.index(".") - 1
    return Fraction(stem + "0") + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10**places)


def _names(piece: str) -> list[Token]:
    if piece.startswith("\\"):
        return [_command(piece)]
    if piece == "log2":
        return [Token("name", "log"), Token("sign", "_"), Token("number", "2", Fraction(2))]
    known = _known(piece)
    if known is not None:
        return [known]
    for size in range(len(piece) - 1, 1, -1):  # sinx, xsin
        for head, tail in ((piece[:size], piece[size:]), (piece[-size:], piece[:-size])):
            if head in FUNCTIONS and len(tail) <= MAX_LETTERS:
                function, letters = Token("name", head), [_letter(letter) for letter in tail]
                return [function, *letters] if head == piece[:size] else [*letters, function]
    if len(piece) > MAX_LETTERS:
        raise SyntaxProblem(f"the word {piece!r}")
    return [_letter(letter) for letter in piece]


def _known(word: str) -> Token | None:
    if word in _SPELLINGS:
        return Token("name", _SPELLINGS[word])
    return Token("name", _SAME_GREEK.get(word, word)) if word in _GREEK else None


def _letter(letter: str) -> Token:
    return Token("name", letter)


def _command(piece: str) -> Token:
    if piece in _SIGNS:
        return Token("sign", piece)
    if piece in COMMANDS:
        return Token("name", piece)
    if piece[1:] in _GREEK:
        return Token("name", _SAME_GREEK.get(piece[1:], piece[1:]))
    known = _known(piece[1:])
    if known is None or len(piece) == 2:
        raise SyntaxProblem(f"the command {piece}")
    return known
