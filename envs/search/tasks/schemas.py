"""Records of question-answering data sets: one reader for the usual schemas.

| what | fields that are understood |
|---|---|
| question | ``question`` (or ``Question``, as in Bamboogle) |
| answers | ``golden_answers`` (FlashRAG, Search-R1), ``answers``, else ``answer`` with ``answer_aliases`` (MuSiQue) |
| supporting titles | ``supporting_titles``; ``supporting_facts``: pairs of title and sentence (HotpotQA, 2Wiki), or lists ``title`` and ``sent_id`` (the same at the hub); ``paragraphs`` with ``is_supporting`` (MuSiQue) |
| passages | ``context``: pairs of title and sentences, or lists ``title`` and ``sentences`` or ``content``; ``paragraphs`` with ``title`` and ``paragraph_text`` |
| difficulty | ``difficulty`` 1 to 3, or ``level``: easy, medium, hard |

Titles and passages are also looked for in ``metadata``, where FlashRAG keeps them. Records are other people's input:
what does not fit is an error that says what was expected.
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trace_gym.errors import BadInputError

_LEVELS = {"easy": 1, "medium": 2, "hard": 3}

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a record says: the fields of a `Question` without its name.

    Attributes:
        question: As in `Question`, as are the other fields.
        is_answerable: False for the questions of MuSiQue whose passages were taken away.
    """

    question: str
    golden_answers: tuple[str, ...]
    supporting_titles: tuple[str, ...] = ()
    type: str = ""
    difficulty: int = 0
    is_answerable: bool = True


def read_record(record: Mapping[Any, Any]) -> Reading:
    """Read one record.

    Raises:
        BadInputError: If it is not of a known form; the message says what was expected.
    """
    fields = _fields(record)
    question = fields.get("question")
    if not isinstance(question, str) or not question.strip():
        raise BadInputError(f"expected a text in 'question'; {_columns(fields)}.")
    level = fields.get("level")
    difficulty = fields.get("difficulty", _LEVELS.get(level) if isinstance(level, str) else None)
    is_known = isinstance(difficulty, int) and not isinstance(difficulty, bool) and 1 <= difficulty <= 3
    kind = fields.get("type")
    return Reading(
        _text(question),
        _answers(fields),
        tuple(dict.fromkeys(_titles(fields))),
        _text(kind) if isinstance(kind, str) else "",
        difficulty if is_known else 0,
        fields.get("answerable") is not False,
    )


def read_passages(record: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    """Yield title and text of every passage that comes with a record.

    Raises:
        BadInputError: If the passages are not of a known form.
    """
    fields = _fields(record)
    context = fields.get("context")
    if context is not None:
        yield from map(_passage, _pairs("context", context))
    for paragraph in _paragraphs(fields):
        yield _passage((paragraph.get("title"), paragraph.get("paragraph_text")))


def _fields(record: Mapping[Any, Any]) -> Fields:
    fields = {key.lower(): value for key, value in record.items() if isinstance(key, str)}
    metadata = fields.get("metadata")
    inner = metadata if isinstance(metadata, Mapping) else {}
    return {**{key.lower(): value for key, value in inner.items() if isinstance(key, str)}, **fields}


def _answers(fields: Fields) -> tuple[str, ...]:
    given = next(
        (fields[name] for name in ("golden_answers", "answers", "answer") if fields.get(name) is not None), None
    )
    aliases = fields.get("answer_aliases") or []
    listed = [*(given if isinstance(given, list) else [given]), *(aliases if isinstance(aliases, list) else [aliases])]
    answers = tuple(dict.fromkeys(text for text in map(_answer, listed) if text))
    if not answers:
        raise BadInputError(f"expected texts in 'golden_answers', or a text in 'answer'; {_columns(fields)}.")
    return answers


def _answer(value: Any) -> str:
    """Return an answer as text; an empty one if it is none."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and math.isfinite(value):
        return str(int(value) if value == int(value) else value)
    return _text(value) if isinstance(value, str) else ""


def _titles(fields: Fields) -> list[str]:
    titles: Any = fields.get("supporting_titles")
    if titles is None and fields.get("supporting_facts") is not None:
        titles = [title for title, _ in _pairs("supporting_facts", fields["supporting_facts"])]
    if titles is None:
        titles = [p.get("title") for p in _paragraphs(fields) if p.get("is_supporting")]
    if not isinstance(titles, list) or not all(isinstance(title, str) for title in titles):
        raise BadInputError("expected a list of titles in 'supporting_titles' or 'supporting_facts'.")
    return [_text(title) for title in titles]


def _pairs(name: str, value: Any) -> list[Sequence[Any]]:
    """Return titles with what belongs to each, from pairs or from parallel lists."""
    if isinstance(value, Mapping):
        others = next((value[key] for key in ("sentences", "content", "sent_id") if key in value), None)
        if isinstance(value.get("title"), list) and isinstance(others, list) and len(value["title"]) == len(others):
            return list(zip(value["title"], others, strict=True))
    elif isinstance(value, list) and all(isinstance(item, list | tuple) and len(item) == 2 for item in value):
        return value
    raise BadInputError(f"expected pairs that begin with a title in {name!r}, or parallel lists with 'title'.")


def _paragraphs(fields: Fields) -> list[Mapping[str, Any]]:
    paragraphs = fields.get("paragraphs") or []
    if not isinstance(paragraphs, list) or not all(isinstance(paragraph, Mapping) for paragraph in paragraphs):
        raise BadInputError("expected objects with 'title' and 'paragraph_text' in 'paragraphs'.")
    return paragraphs


def _passage(pair: Sequence[Any]) -> tuple[str, str]:
    title, text = pair
    if isinstance(text, list) and all(isinstance(sentence, str) for sentence in text):
        # HotpotQA's sentences keep the space before them, 2Wiki's do not.
        has_spaces = any(sentence[:1].isspace() for sentence in text[1:])
        text = ("" if has_spaces else " ").join(text)
    if not isinstance(title, str) or not isinstance(text, str):
        raise BadInputError("expected a title and a text, or a list of sentences, in every passage.")
    return _text(title), _text(text)


def _text(value: str) -> str:
    """Strip a text; half a surrogate pair becomes a question mark, as it cannot be encoded."""
    return value.encode(errors="replace").decode().strip()


def _columns(fields: Fields) -> str:
    return f"the fields are {', '.join(fields) or 'none'}"
