"""Lists of task ids that are read when they are needed: a million of them cost no more memory than a few."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import overload

from trace_gym.errors import BadInputError

_BLOCK = 256  # lines between two places of a file that are remembered
_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{}]+))\}")


class LazyIds(Sequence[str]):
    """Task ids by place; a slice is as lazy as the whole.

    Args:
        size: How many there are.
        get: Returns the id at a place, 0 <= place < size.
    """

    def __init__(self, size: int, get: Callable[[int], str]) -> None:
        """Store both."""
        self._size = size
        self._get = get

    def __len__(self) -> int:
        """Return the number of ids."""
        return self._size

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> LazyIds: ...
    def __getitem__(self, index: int | slice) -> str | LazyIds:
        """Return an id, or those of a slice."""
        places = range(self._size)[index]
        if isinstance(places, range):
            return LazyIds(len(places), lambda place: self._get(places[place]))
        return self._get(places)


def open_tasks(text: str) -> Sequence[str]:
    """Return the task ids that a text names.

    Args:
        text: Either a file with a task id in every line, or a JSON object with ``task_id`` (JSON Lines); or ids with
            braces as a shell expands them, ``chain-{2,3}-train-{000000..499999}``: the last ones change fastest.

    Raises:
        BadInputError: If there is no such file, or it has no or an unreadable line.
    """
    if _BRACES.search(text):
        return _expanded(text)
    path = Path(text)
    if not path.is_file():
        raise BadInputError(f"There is no file {path}; give one with a task id a line, or ids such as sum-{{0..9}}.")
    return _lines(path)


def _expanded(text: str) -> LazyIds:
    """Return the ids of a text with braces, in mixed radix."""
    words: list[str] = []
    wheels: list[Sequence[str]] = []
    end = 0
    for match in _BRACES.finditer(text):
        words.append(text[end : match.start()])
        end = match.end()
        first, last, names = match.groups()
        wheels.append(_numbers(first, last) if names is None else names.split(","))
    words.append(text[end:])
    size = 1
    for wheel in wheels:
        size *= len(wheel)
    if size == 0:
        raise BadInputError(f"{text!r} names no task; a range goes from the smaller number to the larger.")

    def get(place: int) -> str:
        chosen = []
        for wheel in reversed(wheels):
            place, turn = divmod(place, len(wheel))
            chosen.append(wheel[turn])
        return words[0] + "".join(a + b for a, b in zip(reversed(chosen), words[1:], strict=True))

    return LazyIds(size, get)


def _numbers(first: str, last: str) -> LazyIds:
    """Return numbers as text, with leading zeros if the first has any."""
    width = len(first) if first.startswith("0") else 1
    return LazyIds(max(0, int(last) + 1 - int(first)), lambda place: f"{int(first) + place:0{width}d}")


def _lines(path: Path) -> LazyIds:
    """Return the ids of a file, of which some places are kept in memory."""
    starts, size, place = array("Q"), 0, 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                if size % _BLOCK == 0:
                    starts.append(place)
                size += 1
            place += len(line)
    if not size:
        raise BadInputError(f"{path} is empty; it needs a task id a line.")

    def get(index: int) -> str:
        with path.open("rb") as file:
            file.seek(starts[index // _BLOCK])
            lines = (line for line in file if line.strip())
            line = next(islice(lines, index % _BLOCK, None)).decode().strip()
        if not line.startswith("{"):
            return line
        try:
            return str(json.loads(line)["task_id"])
        except (ValueError, KeyError) as error:
            raise BadInputError(f"{path}: task {index + 1} has no task_id that can be read: {line[:80]!r}.") from error

    return LazyIds(size, get)
