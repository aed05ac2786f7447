"""The scripted demonstrator: an oracle that searches for the supporting passages, with slips.

The oracle knows the question's supporting titles, but uses one only once an agent could: the question names the first,
and a bridge is searched for after a passage that mentions it was seen. With a skill below 1 each step goes wrong with
probability ``1 - skill``: the demonstrator searches for the wrong thing, answers too early, or takes an answer that
stands beside the right one. A wrong search is made good by the next step; a wrong answer is final.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trace_gym.envs.search.scoring import exact_match, title_key
from trace_gym.envs.search.tasks import Question
from trace_gym.errors import BadInputError

EARLY_SHARE = 0.25  # of the slips before everything was found

# Capitalised words inside of a sentence.
_NAMES = re.compile(r"(?<=[\w,;] )[^\W\d_a-z][\w'’.-]*\w(?: [^\W\d_a-z][\w'’.-]*\w)*")
_YEARS = re.compile(r"\d{3,}")


@dataclass(frozen=True, slots=True)
class Move:
    """The next step: a query, or the answer.

    Attributes:
        query: What to search for; None if the answer is given.
        answer: The answer; None if there is a query.
    """

    query: str | None = None
    answer: str | None = None


def next_move(
    question: Question,
    queries: Sequence[str],
    titles: Sequence[str],
    read: Sequence[str],
    rng: np.random.Generator,
    skill: float,
) -> Move:
    """Return the demonstrator's next step.

    Args:
        question: What is asked; it must name its supporting passages.
        queries: The `query_key` of each query so far.
        titles: Titles of the passages found so far.
        read: What the searches showed.
        rng: Draws the slips.
        skill: Share of right steps, in [0, 1].

    Raises:
        BadInputError: If the question does not name its supporting passages.
    """
    if not question.supporting_titles:
        raise BadInputError(
            "Questions without supporting titles have no demonstrations: leave demonstrator_skill unset. Training on "
            "them needs a model to start from (trace-gym train --model)."
        )
    is_wrong = rng.random() >= skill
    query = _next_query(question, queries, titles, read)
    if query is None:
        return Move(answer=_wrong_answer(question, read, rng) if is_wrong else question.golden_answers[0])
    if not is_wrong:
        return Move(query=query)
    if rng.random() < EARLY_SHARE:
        return Move(answer=_wrong_answer(question, read, rng))
    return Move(query=_wrong_query(question, query, read, rng))


def query_key(query: str) -> str:
    """Return what two queries have in common that are the same search."""
    return " ".join(query.casefold().split())[:200]


def _next_query(question: Question, queries: Sequence[str], titles: Sequence[str], read: Sequence[str]) -> str | None:
    """Return what to search for; None once all is found, or nothing more can be done."""
    found = {title_key(title) for title in titles}
    missing = [title for title in question.supporting_titles if title_key(title) not in found]
    known = "\n".join((question.question, *read))
    names = [_name(title) for title in missing if _name(title) in known]
    # What was searched in vain is tried in other words, and a title that the text spells otherwise in its own.
    for query in (*names, question.question, *missing):
        if missing and query_key(query) not in queries:
            return query
    return None


def _name(title: str) -> str:
    """Return a title without the note in parentheses that tells it from others."""
    return re.sub(r" \([^)]*\)$", "", title)


def _wrong_query(question: Question, query: str, read: Sequence[str], rng: np.random.Generator) -> str:
    """Return the name of something else that was read of; the whole question before anything was."""
    names = [name for name in _NAMES.findall(" ".join(read[-1:])) if name not in query and query not in name]
    return _draw(names, rng) or question.question


def _wrong_answer(question: Question, read: Sequence[str], rng: np.random.Generator) -> str:
    """Return something like the answer that is none."""
    golden = question.golden_answers
    if golden[0] in ("yes", "no"):
        return "no" if golden[0] == "yes" else "yes"
    if question.type == "comparison":
        others = [_name(title) for title in question.supporting_titles]
    else:
        others = (_YEARS if golden[0].isdigit() else _NAMES).findall(" ".join(read[-1:]))
    others = [other for other in others if not exact_match(other, golden)]
    return _draw(others, rng) or _name(question.supporting_titles[0])


def _draw(choices: Sequence[str], rng: np.random.Generator) -> str | None:
    return choices[int(rng.integers(len(choices)))] if choices else None
