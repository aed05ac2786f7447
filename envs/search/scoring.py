"""Is an answer right? Exact match, F1 and the recall of supporting passages.

The normalisation is the usual one of open-domain question answering (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250):
lower case, no punctuation, no articles, single spaces. Figures are thus comparable with published ones. It departs from
the usual code where that calls wrong answers right or right ones wrong:

- An answer that is a number is compared by its value: "1,000", "1000" and "1000.0" are equal, so are "12" and "twelve",
  while "3.5" and "35", or "-5" and "5", which the usual code takes for equal, are not.
- Punctuation is that of Unicode, not only of ASCII: "1939–1945" equals "1939-1945". Both are composed first (NFKC).
- What would be empty without articles ("The The", the letter grade "A") keeps them, so that it equals itself alone.

Diacritics count, as usual; a data set lists other spellings among its golden answers.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal

MAX_ANSWER_CHARS = 2_000  # what is longer is cut: no golden answer is

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
# No leading zeros: "007" is a name. Few enough digits to be exact.
_NUMBER = re.compile(r"[-−+]?(?:0|[1-9]\d{0,2}(?:,\d{3}){1,5}|[1-9]\d{0,14})(?:\.\d{1,10})?")
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_WORDS = {word: value for value, word in enumerate(_SMALL)}
_WORDS |= {ten: 10 * value for value, ten in enumerate(_TENS, 2)}
_WORDS |= {
    f"{ten}{one}": 10 * tens + ones for tens, ten in enumerate(_TENS, 2) for ones, one in enumerate(_SMALL) if ones
}
_VERDICTS = ("yes", "no", "noanswer")


def normalize_answer(text: str) -> str:
    """Return what two answers have in common if they are the same answer; of a number its value in digits."""
    text = unicodedata.normalize("NFKC", text[:MAX_ANSWER_CHARS]).strip()
    number = _number(text)
    if number is not None:
        return number
    lowered = "".join(c for c in text.lower() if not unicodedata.category(c).startswith("P") and c not in "$+<=>^`|~")
    return " ".join(_ARTICLES.sub(" ", lowered).split()) or " ".join(lowered.split())


def exact_match(answer: str, golden_answers: Iterable[str]) -> bool:
    """Return whether an answer is one of the golden answers, after normalisation."""
    given = normalize_answer(answer)
    return bool(given) and any(given == normalize_answer(golden) for golden in golden_answers)


def f1(answer: str, golden_answers: Iterable[str]) -> float:
    """Return the best harmonic mean of precision and recall in words, in [0, 1].

    As in HotpotQA's own code (https://arxiv.org/abs/1809.09600) an answer of yes or no gets nothing for a part.
    """
    return max((_f1(normalize_answer(answer), normalize_answer(golden)) for golden in golden_answers), default=0.0)


def supporting_recall(found_titles: Iterable[str], supporting_titles: Sequence[str]) -> float | None:
    """Return the share of the supporting passages that were found, by title; None if a question names none."""
    wanted = {title_key(title) for title in supporting_titles}
    if not wanted:
        return None
    return len(wanted & {title_key(title) for title in found_titles}) / len(wanted)


def title_key(title: str) -> str:
    """Return what a title has in common in all its spellings: HTML entities, case, quotes and spaces do not count."""
    plain = unicodedata.normalize("NFKC", html.unescape(title)).casefold()
    return " ".join(plain.replace("_", " ").strip("\"'").split())


def _f1(given: str, golden: str) -> float:
    if given == golden:
        return float(bool(given))
    if given in _VERDICTS or golden in _VERDICTS:
        return 0.0
    words, golden_words = given.split(), golden.split()
    common = (Counter(words) & Counter(golden_words)).total()
    return 2 * common / (len(words) + len(golden_words)) if common else 0.0


def _number(text: str) -> str | None:
    """Return a number's value in digits, if the whole text is a number."""
    bare = text.rstrip(".")
    if _NUMBER.fullmatch(bare):
        value = Decimal(bare.replace(",", "").replace("−", "-"))
        return f"{value.normalize() + 0:f}"
    value_of_words = _WORDS.get(re.sub(r"[\s-]+", "", bare.lower()))
    return None if value_of_words is None else str(value_of_words)
