"""The things of the bundled corpus under each other's names: what is known by heart does not help, only reading does.

Within each kind (cities, books, people, …) the names stand in a circle, and an episode turns it by a number of places
drawn from its seed. Questions and passages are shown with the names so dealt; what the agent writes is read back.
"""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from trace_gym.envs.search.tasks.facts import read_facts

_WORD = re.compile(r"\w+|\W")

Words = tuple[str, ...]


class Renaming:
    """One way of dealing the names.

    Args:
        seed: Decides who bears which; None leaves everybody their own.
    """

    def __init__(self, seed: int | None) -> None:
        """Draw how far each circle turns."""
        self._turns = None if seed is None else np.random.default_rng([seed, 1]).integers(1, 2**31, len(_circles()))

    def show(self, text: str) -> str:
        """Return a text as the agent sees it."""
        return self._turned(text, 1)

    def read(self, text: str) -> str:
        """Return a text of the agent's with the real names; undoes `show`."""
        return self._turned(text, -1)

    def _turned(self, text: str, direction: int) -> str:
        if self._turns is None:
            return text
        circles, places = _circles(), _places()
        words, found, at = _WORD.findall(text), [], 0
        while at < len(words):
            for name in places.get(words[at], ()):  # longest first
                if tuple(words[at : at + len(name[0])]) == name[0]:
                    circle = circles[name[1]]
                    found.append(circle[(name[2] + direction * int(self._turns[name[1]])) % len(circle)])
                    at += len(name[0])
                    break
            else:
                found.append(words[at])
                at += 1
        return "".join(found)


@lru_cache(maxsize=1)
def _circles() -> tuple[tuple[str, ...], ...]:
    """Return the names of each kind in a shuffled order; a name is in one kind only."""
    kinds: dict[str, list[str]] = {}
    seen: set[str] = set()
    for fact in read_facts().values():
        is_proper = fact.fields["name"][0].removeprefix("the ")[:1].isupper()
        if is_proper and fact.kind != "animal" and fact.name not in seen:  # a red kangaroo is no proper name
            seen.add(fact.name)
            kinds.setdefault(fact.kind, []).append(fact.name)
    rng = np.random.default_rng(0)
    return tuple(tuple(names[i] for i in rng.permutation(len(names))) for names in kinds.values())


@lru_cache(maxsize=1)
def _places() -> dict[str, list[tuple[Words, int, int]]]:
    """Return, by first word, the names: their words, circle and place, longest first."""
    places: dict[str, list[tuple[Words, int, int]]] = {}
    for number, circle in enumerate(_circles()):
        for place, name in enumerate(circle):
            words = tuple(_WORD.findall(name))
            places.setdefault(words[0], []).append((words, number, place))
    for names in places.values():
        names.sort(key=lambda name: -len(name[0]))
    return places
