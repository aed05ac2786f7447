r"""Brings an answer to one notation, as text: LaTeX's many spellings of one thing become one.

What stands in ``\text{...}`` and its like is kept apart from mathematics: it comes out in double quotes, so that
``10 \text{ m}`` is not ten times m. Dollars around mathematics vanish, dollars before a number become the unit
``"dollars"``.
"""

from __future__ import annotations

import re
from functools import lru_cache

_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau "
    "upsilon phi chi psi omega"
).split()
_UNICODE = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2014", "-"),
        **dict.fromkeys("\u00d7\u00b7\u22c5\u2217", "*"),
        **dict.fromkeys("\u00f7\u2044", "/"),
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
        **dict.fromkeys("\u2032\u2018\u2019", "'"),
        **dict.fromkeys("\u201c\u201d", " "),
        **{"\uff08": "(", "\uff09": ")", "\uff0c": ",", "\uff1b": ";", "\uff1a": ":", "\u00b2": "^2", "\u00b3": "^3"},
        **{"\u221a": "\\sqrt ", "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u2260": "\\ne "},
        **{"\u222a": "\\cup ", "\u2229": "\\cap ", "\u2208": "\\in ", "\u2205": "\\emptyset ", "\u00b1": "\\pm "},
        **{"\u2213": "\\mp ", "\u2248": "\\approx ", "\u2261": "\\equiv ", "\u00b0": "^\\circ ", "\u2026": "\\ldots "},
        **{
            "\u00bd": "\\frac12",
            "\u00bc": "\\frac14",
            "\u00be": "\\frac34",
            "\u20ac": "\\euro ",
            "\u00a3": "\\pounds ",
        },
        **{"\u230a": "\\lfloor ", "\u230b": "\\rfloor ", "\u2308": "\\lceil ", "\u2309": "\\rceil "},
        **{"\u27e8": "\\langle ", "\u27e9": "\\rangle ", "\u211d": "\\mathbb{R}", "\u2124": "\\mathbb{Z}"},
        **{chr(0x3B1 + place): f"\\{name} " for place, name in enumerate(_GREEK)},
    }
)
_TEXT = re.compile(
    r"\\(text|textbf|textit|textrm|textsc|textsf|mbox|mathrm|mathbf|mathit|mathsf|operatorname)\s*\{([^{}]*)\}"
)
_LETTERS = re.compile(r"[A-Za-z]")
_NAMES = frozenset(
    "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan arccot asin acos atan acot asinh acosh atanh arctg tg "
    "ctg ln log lg exp gcd lcm max min pi".split()
)
_NO_UNITS = frozenset("eix")
_SPACES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=[0-9])(?:\{,\}|,\s*\\[!,]|\\[,!])\s*(?=[0-9]{3}(?![0-9]))", ","),
        (r"(?<!\\)\\(?:,|;|:|!|>|\s)|~|\\(?:quad|qquad|thinspace|enspace)(?![A-Za-z])", " "),
    )
)
_REWRITES = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\(?:left|right)\s*\.(?![0-9])", ""),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|rm|bf|it)(?![A-Za-z])", ""),
        (r"\\(?:hspace|phantom|tag|label|color)\s*\{[^{}]*\}", " "),
        (r"\\(?:mathbf|boldsymbol|bm|vec|overrightarrow|mathit|mathsf|widehat|hat|mathcal)\s*\{([^{}]*)\}", r"\1"),
        (r"\\(?:vec|mathbf)\s*(?=[A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\\(?:lvert|rvert|vert|mid(?=\s*[^0-9n]))(?![A-Za-z])|\\\|", "|"),
        (r"\\(?:leqslant|leq)(?![A-Za-z])|<=|=<", r"\\le "),
        (r"\\(?:geqslant|geq)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|\\not\s*=|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"(?<=[A-Za-z])\{\s*\(\s*([^(){}]*?)\s*\)\s*\}", r"(\1)"),
        (r"(?<=\))\s*&\s*(?=\()", ' "and" '),
        (r"(?<=\))\s*\|\s*(?=\()", ' "or" '),
        (r"\\(?:dots|cdots|dotsc|hdots)(?![A-Za-z])|\.\.\.", r"\\ldots "),
        (r"(?<![0-9.])([0-9]*\.[0-9]*?)([0-9])\2{2,}\s*\\ldots\s*$", r"\1\\overline{\2}"),
        (r"(?<=[0-9])\s*\\ldots\s*$", ""),
        (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:lor|vee)(?![A-Za-z])", ' "or" '),
        (r"\\(?:land|wedge)(?![A-Za-z])", ' "and" '),
        (r"\\(?:pmod|bmod|mod)(?![A-Za-z])\s*\{?([^{}]*)\}?|\(mod ([^()]*)\)", r' "mod" \1\2'),
        (r"\\(?:mathbb|mathbf)\s*\{?R\}?", r"\\Reals "),
        (r"\\setminus(?![A-Za-z])|\\backslash(?![A-Za-z])", r"\\setminus "),
        (r"\\%", "%"),
        (r"(?<=[0-9])\s?[xX]\s?(?=10\s?(?:\^|\*\*))", "*"),
        (r"\^\s*\{\s*\\(?:circ|degree)\s*\}|\\degree(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])", r"^\\circ "),
        (r"(?<=[0-9])\s*\^\s*\{?\s*\"?(?:st|nd|rd|th)\"?\s*\}?(?![A-Za-z])|(?<=[0-9])(?:st|nd|rd|th)(?![A-Za-z])", ""),
        (r"\\dot\s*\{?([0-9])\}?", r"\\overline{\1}"),
        (r"\\bar\s*\{([0-9]+)\}", r"\\overline{\1}"),
        (r"\\(?:infin|infinity)(?![A-Za-z])|(?<![A-Za-z\\])(?:oo|inf|infinity|Infinity)(?![A-Za-z])", r"\\infty "),
        (r"(?<=[^A-Za-z\"\\])(and|or|OR)(?=[^A-Za-z\"])", r' "\1" '),
        (r"(?<![0-9./^_{])([0-9]+) ([0-9]+)/([0-9]+)(?![0-9/.^])", r"\1\\frac{\2}{\3}"),
        (r"(?<![0-9.,])([1-9][0-9]{0,2}(?: [0-9]{3})+)(?![0-9 ,])", lambda match: match[1].replace(" ", "")),
    )
)
_CURRENCY = re.compile(
    r"(-?)\s*(\\\$|\$|\\euro|\\pounds)\s*(-?\s*(?:[0-9][0-9.,]*[0-9]|[0-9]))(?:\s*\"?(?:dollars?|USD)\"?)?"
)
_CURRENCIES = {"\\$": "dollars", "$": "dollars", "\\euro": "euros", "\\pounds": "gbp"}
_SPACE = re.compile(r"\s+")
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
_EDGES = re.compile(r"([\s,;:(]*)(.*?)([\s,;:)]*)", re.DOTALL)
_DOLLAR = re.compile(r"(?<!\\)\$")
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]|\$\$")
_LOST_BACKSLASH = re.compile(r"\\\\(?=[A-Za-z])")


@lru_cache(maxsize=1024)
def to_notation(text: str) -> str:
    """Bring an answer to one notation; a space stays, as ``1, 234`` is a list and ``1,234`` a number."""
    text = _unwrap(" ".join(text.replace('"', " ").split()))
    text = text.translate(_UNICODE)
    if "\\" in text or "$" in text or "{,}" in text:
        text = _latex(text)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    return _SPACE.sub(" ", text).strip().rstrip(".,; ") if text.strip(".") else text


def to_plain(notation: str) -> str:
    """Drop what no reader sees from a notation; equal results mean equal answers."""
    return _IDLE_SPACE.sub("", _SPACE.sub(" ", notation.replace('"', " ")).strip())


def _unwrap(text: str) -> str:
    text = text.strip()
    for _ in range(4):
        before = text
        for left, right in _WRAPPERS:
            inner = text[len(left) : -len(right)]
            if text.startswith(left) and text.endswith(right) and inner and left not in inner:
                text = inner.strip()
        text = text.removesuffix(".").strip() if not text.endswith("..") else text
        if text == before:
            break
    return text


def _latex(text: str) -> str:
    if "\\begin" not in text:
        text = _LOST_BACKSLASH.sub(r"\\", text)
    text = _DELIMITER.sub(" ", text)
    for pattern, new in _SPACES:
        text = pattern.sub(new, text)
    for _ in range(4):
        text, count = _TEXT.subn(_quote, text)
        if not count:
            break
    if len(_DOLLAR.findall(text)) % 2 == 0:
        text = _DOLLAR.sub(" ", text)
    text = _CURRENCY.sub(lambda match: f'{match[1]}{match[3]} "{_CURRENCIES[match[2]]}"', text)
    return _DOLLAR.sub(" ", text.replace("\\$", " "))


def _quote(match: re.Match[str]) -> str:
    content = match[2].replace("~", " ").replace('"', " ")
    word = content.strip()
    before = match.string[: match.start()].rstrip()
    if not _LETTERS.search(word):
        return content
    if word[0] in ",;:(" or word[-1] in ",;:)":
        left, word, right = _EDGES.fullmatch(word).groups()  # type: ignore[union-attr]
        return f" {left} \\text{{{word}}} {right} "
    if word in _NAMES:
        return f"\\{word} "
    if "," in word:
        return f" {content} "
    if len(word) == 1 and (word in _NO_UNITS or before[-1:] not in tuple("0123456789})")):
        return f" {word} "
    if "\\" in word or "^" in word or "$" in word:
        return f" {content} "
    return f' "{word}" '
