"""The bundled corpus: a passage about every fact, written from the tables.

Which wording is taken is decided by a digest of a seed and the title, so that a new row changes no other passage but
those that name it as a peer, and no library's random stream is involved.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trace_gym.envs.search.tasks.facts import Fact, Words
from trace_gym.envs.search.tasks.wording import Wording
from trace_gym.envs.search.tasks.wording_people import PEOPLE
from trace_gym.envs.search.tasks.wording_places import PLACES
from trace_gym.errors import BadInputError

WORDINGS: Mapping[str, Wording] = {**PLACES, **PEOPLE}

SHORT, LEAST, LONG = 34, 30, 90  # words; a passage below the first is given a sentence on its peers
PEER_YEARS = 12  # people born this close together are of the same age

# What has a year, and how it is called when something else names it.
_DATED = {
    "battle": "the ",
    "book": "the book ",
    "building": "",
    "film": "the film ",
    "games": "the ",
    "invention": "",
    "mission": "the space flight ",
    "music": "the musical work ",
    "painting": "the painting ",
    "proglang": "the computer language ",
    "treaty": "the ",
}


def pick(choices: Sequence[Any], *key: object) -> Any:
    """Return one of the choices; equal keys give equal picks."""
    digest = hashlib.sha256("\x1f".join(map(str, key)).encode()).digest()
    return choices[int.from_bytes(digest[:8], "big") % len(choices)]


class PassageWriter:
    """Writes the passage of any fact.

    Args:
        facts: All facts by title.
        seed: Another seed gives other wordings.
    """

    def __init__(self, facts: Mapping[str, Fact], seed: int = 0) -> None:
        """Group the facts for the choice of what a passage mentions beside its own thing."""
        self._seed = seed
        self._fields = {fact.title: _fields(fact, facts) for fact in facts.values()}
        self._groups: dict[tuple[Any, ...], list[Fact]] = defaultdict(list)
        self._years: dict[str, list[Fact]] = defaultdict(list)
        for fact in facts.values():
            self._groups[self._group(fact)].append(fact)
            if fact.kind in _DATED and (year := fact.one("year")):
                self._years[year].append(fact)
        self._people = [fact for fact in facts.values() if fact.number("born")]

    def write(self, fact: Fact) -> str:
        """Return the text about a fact.

        Raises:
            BadInputError: If it comes out too short or too long; the tables or the wordings need a change.
        """
        fields = dict(self._fields[fact.title])
        wording = WORDINGS[fact.kind]
        sentences = []
        for number, slot in enumerate(wording.slots):
            usable = [text for text in slot if needs(text) <= set(fields)]
            most = max((len(needs(text)) for text in usable), default=0)
            usable = [text for text in usable if len(needs(text)) == most]
            if usable:
                sentences.append(self._pick(usable, fact, number).format_map(fields))
        if _length(sentences) < SHORT:
            fields |= self._mentions(fact)
            if "peers" in fields:
                sentences.append(self._pick(wording.peers, fact, "peers").format_map(fields))
        for text in wording.more:
            if _length(sentences) < LEAST and needs(text) <= set(fields):
                sentences.append(text.format_map(fields))
        if not LEAST <= _length(sentences) <= LONG:
            raise BadInputError(f"The passage of {fact.title!r} has {_length(sentences)} words: {' '.join(sentences)}")
        return re.sub(r"([.?!])\.", r"\1", " ".join(sentences))  # a name may end with a stop of its own

    def _pick(self, choices: Sequence[Any], fact: Fact, purpose: object) -> Any:
        return pick(choices, self._seed, fact.title, purpose)

    def _group(self, fact: Fact) -> tuple[Any, ...]:
        return (fact.kind, *(self._fields[fact.title].get(column) for column in WORDINGS[fact.kind].group))

    def _mentions(self, fact: Fact) -> dict[str, Any]:
        """Return the fields that name other things."""
        found: dict[str, Any] = {}
        if peers := self._two(fact, self._peers(fact), "peer"):
            names = [self._fields[peer.title]["name"][0] for peer in peers]
            found |= {"peers": Words(names), "peer": Words(names[:1])}
        others = [other for other in self._years.get(fact.one("year") or "", ()) if other is not fact]
        if others:
            mate = self._pick(others, fact, "mate")
            found["mate"] = _DATED[mate.kind] + self._fields[mate.title]["name"][0]
        born = fact.number("born")
        others = [other for other in self._people if born and 0 < abs((other.number("born") or 0) - born) < PEER_YEARS]
        if others:
            pair = self._two(fact, others, "coeval")
            found["coevals"] = Words(f"the {self._fields[other.title]['trade']} {other.name}" for other in pair)
        return found

    def _peers(self, fact: Fact) -> list[Fact]:
        group = self._group(fact)
        others = [other for other in self._groups[group] if other is not fact and None not in group]
        if fact.kind == "person":  # of the same age; nobody is, if the year of birth is not known
            born = fact.number("born")
            others = [o for o in others if born and abs((o.number("born") or 0) - born) < PEER_YEARS]
        if fact.kind == "city":  # a capital among them would answer the question of another passage
            others = [other for other in others if "is_capital" not in self._fields[other.title]]
        return others

    def _two(self, fact: Fact, others: Sequence[Fact], purpose: str) -> list[Fact]:
        """Return up to two of the others."""
        if not others:
            return []
        first = self._pick(others, fact, purpose)
        rest = [other for other in others if other is not first]
        return [first, self._pick(rest, fact, f"second {purpose}")] if rest else [first]


def _fields(fact: Fact, facts: Mapping[str, Fact]) -> dict[str, Any]:
    """Return what the wordings of a fact may use beside its own columns."""
    fields: dict[str, Any] = dict(fact.fields)
    if fact.kind == "person":
        is_living = "died" not in fields and (fact.number("born") or 0) >= 1930
        fields["was"] = "is" if is_living else "was"
        fields["trade"] = fields["who"][0].split()[-1]
        pronouns = ("He", "His", "him") if fact.one("sex") == "m" else ("She", "Her", "her")
        fields |= zip(("He", "His", "him"), pronouns, strict=True)
    place = facts.get(fact.one("place") or fact.one("country") or "")
    if place is not None and place.kind == "country":
        fields["where"] = place.fields["region"][0]
    elif place is not None and place.kind == "state":
        fields["where"] = f"{place.fields['country']:the}"
    if fact.kind == "city" and place is not None and place.one("capital") in (fact.title, fact.name):
        fields["is_capital"] = True
    return fields


def _length(sentences: Sequence[str]) -> int:
    """Return the number of words."""
    return sum(len(sentence.split()) for sentence in sentences)


def needs(text: str) -> set[str]:
    """Return the fields that a format string uses."""
    return {re.split(r"\W", name)[0] for _, name, _, _ in string.Formatter().parse(text) if name}
