"""`TraceGRPOTrainer`: TRL's `GRPOTrainer` fed with rollout trees.

It consists of three parts: `trace_gym.training.tree_source` plays the trees of a step, this file makes rows of them,
and `trace_gym.training.rows_trainer`, its base, trains on rows. All knowledge of TRL's inside stands in this file and
in that of the base; they are written against ``trl==1.16.*``, and a test of the signatures fails if they change.
Overridden are only seams, here:

- `get_train_dataloader`, `_get_train_sampler`: a batch is ``candidates`` different prompts.
- `get_batch_samples`: a run that is over when it is resumed looks at no prompt.
- `create_scheduler`: the learning rate may follow the token budget.
- `_prepare_inputs`: collects trees when a step begins, then serves its micro-batches.
- `_generate_and_score_completions`: trees to micro-batches.
- `_save_checkpoint`, `_load_optimizer_and_scheduler`: predictor, counters and unfinished micro-batches go
  along.

Of a step of TRACE (arXiv 2606.11119) the collector does stages 1 and 2, TRL the loss; between them stand
here, in this order: metrics of predictions made before any update, the predictor's update, advantages, rows.

Left out: evaluation (see `trace_gym.evaluate`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import send_to_device
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trace_gym.advantages import AdvantageRule, get_advantage, grpo
from trace_gym.chat import ChatEncoder
from trace_gym.collect import Collection
from trace_gym.errors import StateError, require
from trace_gym.messages import Agent
from trace_gym.predictor import Predictor
from trace_gym.record import write_trees
from trace_gym.training.checkpoint import read_state, write_state
from trace_gym.training.config import TraceGRPOConfig
from trace_gym.training.guards import Retry
from trace_gym.training.metrics import batch_metrics, refuse_mass_failure, step_metrics
from trace_gym.training.rows_trainer import Passes, RowsTrainer
from trace_gym.training.split import fitting_rows
from trace_gym.training.tasks import CandidateSampler, training_tasks
from trace_gym.training.torch_predictor import make_predictor
from trace_gym.training.tree_batch import Row, num_trained, predictor_pairs, tree_advantages, tree_rows, whiten_rows
from trace_gym.training.tree_source import AgentFactory, TreeSource


class TraceGRPOTrainer(RowsTrainer):
    """Trains a policy on rollout trees.

    Args:
        model (`str` or `PreTrainedModel` or `PeftModel`): The policy, as for `trl.GRPOTrainer`.
        args (`TraceGRPOConfig`): The configuration.
        agent_factory: Called as ``agent_factory(model, tokenizer, temperature=…, max_tokens=…)``; returns
            the agent that samples from the policy, with token ids and log-probabilities. With ``use_vllm`` the
            engine or the client takes the model's place, and ``name`` (``"vllm"``, ``"vllm_server"``) says which.
        processing_class (`PreTrainedTokenizerBase`): The tokenizer; needs a chat template.
        train_dataset (`Dataset` or sequence of `str`, *optional*): Ids of the tasks, or a data set with a
            column ``task_id``, read when they are played; None trains on every task of the environment.
        peft_config (`peft.PeftConfig`, *optional*): Trains an adapter, such as LoRA, instead of all weights.
        callbacks (list of `TrainerCallback`, *optional*): More callbacks.
        predictor (`Predictor`, *optional*): Used instead of the one that ``args.predictor`` names.
        optimizers (`tuple`, *optional*): As for `trl.GRPOTrainer`.

    Raises:
        MissingExtraError: If ``peft_config`` is given and peft is not installed.
        BadInputError: If tokenizer, tasks and configuration do not fit together. Both before the model is
            loaded.
    """

    _buffered_inputs: Any
    _tag_names = ["trl", "trace_gym"]  # noqa: RUF012
    _name = "TRACE"

    def __init__(
        self,
        model: str | PreTrainedModel,
        args: TraceGRPOConfig,
        *,
        agent_factory: AgentFactory,
        processing_class: PreTrainedTokenizerBase,
        train_dataset: Dataset | Sequence[str] | None = None,
        peft_config: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        predictor: Predictor | None = None,
        optimizers: tuple[Any, Any] = (None, None),
    ) -> None:
        """Check what can be checked cheaply, then let TRL build the rest."""
        if peft_config is not None:
            require("peft", "train")
        self.encoder = ChatEncoder(processing_class)
        tasks = training_tasks(args, train_dataset)
        super().__init__(
            args,
            model=model,
            reward_funcs=verified_outcome,
            train_dataset=Dataset.from_dict({"task_id": [""]}),  # TRL takes none that is lazy
            processing_class=processing_class,
            callbacks=[*(callbacks or []), _StepEvents(self)],
            optimizers=optimizers,
            peft_config=peft_config,
        )
        self.train_dataset = tasks
        self.predictor: Predictor = predictor or make_predictor(
            args.predictor, args.seed, self.model, self.encoder, self.processes, args.predictor_model
        )
        self.num_collections = 0
        self.tokens_total = 0
        self.last_collection: Collection | None = None
        self.source = TreeSource(self, agent_factory)
        self._retry = Retry(args.step_retries, args.max_skipped_steps)
        self._update_start = 0.0

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. Environments are closed when it ends, however it ends."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.source.close()

    def sampler(self) -> AbstractContextManager[Agent]:
        """Return a context with an agent that samples from the policy as it is; see `TreeSource.sampler`."""
        return self.source.sampler()

    @property
    def max_context(self) -> int | None:
        """Longest conversation in tokens, of the configuration and of the model."""
        return self.source.max_context

    @property
    def budget_is_spent(self) -> bool:
        """Whether ``args.token_budget`` tokens have been generated, and the last ones are trained to their end."""
        budget = self.args.token_budget
        return budget is not None and self.tokens_total >= budget and self._step % self._micro_batches_per_step == 0

    # What TRL asks for.

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the learning rate's schedule; under a token budget it runs over tokens, whose end is known."""
        budget = self.args.token_budget
        scheduler = super().create_scheduler(budget or num_training_steps, optimizer)
        if budget is not None and isinstance(scheduler, LambdaLR):
            scheduler.lr_lambdas = [partial(self._rate, rate) for rate in scheduler.lr_lambdas]
        return scheduler

    def _rate(self, rate: Callable[[int], float], _step: int) -> float:
        return rate(min(self.tokens_total, self.args.token_budget or 0))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader whose batches are the candidates of a step, the same ones in every process."""
        loader: DataLoader[Any] = DataLoader(
            self.train_dataset,
            batch_size=self.args.candidates,
            sampler=self._get_train_sampler(),
            collate_fn=list,
            num_workers=self.args.dataloader_num_workers,
        )
        return prepare_data_loader(loader, num_processes=1, process_index=0)

    def _get_train_sampler(self, dataset: Dataset | None = None) -> CandidateSampler:
        return CandidateSampler(
            [(len(group.task_ids), group.weight) for group in self.train_dataset.groups],
            self.args.candidates,
            repeats=self._micro_batches_per_step,
            seed=self.args.seed if self.shuffle_dataset else None,
        )

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """Return the next batches of candidates; none if training was over before it began."""
        if self.control.should_training_stop:
            return [], None
        samples: tuple[list[Any], Any] = super().get_batch_samples(epoch_iterator, num_batches, device)
        return samples

    def _prepare_inputs(self, generation_batch: list[int]) -> Passes:
        if self._step % self._micro_batches_per_step == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._generate_and_score_completions(generation_batch)
        served: Passes = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        return served

    # From tasks to trees to rows.

    def _generate_and_score_completions(self, inputs: list[int]) -> list[Passes]:
        """Return the micro-batches of a step; see the module's docstring for the order of things."""
        task_ids = [self.train_dataset.task_id(number) for number in inputs]
        collection, metrics = self._retry(partial(self._collect, task_ids), self.source.close)
        if collection is None:  # skipped: nothing is trained, and the next step is another one
            self.num_collections += 1
            self._record(metrics)
            return [[]] * self._micro_batches_per_step
        metrics |= step_metrics(collection, self.args.nominal_rollouts, self.train_dataset.mixed)
        start = time.perf_counter()
        self.predictor.update(*predictor_pairs(collection.trees, self.args.predictor_target))
        metrics["time/predictor_update"] = time.perf_counter() - start
        rows, metrics["tree/left_out"] = self._rows(collection)

        self.num_collections += 1
        self.tokens_total += collection.cost.tokens
        self.state.num_input_tokens_seen = self.tokens_total
        updates = self._split(rows, self.num_collections)
        self._record(metrics | batch_metrics(updates))
        self._update_start = time.perf_counter()
        return self._micro_batches(updates, num_trained(rows))

    def _collect(self, task_ids: Sequence[str]) -> Collection:
        self.last_collection = self.source.collect(task_ids, self.num_collections)
        refuse_mass_failure(self.last_collection)
        return self.last_collection

    def _rows(self, collection: Collection) -> tuple[list[Row], int]:
        """Return the rows to train on and how many are too long; write the trees with their advantages."""
        args = self.args
        advantages = [tree_advantages(tree, self._advantage()) for tree in collection.trees]
        rows = tree_rows(collection.trees, advantages, mask_prefix=args.mask_prefix)
        if args.advantage == "treepo":
            rows = whiten_rows(rows)
        rows, left_out = fitting_rows(rows, args.max_batch_tokens)
        for row in rows:
            collection.trees[row.tree].advantages[row.leaf] = row.advantage
        if args.writes_trees(self.num_collections) and self.processes.rank == 0:
            write_trees(args.trees_path, collection.trees)
        return rows, left_out

    def _advantage(self) -> AdvantageRule:
        if self.args.advantage == "grpo":
            return partial(grpo, scale_rewards=self.args.scale_rewards)
        return get_advantage(self.args.advantage)

    def _record(self, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "budget/tokens_total": self.tokens_total}.items():
            self._metrics["train"][name].append(value)

    # Checkpoints.

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        unfinished = self._step % self._micro_batches_per_step != 0
        # This also waits until every process has written its part of the checkpoint.
        micro_batches = self.processes.gather(send_to_device(self._buffered_inputs, "cpu") if unfinished else None)
        if self.processes.rank > 0:
            return
        state = {
            "predictor": self.predictor.get_state(),
            "num_collections": self.num_collections,
            "tokens_total": self.tokens_total,
            "grad_norms": list(self.divergence.norms),
            "step": self._step,
            "micro_batches": micro_batches if unfinished else None,
        }
        write_state(folder, state)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        state = read_state(Path(checkpoint))
        self.predictor.set_state(state["predictor"])
        self.num_collections = state["num_collections"]
        self.tokens_total = state["tokens_total"]
        self.divergence.norms.extend(state["grad_norms"])
        self._step = state["step"]
        self._buffered_inputs = None
        if (micro_batches := state["micro_batches"]) is not None:
            if len(micro_batches) != self.processes.size:
                raise StateError(
                    f"{checkpoint} was written amid the updates of a step, by {len(micro_batches)} processes, whose "
                    f"rows do not fit {self.processes.size}. Start as many, or resume from a checkpoint between steps."
                )
            self._buffered_inputs = send_to_device(micro_batches[self.processes.rank], self.accelerator.device)


class _StepEvents(TrainerCallback):
    """Times the policy update and ends training when the token budget is spent."""

    def __init__(self, trainer: TraceGRPOTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop |= self._trainer.budget_is_spent or state.global_step >= state.max_steps
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._update_start = time.perf_counter()  # moved on if the step begins with a collection

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        trainer._metrics["train"]["time/policy_update"].append(time.perf_counter() - trainer._update_start)
        control.should_training_stop |= trainer.budget_is_spent
        return control


def verified_outcome(**_: Any) -> list[float]:
    """Stand in for the reward function that TRL asks for; rewards come with the trees."""
    raise StateError("Rewards come from the environment's verified outcomes; TRL must not ask for them.")
