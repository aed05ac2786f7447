"""Laws of the loss: it is TRL's where groups are equal, and exact where they are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import trl
from datasets import Dataset
from given_trees import Gradients, MakeTrainer, assert_close, collection, train_on, tree, weights

from trace_gym.messages import Message
from trace_gym.training.policy import PolicyShape, build_model
from trace_gym.tree import ROOT, Node, RolloutTree

LOSS_TYPES = ["dapo", "cispo", "grpo", "sapo", "bnpo", "dr_grpo"]
SHAPE = PolicyShape(hidden=16, layers=2, heads=2, mlp=32, vocabulary=300, context=128)
UNIFORM = {"allocator": "uniform", "expansions": 0, "advantage": "grpo"}

# The same as TRL where both can do it.


def train_trl(trees: tuple[RolloutTree, ...], tokenizer: Any, shape: Any, **options: Any) -> Any:
    """Train TRL's own trainer for one step on the completions of trees with equally many leaves."""
    leaves = [(grown, leaf) for grown in trees for leaf in grown.leaves()]
    size = len(leaves) // len(trees)

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        keys = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "won")
        found: dict[str, list[Any]] = {key: [] for key in keys}
        for grown, leaf in leaves:
            start = len(grown.nodes[ROOT].token_ids)
            ids, sampled, logprobs = zip(*grown.tokens(leaf), strict=True)
            found["prompt_ids"].append(list(ids[:start]))
            found["completion_ids"].append(list(ids[start:]))
            found["logprobs"].append(list(logprobs[start:]))
            found["env_mask"].append([int(flag) for flag in sampled[start:]])
            found["won"].append(grown.nodes[leaf].reward)
        return found

    args = trl.GRPOConfig(
        num_generations=size,
        per_device_train_batch_size=len(leaves),
        shuffle_dataset=False,
        activation_checkpointing=False,
        gradient_checkpointing=None,
        bf16=False,
        dataloader_pin_memory=False,
        max_steps=1,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        max_grad_norm=0.0,
        **options,
    )
    gradients = Gradients()
    trainer = trl.GRPOTrainer(
        build_model(tokenizer, shape, seed=0),
        reward_funcs=lambda completions, won, **_: won,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [grown.task_id for grown in trees]}),
        processing_class=tokenizer,
        rollout_func=rollout,
        callbacks=[gradients],
    )
    trainer.train()
    return trainer, gradients


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # TRL's own doing
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_uniform_rollouts_train_exactly_as_trl_trains_them(
    make_trainer: MakeTrainer, tokenizer: Any, tmp_path: Any, monkeypatch: Any, loss_type: str
) -> None:
    """Uniform counts, no expansions and GRPO advantages: loss, gradients and weights are those of TRL."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    gradients = Gradients()
    options = {"loss_type": loss_type, "learning_rate": 1e-2, "optim": "sgd"}  # Adam would amplify rounding
    ours = make_trainer(callbacks=[gradients], **UNIFORM, **options, candidates=3, seed=1)
    ours.train()
    trees = ours.last_collection.trees
    assert all(grown.is_mixed() and len(grown.leaves()) == 8 for grown in trees)
    theirs, expected = train_trl(trees, tokenizer, SHAPE, output_dir=str(tmp_path / "trl"), **options)
    assert_close(gradients.steps[0], expected.steps[0])
    assert_close(weights(ours), weights(theirs))
    loss, entropy = (ours.state.log_history[0][key] for key in ("loss", "entropy"))
    assert loss == pytest.approx(theirs.state.log_history[0]["loss"], abs=1e-6)
    assert entropy == pytest.approx(theirs.state.log_history[0]["entropy"], abs=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_change_neither_loss_nor_gradient(make_trainer: MakeTrainer, loss_type: str) -> None:
    """However many rows a forward pass holds, the update is the same; bnpo by definition averages "
    "micro-batches."""
    trees = [tree("a", [1, 0, 0, 1, 0]), tree("b", [1, 0]), tree("c", [0, 0, 1])]
    whole, expected = train_on(make_trainer, collection(*trees), loss_type=loss_type)
    cut, gradients = train_on(make_trainer, collection(*trees), loss_type=loss_type, per_device_train_batch_size=3)
    assert cut.args.gradient_accumulation_steps == 24
    if loss_type != "bnpo":
        assert_close(gradients.steps[0], expected.steps[0])
        assert cut.state.log_history[0]["loss"] == pytest.approx(whole.state.log_history[0]["loss"], abs=1e-6)


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_padding_columns_change_neither_loss_nor_gradient(make_trainer: MakeTrainer, loss_type: str) -> None:
    trees = [tree("a", [1, 0, 0]), tree("b", [1, 0])]
    _, expected = train_on(make_trainer, collection(*trees), loss_type=loss_type)
    _, gradients = train_on(make_trainer, collection(*trees), loss_type=loss_type, pad_to_multiple_of=16)
    assert_close(gradients.steps[0], expected.steps[0])


def test_the_entropy_bonus_is_not_diluted_by_empty_micro_batches(make_trainer: MakeTrainer) -> None:
    """Rows of equal length in equal micro-batches: the bonus is the mean over all, as in one pass."""
    bonus: dict[str, Any] = {"entropy_coef": 0.5}
    trees = [tree(name, [1, 0], alike=True) for name in "abc"]
    _, without = train_on(make_trainer, collection(*trees))
    _, expected = train_on(make_trainer, collection(*trees), **bonus)
    _, gradients = train_on(make_trainer, collection(*trees), per_device_train_batch_size=2, **bonus)
    assert_close(gradients.steps[0], expected.steps[0])
    assert not torch.equal(*(steps.steps[0]["model.embed_tokens.weight"] for steps in (without, expected)))


# Varying trees.


def test_uneven_trees_singletons_and_prompts_without_rollouts_train(make_trainer: MakeTrainer) -> None:
    """Only the prompt with both outcomes trains, and nothing else moves its gradient."""
    mixed = [1.0, 0.0, 0.0, 1.0, 0.0]
    trees = [tree("a", []), tree("b", [1.0]), tree("c", mixed), tree("d", [0.0, 0.0]), tree("e", [1.0] * 3)]
    trainer, gradients = train_on(make_trainer, collection(*trees))
    _, expected = train_on(make_trainer, collection(tree("c", mixed)))
    assert trainer.state.log_history[0]["tree/trained_rows"] == 5
    assert_close(gradients.steps[0], expected.steps[0], tolerance=0.0)


def test_a_masked_prefix_is_left_out_of_the_continuations_loss(make_trainer: MakeTrainer) -> None:
    """``mask_prefix`` reaches the rows: the shared turn trains once instead of once per leaf."""

    def trained(mask_prefix: bool) -> int:
        grown = tree("a", [])
        turn = Node(ROOT, (Message("assistant", "x"),), (20, 21), (True, True), (-0.5, -0.5), num_generated=2)
        anchor = grown.add(turn)
        grown.add(replace(turn, parent=anchor, status="terminal", reward=1.0))
        grown.add(replace(turn, parent=anchor, status="terminal", reward=0.0, birth=anchor))
        trainer, _ = train_on(make_trainer, collection(grown), mask_prefix=mask_prefix)
        return sum(int(batch["tool_mask"].sum()) for batches in trainer._buffered_inputs for batch in batches)

    assert (trained(mask_prefix=False), trained(mask_prefix=True)) == (8, 6)


def test_failed_leaves_leave_everything_else_identical(make_trainer: MakeTrainer) -> None:
    """A failed rollout is no outcome: it is in no row, no baseline and no mean."""
    trainer, gradients = train_on(make_trainer, collection(tree("a", [1, 0, 0]), tree("b", [0, 1])))
    failing, same = train_on(make_trainer, collection(tree("a", [1, 0, 0, None, None]), tree("b", [0, 1, None])))
    assert_close(same.steps[0], gradients.steps[0], tolerance=0.0)
    log, expected = failing.state.log_history[0], trainer.state.log_history[0]
    assert (log["failures/count"], expected["failures/count"]) == (3, 0)
    for key in ("loss", "reward/mean", "tree/trained_rows", "tree/effective_ratio_selected"):
        assert log[key] == expected[key]


def test_a_step_without_contrast_moves_nothing(make_trainer: MakeTrainer) -> None:
    """Not even by the optimizer's momentum: the step is skipped, and training goes on after it."""
    mixed, alike = collection(tree("a", [1, 0])), collection(tree("a", [1, 1]), tree("b", [0]), tree("c", []))
    once, _ = train_on(make_trainer, mixed)
    skipped, gradients = train_on(make_trainer, mixed, alike)
    assert all(gradient is None for gradient in gradients.steps[1].values())
    assert_close(weights(skipped), weights(once), tolerance=0.0)
    assert skipped.state.global_step == 2
