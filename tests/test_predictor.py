"""The predictors learn, forget, calibrate and come back from JSON; targets are (un)biased as said."""

from __future__ import annotations

import json

import numpy as np
import pytest

from trace_gym.allocation import allocate_prefixes
from trace_gym.errors import BadInputError, StateError
from trace_gym.messages import Message
from trace_gym.predictor import (
    PREDICTORS,
    PosteriorPredictor,
    TextFeaturePredictor,
    get_predictor,
)
from trace_gym.targets import branch_point_targets, recursive_targets, spearman
from trace_gym.text_features import TextHasher
from trace_gym.tree import Prefix

FAMILIES = [
    "What is the sum of {a} and {b}?",
    "Multiply {a} by {b}.",
    "How many primes lie between {a} and {b}?",
    "Find the remainder of {a} divided by {b}.",
]
SKILL = [2.5, 0.5, -2.0, -0.5]


# CRC-32 of multiply, #2, by, #1, please, multiply among 8,192 weights.
GOLDEN = [8018, 5173, 1721, 1835, 6049, 8018]


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-np.asarray(x, dtype=np.float64)))


def prompt(text: str, task_id: str | None = None) -> Prefix:
    messages = (Message("system", "Solve the task."), Message("user", text))
    return Prefix(task_id=task_id or text, messages=messages)


class World:
    """Tasks whose difficulty shows in their text, rollouts whose fate shows in their observations."""

    def __init__(self, seed: int, size: int = 300) -> None:
        self.rng = np.random.default_rng(seed)
        self.tasks = []
        for number in range(size):
            family, digits = int(self.rng.integers(4)), int(self.rng.integers(1, 6))
            a, b = int(self.rng.integers(10 ** (digits - 1), 10**digits)), int(self.rng.integers(9))
            logit = SKILL[family] - 0.8 * (digits - 3) + 0.5 * self.rng.normal()
            self.tasks.append((prompt(FAMILIES[family].format(a=a, b=b), f"t{number}"), logit))

    def rollout(self, task: int):
        """Return the prefixes after each turn, their true logits, and the outcome."""
        start, logit = self.tasks[task]
        messages, prefixes, logits, errors = list(start.messages), [], [], 0
        for turn in range(1, int(self.rng.integers(2, 4))):
            broken = bool(self.rng.random() < 0.4)
            logit += -1.5 if broken else 1.0
            errors += broken
            said = f"Let me run print({self.rng.integers(1000)})."
            seen = "Traceback: NameError" if broken else f"{self.rng.integers(1000)}"
            messages += [Message("assistant", said), Message("tool", seen)]
            prefixes.append(Prefix(start.task_id, tuple(messages), turn, 20 * turn, errors))
            logits.append(logit)
        return prefixes, logits, float(self.rng.random() < sigmoid(logit))

    def step(self, prompts: int, rollouts: int = 4):
        """Return the pairs of one training step and the true probabilities of its prefixes."""
        prefixes, successes, counts, truth = [], [], [], []
        for task in self.rng.choice(len(self.tasks), prompts, replace=False).tolist():
            wins = 0.0
            for _ in range(rollouts):
                path, logits, outcome = self.rollout(task)
                wins += outcome
                prefixes += path
                successes += [outcome] * len(path)
                counts += [1.0] * len(path)
                truth += sigmoid(logits).tolist()
            prefixes.append(self.tasks[task][0])
            successes.append(wins)
            counts.append(float(rollouts))
            truth.append(np.nan)
        return prefixes, np.array(successes), np.array(counts), np.array(truth)


def auc(predicted, outcome):
    """Probability that a success was predicted higher than a failure."""
    wins, losses = predicted[outcome > 0], predicted[outcome == 0]
    above = (wins[:, None] > losses).mean() + 0.5 * (wins[:, None] == losses).mean()
    return float(above)


@pytest.fixture(scope="module")
def trained():
    """A text predictor after ten steps, with a record of what it predicted before each."""
    world, predictor, record = World(0), TextFeaturePredictor(), []
    for _ in range(10):
        prefixes, successes, counts, truth = world.step(48)
        deep = np.array([p.turn > 0 for p in prefixes])
        record.append((predictor.predict(prefixes), successes, counts, deep, truth))
        predictor.update(prefixes, successes, counts)
    return world, predictor, record


@pytest.mark.parametrize("name", PREDICTORS)
def test_cold_predictors_say_one_half(name):
    """Nothing seen, nothing claimed."""
    predictor = get_predictor(name, seed=3)
    assert predictor.predict([prompt("a"), prompt("b")]).tolist() == [0.5, 0.5]
    assert predictor.predict([]).shape == (0,)
    predictor.update([], [], [])
    predictor.update([prompt("a")], [0], [0])
    assert predictor.predict([prompt("a")]).tolist() == [0.5]


@pytest.mark.parametrize("name", PREDICTORS)
def test_unknown_prompts_get_the_batch_mean(name):
    """After a batch with success rate .3, a prompt without a known word is predicted near .3."""
    predictor, rng = get_predictor(name), np.random.default_rng(0)
    prompts = [prompt(f"question {i}") for i in range(100)]
    predictor.update(prompts, rng.binomial(4, 0.3, 100), np.full(100, 4))
    assert predictor.predict([prompt("wholly different")])[0] == pytest.approx(0.3, abs=0.06)


def test_the_posterior_follows_its_formula():
    """MoPPS with discount .5, the prior worth 2 rollouts at the running mean; worked out by hand."""
    predictor = PosteriorPredictor(discount=0.5, strength=2.0)
    one, two = prompt("one"), prompt("two")
    predictor.update([one], [3], [4])
    assert predictor.batch_mean == pytest.approx(3.5 / 5)
    assert predictor.predict([one, two]) == pytest.approx([(3 + 1.4) / 6, 0.7])
    predictor.update([one, one], [0, 0], [1, 1])
    mean = 1.75 / 4.5
    assert predictor.predict([one]) == pytest.approx([(1.5 + 2 * mean) / (4 + 2)])


def test_the_posterior_gives_prefixes_the_value_of_their_prompt():
    """Prefixes are predicted at the root's value and teach the posterior nothing."""
    world, predictor = World(1), PosteriorPredictor()
    path, _, _ = world.rollout(0)
    root = world.tasks[0][0]
    predictor.update([root], [1], [8])
    before = predictor.predict([root])
    predictor.update(path, np.ones(len(path)), np.ones(len(path)))
    assert predictor.predict([root, *path]).tolist() == [before[0]] * (1 + len(path))


@pytest.mark.parametrize("name", PREDICTORS)
def test_predictions_stay_inside_the_floor(name):
    """However clear the case, a prediction never leaves [.02, .98]."""
    predictor = get_predictor(name)
    for _ in range(30):
        predictor.update([prompt("easy one"), prompt("hard two")], [50, 0], [50, 50])
    easy, hard = predictor.predict([prompt("easy one"), prompt("hard two")])
    assert easy == 0.98 and hard == 0.02


def test_a_policy_that_never_succeeds_breaks_nothing():
    """A thousand steps of failures only: the running mean underflows, predictions stay at the floor."""
    for predictor in (PosteriorPredictor(), TextFeaturePredictor(size=64)):
        for _ in range(1200):
            predictor.update([prompt("one")], [0], [4])
        assert predictor.predict([prompt("one"), prompt("two")]) == pytest.approx([0.02, 0.02], abs=0.02)


def test_the_text_predictor_learns_to_rank_and_beats_the_running_mean(trained):
    """On prompts and on prefixes, predicted before they were learnt."""
    _, _, record = trained
    for kind in (False, True):
        predicted, outcome, mean = [], [], []
        for step, (p, s, n, deep, _) in enumerate(record):
            if step < 3:
                continue
            past = record[step - 1]
            average = past[1][~past[3]].sum() / past[2][~past[3]].sum()
            for q, wins, tries in zip(*(x[deep == kind] for x in (p, s, n)), strict=True):
                outcome += [1.0] * int(wins) + [0.0] * int(tries - wins)
                predicted += [q] * int(tries)
                mean += [average] * int(tries)
        predicted, outcome, mean = np.array(predicted), np.array(outcome), np.array(mean)
        assert auc(predicted, outcome) > 0.75
        assert ((predicted - outcome) ** 2).mean() < 0.85 * ((mean - outcome) ** 2).mean()


def test_the_text_predictor_tells_prefixes_of_one_prompt_apart(trained):
    """Predictions follow the true values, and sink with an error in the observation."""
    world, predictor, record = trained
    predicted, _, _, deep, truth = record[-1]
    assert spearman(predicted[deep], truth[deep]) > 0.7
    start = world.tasks[0][0]
    said = Message("assistant", "Let me run print(3).")
    good = Prefix("t0", (*start.messages, said, Message("tool", "37")), 1, 20, 0)
    bad = Prefix("t0", (*start.messages, said, Message("tool", "Traceback: NameError")), 1, 20, 1)
    high, low = predictor.predict([good, bad])
    assert high > low + 0.15


def test_the_text_predictor_generalises_to_unseen_prompts(trained):
    """New task ids and numbers, known words: easy families above hard ones."""
    _, predictor, _ = trained
    fresh = [prompt(f.format(a=48271, b=7), f"new {i}") for i, f in enumerate(FAMILIES)]
    values = predictor.predict(fresh)
    assert values[0] > values[1] > values[2] and values[3] > values[2]
    short = predictor.predict([prompt(FAMILIES[1].format(a=4, b=7), "short")])
    assert short[0] > values[1] + 0.1


def test_predictions_are_calibrated(trained):
    """Absolute values matter to the allocator: predicted and observed rates agree in every bin."""
    _, _, record = trained
    predicted = np.concatenate([r[0] for r in record[4:]])
    won = np.concatenate([r[1] for r in record[4:]])
    tried = np.concatenate([r[2] for r in record[4:]])
    for group in np.array_split(np.argsort(predicted), 6):
        rate = won[group].sum() / tried[group].sum()
        mean = np.average(predicted[group], weights=tried[group])
        assert rate == pytest.approx(mean, abs=0.08)


def test_noise_teaches_no_confidence():
    """Outcomes that do not depend on the text leave predictions near one half."""
    rng, predictor = np.random.default_rng(2), TextFeaturePredictor()
    for step in range(8):
        texts = [" ".join(rng.choice([f"w{i}" for i in range(200)], 12)) for _ in range(64)]
        batch = [prompt(text, f"{step} {i}") for i, text in enumerate(texts)]
        predictor.update(batch, rng.binomial(4, 0.5, 64), np.full(64, 4))
    values = predictor.predict(batch)
    assert np.abs(values - 0.5).mean() < 0.08


def test_a_policy_that_improves_is_followed():
    """When the success rate jumps from .2 to .8, predictions follow within three steps."""
    rng = np.random.default_rng(3)
    batch = [prompt(f"question number {i}") for i in range(100)]
    for predictor in (PosteriorPredictor(), TextFeaturePredictor()):
        for rate in [0.2] * 6 + [0.8] * 3:
            predictor.update(batch, rng.binomial(4, rate, 100), np.full(100, 4))
        assert predictor.predict(batch).mean() == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("name", PREDICTORS)
def test_state_survives_json_and_learning_goes_on_alike(name):
    """Saved, written, read, restored: the same predictions, bit for bit, now and after a step."""
    world, first, second = World(4), get_predictor(name), get_predictor(name)
    for _ in range(3):
        first.update(*world.step(16)[:3])
    state = json.loads(json.dumps(first.get_state()))
    second.set_state(state)
    prefixes, successes, counts, _ = world.step(16)
    assert first.predict(prefixes).tobytes() == second.predict(prefixes).tobytes()
    first.update(prefixes, successes, counts)
    second.update(prefixes, successes, counts)
    assert first.predict(prefixes).tobytes() == second.predict(prefixes).tobytes()
    assert first.get_state() == second.get_state()


def test_states_of_another_predictor_are_refused():
    """Kind, size and seed must agree; the error says what to do."""
    with pytest.raises(StateError, match="kind is 'posterior'"):
        TextFeaturePredictor().set_state(PosteriorPredictor().get_state())
    with pytest.raises(StateError, match=r"seed is 1.*Make the predictor as it was"):
        TextFeaturePredictor(seed=0).set_state(TextFeaturePredictor(seed=1).get_state())
    with pytest.raises(StateError, match="kind is None"):
        PosteriorPredictor().set_state({})


def test_hashing_is_the_same_in_every_process():
    """Golden numbers: Python's own hash would change from process to process."""
    hasher = TextHasher(8192, 0)
    zero = np.zeros(1)
    features = hasher([prompt("Multiply 48 by 7, please: multiply!")], zero, zero)
    assert features.index.tolist() == GOLDEN
    again = hasher([prompt("multiply 13 BY 9 please multiply")], zero, zero)
    assert again.index.tolist() == GOLDEN
    assert hasher([prompt("")], zero, zero).lengths.tolist() == [1]
    assert features.value == pytest.approx(np.full(6, 1 / np.sqrt(6)))


def test_seeds_decide_the_hash_and_nothing_else_is_random():
    """Two predictors with one seed agree bit for bit; another seed moves words to other weights."""
    results = []
    for seed in (5, 5, 6):
        world, predictor = World(5), get_predictor("text", seed=seed)
        for _ in range(2):
            predictor.update(*world.step(16)[:3])
        results.append(predictor.predict(world.step(16)[0]))
    assert results[0].tobytes() == results[1].tobytes()
    assert results[0].tobytes() != results[2].tobytes()
    np.testing.assert_allclose(results[0], results[2], atol=0.15)


def test_features_are_a_matrix():
    """`times` and `transposed` are the products with the dense matrix that the features describe."""
    world = World(6)
    prefixes = world.step(6)[0]
    rng = np.random.default_rng(0)
    features = TextHasher(64, 0)(prefixes, rng.normal(size=len(prefixes)), np.ones(len(prefixes)))
    matrix = np.zeros((len(prefixes), 64))
    matrix[:, :16] = features.dense
    rows = np.repeat(np.arange(len(prefixes)), features.lengths)
    np.add.at(matrix, (rows, features.index), features.value)
    weights, numbers = rng.normal(size=64), rng.normal(size=len(prefixes))
    np.testing.assert_allclose(features.times(weights), matrix @ weights, atol=1e-12)
    np.testing.assert_allclose(features.transposed(numbers, 64), matrix.T @ numbers, atol=1e-12)


#   0 -- 1 -- 2 -- 3 (1)      bare rollout
#             \ -- 4 -- 5 (0)  born at 2
#        \ -- 6 (failed)       born at 1
#   0 -- 7 (0)                 bare rollout of one turn
PARENTS = [-1, 0, 1, 2, 2, 4, 1, 0]
BIRTHS = [0, 0, 0, 0, 2, 2, 1, 0]
RETURNS = [np.nan, np.nan, np.nan, 1.0, np.nan, 0.0, np.nan, 0.0]


def test_branch_point_targets_credit_a_leaf_from_its_birth_on():
    """The root counts bare rollouts only; node 2 both its leaves; the failed leaf nowhere."""
    nodes, successes, counts = branch_point_targets(PARENTS, BIRTHS, RETURNS)
    assert nodes.tolist() == [0, 1, 2, 4]
    assert successes.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert counts.tolist() == [2.0, 1.0, 2.0, 1.0]


def test_recursive_targets_credit_every_leaf_below():
    """Each prefix gets all scored leaves below it, as the recursive backup does."""
    nodes, successes, counts = recursive_targets(PARENTS, RETURNS)
    assert nodes.tolist() == [0, 1, 2, 4]
    assert successes.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert counts.tolist() == [3.0, 2.0, 2.0, 1.0]


def test_targets_of_odd_trees():
    """A prompt alone and a tree of failures have no pairs; what is no tree is refused."""
    assert branch_point_targets([-1], [0], [np.nan])[0].size == 0
    assert recursive_targets([-1, 0], [np.nan, np.nan])[0].size == 0
    with pytest.raises(BadInputError, match="describe no tree"):
        branch_point_targets([-1, 1], [0, 0], [np.nan, 1.0])
    with pytest.raises(BadInputError, match=r"births\[2\] is 1"):
        branch_point_targets([-1, 0, 0], [0, 0, 1], [np.nan, 1.0, 1.0])
    with pytest.raises(BadInputError, match="shapes"):
        branch_point_targets([-1, 0], [0], [np.nan, 1.0])


def gamblers_ruin(rng, position, goal):
    """Play a fair walk to 0 or the goal; return the positions after each turn."""
    walk = []
    while 0 < position < goal:
        position += 1 if rng.random() < 0.5 else -1
        walk.append(position)
    return walk


def ruin_tree(rng, start, goal, budget):
    """One bare rollout, then Stage 2 with perfect predictions; value of a position is its share."""
    parents, births, returns, values = [-1], [0], [np.nan], [start / goal]

    def add(walk, anchor):
        node, birth = anchor, anchor
        for position in walk:
            parents.append(node)
            births.append(birth)
            values.append(position / goal)
            returns.append(values[-1] if position in (0, goal) else np.nan)
            node = len(parents) - 1

    add(gamblers_ruin(rng, start, goal), 0)
    qualifying = list(range(1, len(parents) - 1))
    counts = allocate_prefixes([values[i] for i in qualifying], returns[-1], budget, rng)
    for anchor, count in zip(qualifying, counts.tolist(), strict=True):
        for _ in range(count):
            add(gamblers_ruin(rng, round(values[anchor] * goal), goal), anchor)
    return parents, births, returns, values


@pytest.mark.slow
def test_branch_point_credit_is_unbiased_where_recursive_backup_is_not():
    """Gambler's ruin from 1 of 6 with adaptive branching: the tree mean overrates the hard prompt.

    Values are known exactly. Branch-point pairs stay within noise at the root and at every other
    position; recursive pairs are off at the root by more than .03.
    """
    rng, goal = np.random.default_rng(7), 6
    sums = {name: np.zeros((2, goal)) for name in ("branch", "recursive")}
    root = {"branch": np.zeros(2), "recursive": np.zeros(2)}
    for _ in range(6000):
        parents, births, returns, values = ruin_tree(rng, 1, goal, 2)
        for name, targets in (
            ("branch", branch_point_targets(parents, births, returns)),
            ("recursive", recursive_targets(parents, returns)),
        ):
            for node, s, n in zip(*(x.tolist() for x in targets), strict=True):
                sums[name][:, round(values[node] * goal)] += s, n
                if node == 0:
                    root[name] += s, n
    bias = {name: total[0] / total[1] - 1 / goal for name, total in root.items()}
    assert abs(bias["branch"]) < 0.015
    assert bias["recursive"] > 0.03
    truth = np.arange(1, goal) / goal
    branch = sums["branch"][0, 1:] / sums["branch"][1, 1:] - truth
    recursive = sums["recursive"][0, 1:] / sums["recursive"][1, 1:] - truth
    assert np.abs(branch).max() < 0.02
    assert np.abs(recursive).max() > 0.03


def test_spearman_equals_scipy():
    """Average ranks for ties, NaN for a constant side."""
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(8)
    for _ in range(100):
        size = int(rng.integers(3, 40))
        x = rng.integers(0, 6, size) / 5 if rng.random() < 0.5 else rng.random(size)
        y = rng.integers(0, 4, size) / 3
        if np.ptp(x) > 0 and np.ptp(y) > 0:
            assert spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert np.isnan(spearman([0.5, 0.5], [0.0, 1.0]))
    assert np.isnan(spearman([], [])) and np.isnan(spearman([0.5], [1.0]))
    assert spearman([0.1, 0.2, 0.3], [1, 2, 3]) == pytest.approx(1.0)
    with pytest.raises(BadInputError, match="differ"):
        spearman([0.5], [0.5, 0.5])


def test_bad_input_is_refused():
    """Impossible counts, lengths that disagree, settings out of range, names that do not exist."""
    for name in PREDICTORS:
        predictor = get_predictor(name)
        with pytest.raises(BadInputError, match=r"successes\[0\] is 3.0 of counts\[0\] 2.0"):
            predictor.update([prompt("a")], [3], [2])
        with pytest.raises(BadInputError, match="successes"):
            predictor.update([prompt("a")], [np.nan], [2])
        with pytest.raises(BadInputError, match="1 prefixes"):
            predictor.update([prompt("a")], [1, 1], [2, 2])
    with pytest.raises(BadInputError, match="discount"):
        PosteriorPredictor(discount=0.0)
    with pytest.raises(BadInputError, match="size 10"):
        TextFeaturePredictor(size=10)
    with pytest.raises(BadInputError, match="Did you mean 'posterior'"):
        get_predictor("posteriori")
