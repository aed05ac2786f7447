"""The forms of bundled questions: chains over two facts, and comparisons of two.

A chain goes from a thing that the question names, over a second thing that it does not name (the bridge), to a fact
about the second thing. A hint about the bridge makes it easier: then one search can find both passages. A comparison
names both things.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chain:
    """A bridge: the first thing's ``link`` is the title of the second thing, whose ``answer`` is asked for.

    Attributes:
        kind: Kind of the first thing.
        link: Its column that names the second thing.
        bridge: Kind of the second thing.
        answer: Column of the second thing.
        wordings: Questions, with ``{it}`` for the first thing.
    """

    kind: str
    link: str
    bridge: str
    answer: str
    wordings: tuple[str, ...]


# What the first thing is called, and what its bridge is to it.
_MAKERS: tuple[tuple[str, str, str, str], ...] = (
    ("book", "author", "the book or play {it}", "author"),
    ("music", "composer", "the musical work {it}", "composer"),
    ("painting", "painter", "the painting {it}", "painter"),
    ("film", "director", "the film {it}", "director"),
    ("element", "discoverer", "the chemical element {it}", "discoverer"),
    ("moon", "discoverer", "the moon {it}", "discoverer"),
    ("unit", "person", "the unit {it}", "person behind the name"),
    ("invention", "inventor", "{it}", "inventor"),
    ("proglang", "designer", "the computer language {it}", "designer"),
    ("building", "architect", "{it}", "architect"),
)
# Things in a country or a state, and the country or state in a question.
_PLACED: tuple[tuple[str, str, str], ...] = (
    ("city", "place", "where {it} lies"),
    ("mountain", "country", "where {it} rises"),
    ("lake", "countries", "to which {it} belongs"),
    ("island", "place", "that owns the island {it}"),
    ("park", "place", "with the national park {it}"),
    ("food", "country", "from which {it} comes"),
    ("animal", "country", "whose wildlife includes the {it}"),
    ("plant", "country", "where the plant {it} is at home"),
    ("battle", "country", "where the {it} took place"),
    ("person", "birthplace", "in which {it} was born"),
)
# Things in a city.
_IN_CITY: tuple[tuple[str, str, str], ...] = (
    ("person", "birthplace", "birthplace of {it}"),
    ("university", "city", "home town of {it}"),
    ("museum", "city", "city with {it}"),
    ("building", "city", "city with {it}"),
    ("bridge", "city", "city with {it}"),
    ("games", "city", "host city of the {it}"),
    ("treaty", "place", "city of the {it}"),
)


def _makers() -> list[Chain]:
    chains = []
    for kind, link, thing, role in _MAKERS:
        of = f"the {role} of {thing}"
        chains += [
            Chain(kind, link, "person", "birthplace", (f"Where was {of} born?", f"What is the birthplace of {of}?")),
            Chain(kind, link, "person", "born", (f"In which year was {of} born?", f"When was {of} born?")),
            Chain(kind, link, "person", "died", (f"In which year did {of} die?",)),
        ]
    return chains


def _placed() -> list[Chain]:
    chains = []
    for kind, link, where in _PLACED:
        for bridge, answer, wordings in (
            ("country", "capital", (f"What is the capital of the country {where}?",)),
            ("country", "currency", (f"With which currency does one pay in the country {where}?",)),
            ("country", "languages", (f"What is the official language of the country {where}?",)),
            ("state", "capital", (f"What is the capital of the state or region {where}?",)),
            ("state", "since", (f"In which year did the state or province {where} join the union?",)),
        ):
            chains.append(Chain(kind, link, bridge, answer, wordings))
    return chains


def _in_city() -> list[Chain]:
    chains = []
    for kind, link, city in _IN_CITY:
        chains += [
            Chain(kind, link, "city", "river", (f"Which river flows through the {city}?",)),
            Chain(kind, link, "city", "coast", (f"On which body of water lies the {city}?",)),
            Chain(kind, link, "city", "place", (f"In which country or state is the {city}?",)),
        ]
    return chains


CHAINS: tuple[Chain, ...] = (
    *_makers(),
    *_placed(),
    *_in_city(),
    Chain("city", "river", "river", "mouth", ("Into which water flows the river that passes through {it}?",)),
    Chain("river", "mouth", "river", "mouth", ("Where does the river that takes in the {it} end?",)),
    Chain("painting", "museum", "museum", "city", ("In which city can one see the painting {it}?",)),
    Chain("painting", "museum", "museum", "founded", ("From which year dates the museum that owns {it}?",)),
    Chain("moon", "planet", "planet", "diameter", ("How many kilometres across is the world that {it} circles?",)),
    Chain("mission", "target", "planet", "diameter", ("How many kilometres across is the target of {it}?",)),
    Chain("myth", "parent", "myth", "parent", ("Whose child is the parent of {it}?",)),
)


# What is told of a bridge in an easier question.
HINTS: Mapping[str, str] = {
    "person": "This person is remembered for {known}.",
    "city": "That place is known for {about}.",
    "state": "It is known for {about}.",
    "country": "That country lies in {region} and is a neighbour of {neighbour:the}.",
    "river": "Of that river one reads: {about}.",
    "museum": "One goes there for {about}.",
    "planet": "Of that world one reads: {about}.",
    "myth": "One reads of that parent: {about}.",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A question about two things of one kind.

    Attributes:
        kind: Their kind.
        column: What is compared.
        wordings: Questions, with ``{a}`` and ``{b}``.
        wants: ``"less"`` or ``"more"``: the thing with that number is the answer; ``"same"``: the answer is yes or no.
        gap: Least difference of two numbers, so that the answer is clear.
    """

    kind: str
    column: str
    wordings: tuple[str, ...]
    wants: str
    gap: int = 3


def _earlier(kind: str, column: str, verb: str, noun: str, the: str = "") -> tuple[Comparison, Comparison]:
    pair = f"{the}{{a}} or {the}{{b}}"
    return (
        Comparison(kind, column, (f"Which {noun} {verb} earlier, {pair}?",), "less"),
        Comparison(kind, column, (f"Which {noun} {verb} later, {pair}?",), "more"),
    )


def _same(kind: str, column: str, question: str) -> Comparison:
    return Comparison(kind, column, (question,), "same")


COMPARISONS: tuple[Comparison, ...] = (
    Comparison("person", "born", ("Who was born first, {a} or {b}?", "Who was born earlier, {a} or {b}?"), "less"),
    Comparison("person", "born", ("Who was born later, {a} or {b}?",), "more"),
    Comparison("person", "died", ("Who died first, {a} or {b}?",), "less"),
    *_earlier("book", "year", "came out", "work"),
    *_earlier("music", "year", "was heard or printed", "musical work"),
    *_earlier("film", "year", "came out", "film"),
    *_earlier("building", "year", "was completed", "building"),
    *_earlier("university", "founded", "was founded", "university"),
    *_earlier("mission", "year", "was launched", "space flight"),
    *_earlier("battle", "year", "took place", "event", "the "),
    *_earlier("state", "since", "joined its union", "state"),
    *_earlier("element", "year", "was found", "element"),
    Comparison("mountain", "metres", ("Which mountain is higher, {a} or {b}?",), "more", 50),
    Comparison("lake", "metres", ("Which lake is deeper, {a} or {b}?",), "more", 10),
    Comparison("element", "number", ("Which element has the higher atomic number, {a} or {b}?",), "more"),
    Comparison("mineral", "hardness", ("Which mineral is harder, {a} or {b}?",), "more", 1),
    Comparison("planet", "diameter", ("Which world is larger, {a} or {b}?",), "more", 1000),
    _same("person", "birthplace", "Were {a} and {b} born in the same place?"),
    _same("city", "place", "Are {a} and {b} in the same country or state?"),
    _same("country", "currency", "Do {a} and {b} use a currency of the same name?"),
    _same("river", "mouth", "Do the {a} and the {b} flow into the same water?"),
    _same("book", "author", "Were {a} and {b} written by the same person?"),
    _same("film", "director", "Were the films {a} and {b} directed by the same person?"),
    _same("element", "class", "Do {a} and {b} belong to the same class of elements?"),
    _same("painting", "museum", "Are the paintings {a} and {b} in the same museum?"),
    _same("language", "family", "Are {a} and {b} languages of the same family?"),
    _same("moon", "planet", "Do {a} and {b} circle the same planet?"),
)

# Other names that are right as an answer.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "Beijing": ("Peking",),
    "Bengaluru": ("Bangalore",),
    "Cape Verde": ("Cabo Verde",),
    "Chennai": ("Madras",),
    "Czech Republic": ("Czechia",),
    "Democratic Republic of the Congo": ("DR Congo", "Congo-Kinshasa"),
    "East Timor": ("Timor-Leste",),
    "Gdańsk": ("Danzig",),
    "Ho Chi Minh City": ("Saigon",),
    "Istanbul": ("Constantinople",),
    "Ivory Coast": ("Côte d'Ivoire",),
    "Kolkata": ("Calcutta",),
    "Kyiv": ("Kiev",),
    "Königsberg": ("Kaliningrad",),
    "Mumbai": ("Bombay",),
    "Myanmar": ("Burma",),
    "New York City": ("New York",),
    "Odesa": ("Odessa",),
    "Oslo": ("Kristiania", "Christiania"),
    "Republic of the Congo": ("Congo-Brazzaville",),
    "Saint Petersburg": ("St. Petersburg", "Leningrad"),
    "Thessaloniki": ("Salonica",),
    "Turkey": ("Türkiye",),
    "United Kingdom": ("UK", "Great Britain", "Britain"),
    "United States": ("USA", "US", "United States of America", "America"),
    "Vatican City": ("Holy See",),
    "Washington, D.C.": ("Washington", "Washington DC"),
    "Wrocław": ("Breslau",),
    "pound sterling": ("pound", "sterling"),
    "renminbi": ("yuan",),
}
