"""Evaluation: hand-computed statistics, failures apart, files that resume."""

import json
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from trace_gym.envs.text_env import TextEnv, TurnResult
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.evaluate import (
    EpisodeResult,
    Report,
    clustered_interval,
    evaluate,
    pass_at_k,
    wilson_interval,
)
from trace_gym.messages import Completion, Message

TASKS = ("easy", "hard", "coin")


class Quiz(TextEnv):
    """Two turns: "look" (a tool call that fails), then any other word is the answer; only "yes" is right."""

    broken = frozenset()

    def __init__(self):
        super().__init__(max_turns=3)

    @property
    def task_ids(self):
        return TASKS

    def _begin(self, task_id, seed):
        if "setup" in self.broken:
            raise InfrastructureError("sandbox_died", "no sandbox")
        return (Message("user", task_id),), None

    def _play(self, episode, action):
        if episode.task_id in self.broken:
            raise InfrastructureError("sandbox_died", "gone")
        if action == "look":
            return TurnResult((Message("tool", "Error", "look"),), None, tool_calls=1, tool_errors=1)
        verdict = "correct" if action == "yes" else "wrong"
        return TurnResult((), None, float(verdict == "correct"), {"verdict": verdict, "reason": "said so"})

    def _dump_world(self, world):
        return None

    def _load_world(self, data, live, reseed):
        return None

    def _twin(self):
        return type(self)()


class Guesser:
    """Always right on easy, never on hard, at random on coin; counts what it was asked."""

    batched = True

    def __init__(self):
        self.seeds = []

    async def complete(self, requests):
        self.seeds += [request.seed for request in requests if len(request.messages) > 1]
        return [Completion(self.answer(request), num_tokens=5) for request in requests]

    def answer(self, request):
        if len(request.messages) == 1:
            return "look"
        task = request.messages[0].content
        right = {"easy": True, "hard": False}.get(task, np.random.default_rng(request.seed).random() < 0.5)
        return "yes" if right else "no"


@pytest.fixture
def quiz(monkeypatch):
    """An environment class whose broken tasks can be set."""
    monkeypatch.setattr(Quiz, "broken", frozenset())
    return Quiz


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_equals_hand_values(successes, total, low, high):
    """Published values of the score interval."""
    assert wilson_interval(successes, total) == pytest.approx((low, high), abs=1e-4)


def test_pass_at_k_equals_hand_values():
    """1 - C(n - c, k) / C(n, k): 1 - 3/10, one of one, nothing solved, more solved than could be missed."""
    assert pass_at_k([2, 5, 0, 4], 5, 2) == pytest.approx([0.7, 1.0, 0.0, 1.0])
    assert pass_at_k([3, 1], [4, 10], 1) == pytest.approx([0.75, 0.1])


def test_pass_at_k_equals_the_share_of_subsets_with_a_success():
    """The closed form counts subsets."""
    wins = [True, False, False, True, False, False]
    for k in range(1, 7):
        share = np.mean([any(subset) for subset in combinations(wins, k)])
        assert pass_at_k(2, 6, k) == pytest.approx(share)


def test_impossible_counts_are_refused():
    """More successes than trials, or k beyond what was played, is the caller's mistake."""
    for call in (
        lambda: wilson_interval(3, 2),
        lambda: pass_at_k([1], [2], 3),
        lambda: pass_at_k([3], [2], 1),
    ):
        with pytest.raises(BadInputError):
            call()


def test_with_one_episode_per_task_the_interval_is_wilsons():
    """The effective number of episodes is then the number of tasks, exactly."""
    solved = np.array([1] * 13 + [0] * 7)
    mean, interval = clustered_interval(solved, np.ones(20))
    assert mean == 0.65
    assert interval == pytest.approx(wilson_interval(13, 20))


def test_episodes_of_one_task_count_less_than_episodes_of_many():
    """Eight equal episodes of a task say no more than one; evenly spread ones count fully."""
    equal = clustered_interval([8, 8, 0, 0], [8] * 4)
    assert equal == (0.5, pytest.approx(wilson_interval(2, 4)))
    even = clustered_interval([4, 4, 4, 4], [8] * 4)
    assert even == (0.5, pytest.approx(wilson_interval(16, 32)))
    assert clustered_interval([8, 8], [8, 8])[1] == pytest.approx(wilson_interval(2, 2))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """40 tasks of different difficulty, 4 episodes each, 600 draws: coverage near 95 %."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(600):
        chances = rng.beta(0.6, 0.9, size=40)
        low, high = clustered_interval(rng.binomial(4, chances), np.full(40, 4))[1]
        hits += low <= 0.4 <= high
    assert 0.92 < hits / 600 < 0.98


def test_a_report_counts_what_happened(quiz):
    """Rewards, turns, tokens, tool errors and the estimates for every k."""
    report = evaluate(quiz, Guesser(), TASKS, 4)
    assert (report.num_tasks, report.num_episodes, report.failures) == (3, 12, {})
    coin = report.pass_at_1 * 3 - 1
    assert 0 < coin < 1
    assert report.verdicts["correct"] == round(4 + 4 * coin)
    assert report.mean_reward == pytest.approx(report.pass_at_1)
    assert (report.mean_turns, report.mean_tokens) == (2, 10)
    assert (report.mean_tool_calls, report.mean_tool_errors) == (1, 1)
    assert report.pass_at_k[1] == pytest.approx(report.pass_at_1)
    assert report.pass_at_k[4] == pytest.approx(2 / 3)
    assert list(report.pass_at_k) == [1, 2, 3, 4]
    assert "pass@4" in str(report) and "pass@3" not in str(report)
    json.dumps(report.to_dict(), allow_nan=False)


def test_equal_calls_play_equal_episodes_and_seeds_differ_within_one(quiz, tmp_path):
    """Every episode has a seed of its own; the same call gives the same file."""
    agent = Guesser()
    for name in ("a", "b"):
        evaluate(quiz, agent, TASKS, 5, seed=3, chunk=7, out=tmp_path / name)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    assert len(set(agent.seeds)) == 15


def test_infrastructure_failures_are_apart(quiz, monkeypatch):
    """They lower no mean, and are counted by kind."""
    monkeypatch.setattr(quiz, "broken", frozenset({"hard"}))
    report = evaluate(quiz, Guesser(), ["easy", "hard"], 2)
    assert (report.pass_at_1, report.num_tasks, report.num_episodes) == (1.0, 1, 2)
    assert report.failures == {"sandbox_died": 2}
    monkeypatch.setattr(quiz, "broken", frozenset({"setup"}))
    nothing = evaluate(quiz, Guesser(), ["easy"], 3)
    assert nothing.failures == {"sandbox_died": 3}
    assert math.isnan(nothing.pass_at_1) and nothing.interval == (0.0, 1.0)
    assert nothing.to_dict()["pass_at_1"] is None
    assert "sandbox_died 3" in str(nothing) and nothing.reasons["sandbox_died"] in str(nothing)


def test_episodes_in_the_file_are_not_played_again(quiz, tmp_path):
    """A finished file answers at once; more episodes per task play only the new ones, with new seeds."""
    path = tmp_path / "runs" / "eval.jsonl"
    agent = Guesser()
    first = evaluate(quiz, agent, TASKS, 2, out=path)
    assert len(lines(path)) == 6
    assert evaluate(quiz, agent, TASKS, 2, out=path) == first
    assert len(agent.seeds) == 6
    assert evaluate(quiz, agent, TASKS, 3, out=path).num_episodes == 9
    assert len(agent.seeds) == len(set(agent.seeds)) == 9
    assert [(line["task_id"], line["episode"]) for line in lines(path)[6:]] == [(t, 2) for t in TASKS]


def test_a_half_written_last_line_is_played_again(quiz, tmp_path):
    """What was cut off by a crash is dropped; the rest is kept."""
    path = tmp_path / "eval.jsonl"
    evaluate(quiz, Guesser(), TASKS, 2, out=path)
    path.write_text(path.read_text()[:-20])
    agent = Guesser()
    assert evaluate(quiz, agent, TASKS, 2, out=path).num_episodes == 6
    assert len(agent.seeds) == 1
    assert len(lines(path)) == 6


def test_failed_episodes_are_played_again_on_resuming(quiz, tmp_path, monkeypatch):
    """A failure in the file is not done; its newer outcome counts."""
    path = tmp_path / "eval.jsonl"
    monkeypatch.setattr(quiz, "broken", frozenset({"easy"}))
    evaluate(quiz, Guesser(), TASKS, 2, out=path)
    monkeypatch.setattr(quiz, "broken", frozenset())
    agent = Guesser()
    report = evaluate(quiz, agent, TASKS, 2, out=path)
    assert (report.num_episodes, report.failures) == (6, {})
    assert len(agent.seeds) == 2
    assert len(lines(path)) == 8


def test_a_file_that_is_no_evaluation_is_refused(quiz, tmp_path):
    """The message names the line; nothing is overwritten."""
    path = tmp_path / "notes.jsonl"
    path.write_text('{"hello": 1}\n')
    with pytest.raises(BadInputError, match="Line 1"):
        evaluate(quiz, Guesser(), TASKS, out=path)
    assert path.read_text() == '{"hello": 1}\n'


def test_progress_is_told_after_every_chunk(quiz, tmp_path):
    """Starting with what is already done."""
    seen = []
    path = tmp_path / "eval.jsonl"
    evaluate(quiz, Guesser(), TASKS[:1], 2, out=path)
    evaluate(quiz, Guesser(), TASKS, 2, out=path, chunk=2, progress=lambda *numbers: seen.append(numbers))
    assert seen == [(2, 6), (4, 6), (6, 6)]


def test_partial_rewards_are_no_successes():
    """Solved means a reward of 1; the mean reward keeps the rest. Tasks short of k outcomes leave pass@k."""
    episode = EpisodeResult("a", 0, 0.5)
    failed = EpisodeResult("b", 1, None, failure={"kind": "deadline", "reason": "slow"})
    episodes = [
        episode,
        replace(episode, episode=1, reward=1.0),
        replace(failed, episode=0, reward=1.0, failure=None),
    ]
    report = Report.of([*episodes, failed], 2)
    assert report.pass_at_1 == pytest.approx(0.75)
    assert report.mean_reward == pytest.approx(2.5 / 3)
    assert report.pass_at_k == {1: pytest.approx(0.75), 2: pytest.approx(1.0)}


def test_a_report_of_groups_comes_back_from_json():
    """Each group is a report of its own; what is undefined stays so."""
    failed = EpisodeResult("b/1", 0, None, failure={"kind": "deadline", "reason": "slow"})
    episodes = [EpisodeResult("a/1", 0, 1.0), failed, EpisodeResult("a/2", 0, 0.0)]
    report = Report.of(episodes, group=lambda task_id: task_id.partition("/")[0])
    assert report.groups["a"] == Report.of([episodes[0], episodes[2]]) and report.groups["b"].num_episodes == 0
    back = Report.from_dict(json.loads(json.dumps(report.to_dict())))
    assert back.groups["a"] == report.groups["a"] and math.isnan(back.groups["b"].pass_at_1)
    assert (back.pass_at_1, back.interval, back.pass_at_k) == (report.pass_at_1, report.interval, report.pass_at_k)


def test_bad_arguments_are_refused(quiz):
    """Zero episodes or a task listed twice."""
    for task_ids, options in ((TASKS, {"n": 0}), (TASKS, {"chunk": 0}), (("easy", "easy"), {})):
        with pytest.raises(BadInputError):
            evaluate(quiz, Guesser(), task_ids, **options)
