"""Laws of the analyzer: the terms that Anserini's DefaultEnglishAnalyzer makes (all checked against it)."""

import random

import pytest

from trace_gym.envs.search.retrieval.analyzer import EnglishAnalyzer


@pytest.fixture(scope="module")
def analyze():
    return EnglishAnalyzer()


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("O'Neill's", ["o'neil"]),
        ("U.S.A", ["u.s.a"]),
        ("3.14 1,000 v1.2 3.x", ["3.14", "1,000", "v1.2", "3", "x"]),
        ("a_b foo:bar __ _", ["a_b", "foo:bar"]),
        ("wi-fi 12:30 C++", ["wi", "fi", "12", "30", "c"]),
        ("rock'n'roll", ["rock'n'rol"]),
        ("½ x² ⅓ 10⁄3", ["x", "10⁄3"]),
        ("the dog's \u2018bone\u2019 and its owners\u2019", ["dog", "bone", "it", "owner"]),
    ],
)
def test_words_end_where_lucene_ends_them(analyze, text, terms):
    """Marks join letters or digits by their kind; a possessive goes, and so do connectors without a word."""
    assert analyze(text) == terms


@pytest.mark.parametrize(
    ("word", "stem"),
    [
        ("agreed", "agre"),
        ("skies", "ski"),
        ("dying", "dy"),
        ("geology", "geologi"),
        ("archaeology", "archaeolog"),
        ("psychological", "psycholog"),
        ("possibly", "possibl"),
        ("is", ""),
        ("as", ""),
        ("us", "us"),
    ],
)
def test_stems_are_those_of_lucenes_porter_stemmer(analyze, word, stem):
    """Porter with Martin's two departures; words of two letters stay, stop words go."""
    assert analyze(word) == ([stem] if stem else [])


def test_stop_words_are_lucenes_and_go_in_any_case(analyze):
    """33 words; such words as "which" and "from" are terms."""
    assert analyze("The cat AND not this OR That will be there") == ["cat"]
    assert analyze("which from") == ["which", "from"]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("cafe\u0301 na\u00adive", ["cafe\u0301", "na\u00adiv"]),  # marks belong to the character before
        ("İZMİR ΣΟΦΟΣ", ["izmir", "σοφοσ"]),  # code point by code point: no final sigma
        ("東京タワーabcひらー", ["東", "京", "タワー", "abc", "ひ", "ら", "ー"]),
        ("한국어 ภาษาไทยabc", ["한국어", "ภาษาไทย", "abc"]),
        ("tea™ ☕♪☆ 👩\u200d🚀 🇩🇪🇫 👍🏽", ["tea", "™", "☕", "♪", "👩\u200d🚀", "🇩🇪", "👍🏽"]),
        ('ב"א Ⅷ ⓐ', ['ב"א', "ⅷ", "ⓐ"]),
        ("\ud800x \x00y\x07", ["x", "y"]),
    ],
)
def test_scripts_and_signs_are_cut_as_lucene_cuts_them(analyze, text, terms):
    """Han and Hiragana one by one, Katakana and Thai in runs, pictographs alone, flags in pairs."""
    assert analyze(text) == terms


def test_long_tokens_are_cut_every_255_characters(analyze):
    """As by Lucene's scanner, which starts afresh behind the cut."""
    assert [len(term) for term in analyze("a" * 600)] == [255, 255, 90]
    assert analyze("x" * 254 + "'s y") == ["x" * 254, "s", "y"]
    assert analyze("x" * 253 + "'s y") == ["x" * 253, "y"]


def test_any_text_is_analysed_and_twice_the_same(analyze):
    """No text fails, and what was seen before does not matter."""
    rng = random.Random(0)
    texts = ["".join(chr(rng.randrange(0x110000)) for _ in range(200)) for _ in range(50)]
    first = [analyze(text) for text in texts]
    assert [EnglishAnalyzer()(text) for text in texts[:3]] == first[:3]
    assert [analyze(text) for text in texts] == first


@pytest.mark.parametrize("unit", ["a", "_", "a'", 'א"', "👍\u200d", "1,", "a\u0301"])
@pytest.mark.timeout(20)
def test_the_time_is_linear_in_the_length(analyze, unit):
    """A hostile document of 300,000 characters does not hang (the deadline is generous)."""
    analyze(unit * (300_000 // len(unit)))
