"""Bundled questions: drafted from the facts, and kept only if the corpus bears them out.

Every question kept has one right answer, and needs both of its passages: the first does not hold the answer, the second
does not name the thing asked about, and no third passage names both. Difficulty 1 is a comparison; 2 a chain with a
hint, so that a search for the question itself finds the passage with the answer; 3 a chain without one, where more
than `FAR` other passages have more in common with the question than that passage.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trace_gym.envs.search.tasks.chains import ALIASES, CHAINS, COMPARISONS, HINTS, Chain, Comparison
from trace_gym.envs.search.tasks.facts import Fact, Words, strip_note
from trace_gym.envs.search.tasks.passages import needs, pick

FAR = 10  # passages
NUM_DRAWN = 8  # partners to choose the nearest from: those far apart are too easy


@dataclass(frozen=True, slots=True)
class Draft:
    """A question before it has an id.

    Attributes:
        form: What it was made from; questions are balanced over forms and difficulties.
        question: The text.
        golden_answers: Right answers, the usual one first.
        supporting_titles: The two passages; of a chain in the order of its steps.
        type: ``"bridge"`` or ``"comparison"``.
        difficulty: 1 to 3.
    """

    form: str
    question: str
    golden_answers: tuple[str, ...]
    supporting_titles: tuple[str, str]
    type: str
    difficulty: int


class Texts:
    """Which passages mention what.

    Args:
        passages: The passages by title.
    """

    def __init__(self, passages: Mapping[str, str]) -> None:
        """Index the passages by their words."""
        self._titles = list(passages)
        self._padded = [_padded(f"{strip_note(title)} {text}") for title, text in passages.items()]
        self._holders = _index(self._padded)
        self._places = {title: place for place, title in enumerate(self._titles)}
        lowered = _index([text.lower() for text in self._padded])
        self._postings = {word: np.fromiter(sorted(found), dtype=np.int64) for word, found in lowered.items()}
        self._mentions: dict[str, frozenset[str]] = {}

    def mention(self, phrase: str) -> frozenset[str]:
        """Return the titles of the passages that hold a phrase, word for word."""
        if phrase not in self._mentions:
            padded = _padded(phrase)
            holders = min((self._holders.get(word, set()) for word in padded.split()), key=len, default=set())
            self._mentions[phrase] = frozenset(self._titles[i] for i in holders if padded in self._padded[i])
        return self._mentions[phrase]

    def num_closer(self, question: str, title: str) -> int:
        """Return how many passages share as much with a question as one does, by the weight of the shared words."""
        scores = np.zeros(len(self._titles))
        for word in sorted(set(_padded(question).lower().split())):
            postings = self._postings.get(word)
            if postings is not None:
                scores[postings] += np.log(1 + len(self._titles) / len(postings))
        return int(np.sum(scores >= scores[self._places[title]])) - 1


def _index(texts: Sequence[str]) -> dict[str, set[int]]:
    holders: dict[str, set[int]] = defaultdict(set)
    for place, text in enumerate(texts):
        for word in text.split():
            holders[word].add(place)
    return holders


_WORD = re.compile(r"[^\W_]+")


def _padded(text: str) -> str:
    return f" {' '.join(_WORD.findall(text))} "


class Drafter:
    """Drafts questions about facts.

    Args:
        facts: All facts by title.
        passages: The passage about each.
        seed: Another seed gives other questions.
    """

    def __init__(self, facts: Mapping[str, Fact], passages: Mapping[str, str], seed: int = 0) -> None:
        """Index the passages."""
        self._facts = facts
        self._texts = Texts(passages)
        self._seed = seed
        names = Counter(fact.name for fact in facts.values())
        self._kinds: dict[str, list[Fact]] = defaultdict(list)
        for fact in facts.values():
            if names[fact.name] == 1:  # else a question could mean either
                self._kinds[fact.kind].append(fact)

    def chains(self) -> Iterator[Draft]:
        """Yield every chain that the corpus bears out, with and without a hint."""
        for chain in CHAINS:
            for first in self._kinds[chain.kind]:
                second = self._facts.get(first.one(chain.link) or "")
                if second is not None and second.kind == chain.bridge and second is not first:
                    yield from self._chain(chain, first, second)

    def comparisons(self) -> Iterator[Draft]:
        """Yield comparisons, for each thing one with a partner drawn from its kind."""
        for form in COMPARISONS:
            groups: dict[object, list[Fact]] = defaultdict(list)
            for fact in self._kinds[form.kind]:
                groups[_value(fact, form)].append(fact)
            groups.pop(None, None)
            things = [fact for group in groups.values() for fact in group]
            for first in things:
                key = (self._seed, form.column, form.wants, first.title)
                wants_same = form.wants == "same" and pick((True, False), *key)
                others = groups[_value(first, form)] if wants_same else things
                drawn = [pick(others, *key, draw) for draw in range(NUM_DRAWN)]
                partners = [other for other in drawn if self._is_pair(form, first, other, wants_same)]
                if partners:
                    yield self._comparison(form, first, min(partners, key=lambda other: _distance(form, first, other)))

    def _chain(self, chain: Chain, first: Fact, second: Fact) -> Iterator[Draft]:
        answer = second.one(chain.answer)
        if answer is None or not self._is_sound(first, second, strip_note(answer)):
            return
        plain = pick(chain.wordings, self._seed, first.title, chain.answer).format(it=first.fields["name"])
        fields = dict(second.fields)
        if "neighbours" in fields:
            fields["neighbour"] = Words([pick(fields["neighbours"], self._seed, first.title)])
        hint = HINTS[chain.bridge]
        told = f"{plain} {hint.format_map(fields)}" if needs(hint) <= set(fields) else None
        for question, difficulty in ((plain, 3), (told, 2)):
            if question is None or any(
                _padded(name) in _padded(question) for name in (second.name, strip_note(answer))
            ):
                continue
            is_far = self._texts.num_closer(question, second.title) > FAR
            if is_far == (difficulty == 3):
                answers = self._answers(chain, second, answer)
                form = f"{chain.kind} {chain.link} {chain.answer}"
                yield Draft(form, question, answers, (first.title, second.title), "bridge", difficulty)

    def _is_sound(self, first: Fact, second: Fact, answer: str) -> bool:
        names_first, names_answer = self._texts.mention(first.name), self._texts.mention(answer)
        return (
            first.title in self._texts.mention(second.name)
            and second.title in names_answer
            and first.title not in names_answer
            and second.title not in names_first
            and not (names_first & names_answer)
        )

    def _answers(self, chain: Chain, second: Fact, answer: str) -> tuple[str, ...]:
        answers = list(_spellings(answer))
        place = self._facts.get(answer)
        if chain.answer == "currency" and " " not in answer and answer != "euro":
            answers += [f"{second.fields['adjective']} {spelling}" for spelling in answers]
        if chain.answer == "place" and place is not None and place.kind == "state":
            answers += _spellings(place.fields["country"][0])
        return tuple(dict.fromkeys(answers))

    def _is_pair(self, form: Comparison, first: Fact, other: Fact, wants_same: bool) -> bool:
        if (
            other is first
            or other.title in self._texts.mention(first.name)
            or first.title in self._texts.mention(other.name)
        ):
            return False
        a, b = _value(first, form), _value(other, form)
        if form.wants == "same":
            return (a == b) == wants_same
        return isinstance(a, int) and isinstance(b, int) and abs(a - b) >= form.gap

    def _comparison(self, form: Comparison, first: Fact, other: Fact) -> Draft:
        a, b = _value(first, form), _value(other, form)
        question = pick(form.wordings, self._seed, first.title, other.title)
        question = question.format(a=first.fields["name"], b=other.fields["name"])
        if form.wants == "same":
            answers: tuple[str, ...] = ("yes" if a == b else "no",)
        else:
            first_wins = (a < b) == (form.wants == "less")  # type: ignore[operator]
            answers = tuple(_spellings((first if first_wins else other).title))
        titles = (first.title, other.title)
        name = f"{form.kind} {form.column} {answers[0] if form.wants == 'same' else form.wants}"
        return Draft(name, question, answers, titles, "comparison", 1)


def _value(fact: Fact, form: Comparison) -> int | str | None:
    return fact.one(form.column) if form.wants == "same" else fact.number(form.column)


def _distance(form: Comparison, first: Fact, other: Fact) -> int:
    return abs((first.number(form.column) or 0) - (other.number(form.column) or 0)) if form.wants != "same" else 0


def _spellings(title: str) -> list[str]:
    """Return what a thing may be called in an answer: its name, other names, and all without diacritics."""
    name = strip_note(title)
    names = [name, *ALIASES.get(name, ())]
    if name.startswith("The "):
        names.append(name[4:])
    if name.endswith(" River"):
        names.append(name.removesuffix(" River"))
    plain = [_without_marks(name) for name in names]
    return list(dict.fromkeys([*names, *plain]))


def _without_marks(text: str) -> str:
    letters = text.translate(str.maketrans("łŁøØđĐıəʻ", "lLoOdDie'")).replace("ß", "ss")
    return "".join(c for c in unicodedata.normalize("NFD", letters) if not unicodedata.combining(c))


def balanced(drafts: Iterable[Draft], size: int, seed: int = 0) -> list[Draft]:
    """Return up to so many drafts, going round their forms; of each pair of passages one, and no question twice."""
    forms: dict[str, list[Draft]] = defaultdict(list)
    for draft in drafts:
        forms[f"{draft.form} {draft.difficulty}"].append(draft)
    queues = [_shuffled(forms[form], seed) for form in sorted(forms)]
    chosen: list[Draft] = []
    seen: set[object] = set()
    while any(queues) and len(chosen) < size:
        for queue in queues:
            while queue:
                draft = queue.pop()
                keys = {frozenset(draft.supporting_titles), draft.question}
                if not keys & seen:
                    seen |= keys
                    chosen.append(draft)
                    break
    return chosen[:size]


def _shuffled(drafts: Sequence[Draft], seed: int) -> list[Draft]:
    return sorted(drafts, key=lambda draft: pick(range(2**62), seed, draft.question))
