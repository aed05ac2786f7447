"""Corpora: JSON lines to passages, from the bundled file or one of the user's.

Read line by line, so that a file of any size needs the memory of one line. A line is an object with ``id`` and
``contents`` (whose first line is the title, as Search-R1 and wiki-18 have it) or ``id``, ``title`` and ``text``;
``_id`` is taken for ``id``. A name that ends in ``.gz`` is unpacked. Lines end at the
line feed only.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from trace_gym.envs.search.retrieval.base import Passage
from trace_gym.errors import BadInputError

BUNDLED = "search_corpus.jsonl"
_EXPECTED = "expected an object with id and contents, or with id, title and text"


def corpus_path(path: str | Path | None) -> Path:
    """Return the file of a corpus; of the bundled one for None.

    Raises:
        BadInputError: If there is no such file.
    """
    if path is None:
        return Path(str(importlib.resources.files("trace_gym.assets") / BUNDLED))
    path = Path(path).expanduser()
    if not path.is_file():
        raise BadInputError(f"No corpus {path}: give a file of JSON lines or the folder of an index.")
    return path


def corpus_digest(path: Path) -> str:
    """Return the hash of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def iter_corpus(path: str | Path | None = None) -> Iterator[Passage]:
    """Yield the passages of a corpus in its order; ids are not compared with each other here.

    Raises:
        BadInputError: With file and line number, for a line that is no passage.
    """
    path = corpus_path(path)
    with _open(path) as file:
        number = 0
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield to_passage(json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").strip()))
        except (ValueError, OSError, EOFError, RecursionError) as error:  # bad JSON, UTF-8, record or archive
            raise BadInputError(f"{path}, line {number or 1}: {error}.") from error


def read_corpus(path: str | Path | None = None) -> tuple[Passage, ...]:
    """Return the passages of a corpus; the bundled one for None.

    Raises:
        BadInputError: With file and line number, for a line that is no passage, or if an id occurs twice.
    """
    passages = tuple(iter_corpus(path))
    seen = set()
    for passage in passages:
        if passage.id in seen:
            raise duplicate_id(corpus_path(path), passage.id)
        seen.add(passage.id)
    return passages


def duplicate_id(path: Path, id: str) -> BadInputError:
    """Build the error for an id that two passages have."""
    return BadInputError(f"{path}: two passages have the id {id!r:.80}; ids must be unique.")


def to_passage(record: Any) -> Passage:
    """Make a passage of a decoded line.

    Raises:
        ValueError: If it is none; the message says what is missing.
    """
    if not isinstance(record, dict):
        raise ValueError(f"{_EXPECTED}, found {type(record).__name__}")
    id = record.get("id", record.get("_id"))
    if isinstance(id, int) and not isinstance(id, bool):
        id = str(id)
    if not isinstance(id, str) or not id.strip():
        raise ValueError(f"no id; {_EXPECTED}")
    title, text, contents = (record.get(name) for name in ("title", "text", "contents"))
    if isinstance(contents, str):
        first, _, rest = contents.partition("\n")
        if not isinstance(title, str):
            title, text = first, rest
        else:
            text = rest if _clean_title(first) == _clean_title(title) else contents
    if not isinstance(title, str) or not isinstance(text, str) or not f"{title}{text}".strip():
        raise ValueError(f"no text; {_EXPECTED}")
    return Passage(id, _clean_title(title), text)


def _clean_title(title: str) -> str:
    """Return a title in one line, without the quotes that wiki-18 has around it."""
    title = " ".join(title.split())
    return title[1:-1] if len(title) > 2 and title[0] == title[-1] == '"' else title


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")
