"""Laws of a run: what it changes, when it ends, and that it goes on from where it was."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from given_trees import MakeTrainer, assert_close, weights

from trace_gym.agents.transformers import TransformersAgent
from trace_gym.errors import InfrastructureError, StateError
from trace_gym.record import read_trees


def test_a_step_in_which_most_rollouts_failed_is_refused(make_trainer: MakeTrainer) -> None:
    """What survives a fault was chosen by the fault; the error names it and what it hit."""
    failing = tuple(f"{d}{c}" for d in "0123" for c in "abcdef")
    trainer = make_trainer(env_kwargs={"failing": failing}, step_retries=0, max_skipped_steps=0)
    with pytest.raises(InfrastructureError, match=r"sandbox_died: \d+ of \d+ rollouts .* the sandbox died"):
        trainer.train()
    assert not trainer.source.is_open, "environments are closed"


def test_some_failing_tasks_do_not_stop_training(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(env_kwargs={"failing": ("0a", "1b", "2c")}, candidates=24, root_budget=96)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["failures/count"] > 0 and log["tree/trained_rows"] > 0


@pytest.mark.parametrize("advantage", ["grpo", "tree_grpo", "treepo"])
@pytest.mark.parametrize("allocator", ["trace", "treepo"])
def test_all_weights_change_in_two_steps(make_trainer: MakeTrainer, allocator: str, advantage: str) -> None:
    trainer = make_trainer(allocator=allocator, advantage=advantage, max_steps=2)
    before = weights(trainer)
    trainer.train()
    assert all(not torch.equal(before[name], after) for name, after in weights(trainer).items())


def test_lora_changes_adapters_only(make_trainer: MakeTrainer) -> None:
    """With a KL term, the reference is the model without its adapter: the first step starts at distance 0."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(peft_config=lora, max_steps=2, beta=0.1)
    before = weights(trainer)
    trainer.train()
    changed = {name for name, after in weights(trainer).items() if not torch.equal(before[name], after)}
    assert changed == {name for name in before if "lora_" in name}
    first, second = (log["kl"] for log in trainer.state.log_history[:2])
    assert first == 0.0 and second > 0.0


def test_several_updates_per_collection_start_from_the_sampling_policy(make_trainer: MakeTrainer) -> None:
    """Rows of later updates keep the log-probabilities of the weights that sampled them."""
    trainer = make_trainer(updates_per_step=2, num_iterations=2, max_steps=8, per_device_train_batch_size=16)
    trainer.train()
    assert trainer.num_collections == 2
    tokens = [log["budget/tokens"] for log in trainer.state.log_history if "budget/tokens" in log]
    assert len(tokens) == 2 and sum(tokens) == trainer.tokens_total


def test_the_sampler_and_the_trainer_agree_on_log_probabilities(make_trainer: MakeTrainer) -> None:
    """With a real policy, what the agent reports is what the trainer computes, at any temperature."""
    trainer = make_trainer(agent_factory=TransformersAgent, temperature=0.7, num_iterations=2)
    trainer.train()
    for batch in (batch for batches in trainer._buffered_inputs for batch in batches):
        sampled = batch["tool_mask"].bool()
        given, computed = batch["sampling_per_token_logps"][sampled], batch["old_per_token_logps"][sampled]
        torch.testing.assert_close(given, computed, rtol=0.0, atol=1e-4)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(make_trainer: MakeTrainer) -> None:
    def run(seed: int) -> list[dict[str, float]]:
        trainer = make_trainer(agent_factory=TransformersAgent, max_steps=2, seed=seed)
        trainer.train()
        timed = ("time/", "step_time", "train_")
        return [
            {key: value for key, value in log.items() if not key.startswith(timed)} for log in trainer.state.log_history
        ]

    assert run(seed=3) == run(seed=3) != run(seed=4)


@pytest.mark.slow
@pytest.mark.parametrize(("updates", "interrupted_at"), [(1, 3), (2, 3)])
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(
    make_trainer: MakeTrainer, tmp_path: Any, updates: int, interrupted_at: int
) -> None:
    """Weights, predictor, budget and data order go on, also from the middle of a collection."""
    options = {"agent_factory": TransformersAgent, "updates_per_step": updates, "candidates": 10}
    options |= {"predictor": "text", "root_budget": 40, "max_steps": 6, "save_strategy": "steps"}
    whole = make_trainer(**options, save_steps=interrupted_at)
    whole.train()
    resumed = make_trainer(**options, save_steps=100)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{interrupted_at}"))
    assert_close(weights(resumed), weights(whole), tolerance=0.0)
    assert resumed.tokens_total == whole.tokens_total
    assert resumed.predictor.get_state() == whole.predictor.get_state()
    assert resumed.divergence.norms == whole.divergence.norms


def test_a_checkpoint_of_another_trainer_is_refused(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    make_trainer(save_strategy="steps", save_steps=1).train()
    checkpoint = tmp_path / "run" / "checkpoint-1"
    (checkpoint / "trace_gym.pt").unlink()
    with pytest.raises(StateError, match="incomplete or not of this trainer"):
        make_trainer(max_steps=2).train(resume_from_checkpoint=str(checkpoint))


def test_training_ends_when_the_token_budget_is_spent(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_steps=-1, token_budget=500, updates_per_step=2)
    trainer.train()
    last = trainer.last_collection.cost.tokens
    assert trainer.tokens_total - last < 500 <= trainer.tokens_total
    assert trainer.state.global_step == 2 * trainer.num_collections, "the last one is trained to its end"


def test_the_learning_rate_follows_the_token_budget(make_trainer: MakeTrainer) -> None:
    """It falls with what was generated, whatever the number of steps, and ends at zero with the budget."""
    trainer = make_trainer(max_steps=-1, token_budget=500, lr_scheduler_type="linear")
    trainer.train()
    rates = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    assert rates[0] == trainer.args.learning_rate and rates == sorted(rates, reverse=True)
    assert len(set(rates)) == len(rates) > 1 and not any(trainer.lr_scheduler.get_last_lr())


def test_a_run_resumed_after_its_end_spends_and_changes_nothing(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    options = {"max_steps": -1, "token_budget": 300, "save_strategy": "steps", "save_steps": 1}
    ended = make_trainer(**options)
    ended.train()
    resumed = make_trainer(**options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{ended.state.global_step}"))
    assert resumed.tokens_total == ended.tokens_total >= 300
    assert_close(weights(resumed), weights(ended), tolerance=0.0)


def test_trees_are_written_with_the_advantages_they_were_trained_with(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    """Those of every n-th step."""
    path = tmp_path / "trees.jsonl"
    trainer = make_trainer(trees_path=str(path), trees_every=2, max_steps=3)
    trainer.train()
    trees = list(read_trees(path))
    assert [grown.step for grown in trees] == [0] * 4 + [2] * 4
    rows = sum(trainer.state.log_history[step]["tree/trained_rows"] for step in (0, 2))
    assert sum(len(grown.advantages) for grown in trees) == rows > 0


def test_only_the_given_tasks_are_played(make_trainer: MakeTrainer) -> None:
    given = ["0a", "1b", "2c", "3d"]
    trainer = make_trainer(train_dataset=given, max_steps=2)
    trainer.train()
    assert sorted(grown.task_id for grown in trainer.last_collection.trees) == given


def test_a_notebook_whose_event_loop_runs_can_train(make_trainer: MakeTrainer) -> None:
    async def cell() -> None:
        make_trainer().train()

    asyncio.run(cell())
