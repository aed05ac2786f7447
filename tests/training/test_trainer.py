"""Laws of the trainer: it is TRL's where groups are equal, and exact where they are not."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from transformers import TrainerCallback

from trace_gym.agents.transformers import TransformersAgent
from trace_gym.budget import Cost
from trace_gym.collect import Collection
from trace_gym.errors import BadInputError, InfrastructureError, MissingExtraError, StateError
from trace_gym.messages import Failure, Message
from trace_gym.record import read_trees
from trace_gym.training import TraceGRPOConfig, TraceGRPOTrainer
from trace_gym.training.policy import PolicyShape, build_model
from trace_gym.training.trainer import CandidateSampler
from trace_gym.tree import NO_PARENT, ROOT, Node, RolloutTree

MakeTrainer = Callable[..., TraceGRPOTrainer]
LOSS_TYPES = ["dapo", "cispo", "grpo", "sapo", "bnpo", "dr_grpo"]
SHAPE = PolicyShape(hidden=16, layers=2, heads=2, mlp=32, vocabulary=300, context=128)
UNIFORM = {"allocator": "uniform", "expansions": 0, "advantage": "grpo"}


class Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor | None]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: None if p.grad is None else p.grad.clone() for name, p in named})


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_close(given: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert given.keys() == expected.keys()
    for name, value in given.items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def tree(task_id: str, outcomes: list[float | None], alike: bool = False) -> RolloutTree:
    """Return a tree of one-turn rollouts, of different lengths unless alike; None is a failed rollout."""
    prompt = Node(NO_PARENT, (Message("user", task_id),), (7, 8, 9), (False,) * 3, (0.0,) * 3, value=0.5)
    grown = RolloutTree("test", task_id, prompt)
    for i, outcome in enumerate(outcomes):
        if outcome is None:
            grown.add(Node(ROOT, (), status="failed", failure=Failure("sandbox_died", "it died")))
            continue
        ids = tuple(range(20 + i, 24 + i if alike else 22 + 2 * i))
        flags = tuple(k != 1 for k in range(len(ids)))  # the second token is not the policy's
        grown.add(
            Node(
                ROOT,
                (Message("assistant", "x"),),
                ids,
                flags,
                (-0.5,) * len(ids),
                status="terminal",
                reward=outcome,
                num_generated=sum(flags),
            )
        )
    return grown


def collection(*trees: RolloutTree) -> Collection:
    cost = sum((Cost.of(grown) for grown in trees), Cost())
    counts = np.array([len(grown.leaves()) for grown in trees])
    return Collection(trees, np.full(len(trees), 0.5), counts, cost, {"generate": 0.0})


def train_on(make_trainer: MakeTrainer, *collections: Collection, **options: Any) -> tuple[Any, Gradients]:
    """Train one step per collection, on given trees instead of collected ones."""
    gradients, waiting = Gradients(), list(collections)
    options = {"advantage": "grpo", "max_steps": len(collections)} | options
    trainer = make_trainer(callbacks=[gradients], **options)
    trainer._collect = lambda task_ids: waiting.pop(0)
    trainer.train()
    return trainer, gradients


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


def test_a_step_in_which_most_rollouts_failed_is_refused(make_trainer: MakeTrainer) -> None:
    """What survives a fault was chosen by the fault; the error names it and what it hit."""
    failing = tuple(f"{d}{c}" for d in "0123" for c in "abcdef")
    trainer = make_trainer(env_kwargs={"failing": failing}, step_retries=0, max_skipped_steps=0)
    with pytest.raises(InfrastructureError, match=r"sandbox_died: \d+ of \d+ rollouts .* the sandbox died"):
        trainer.train()
    assert trainer._collector is None, "environments are closed"


def test_some_failing_tasks_do_not_stop_training(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(env_kwargs={"failing": ("0a", "1b", "2c")}, candidates=24, root_budget=96)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["failures/count"] > 0 and log["tree/trained_rows"] > 0


# Training.


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
    path = tmp_path / "trees.jsonl"
    trainer = make_trainer(trees_path=str(path), max_steps=2)
    trainer.train()
    trees = list(read_trees(path))
    assert [grown.step for grown in trees] == [0] * 4 + [1] * 4
    rows = sum(log.get("tree/trained_rows", 0) for log in trainer.state.log_history)
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


def test_the_configuration_can_be_given_on_a_command_line(tmp_path: Any) -> None:
    parser = transformers.HfArgumentParser(TraceGRPOConfig)
    line = f"--output_dir {tmp_path} --report_to none --token_budget 1000 --env_kwargs".split()
    (config,) = parser.parse_args_into_dataclasses([*line, '{"max_turns": 4}'])
    assert (config.env_kwargs, config.token_budget, config.bf16) == ({"max_turns": 4}, 1000, False)


# What can go wrong before anything heavy starts.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root_budget": 1}, "root_budget is 1; it must be at least 2"),
        ({"candidates": 4}, "root_budget is 256, but 4 candidates with max_per_root=16 take 64 at most"),
        ({"allocator": "uniform"}, "expansions is 2, but allocator 'uniform'"),
        ({"env_kwargs": {"max_turns": 1}}, "with max_turns=1 a rollout has no prefix"),
        ({"allocator": "treep"}, "Unknown allocator 'treep'. Did you mean 'treepo'"),
        ({"advantage": "gae"}, "Unknown advantage 'gae'"),
        ({"predictor": "oracle"}, "Unknown predictor 'oracle'"),
        ({"predictor_target": "all"}, "Unknown predictor target 'all'"),
        ({"loss_type": "luspo"}, "loss_type 'luspo' is not exact with varying rows"),
        ({"loss_type": "vespo"}, "loss_type 'vespo' is not exact with varying rows"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level is 'sequence'"),
        ({"scale_rewards": "batch"}, "scale_rewards is 'batch'"),
        ({"num_generations": 4}, "num_generations is 4; the allocator decides"),
        ({"gradient_accumulation_steps": 2}, "holds fewer than the 768 rows"),
        ({"top_p": 0.9}, "top_p is 0.9, which would have no effect"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be positive"),
    ],
)
def test_contradictions_are_refused_with_value_rule_and_remedy(
    tmp_path: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        TraceGRPOConfig(output_dir=str(tmp_path), report_to="none", **options)


def test_a_configuration_can_be_changed_in_part(tmp_path: Any) -> None:
    config = TraceGRPOConfig(output_dir=str(tmp_path), report_to="none", updates_per_step=2)
    changed = replace(config, seed=7)
    assert changed.seed == 7 and changed.steps_per_generation == config.steps_per_generation


def test_every_field_explains_itself() -> None:
    assert all(f.metadata.get("help") for f in TraceGRPOConfig.__dataclass_fields__.values())


def test_a_missing_peft_is_named_before_the_model_is_loaded(
    make_trainer: MakeTrainer, tokenizer: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    args = TraceGRPOConfig(output_dir=str(tmp_path), report_to="none")
    with pytest.raises(MissingExtraError, match=r"trace-gym\[train\]"):
        TraceGRPOTrainer("no/such-model", args, agent_factory=None, processing_class=tokenizer, peft_config=object())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": 25}, "candidates is 25, but there are 24 tasks"),
        ({"env_kwargs": {"max_turns": 1}}, "a rollout has no prefix"),
    ],
)
def test_a_configuration_that_does_not_fit_the_environment_is_refused(
    make_trainer: MakeTrainer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        make_trainer(**options)


# The seams.


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


SIGNATURES = {
    "get_train_dataloader": ["self"],
    "_get_dataloader": ["self", "dataset", "description", "batch_size", "sampler_fn", "is_training"],
    "_get_train_sampler": ["self", "dataset"],
    "_prepare_inputs": ["self", "generation_batch"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_compute_loss": ["self", "model", "inputs"],
    "_get_per_token_logps_and_entropies": ["self", "model", "input_ids", "attention_mask", "logits_to_keep"],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_methods_that_are_overridden_or_called_are_still_there(name: str) -> None:
    """If this fails after an upgrade, read `training/trainer.py` against the new TRL before changing it."""
    parameters = list(inspect.signature(getattr(trl.GRPOTrainer, name)).parameters)
    assert parameters[: len(SIGNATURES[name])] == SIGNATURES[name]


def test_the_loss_still_reads_what_the_trainer_writes() -> None:
    """Keys of the micro-batch and normalisers of each loss type, as `_compute_loss` has them."""
    source = inspect.getsource(trl.GRPOTrainer._compute_loss)
    for key in (
        "num_items_in_batch",
        "advantages",
        "tool_mask",
        "old_per_token_logps",
        "ref_per_token_logps",
    ):
        assert f'"{key}"' in source
    for line in (
        'if self.loss_type in ["grpo", "sapo"]:',
        "loss = (per_token_loss * mask).sum() / (per_token_loss.size(0) * self.max_completion_length)",
        'elif self.loss_type in ["cispo", "dapo", "vespo"]:',
        "normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation",
    ):
        assert line in source
    assert "generate_every = self.args.steps_per_generation * self.num_iterations" in inspect.getsource(
        trl.GRPOTrainer._prepare_inputs
    )
    assert "set_epoch(epoch)" in inspect.getsource(transformers.Trainer)
