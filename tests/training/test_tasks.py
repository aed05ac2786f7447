"""Laws of what a run trains on: each prompt once per step, each group by its weight, nothing read too early."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from trace_gym.errors import BadInputError
from trace_gym.task_list import LazyIds
from trace_gym.training import TraceGRPOTrainer
from trace_gym.training.tasks import CandidateSampler, Group, Tasks


def drawn(sampler: CandidateSampler, epochs: int) -> list[tuple[int, ...]]:
    """Return the steps of some epochs."""
    found: list[tuple[int, ...]] = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order, size = list(sampler), sampler.candidates
        found += [tuple(order[i : i + size]) for i in range(0, len(order), size)]
    return found


def test_groups_come_by_weight_and_are_gone_through_evenly() -> None:
    """In every step and in sum, across epochs, however small a group is; no step shows a prompt twice."""
    groups = [(50, 0.55), (7, 0.1), (1_000, 0.35)]
    steps = drawn(CandidateSampler(groups, candidates=8, repeats=1, seed=0), epochs=2)
    assert all(len(set(step)) == 8 for step in steps)
    counts = [Counter((i >= 50) + (i >= 57) for i in step) for step in steps]
    for group, (_, weight) in enumerate(groups):
        assert all(abs(count[group] - 8 * weight) < 2 for count in counts)
        assert abs(sum(count[group] for count in counts) - 8 * weight * len(steps)) < 2
    shown = Counter(i for step in steps for i in step)
    small = [shown[i] for i in range(50, 57)]
    assert max(small) - min(small) <= 0.3 * max(small)
    assert max(shown[i] for i in range(57, 1057)) <= 1 + len(steps) * 8 * 0.35 // 1_000


def test_each_prompt_comes_once_per_epoch_and_epochs_differ() -> None:
    """Batches of candidates hold different prompts and repeat for every micro-batch."""
    sampler = CandidateSampler([(11, 1.0)], candidates=4, repeats=3, seed=0)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert len(order) == len(sampler) == 24
        assert order[:4] == order[4:8] == order[8:12] and order[12:16] == order[20:24]
        assert len(set(order)) == 8
        epochs.append(order)
    assert epochs[0] != epochs[1]


def test_the_order_of_one_group_is_that_of_a_plain_permutation() -> None:
    """Runs of earlier versions can be repeated."""
    import numpy as np

    steps = drawn(CandidateSampler([(10, 1.0)], candidates=3, repeats=1, seed=5), epochs=2)
    expected = [np.random.default_rng([5, epoch]).permutation(10)[:9].tolist() for epoch in range(2)]
    assert [i for step in steps for i in step] == [i for epoch in expected for i in epoch]


def test_only_the_tasks_of_a_step_are_read(make_trainer: Any) -> None:
    """A million prompts: as many are asked for as there are candidates."""
    asked: list[int] = []

    def get(place: int) -> str:
        asked.append(place)
        return f"{place % 4}a"

    trainer: TraceGRPOTrainer = make_trainer(train_dataset=LazyIds(1_000_000, get), max_steps=2)
    trainer.train()
    assert len(asked) == len(set(asked)) == 2 * trainer.args.candidates, "once each, and none ahead"


def test_rows_are_found_in_their_group() -> None:
    tasks = Tasks([Group(["a", "b"], 0.5), Group(["c"], 0.5)])
    assert [tasks.task_id(tasks[i]) for i in range(len(tasks))] == ["a", "b", "c"]


MIXED = [{"env": "trace_gym_tests/Guess-v0", "name": name, "weight": weight} for name, weight in (("x", 3), ("y", 1))]


def test_a_mixture_is_trained_on_by_weight(make_trainer: Any) -> None:
    """The pool of candidates of every step has the sources' shares; each has ratios and rewards of its own."""
    trainer = make_trainer(
        env_id="trace_gym/Mixture-v0", env_kwargs={"sources": MIXED}, candidates=8, root_budget=48, max_steps=3
    )
    trainer.train()
    pool = Counter(tree.task_id[0] for tree in trainer.last_collection.trees)
    assert pool == {"x": 6, "y": 2}
    log = trainer.state.log_history[2]
    assert log["budget/continuations"] > 0, "states and prefixes of sources are restored"
    trees = {name: [tree for tree in trainer.last_collection.trees if tree.task_id[0] == name] for name in "xy"}
    for name, own in trees.items():
        ratio = sum(tree.is_mixed() for tree in own) / len(own)
        assert log[f"tree/effective_ratio_candidates/{name}"] == pytest.approx(ratio)
    rewards = [log[f"reward/mean/{name}"] * sum(len(tree.leaves()) for tree in own) for name, own in trees.items()]
    assert sum(rewards) / log["tree/leaves"] == pytest.approx(log["reward/mean"])
    assert all(row["failures/count"] == 0 for row in trainer.state.log_history[:3])


def test_more_candidates_than_a_source_has_are_refused(make_trainer: Any) -> None:
    with pytest.raises(BadInputError, match="there are 24 tasks like 'x/0a'"):
        make_trainer(env_id="trace_gym/Mixture-v0", env_kwargs={"sources": MIXED}, candidates=40, root_budget=96)
