"""The bundled corpus and questions: reproducible, true to their tables, and questions that need both passages."""

import json
import re
import unicodedata
from collections import Counter
from importlib.resources import files

import pytest

from trace_gym.envs.search.retrieval import read_corpus
from trace_gym.envs.search.scoring import exact_match
from trace_gym.envs.search.tasks import bundled_questions, side_of
from trace_gym.envs.search.tasks.drafts import Texts
from trace_gym.envs.search.tasks.facts import Words, read_facts, strip_note
from trace_gym.envs.search.tasks.generate import CORPUS, QUESTIONS, generate, to_lines
from trace_gym.envs.search.tasks.passages import WORDINGS, pick


@pytest.fixture(scope="module")
def corpus():
    """Texts by title."""
    return {passage.title: passage.text for passage in read_corpus()}


@pytest.fixture(scope="module")
def questions():
    lines = (files("trace_gym.assets") / QUESTIONS).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


@pytest.mark.slow
def test_the_shipped_files_are_what_the_generator_writes():
    """A change of the tables or the wordings has to be followed by a run of the generator."""
    for name, records in zip((CORPUS, QUESTIONS), generate(), strict=True):
        shipped = (files("trace_gym.assets") / name).read_text(encoding="utf-8")
        assert to_lines(records) == shipped, f"run python -m trace_gym.envs.search.tasks.generate ({name} differs)"


def test_there_is_enough_of_everything(corpus, questions):
    assert len(corpus) >= 2_000
    levels = Counter((question["type"], question["difficulty"]) for question in questions)
    assert set(levels) == {("comparison", 1), ("bridge", 2), ("bridge", 3)}
    assert min(levels.values()) >= 400
    assert len({question["question"] for question in questions}) == len(questions)


def test_passages_are_of_a_readable_length(corpus):
    """30 to 90 words, whole sentences, no piece of a template left over."""
    for title, text in corpus.items():
        assert 30 <= len(text.split()) <= 90, title
        assert text.endswith((".", "?")) and "  " not in text and not re.search(r"[{}|]|\.\.", text), text
        assert not re.search(r"\b(the the|a a|an? [aeiou]n? )\b", text), text


def test_every_supporting_title_is_in_the_corpus(corpus, questions):
    for question in questions:
        assert len(question["supporting_titles"]) == 2
        assert set(question["supporting_titles"]) <= set(corpus), question


def test_no_chain_can_be_answered_from_one_passage(corpus, questions):
    """The question does not name the bridge; the first passage names it but lacks the answer, which the second has;
    the second does not name what the question is about, and no third passage has both."""
    texts = Texts(corpus)
    for question in (question for question in questions if question["type"] == "bridge"):
        first, second = question["supporting_titles"]
        start, bridge, answer = strip_note(first), strip_note(second), question["golden_answers"][0]
        mentions = Texts({"question": question["question"]}).mention
        assert not mentions(bridge) and not mentions(answer), question
        assert first in texts.mention(bridge) and first not in texts.mention(answer), question
        assert second in texts.mention(answer) and second not in texts.mention(start), question
        assert not texts.mention(start) & texts.mention(answer), question


def test_a_comparison_names_both_things_and_neither_passage_names_the_other(corpus, questions):
    texts = Texts(corpus)
    for question in (question for question in questions if question["type"] == "comparison"):
        names = [strip_note(title) for title in question["supporting_titles"]]
        assert all(name.lower() in question["question"].lower() for name in names), question
        assert question["golden_answers"][0] in (*names, "yes", "no"), question
        assert question["supporting_titles"][0] not in texts.mention(names[1]), question
        assert question["supporting_titles"][1] not in texts.mention(names[0]), question


def test_yes_is_about_as_frequent_as_no(questions):
    answers = Counter(question["golden_answers"][0] for question in questions)
    assert 0.4 < answers["yes"] / (answers["yes"] + answers["no"]) < 0.6


def test_comparisons_are_answered_by_the_tables(questions):
    """Worked out anew from the numbers in the tables."""
    facts = read_facts()
    columns = {"born first": "born", "born earlier": "born", "deeper": "metres", "higher atomic": "number"}
    seen = 0
    for question in questions:
        column = next((column for words, column in columns.items() if words in question["question"]), None)
        if column is None:
            continue
        seen += 1
        ordered = sorted((facts[title] for title in question["supporting_titles"]), key=lambda f: f.number(column))
        winner = ordered[0] if column == "born" else ordered[-1]
        assert question["golden_answers"][0] == winner.name, question
    assert seen > 50


def test_answers_in_other_spellings_are_right(questions):
    """Without diacritics, and under other names of the same thing."""
    golden = {question["golden_answers"][0]: question["golden_answers"] for question in questions}
    accented = [answer for answer in golden if not answer.isascii() and not set(answer) & set("đłøʻ")]
    assert len(accented) > 20
    for answer in accented:
        plain = "".join(c for c in unicodedata.normalize("NFD", answer) if not unicodedata.combining(c))
        assert exact_match(plain, golden[answer]), answer
    assert exact_match("Washington DC", golden["Washington, D.C."])
    assert exact_match("Swedish krona", golden["krona"])
    assert exact_match("USA", golden["United States"])


def test_no_pair_of_passages_is_asked_about_in_both_splits():
    train, held_out = (set(_pairs(bundled_questions(split))) for split in ("train", "eval"))
    assert not train & held_out
    assert 0.15 < len(held_out) / len(train | held_out) < 0.25


def _pairs(table):
    return (frozenset(question.supporting_titles) for question in table.questions())


def test_every_beginning_of_the_questions_is_balanced():
    for split in ("train", "eval"):
        levels = Counter(question.difficulty for question in list(bundled_questions(split).questions())[:150])
        assert min(levels[level] for level in (1, 2, 3)) > 30
    assert all(side_of(question) == "eval" for question in bundled_questions("eval").questions())


def test_neighbours_on_land_are_neighbours_of_each_other():
    """A border has two sides."""
    facts = read_facts()
    countries = {fact.name: fact for fact in facts.values() if fact.kind == "country"}
    for name, fact in countries.items():
        for other in fact.fields.get("neighbours", ()):
            if other in countries:
                assert name in countries[other].fields["neighbours"], (name, other)


def test_tables_hold_no_impossible_numbers():
    """People die after they were born, and elements are numbered without a gap."""
    facts = read_facts().values()
    for fact in facts:
        born, died = fact.number("born"), fact.number("died")
        if born and died:
            assert 15 <= died - born <= 110, fact.title
    elements = [fact for fact in facts if fact.kind == "element"]
    assert [fact.number("number") for fact in elements] == list(range(1, 119))
    assert len({fact.one("symbol") for fact in elements}) == 118


def test_makers_lived_when_their_works_appeared():
    """A work may appear after its maker's death, but not before the maker was a child of five."""
    facts = read_facts()
    columns = ("author", "composer", "painter", "director", "inventor", "designer", "discoverer", "architect")
    seen = 0
    for fact in facts.values():
        for column in columns:
            maker = facts.get(fact.one(column) or "")
            year = fact.number("year")
            if maker is not None and year and (born := maker.number("born")):
                seen += 1
                assert born + 5 <= year, (fact.title, maker.title)
                died = maker.number("died")
                assert died is None or year <= died + 50, (fact.title, maker.title)
    assert seen > 400


def test_every_kind_of_fact_has_its_wording():
    assert {fact.kind for fact in read_facts().values()} == set(WORDINGS)


def test_choices_depend_on_the_key_alone():
    """Known values: no library's random stream is involved."""
    assert [pick("abcdef", 0, title) for title in ("Paris", "Rome", "Oslo")] == ["d", "d", "f"]
    assert pick("abcdef", 0, "Paris") == pick("abcdef", 0, "Paris")


def test_fields_agree_in_number_and_take_articles():
    one, two, three = Words(["Netherlands"]), Words(["a", "b"]), Words(["x", "y (note)", "z"])
    assert f"{one:the}; {one:The}; {one}" == "the Netherlands; The Netherlands; Netherlands"
    assert f"{two}; {three}" == "a and b; x, y and z"
    assert f"belong{one:v} belong{two:v} language{two:s} {one:is} {two:is}" == "belongs belong languages is are"
    assert f"{Words(['Lake Geneva']):water} {Words(['Black Sea']):water}" == "Lake Geneva the Black Sea"
    assert (
        f"{Words(['element']):a} {Words(['Bavarian king']):a} {Words(['ode']):cap}" == "an element a Bavarian king Ode"
    )
    with pytest.raises(ValueError, match="allowed: the, The, water"):
        f"{one:nope}"
