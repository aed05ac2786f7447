r"""Records of local files: JSON Lines, a JSON array, either of them gzipped, CSV and Parquet.

JSON Lines are indexed, not loaded: a file of a million records costs eight bytes for each, and a record is read when
it is asked for. The other forms are read whole. What a file is shows in its first character (JSON) or its name
(``.gz``, ``.csv``, ``.parquet``). Only Parquet needs a library.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import os
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_gym.errors import BadInputError, require, unknown_name

Record = Mapping[Any, Any]

FILES = (".jsonl", ".json", ".csv", ".parquet", ".gz")


class Rows:
    """Records in a fixed order, each with a place that a person finds.

    Args:
        source: What a person calls the whole, such as the file's path.
    """

    def __init__(self, source: str) -> None:
        """Keep the name."""
        self.source = source

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of records."""

    @abstractmethod
    def __getitem__(self, index: int) -> Record:
        """Return a record."""

    @abstractmethod
    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records in order, quicker than one by one."""

    @abstractmethod
    def place(self, index: int) -> str:
        """Say where a record stands, such as ``"tasks.jsonl, line 7"``."""


class ListRows(Rows):
    """Records in memory."""

    def __init__(self, source: str, unit: str, items: Iterable[tuple[int, Record]]) -> None:
        """Keep the records, each with its number in the source, in units such as ``"line"``."""
        super().__init__(source)
        self._unit = unit
        numbered = list(items)
        self._numbers = array("Q", (number for number, _ in numbered))
        self._records = [record for _, record in numbered]

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        """Return a record."""
        return self._records[index]

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records."""
        return iter(self._records)

    def place(self, index: int) -> str:
        """Say where a record stands."""
        return f"{self.source}, {self._unit} {self._numbers[index]}"


class TableRows(Rows):
    """Records of a `datasets.Dataset`, which keeps them in Arrow."""

    def __init__(self, source: str, table: Any) -> None:
        """Keep the table."""
        super().__init__(source)
        self._table = table

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._table)

    def __getitem__(self, index: int) -> Record:
        """Return a record."""
        record: Record = self._table[index]
        return record

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records."""
        return iter(self._table)

    def place(self, index: int) -> str:
        """Say where a record stands."""
        return f"{self.source}, record {index + 1}"


class LineRows(Rows):
    """Records of a JSON Lines file, known by where they start; blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        """Find the lines. Only a line feed ends one: a text may hold U+2028."""
        super().__init__(str(path))
        self._path = path
        self._stamp = file_stamp(path)
        self._starts = array("Q", (start for start, _ in self._lines()))

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._starts)

    def __getitem__(self, index: int) -> Record:
        """Read a record."""
        if file_stamp(self._path) != self._stamp:
            raise BadInputError(f"{self._path} has changed since it was loaded; create the environment anew.")
        with self._path.open("rb") as stream:
            stream.seek(self._starts[index])
            return self._parse(index, stream.readline())

    def __iter__(self) -> Iterator[Record]:
        """Read the records in order."""
        for index, (_, line) in enumerate(self._lines()):
            yield self._parse(index, line)

    def place(self, index: int) -> str:
        """Say where a record stands."""
        with self._path.open("rb") as stream:
            number = stream.read(self._starts[index]).count(b"\n") + 1
        return f"{self._path}, line {number}"

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        start = 0
        with self._path.open("rb") as stream:
            for line in stream:
                if line.strip():
                    yield start, line
                start += len(line)

    def _parse(self, index: int, line: bytes) -> Record:
        return parse_line(line, lambda: self.place(index))


def file_stamp(path: Path) -> tuple[int, int]:
    """Return what changes when a file does: its size and time of modification in nanoseconds."""
    try:
        stat = path.stat()
    except (OSError, ValueError) as error:  # the latter: a zero byte
        raise _unreadable(path, error) from error
    return stat.st_size, stat.st_mtime_ns


def parse_line(line: bytes, place: Any) -> Record:
    """Read one line of JSON; ``place()`` says where it stands if that fails."""
    try:
        record = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{place()}: expected one JSON object per line; {error}.") from error
    return _checked(record, place)


def _checked(record: Any, place: Any) -> Record:
    if not isinstance(record, dict):
        raise BadInputError(f"{place()}: expected a JSON object, got {type(record).__name__}.")
    return record


def open_rows(path: Path) -> Rows:
    """Open a file of records.

    Raises:
        BadInputError: If the file cannot be read or its form is not known; the message names the file and the line.
        MissingExtraError: If a Parquet file needs a library that is not installed.
    """
    try:
        if path.suffix == ".parquet":
            return _parquet(path)
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as stream:
            if path.name.removesuffix(".gz").endswith(".csv"):
                return ListRows(str(path), "line", _csv(path, stream.read()))
            if _first_character(stream) == b"[":
                return ListRows(str(path), "record", _json_array(path, stream.read()))
            if path.suffix == ".gz":
                return ListRows(str(path), "line", _json_lines(path, stream))
        return LineRows(path)
    except (OSError, EOFError, zlib.error) as error:  # the last two: a truncated or damaged archive
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> BadInputError:
    return BadInputError(f"Cannot read tasks from {path}: {error}.")


def _first_character(stream: io.BufferedIOBase) -> bytes:
    """Return the first byte that is no space, and go back to the start."""
    start = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    stream.seek(0)
    return start[:1]


def _json_array(path: Path, content: bytes) -> Iterator[tuple[int, Record]]:
    try:
        items: Sequence[Any] = json.loads(content.removeprefix(codecs.BOM_UTF8).decode())
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path}: not a JSON array: {error}.") from error
    for number, item in enumerate(items, 1):
        yield number, _checked(item, lambda number=number: f"{path}, record {number}")


def _json_lines(path: Path, stream: io.BufferedIOBase) -> Iterator[tuple[int, Record]]:
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield number, parse_line(line, lambda number=number: f"{path}, line {number}")


def _csv(path: Path, content: bytes) -> Iterator[tuple[int, Record]]:
    number = 1
    try:
        reader = csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        number += bool(reader.fieldnames)  # reads the head
        for record in reader:
            yield number, record
            number = reader.line_num + 1  # a quoted text may hold line feeds
    except UnicodeDecodeError as error:
        raise BadInputError(f"{path}: expected comma-separated values in UTF-8; {error}.") from error
    except csv.Error as error:
        raise BadInputError(f"{path}, line {number}: expected comma-separated values; {error}.") from error


def _parquet(path: Path) -> Rows:
    parquet, datasets = require("pyarrow.parquet", "math"), require("datasets", "math")
    arrow = require("pyarrow", "math")
    try:
        return TableRows(str(path), datasets.Dataset(parquet.read_table(path)))
    except arrow.ArrowException as error:
        raise _unreadable(path, error) from error


@dataclass(frozen=True)
class Located:
    """A set and where it comes from; the stamp changes with the file, so that the cache never serves an old one."""

    name: str
    path: Path | None = None
    stamp: tuple[int, int] = (0, 0)


def locate(source: str, named: Collection[str], suites: Collection[str]) -> Located:
    """Find out what a source is: a name goes before a file of that name; ``"NAME=PATH"`` is a file under a name.

    Raises:
        BadInputError: If there is no such set or file; lists the names of sets and suites.
    """
    if source in named:
        return Located(source)
    name, equals, rest = source.partition("=")
    if equals and name and not os.path.exists(source):  # noqa: PTH110, pathlib raises for a text too long for a name
        path = Path(rest).expanduser()
    else:
        path = Path(source).expanduser()
        name = file_name(path)
        if path.suffix not in FILES and path.name == source and not os.path.exists(path):  # noqa: PTH110
            raise unknown_name("data set or file", source, [*named, *suites])
    return Located(name, path, file_stamp(path))


def file_name(path: Path) -> str:
    """Return the name of a set that is read from a file: that of the file without its endings."""
    return Path(path.name.removesuffix(".gz")).stem
