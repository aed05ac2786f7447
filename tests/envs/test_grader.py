r"""Verdicts: what the grader takes for equal, for different, and for neither."""

from __future__ import annotations

import itertools
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from trace_gym.envs.math import grade
from trace_gym.envs.math.grading import close_grader, extract_answer, grader

needs_workers = pytest.mark.skipif(find_spec("math_verify") is None, reason="the extra `math` is not installed")


@pytest.fixture(scope="module", autouse=True)
def workers_end_with_the_module():
    grade(r"\sin 2x", r"2\sin x \cos x", patient=True)  # starts them
    yield
    close_grader()


@pytest.fixture
def no_workers(monkeypatch):
    def refuse(*texts):
        raise AssertionError(f"a worker was asked about {texts}")

    monkeypatch.setattr(grader, "compare_thoroughly", refuse)


def outcome(prediction: str, gold: str, **more) -> str:
    return grade(prediction, gold, **more).outcome


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}", "7"),
        (r"first \boxed{2}, no, \boxed{\frac{1}{3}} it is", r"\frac{1}{3}"),
        (r"I put it in \boxed as asked: \boxed{12}", "12"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{8}}", "8"),
        (r"an open brace { before \boxed{4}", "4"),
        (r"\boxed{1, and then \boxed{2}", "2"),
        (r"<think> \boxed{1} </think> \boxed{2}", "2"),
        (r"\boxed{}", ""),
        (r"\boxed{6} and then \boxed{7", None),
        (r"<think> \boxed{1} </think> nothing", None),
        (r"<think> still at it \boxed{1}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, answer: str | None) -> None:
    """The last box counts if it is closed; an earlier one never takes its place."""
    assert extract_answer(text) == answer


def pairs(sign: str, workers: bool) -> list[tuple[str, str]]:
    """Read grader_pairs.txt: the pairs with one sign, of the sections that need workers or of the others."""
    found, harder = [], False
    for line in (Path(__file__).parent / "grader_pairs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            harder = line.endswith("(workers)")
        elif line and harder == workers and (parts := f" {line} ".split(f" {sign} "))[1:]:
            found.append((parts[0].strip(), parts[1].strip()))
    return found


@pytest.mark.parametrize(("one", "other"), pairs("==", workers=False))
def test_equal_answers_are_correct_both_ways(one: str, other: str, no_workers: None) -> None:
    """Notation does not matter, value does; and equality has no direction. None of this needs a worker."""
    assert outcome(one, other) == "correct"
    assert outcome(other, one) == "correct"


@needs_workers
@pytest.mark.parametrize(("one", "other"), pairs("==", workers=True))
def test_equal_functions_and_complex_numbers_are_correct_both_ways(one: str, other: str) -> None:
    """What exact arithmetic cannot hold is compared by many digits."""
    assert outcome(one, other) == "correct"
    assert outcome(other, one) == "correct"


@pytest.mark.parametrize(("prediction", "gold"), pairs("!=", workers=False))
def test_other_answers_are_wrong(prediction: str, gold: str, no_workers: None) -> None:
    """A readable right answer settles the matter: another value, another shape and no answer at all are wrong."""
    assert outcome(prediction, gold) == "wrong"


@needs_workers
@pytest.mark.parametrize(("prediction", "gold"), pairs("!=", workers=True))
def test_other_functions_are_wrong(prediction: str, gold: str) -> None:
    """A difference beyond the precision of a double is a difference."""
    assert outcome(prediction, gold) == "wrong"


@pytest.mark.slow
@needs_workers
def test_equality_is_symmetric_over_all_pairs_of_the_corpus() -> None:
    """Whatever two answers are compared, the direction does not matter where both can be read."""
    # A decimal may be rounded, a list Python's or an interval; a right answer may be a sum, or contradict itself.
    directed = re.compile(r"[-+]?[0-9]*\.[0-9]{2,}|\[[^\[]*,[^\[]*\]|5 = 7|.*\\(?:int|sum|lim).*")
    table = pairs("==", workers=False)[::3] + pairs("!=", workers=False)[::4]
    texts = sorted({text for pair in table for text in pair if len(text) < 30 and not directed.fullmatch(text)})[::2]
    for one, other in itertools.combinations(texts, 2):
        there, back = outcome(one, other), outcome(other, one)
        assert there == back or "ungradable" in (there, back), (one, other)


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("100/3", "33.3", "correct"),
        (r"\frac{\pi}{3}", "1.0472", "correct"),
        (r"\frac{\pi}{3}", "1.05", "wrong"),
        (r"\sqrt{156}", "12.5", "wrong"),
        ("33.34", "33.3", "wrong"),
        ("(0.723606797749979, -0.105572809000084)", "(0.72, -0.1056)", "correct"),
        ("(0.7, -0.11)", "(0.72, -0.1056)", "wrong"),
        ("30.4", r"30.4 \text{ OR } \frac{153}{5}", "correct"),
        ("[1, 2]", "2, 1", "correct"),
    ],
)
def test_a_rounded_right_answer_stands_for_what_rounds_to_it(prediction: str, gold: str, expected: str) -> None:
    """Only the right answer may be rounded, and only if it has enough digits; likewise only it may offer a choice."""
    if "pi" not in prediction or find_spec("math_verify"):
        assert outcome(prediction, gold) == expected


@pytest.mark.parametrize(
    ("prediction", "gold", "question", "expected"),
    [
        ("60%", "60", "What percentage of the students dance?", "correct"),
        ("60", r"60\%", "By what percent does it grow?", "correct"),
        ("0.6", r"60\%", "What percent is it?", "wrong"),
        ("60%", "60", "How many students dance?", "wrong"),
        ("0.6", r"60\%", "How large is the probability?", "correct"),
    ],
)
def test_a_percent_sign_is_a_unit_where_percent_are_asked_for(prediction, gold, question, expected) -> None:
    """Fifty percent is one half; it is fifty only as the answer to how many percent."""
    assert outcome(prediction, gold, question=question) == expected


@pytest.mark.parametrize(
    ("prediction", "gold", "expected"),
    [
        ("B", "B", "correct"),
        ("(b)", "B", "correct"),
        (r"\boxed{\text{B. 5 m}}", "B", "correct"),
        ("The answer is B.", "B", "correct"),
        (r"It follows that \boxed{F = ma}. **Answer: B**", "B", "correct"),
        ("5 m", "B", "correct"),
        ("5 metres", "B", "correct"),
        ("B", "5 m", "correct"),
        ("none of these", "D", "correct"),
        ("A", "B", "wrong"),
        ("B or C", "B", "wrong"),
        ("E", "B", "wrong"),
        ("7 m", "B", "wrong"),
        ("A", "E", "ungradable"),
    ],
)
def test_options_are_named_by_their_letter_or_their_text(prediction: str, gold: str, expected: str) -> None:
    """Both sides may say the letter or what it stands for."""
    assert outcome(prediction, gold, options=["4 m", "5 m", "6 m", "None of these"]) == expected


@pytest.mark.parametrize(
    ("response", "gold", "expected"),
    [
        (r"not \boxed{8} nor \boxed{9}, but \boxed{11}", "11", "correct"),
        (r"<answer>\(\boxed{35}\).</answer>", "35", "correct"),
        ("<answer>35</answer>", "35", "correct"),
        ("<think> 3 and 5 </think> The answer is 8.", "8", "correct"),
        ("Work.\n#### 1,234", "1234", "correct"),
        (r"<think> is it \boxed{8}? </think> \boxed{9}", "8", "wrong"),
        (r"Marked with \boxed: nothing", "4", "wrong"),
        (r"$\boxed{C}$", "C", "correct"),
        (r"\boxed{p \gg \Delta x}. Answer: D", "D", "correct"),
    ],
)
def test_a_whole_response_is_graded_by_its_answer(response: str, gold: str, expected: str) -> None:
    """The last box counts, then what is announced."""
    assert outcome(response, gold) == expected


@needs_workers
@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("42", ""),
        ("42", r"\boxed{42"),
        ("42", "7" * 5000),
        ("1", "9^9^9^9"),
        ("0", "1/0"),
        ("4", r"\frac{1}{"),
        ("odd numbers without the squares", "all odd numbers that are not squares"),
    ],
)
def test_what_a_bad_right_answer_makes_undecidable_is_ungradable(prediction: str, gold: str) -> None:
    """A right answer that cannot be read is not the fault of the answer."""
    assert outcome(prediction, gold) == "ungradable"


@needs_workers
def test_math_verify_reads_what_the_own_grammar_does_not() -> None:
    """An integral is compared with an integral."""
    assert outcome(r"\int_0^1 2 x dx", r"2 \int_0^1 x dx") == "correct"
    assert outcome(r"\int_0^1 x dx", r"\int_0^1 x^2 dx") == "wrong"


def test_every_verdict_has_a_reason() -> None:
    """The reason says which rule decided."""
    assert grade("6/4", "1.5").reason == "the same value"
    assert grade("7", "1.5").reason == "another value"
    assert "512" in grade("1" * 513, "1").reason
    assert "not worked out" in grade(r"\sum_{k=1}^3 k", "6").reason
