"""The tables of facts that the bundled corpus is written from.

The tables stand in ``assets/search_facts_*.txt``: ``[kind] column | column | …`` opens a table, each following line is
one thing, its title first; ``;`` parts the items of a list; an empty field means that the fact is not certain. Titles
are unique over all tables; "Mercury (planet)" is called "Mercury" in running text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from trace_gym.errors import BadInputError

# Names that take an article in running text.
_WITH_THE = re.compile(
    r"Bahamas|Comoros|Gambia|Maldives|Netherlands|Philippines|Seychelles"
    r"|(Central African|Czech|Dominican) Republic|(Democratic )?Republic of the Congo"
    r"|United (States|Kingdom|Arab Emirates)|British Crown"
    r"|.* Islands"
)
# First words of animals' names that keep their capital.
_PROPER = frozenset(
    "African American Andean Arctic Ethiopian European Galápagos Iberian Japanese Javan Komodo Philippine Przewalski's "
    "Tasmanian".split()
)
_AGREEMENT = {"s": ("", "s"), "v": ("s", ""), "is": ("is", "are")}  # of one, of many
# Waters that take none.
_BARE_WATER = re.compile(r"(Lake|Gulf St) .*|.* (Bay|Inlet|Sound)|Port Jackson")


def strip_note(title: str) -> str:
    """Return a title without the note in parentheses that makes it unique."""
    return re.sub(r" \([^)]*\)$", "", title)


class Words(tuple[str, ...]):
    """The values of one field, for use in a sentence template.

    Format specs: none joins the names; ``the`` and ``The`` give each its article, the latter with a capital; ``water``
    the same for seas and rivers; ``a`` puts the indefinite article before; ``cap`` starts with a capital, ``low``
    without one; ``s``, ``v`` and ``is`` are endings of nouns and verbs, and a verb, that agree in number.
    """

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        """Return the values as the spec says.

        Raises:
            BadInputError: If there is no such spec.
        """
        names = [strip_note(value) for value in self]
        if spec in _AGREEMENT:
            return _AGREEMENT[spec][len(names) > 1]
        if spec in ("the", "The"):
            text = _join([f"the {name}" if _WITH_THE.fullmatch(name) else name for name in names])
            return text[:1].upper() + text[1:] if spec == "The" else text
        if spec == "water":
            return _join([name if _BARE_WATER.fullmatch(name) else f"the {name}" for name in names])
        text = _join(names)
        if spec == "a":
            return f"{'an' if text[:1].lower() in 'aeiou' else 'a'} {text}"
        if spec == "cap":
            return text[:1].upper() + text[1:]
        if spec == "low":
            return text if text.split()[0] in _PROPER else text[:1].lower() + text[1:]
        if spec:
            raise BadInputError(f"Unknown format {spec!r} of a field; allowed: the, The, water, a, cap, low, s, v, is.")
        return text


def _join(names: list[str]) -> str:
    if len(names) < 3:
        return " and ".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


@dataclass(frozen=True, slots=True)
class Fact:
    """One row of a table.

    Attributes:
        kind: The table, such as ``"city"``.
        title: Unique name.
        fields: Column to values; a column without a value is absent. Column ``name`` holds the title.
    """

    kind: str
    title: str
    fields: Mapping[str, Words]

    @property
    def name(self) -> str:
        """What it is called in running text."""
        return strip_note(self.title)

    def one(self, column: str) -> str | None:
        """Return the value of a column, if there is exactly one."""
        values = self.fields.get(column, ())
        return values[0] if len(values) == 1 else None

    def number(self, column: str) -> int | None:
        """Return the value of a column as a number; None if there is none, or a year before Christ."""
        value = self.one(column)
        return int(value) if value is not None and value.isdigit() else None


def read_facts() -> dict[str, Fact]:
    """Return all facts by title, in the order of the files' names and lines.

    Raises:
        BadInputError: If a line has another number of fields than its table, or a title occurs twice.
    """
    facts: dict[str, Fact] = {}
    folder = files("trace_gym.assets")
    for file in sorted((f for f in folder.iterdir() if f.name.startswith("search_facts_")), key=lambda f: f.name):
        kind, columns = "", []
        # Only "\n" ends a line, here as everywhere.
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip() or line.startswith("#"):
                continue
            if line.startswith("["):
                kind, _, head = line[1:].partition("]")
                columns = ["name", *[part.strip() for part in head.split("|")][1:]]
                continue
            cells = [cell.strip() for cell in line.split("|")]
            if len(cells) != len(columns):
                expected = f"{len(columns)} fields ({', '.join(columns)})"
                raise BadInputError(f"{file.name}, line {number}: expected {expected}, got {len(cells)}.")
            title = cells[0].removeprefix("the ")
            title = title[:1].upper() + title[1:]
            if title in facts:
                raise BadInputError(f"{file.name}, line {number}: the title {title!r} occurs twice.")
            fields = {
                column: Words(part.strip() for part in cell.split(";"))
                for column, cell in zip(columns, cells, strict=True)
                if cell
            }
            facts[title] = Fact(kind, title, fields)
    return facts
