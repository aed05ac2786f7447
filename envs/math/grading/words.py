"""Answers in words: synonyms, clock times, dates, and which letter of a multiple choice is meant."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ALIKE = {
    "no solution": (
        "no solution,no solutions,no real solution,no real solutions,there is no solution,there are no solutions,none,"
        "empty set,the empty set,null set,no such number exists,no such numbers exist,emptyset,set(),s.emptyset,"
        "no integer solutions,no value,no values,no real roots"
    ),
    "undefined": "undefined,does not exist,doesn't exist,dne,nonexistent,not defined,limit does not exist",
    "all reals": (
        "all real numbers,all reals,the set of all real numbers,every real number,any real number,reals,all x"
    ),
    "infinite": "infinite,infinitely many,infinity,infinitely many solutions,an infinite number",
    "true": "true,yes",
    "false": "false,no",
}
_CANONICAL = {text: name for name, texts in _ALIKE.items() for text in texts.split(",")}
_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty".split()
)
_MONTHS = "january february march april may june july august september october november december".split()
_CLOCK = re.compile(
    r"(?P<hour>[0-9]{1,2})(?:\s*:\s*(?P<minute>[0-5][0-9])(?:\s*:\s*(?P<second>[0-5][0-9]))?)?\s*\(?(?P<half>[ap]\.?\s?m\.?)?\)?"
)
_ARTICLE = re.compile(r"^(?:the|an?) (?=[a-z]{2})")
_EDGE = re.compile(r"^[\s.,;:!'\"]+|[\s.,;:!'\"]+$")
_DATE_PIECE = re.compile(r"[a-z]+|[0-9]+")
_LETTER = re.compile(r"\(?\s*(?P<letter>[A-Za-z])\s*(?:[).:](?P<more>.*))?", re.DOTALL)
_CALLED = re.compile(r"(?:the )?(?:correct |final )?(?:option|answer|choice)(?: is)?:? *", re.IGNORECASE)
LETTERS = "ABCDEFGHIJKLMNOPQRST"


def canonical_words(notation: str) -> str:
    """Return words in lower case without article and punctuation; synonyms come out equal."""
    text = " ".join(notation.replace('"', " ").replace("\\", "").lower().split())
    text = _ARTICLE.sub("", _EDGE.sub("", text))
    return _CANONICAL.get(text, text)


def is_known_phrase(notation: str) -> bool:
    """Whether the words are among the synonyms this module knows, such as ``no solution``."""
    return canonical_words(notation) in _ALIKE


def number_word(notation: str) -> int | None:
    """Return the number that a word from ``zero`` to ``twenty`` names."""
    word = canonical_words(notation)
    return _NUMBERS.index(word) if word in _NUMBERS else None


def clock_time(notation: str) -> tuple[int, str] | None:
    """Read a time such as ``5:30 p.m.``.

    Returns:
        The second of the day, and ``am``, ``pm``, ``24`` (after 12) or nothing.
    """
    text = " ".join(notation.replace('"', " ").lower().split())
    match = _CLOCK.fullmatch({"noon": "12:00 pm", "midnight": "12:00 am"}.get(text, text))
    if match is None or not (match["minute"] or match["half"]):
        return None
    hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
    half = (match["half"] or "").replace(".", "").replace(" ", "")
    if hour > (12 if half else 24):
        return None
    if half:
        hour = hour % 12 + (12 if half == "pm" else 0)
    return (hour * 60 + minute) * 60 + second, half or ("24" if hour > 12 else "")


def date(notation: str) -> tuple[str, ...] | None:
    """Return the parts of a date that names its month, in one order."""
    text = notation.replace('"', " ").lower()
    pieces = _DATE_PIECE.findall(text)
    months = [piece for piece in pieces if len(piece) >= 3 and any(month.startswith(piece) for month in _MONTHS)]
    rest = [piece.lstrip("0") for piece in pieces if piece not in (*months, "st", "nd", "rd", "th", "of")]
    if len(months) != 1 or not rest or not all(piece.isdigit() for piece in rest):
        return None
    month = next(month for month in _MONTHS if month.startswith(months[0]))
    return (month, *sorted(rest))


def letter_of(text: str) -> tuple[str, str] | None:
    """Read ``B``, ``(B)``, ``B.``, ``option B`` or ``B: both``; return the letter and what follows it."""
    text = text.replace('"', " ").strip().strip("*").strip()
    called = _CALLED.match(text)
    bare = text[called.end() :].strip() if called else text
    match = _LETTER.fullmatch(bare)
    if match is None or (match["letter"].islower() and not (called or "(" in bare)):
        return None
    return match["letter"].upper(), (match["more"] or "").strip()


def choose(text: str, options: Sequence[str]) -> int | None:
    """Return which option a text names by its letter, or None; see also the option's own text."""
    letter = letter_of(text)
    if letter is None and len(text.strip()) == 1:
        letter = letter_of(text.strip().upper())
    if letter is None or letter[0] not in LETTERS[: len(options)]:
        return None
    return LETTERS.index(letter[0])
