"""Questions by name: the bundled set, the data sets of the papers, suites of them, and local files.

The suite ``qa`` is what the TRACE paper reports: the test sets of Search-R1 with two steps or more, as FlashRAG hosts
them. They come without a corpus; Search-R1 searches Wikipedia (``wiki-18``) for all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from trace_gym.cache import cache_folder
from trace_gym.envs.hub import hub_rows
from trace_gym.envs.record_files import Located, Rows, locate, open_rows
from trace_gym.envs.search.tasks.question import Question, QuestionTable, side_of
from trace_gym.envs.search.tasks.schemas import read_passages, read_record
from trace_gym.envs.task_table import EVAL_SHARE, SPLITS, check_split
from trace_gym.errors import BadInputError, unknown_name

Source = str | Path
Data = Source | Sequence[Source] | Mapping[str, Source | Sequence[Source]]

BUNDLED = "search_questions.jsonl"


@dataclass(frozen=True)
class NamedSet:
    """Where a data set is found.

    Attributes:
        hub_id: Its id at the hub.
        revision: The commit, so that a benchmark stays the same benchmark.
        config: The configuration.
        split: The part of it.
        size: Questions in that part.
        licence: Of the questions, as their authors state it.
    """

    hub_id: str
    revision: str
    config: str
    split: str
    size: int
    licence: str


_FLASHRAG = ("RUC-NLPIR/FlashRAG_datasets", "bcafb8dd07d453be3cbeeeb3f78be1841bddf92c")
_HOTPOTQA = ("hotpotqa/hotpot_qa", "1908d6afbbead072334abe2965f91bd2709910ab")

NAMED: dict[str, NamedSet] = {
    "hotpotqa": NamedSet(*_FLASHRAG, "hotpotqa", "dev", 7_405, "CC-BY-SA-4.0"),
    "hotpotqa-train": NamedSet(*_FLASHRAG, "hotpotqa", "train", 90_447, "CC-BY-SA-4.0"),
    # With the ten passages of each question, two of which are needed.
    "hotpotqa-distractor": NamedSet(*_HOTPOTQA, "distractor", "validation", 7_405, "CC-BY-SA-4.0"),
    "2wikimultihopqa": NamedSet(*_FLASHRAG, "2wikimultihopqa", "dev", 12_576, "Apache-2.0"),
    "musique": NamedSet(*_FLASHRAG, "musique", "dev", 2_417, "CC-BY-4.0"),
    "bamboogle": NamedSet(*_FLASHRAG, "bamboogle", "test", 125, "not stated"),
}
SUITES: dict[str, tuple[str, ...]] = {"qa": ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")}


@lru_cache(maxsize=8)  # the environments of a run share one table; it never changes
def bundled_questions(
    split: str = "train",
    difficulties: tuple[int, ...] | None = None,
    types: tuple[str, ...] | None = None,
    fold: int = 0,
) -> QuestionTable:
    """Return bundled questions, in an order in which every beginning is balanced over difficulties.

    Args:
        split: ``"train"`` or ``"eval"``; no pair of passages is asked about in both.
        difficulties: Some of 1 (comparisons), 2 (two steps, with a hint), 3 (two steps); None for all.
        types: Some of ``"comparison"``, ``"bridge"``; None for all.
        fold: Which fifth of the questions is held out, 0 to 4.

    Raises:
        BadInputError: If an argument is out of range or no question is left.
    """
    check_split(split)
    _check_fold(fold)
    records = [json.loads(line) for line in _bundled_text().split("\n") if line]
    questions = [question for record in records if (question := _question(record["id"], record)) is not None]
    for name, given, known in (
        ("difficulty", difficulties, {question.difficulty for question in questions}),
        ("type", types, {question.type for question in questions}),
    ):
        for value in given or ():
            if value not in known:
                raise unknown_name(f"{name} of bundled questions", value, map(str, known))
    kept = [
        question
        for question in questions
        if side_of(question, fold) == split
        and (difficulties is None or question.difficulty in difficulties)
        and (types is None or question.type in types)
    ]
    if not kept:
        raise BadInputError(f"No bundled question has a difficulty of {difficulties} and a type of {types}.")
    return QuestionTable(kept)


def _bundled_text() -> str:
    return (files("trace_gym.assets") / BUNDLED).read_text(encoding="utf-8")


def load_questions(data: Data, split: str | None = None, fold: int = 0) -> QuestionTable:
    """Load the questions that ``data`` names.

    Args:
        data: A name from `NAMED` or `SUITES`, a local file (see `schemas`), ``"NAME=PATH"`` for a local file under a
            name, or a sequence of these. A mapping ``{"train": …, "eval": …}`` gives each split data of its own.
        split: ``"train"`` or ``"eval"``: one question in five is held out for the latter, see `side_of`; None for all.
        fold: Which fifth that is, 0 to 4.

    Raises:
        BadInputError: If there is no such set or file, or a record cannot be read; the message names the file, the
            line and what was expected.
        InfrastructureError: If the hub cannot be reached.
        MissingExtraError: If a library is needed that is not installed.
    """
    check_split(split)
    _check_fold(fold)
    if isinstance(data, Mapping):
        sources, split = _sources(data, split or "train"), None
    else:
        sources = _sources(data, None)
    return _load(sources, split, fold)


def context_corpus(data: Data) -> Path | None:
    """Return a corpus file of all passages that come with the questions; None unless every source has some.

    A passage that comes with several questions stands there once. The file lies in the cache, under a digest of what
    it holds.

    Raises:
        BadInputError: If a source cannot be read.
        InfrastructureError: If the hub cannot be reached.
    """
    splits = SPLITS if isinstance(data, Mapping) else (None,)
    return _contexts(tuple(dict.fromkeys(source for split in splits for source in _sources(data, split))))


@lru_cache(maxsize=4)  # as above
def _contexts(sources: tuple[Located, ...]) -> Path | None:
    passages: dict[tuple[str, str], None] = {}
    for source in sources:
        before = len(passages)
        passages |= dict.fromkeys(_passages(source))
        if len(passages) == before:
            return None
    lines = [
        json.dumps({"id": f"c{index}", "title": title, "contents": f"{title}\n{text}"}, ensure_ascii=False) + "\n"
        for index, (title, text) in enumerate(passages)
    ]
    content = "".join(lines).encode()
    path = cache_folder("search") / f"contexts-{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(content)
        part.replace(path)  # in one piece: another process may be looking
    return path


def list_sets() -> str:
    """Return the table of the named sets, one to a line."""
    lines = [("NAME", "QUESTIONS", "SUITE", "LICENCE", "HUB")]
    for name, spec in NAMED.items():
        suite = next((suite for suite, names in SUITES.items() if name in names), "")
        lines.append((name, f"{spec.size:,}", suite, spec.licence, f"{spec.hub_id} ({spec.config}, {spec.split})"))
    return "\n".join(f"{a:21}{b:>9}  {c:6} {d:13} {e}" for a, b, c, d, e in lines)


def show_questions(table: QuestionTable, count: int) -> str:
    """Return the first questions of a table as a person reads them."""
    shown = [f"{len(table):,} questions"]
    for question in map(table.get, table[:count]):
        facts = [question.type, f"difficulty {question.difficulty}" if question.difficulty else ""]
        head = ", ".join([question.task_id, *filter(None, facts)])
        titles = f"\nfrom: {'; '.join(question.supporting_titles)}" if question.supporting_titles else ""
        shown.append(f"--- {head}\n{question.question}\n=> {' | '.join(question.golden_answers)}{titles}")
    return "\n\n".join(shown)


def _check_fold(fold: int) -> None:
    if fold not in range(EVAL_SHARE):
        raise BadInputError(f"fold must be from 0 to {EVAL_SHARE - 1}; got {fold}.")


def _sources(data: Data, split: str | None) -> tuple[Located, ...]:
    if isinstance(data, Mapping):
        if set(data) != set(SPLITS):
            raise BadInputError(f"As a mapping, data needs the keys 'train' and 'eval'; got {sorted(map(str, data))}.")
        data = data[split or "train"]
    given = [data] if isinstance(data, str | Path) else data
    is_list = isinstance(given, Sequence) and all(isinstance(source, str | Path) for source in given)
    if not is_list or not given:
        raise BadInputError(f"data must be a name, a file or a sequence of them; got {data!r}.")
    names = [name for source in given for name in SUITES.get(str(source), (str(source),))]
    return tuple(locate(name, NAMED, SUITES) for name in names)


@lru_cache(maxsize=4)  # as above
def _load(sources: tuple[Located, ...], split: str | None, fold: int) -> QuestionTable:
    questions = [question for source in sources for question in _read(source)]
    kept = [question for question in questions if split in (None, side_of(question, fold))]
    if not kept:
        named = ", ".join(source.name for source in sources)
        if not questions:
            raise BadInputError(f"{named}: no questions; expected one JSON object per line, or an array.")
        raise BadInputError(f"{named}: no question is in the {split} split; one in five is held out.")
    return QuestionTable(kept)


def _read(source: Located) -> Iterator[Question]:
    rows = _rows(source)
    for index, record in enumerate(rows):
        try:
            question = _question(f"{source.name}-{index + 1:06d}", record)
        except BadInputError as error:
            raise BadInputError(f"{rows.place(index)}: {error}") from None
        if question is not None:
            yield question


def _question(task_id: str, record: Mapping[Any, Any]) -> Question | None:
    """Return the question of a record; None for one that has no answer in its passages by design."""
    said = read_record(record)
    if not said.is_answerable:
        return None
    return Question(task_id, said.question, said.golden_answers, said.supporting_titles, said.type, said.difficulty)


def _passages(source: Located) -> Iterator[tuple[str, str]]:
    rows = _rows(source)
    for index, record in enumerate(rows):
        try:
            yield from read_passages(record)
        except BadInputError as error:
            raise BadInputError(f"{rows.place(index)}: {error}") from None


def _rows(source: Located) -> Rows:
    if source.path is not None:
        return open_rows(source.path)
    spec = NAMED[source.name]
    return hub_rows(source.name, spec.hub_id, spec.split, extra="qa", config=spec.config, revision=spec.revision)
