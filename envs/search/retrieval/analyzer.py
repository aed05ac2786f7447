"""Text to index terms, as Anserini's DefaultEnglishAnalyzer makes them, without Java.

Lucene's StandardTokenizer (word breaks of Unicode Standard Annex #29), possessive ``'s`` off, lower case, stop words
out, Porter stemmer with Martin's two departures. Every character is mapped to a one-letter class first, so that the
tokenizer is a regular expression over ASCII; the classes were checked against Lucene code point by code point.
Left out: characters that came after Unicode 12.1 (Lucene separates at them) and keycaps of ``#`` and ``*``.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator

from trace_gym.errors import require

ANALYZER_VERSION = "anserini-english-1"  # of every index; raised with every change of a term

MAX_TOKEN_CHARS = 255
_MAX_CACHED = 500_000

_STOP_WORDS = frozenset(
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with".split()
)

# Classes: a letter, h Hebrew letter, k Katakana, i one token by itself (Han, Hiragana), s Thai and its kin (runs apart
# from letters), t marks of those scripts, e pictograph, m skin tone, r regional indicator, z zero-width joiner, x other
# mark (belongs to the character before), 1 digit, _ connector. Joiners: ' . (between letters or digits) : (letters)
# , (digits) " (Hebrew letters).
_RANGES = {
    "h": "5d0-5ea 5ef-5f2 fb1d fb1f-fb28 fb2a-fb4f",
    "i": "2e80-2fd5 3005 3007 3021-3029 3038-303b 3041-3096 309d-309f 3400-4db5 4e00-9fef f900-fad9 1b001-1b11e "
    "1b150-1b152 1f200 20000-2fa1d",
    "k": "3031-3035 309b-309c 30a0-30fa 30fc-30ff 31f0-31ff 32d0-32fe 3300-3357 ff66-ff9d 1b000 1b164-1b167",
    "s": "e01-e30 e32-e33 e40-e46 e81-eb0 eb2-eb3 ebd-ec6 edc-edf 1000-102a 103f 1050-1055 105a-105d 1061 1065-1066 "
    "106e-1070 1075-1081 108e 109e-109f 1780-17b3 17d7 17dc 1950-19c9 19da-19df 1a20-1a54 1aa0-1aad a9e0-a9e4 "
    "a9e6-a9ef a9fa-a9fe aa60-aa7a aa7e-aaaf aab1 aab5-aab6 aab9-aabd aac0 aac2-aadf 11700-1171a 1173a-1173b 1173f",
    "t": "e31 e34-e3a e47-e4e eb1 eb4-ebc ec8-ecd 102b-103e 1056-1059 105e-1060 1062-1064 1067-106d 1071-1074 "
    "1082-108d 108f 109a-109d 17b4-17d3 17dd 1a55-1a7c a9e5 aa7b-aa7d aab0 aab2-aab4 aab7-aab8 aabe-aabf aac1 "
    "1171d-1172b",
    "m": "1f3fb-1f3ff",
    "e": "a9 ae 203c 2049 2122 2194-2199 21a9-21aa 231a-231b 2328 2388 23cf 23e9-23f3 23f8-23fa 25aa-25ab 25b6 25c0 "
    "25fb-25fe 2600-2605 2607-2612 2614-2685 2690-2705 2708-2712 2714 2716 271d 2721 2728 2733-2734 2744 2747 274c "
    "274e 2753-2755 2757 2763-2767 2795-2797 27a1 27b0 27bf 2934-2935 2b05-2b07 2b1b-2b1c 2b50 2b55 3030 303d 3297 "
    "3299 1f000-1f0ff 1f10d-1f10f 1f12f 1f16c-1f16f 1f18e 1f191-1f19a 1f1ad-1f1e5 1f201-1f202 1f21a 1f22f "
    "1f232-1f23a 1f250-1f3fa 1f400-1f53d 1f546-1f64f 1f680-1f6ff 1f774-1f77f 1f7d5-1f7ff 1f80c-1f80f 1f848-1f84f "
    "1f85a-1f85f 1f888-1f88f 1f8ae-1f8ff 1f90c-1f93a 1f93c-1f945 1f947-1fffd",
    "r": "1f1e6-1f1ff",
    "a": "2c2-2df 2e5-2ff 55b-55c 55e 5f3 24b6-24e9 a708-a721 a789-a78a ab5b 1f130-1f149 1f150-1f169 1f170-1f189",
    "1": "66b",
    "_": "202f",
    "x": "ff9e-ff9f",
    "z": "200d",
    "'": "27",
    ".": "2e 2018 2019 2024 fe52 ff07 ff0e",
    ":": "3a b7 387 5f4 2027 fe13 fe55 ff1a",
    ",": "2c 3b 37e 589 60c 60d 66c 7f8 2044 fe10 fe14 fe50 fe54 ff0c ff1b",
    '"': "22",
    " ": "200b",
}
_NOT_ALONE = {"_", "x", "z"}
_CATEGORIES = {"Nd": "1", "Nl": "a", "Pc": "_", "Mn": "x", "Mc": "x", "Me": "x", "Cf": "x"}


def _bounds() -> tuple[list[int], list[tuple[int, str]]]:
    rows = []
    for name, ranges in _RANGES.items():
        for item in ranges.split():
            first, _, last = item.partition("-")
            rows.append((int(first, 16), int(last or first, 16), name))
    rows.sort()
    return [first for first, _, _ in rows], [(last, name) for _, last, name in rows]


class _Classes(dict[int, str]):
    """Code point to class, found when it is first met; a table for `str.translate`."""

    _firsts, _lasts = _bounds()

    def __missing__(self, code: int) -> str:
        place = bisect_right(self._firsts, code) - 1
        if place >= 0 and code <= self._lasts[place][0]:
            name = self._lasts[place][1]
        else:
            category = unicodedata.category(chr(code))
            name = "a" if category[0] == "L" else _CATEGORIES.get(category, " ")
        self[code] = name
        return name


def _token_pattern() -> re.Pattern[str]:
    """Build the rules of Lucene's grammar over classes; all repeats are possessive, so time is linear."""
    mark = "[xtmz]*+"
    connector, digit, katakana = f"_{mark}", f"1{mark}", f"k{mark}"
    letter = f"(?:a{mark}|h{mark}(?:'{mark}|\"{mark}(?=h))?+)"
    letters = f"{letter}(?:(?:(?:{connector})*+|[:.']{mark}){letter})*+"
    digits = f"{digit}(?:(?:(?:{connector})*+|[,.']{mark}){digit})*+"
    segment = f"(?:{katakana}(?:(?:{connector})*+{katakana})*+|(?:{letters}|{digits})++)"
    word = f"(?:{connector})*+{segment}(?:(?:{connector})++{segment})*+(?:{connector})*+"
    asian = "[st][stxmz]*+"
    pictograph = f"z?e[xtm]*+(?:ze[xtm]*+)*+{mark}"
    # Connectors alone are no term, but a match, lest every place in a long run of them be tried as a beginning.
    return re.compile(f"{word}|(?:_[xz]*+)++|{asian}|i{mark}|{pictograph}|m{mark}|r{mark}r{mark}")


class EnglishAnalyzer:
    """Makes terms of documents and queries alike; safe in threads.

    Raises:
        MissingExtraError: If nltk, which has the stemmer, is not installed.
    """

    def __init__(self) -> None:
        """Load the stemmer."""
        porter = require("nltk.stem.porter", "qa").PorterStemmer
        self._stem = porter(mode=porter.MARTIN_EXTENSIONS).stem
        self._classes = _Classes()
        self._pattern = _token_pattern()
        self._terms: dict[str, str] = {}

    def __call__(self, text: str) -> list[str]:
        """Return the terms of a text in order; the analysis never fails."""
        terms = self._terms
        found = []
        for token in self._tokens(text):
            term = terms.get(token)
            if term is None:
                term = self._term(token)
                if len(terms) > _MAX_CACHED:
                    terms.clear()
                terms[token] = term
            if term:
                found.append(term)
        return found

    def _tokens(self, text: str) -> Iterator[str]:
        classes = text.translate(self._classes)
        for match in self._pattern.finditer(classes):
            start, end = match.span()
            if end - start <= MAX_TOKEN_CHARS:
                yield text[start:end]
                continue
            # Lucene's scanner sees so many characters at a time, and starts afresh behind them.
            while part := self._pattern.search(classes, start, min(start + MAX_TOKEN_CHARS, end)):
                part = self._pattern.match(classes, part.start(), min(part.start() + MAX_TOKEN_CHARS, end)) or part
                yield text[slice(*part.span())]
                start = part.end()

    def _term(self, token: str) -> str:
        """Return the term of a token; empty for a stop word and for connectors without a word."""
        if not set(token.translate(self._classes)) - _NOT_ALONE:
            return ""
        if token[-2:-1] in ("'", "\u2019", "\uff07") and token[-1] in "sS":
            token = token[:-2]
        # Java lower-cases code point by code point: no final sigma, one character for a dotted capital I.
        token = token.lower() if token.isascii() else "".join(char.lower()[0] for char in token)
        return "" if token in _STOP_WORDS else self._stem(token, to_lowercase=False)
