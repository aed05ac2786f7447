"""Units and scale words behind a number: ``12 cm^2``, ``3.5 million``, ``40%``, ``18 dollars``, ``5 eggs``.

A unit of the table has a measure and a factor, so 1 m is 100 cm. Any other word is a noun: a name of what is
counted, which need not be there. A single letter is a unit only in upright type or after a space.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_TOKEN = re.compile(
    r'"(?P<quoted>[^"]*)"|(?P<degree>\^\\circ)|(?P<word>[A-Za-z]+\.?)|(?P<power>\^\s*\{?-?[1-4]\}?)'
    r"|(?P<sign>[%/*'])|\\cdot|\s+"
)
_WORD = re.compile(r"[A-Za-z]+|[%/*]|\^\s*-?[1-4]")
_MAX_UNIT = 60  # characters
_LETTER_UNITS = frozenset("mgsLh")
_MIN_NOUN = 4  # letters; shorter ones may be products of symbols

SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALES = {**SCALES, **{f"{word}s": size for word, size in SCALES.items()}}


def _table() -> dict[str, tuple[str, int, Fraction]]:
    rows = {
        "length": "mm millimeter 1/1000;cm centimeter 1/100;dm decimeter 1/10;m meter 1;km kilometer 1000;"
        "in inch 127/5000;ft foot 381/1250;yd yard 1143/1250;mi mile 201168/125",
        "time": "ms millisecond 1/1000;s sec second 1;min minute 60;h hr hour 3600;day 86400;week 604800",
        "calendar": "month 1;yr year 12",
        "mass": "mg milligram 1/1000;g gram 1;kg kilogram 1000;ton tonne 1000000;lb pound 45359237/100000;"
        "oz ounce 45359237/1600000",
        "money": "dollar usd 1;cent 1/100",
        "gallon": "gallon gal 1;quart 1/4;pint 1/8;cup 1/16",
        "angle": "degree deg 1",
        "radian": "radian rad 1",
        "percent": "% percent pct percentage 1",
    }
    alone = (
        "euro eur;gbp;yen;yuan;rupee;acre;hectare ha;bit;byte;kb;mb;gb;tb;newton N;joule J;watt W;kw;volt V;hz;"
        "kelvin K;mol;ampere A;pa;celsius C;fahrenheit F"
    )
    found: dict[str, tuple[str, int, Fraction]] = {}
    for measure, row in rows.items():
        for entry in row.split(";"):
            *names, factor = entry.split()
            for name in names:
                found[name] = (measure, 1, Fraction(factor))
    for entry in alone.split(";"):
        for name in entry.split():
            found[name] = (entry.split()[0], 1, Fraction(1))
    litre = {"ml": 10**6, "milliliter": 10**6, "cl": 10**5, "l": 1000, "L": 1000, "liter": 1000, "cc": 10**6}
    found.update({name: ("length", 3, Fraction(1, count)) for name, count in litre.items()})
    return found


_UNITS = _table()
_CONNECTING = frozenset("per of sq cu the a".split())
_PLURALS = {"feet": "foot", "inches": "inch", "lbs": "lb", "hrs": "hr", "mins": "min", "secs": "sec"}
_BRITISH = re.compile(r"(met|lit)re$")
_RATES = {"mph": "mile/hour", "kph": "km/h", "kmh": "km/h", "mps": "m/s"}


@dataclass(frozen=True, slots=True)
class Unit:
    """What a number is a number of.

    Attributes:
        measures: Exponent of each measure, sorted by name; empty for mere nouns.
        factor: How many basic units it is.
        nouns: Words that are no units.
    """

    measures: tuple[tuple[str, int], ...] = ()
    factor: Fraction = Fraction(1)
    nouns: tuple[str, ...] = ()

    @property
    def is_percent(self) -> bool:
        """Whether it is a percent sign or word."""
        return self.measures == (("percent", 1),)


DEGREES = Unit((("angle", 1),))
UNITLESS = Unit()


def split_unit(text: str) -> tuple[str, Fraction, Unit] | None:
    """Split ``12 cm`` into its number, scale and unit.

    Args:
        text: In the notation of `trace_gym.envs.math.grading.notation`.

    Returns:
        The number's text, the factor of its scale words and the unit; None if no unit stands at the end.
    """
    for match in re.finditer(r'\s*(?:"|\^\\circ|%|\'|[A-Za-z]+)', text):
        start = match.start()
        if start == 0 or len(text) - start > _MAX_UNIT:
            continue
        if text[start - 1] in "\\_{^" or (text[start].isalpha() and text[start - 1].isalpha()):
            continue
        found = _unit(text[start:])
        if found is not None:
            return text[:start].strip(), *found
    return None


def _unit(text: str) -> tuple[Fraction, Unit] | None:
    words = _words(text)
    if not words:
        return None
    scale = Fraction(1)
    while words and words[0].lower() in _SCALES:
        scale *= _SCALES[words.pop(0).lower()]
    return None if words and words[0] in ("/", "*", "per") else _combine(words, scale)


def _words(text: str) -> list[str] | None:
    """Cut a unit into words, signs and powers; None if there is anything else in it."""
    words: list[str] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            return None
        if match["quoted"] is not None:
            words.extend(_WORD.findall(match["quoted"]))
        elif match["degree"]:
            words.append("degree")
        elif match["word"]:
            word = match["word"].rstrip(".")
            spaced = place > 0 and text[place - 1] in " /*"
            if len(word) == 1 and (word not in _LETTER_UNITS or not spaced) and words[-1:] != ["degree"]:
                return None
            if 1 < len(word) < _MIN_NOUN and _entry(word) is None and word.lower() not in _CONNECTING | _RATES.keys():
                return None
            words.append(word)
        elif match["power"] or match["sign"]:
            words.append((match["power"] or match["sign"]).replace(" ", "").replace("{", "").replace("}", ""))
        place = match.end()
    return None if "'" in words else words


def _combine(words: list[str], scale: Fraction) -> tuple[Fraction, Unit] | None:
    measures: dict[str, int] = {}
    factor, nouns = Fraction(1), []
    sign, power = 1, 1
    words = [part for word in words for part in re.split(r"(/)", _RATES.get(word.lower(), word)) if part]
    for place, word in enumerate(words):
        low = word.lower()
        if low in ("/", "per"):
            sign = -1
        elif low in ("*", "unit", "units", "of", "a", "the") or word.startswith("^"):
            pass
        elif low in ("square", "sq", "squared", "cubic", "cu", "cubed"):
            power = 2 if low.startswith("sq") else 3
        elif low == "degree" and words[place + 1 : place + 2] in (["C"], ["F"], ["Celsius"], ["Fahrenheit"]):
            pass
        elif (entry := _entry(word)) is not None:
            following = words[place + 1] if place + 1 < len(words) else ""
            if following.startswith("^"):
                power = int(following[1:])
            elif following.lower() in ("squared", "cubed"):
                power = 2 if following.lower() == "squared" else 3
            measures[entry[0]] = measures.get(entry[0], 0) + sign * power * entry[1]
            factor *= entry[2] ** (sign * power)
            power = 1
        elif len(word) > 1:
            nouns.append(low.rstrip("s"))
        else:
            return None
    kept = tuple(sorted((name, count) for name, count in measures.items() if count))
    return scale, Unit(kept, factor, tuple(nouns))


def _entry(word: str) -> tuple[str, int, Fraction] | None:
    for name in (word, word.lower()):
        name = _BRITISH.sub(r"\1er", _PLURALS.get(name, name))
        for form in (name, name.removesuffix("s")):
            stem = _BRITISH.sub(r"\1er", form)
            if stem in _UNITS:
                return _UNITS[stem]
    return None
