"""`TraceGRPOTrainer`: TRL's `GRPOTrainer` fed with rollout trees.

All knowledge of TRL's inside stands in this file; it is written against ``trl==1.16.*``, and a test of the
signatures fails if they change. Overridden are only seams:

- `get_train_dataloader`, `_get_train_sampler`: a batch is ``candidates`` different prompts.
- `create_scheduler`: the learning rate may follow the token budget.
- `_prepare_inputs`: collects trees when a step begins, then serves its micro-batches.
- `log`: metrics of all processes.
- `_generate_and_score_completions`: trees to micro-batches.
- `_compute_loss`: TRL's loss, weighted so that micro-batches of unequal size give exact means.
- `_get_per_token_logps_and_entropies`: log-probabilities of packed rows (see `trace_gym.training.packing`).
- `_save_checkpoint`, `_load_optimizer_and_scheduler`: predictor, counters and unfinished micro-batches go
  along.

Of a step of TRACE (arXiv 2606.11119) the collector does stages 1 and 2, TRL the loss; between them stand
here, in this order: metrics of predictions made before any update, the predictor's update, advantages, rows.

Several processes (DDP, FSDP 2, DeepSpeed): all of them hold all trees of a step, and so decide alike about rows and
updates; each trains the trees dealt to it. Those with fewer forward passes fill up with passes of weight 0, since a
model that is shared or sharded wants all processes in every one.

With vLLM the weights go to its engine when a step begins, and TRL's loss is corrected for the difference between its
log-probabilities and the model's (see `trace_gym.training.vllm_sampling`).

Left out: evaluation (see `trace_gym.evaluate`).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import DistributedType, send_to_device
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.trainer.utils import use_adapter

from trace_gym.advantages import AdvantageRule, get_advantage, grpo
from trace_gym.allocation import get_allocator
from trace_gym.batching import run_to_end
from trace_gym.chat import ChatEncoder
from trace_gym.collect import Collection, Collector
from trace_gym.errors import StateError, require
from trace_gym.executor import get_executor
from trace_gym.messages import Agent
from trace_gym.predictor import Predictor
from trace_gym.record import write_trees
from trace_gym.training.config import TraceGRPOConfig
from trace_gym.training.guards import Retry, refuse_divergence
from trace_gym.training.metrics import batch_metrics, refuse_mass_failure, step_metrics
from trace_gym.training.packing import pack_rows, prepare_model, why_not_packed
from trace_gym.training.processes import launched, local_metrics, refuse_engine, whole_weights
from trace_gym.training.split import Limits, MicroBatch, fitting_rows, passes_of, split_rows
from trace_gym.training.tasks import CandidateSampler, env_maker, training_tasks
from trace_gym.training.torch_predictor import make_predictor
from trace_gym.training.tree_batch import (
    Row,
    num_trained,
    pad_rows,
    predictor_pairs,
    tree_advantages,
    tree_rows,
    whiten_rows,
)
from trace_gym.training.vllm_sampling import awake, engine_of, engine_start, importance_ratios, sampling_metrics

STATE_FILE = "trace_gym.pt"

AgentFactory = Callable[..., Agent]


class TraceGRPOTrainer(GRPOTrainer):
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

    args: TraceGRPOConfig
    model: Any
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
        self._encoder = ChatEncoder(processing_class)
        tasks = training_tasks(args, train_dataset)
        with warnings.catch_warnings():
            # peft asks transformers for an attribute by its old name.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            with engine_start() if args.use_vllm else nullcontext():
                super().__init__(
                    model=model,
                    reward_funcs=verified_outcome,
                    args=args,
                    train_dataset=Dataset.from_dict({"task_id": [""]}),  # TRL takes none that is lazy
                    processing_class=processing_class,
                    callbacks=[*(callbacks or []), _StepEvents(self)],
                    optimizers=optimizers,
                    peft_config=peft_config,
                )
        self.train_dataset = tasks
        self.processes = launched()
        refuse_engine(self.accelerator, self.processes)
        self.predictor: Predictor = predictor or make_predictor(
            args.predictor, args.seed, self.model, self._encoder, self.processes, args.predictor_model
        )
        self.num_collections = 0
        self.tokens_total = 0
        self.last_collection: Collection | None = None
        self._agent_factory = agent_factory
        self._collector: Collector | None = None
        self._retry = Retry(args.step_retries, args.max_skipped_steps)
        self._update_start = 0.0
        self._scored = torch.empty(0)  # completion tokens of the current forward pass that are trained
        self._flex = self.model.config._attn_implementation == "flex_attention"
        self._packing = args.packing and self._prepare_packing()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`. Environments are closed when it ends, however it ends."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self._close_collector()

    @property
    def budget_is_spent(self) -> bool:
        """Whether ``args.token_budget`` tokens have been generated."""
        return self.args.token_budget is not None and self.tokens_total >= self.args.token_budget

    @property
    def _micro_batches_per_step(self) -> int:
        """Micro-batches of TRL's loop that one collection serves, repeated iterations included."""
        return int(self.args.updates_per_step * self.args.gradient_accumulation_steps * self.num_iterations)

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

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self._step % self._micro_batches_per_step == 0 or self._buffered_inputs is None:
            self._buffered_inputs = self._generate_and_score_completions(generation_batch)
        return self._buffered_inputs[self._step % len(self._buffered_inputs)]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Return the micro-batches of a step; see the module's docstring for the order of things."""
        if self.budget_is_spent:  # resumed after its end: nothing is collected, nothing changes
            return [[]] * self._micro_batches_per_step
        task_ids = [row["task_id"] for row in inputs]
        collection, metrics = self._retry(partial(self._collect, task_ids), self._close_collector)
        if collection is None:
            return self._skip(metrics)
        metrics |= step_metrics(collection, self.args.nominal_rollouts)
        start = time.perf_counter()
        self.predictor.update(*predictor_pairs(collection.trees, self.args.predictor_target))
        metrics["time/predictor_update"] = time.perf_counter() - start

        advantages = [tree_advantages(tree, self._advantage()) for tree in collection.trees]
        rows = tree_rows(collection.trees, advantages, mask_prefix=self.args.mask_prefix)
        if self.args.advantage == "treepo":
            rows = whiten_rows(rows)
        rows, metrics["tree/left_out"] = fitting_rows(rows, self.args.max_batch_tokens)
        for row in rows:
            collection.trees[row.tree].advantages[row.leaf] = row.advantage
        if self.args.writes_trees(self.num_collections) and self.processes.rank == 0:
            write_trees(self.args.trees_path, collection.trees)

        self.num_collections += 1
        self.tokens_total += collection.cost.tokens
        self.state.num_input_tokens_seen = self.tokens_total
        updates = self._split(rows)
        metrics |= batch_metrics(updates) | {"budget/tokens_total": self.tokens_total}
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        self._update_start = time.perf_counter()
        num_items = torch.tensor(num_trained(rows), device=self.accelerator.device)
        with torch.no_grad():
            return [[self._tensors(batch, num_items) for batch in part] for part in self._passes(updates)]

    def _skip(self, metrics: dict[str, float]) -> list[list[dict[str, Any]]]:
        """Report a step whose infrastructure failed; its micro-batches are empty, so nothing is trained."""
        self.num_collections += 1
        for name, value in (metrics | {"budget/tokens_total": self.tokens_total}).items():
            self._metrics["train"][name].append(value)
        return [[]] * self._micro_batches_per_step

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics of all processes since the last log."""
        if self.processes.size > 1:
            metrics = self._metrics["train"]
            parts = self.processes.gather(dict(metrics))
            for name in dict.fromkeys(name for part in parts for name in part):
                metrics[name] = [value for part in parts for value in part.get(name, ())]
        super().log(logs, start_time)

    def _compute_loss(self, model: torch.nn.Module, inputs: list[dict[str, Any]]) -> torch.Tensor:
        # Without rows, a loss that reaches no parameter: gradients stay None, so an update without a single row
        # leaves the weights and the optimizer's momentum alone.
        loss = torch.zeros((), device=self.accelerator.device, requires_grad=not inputs)
        synchronize = self.accelerator.sync_gradients
        for i, batch in enumerate(inputs, start=1):
            last = i == len(inputs)
            self.accelerator.sync_gradients = synchronize and last
            with nullcontext() if last else self.accelerator.no_sync(model):
                part = self._part_of_loss(model, batch)
                if not last:
                    # Gradients are taken at once, so that memory holds the activations of one forward pass only.
                    self.accelerator.backward(part, **self._backward_options)
                    part = part.detach()
            loss = loss + part
        return loss

    def _part_of_loss(self, model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        if not batch["weight"]:  # only to take part in a forward pass of other processes
            return self._logps(model, batch).sum() * 0.0
        self._scored = batch["tool_mask"]
        with local_metrics(self.accelerator):
            part: torch.Tensor = super()._compute_loss(model, batch) * batch["weight"]
        refuse_divergence(part, self.args.max_loss, batch, Path(self.args.output_dir), self.state.global_step)
        return part

    @property
    def _backward_options(self) -> dict[str, Any]:
        """As transformers calls it: accumulated gradients are not scaled."""
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        return {"scale_wrt_gas": False} if is_deepspeed else {}

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if not self._packing:
            found: Any = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
            return found
        packed = pack_rows(input_ids, attention_mask, self._scored)
        with self.accelerator.autocast():
            outputs = model(**packed.model_inputs(self._flex), fused_lm_head=True)
        entropies = packed.to_rows(outputs.entropy) if kwargs.get("compute_entropy") else None
        return packed.to_rows(outputs.log_probs), entropies, None

    # From tasks to trees to tensors.

    def _collect(self, task_ids: list[str]) -> Collection:
        if self._collector is None:
            self._collector = self._make_collector()
        # Evaluation mode also turns activation checkpointing off, which would forbid the key-value cache.
        training = self.model.training
        self.model.eval()
        try:
            with self._sampler_ready():
                collection = run_to_end(
                    self._collector.collect(task_ids, self.args.root_budget, step=self.num_collections)
                )
        finally:
            self.model.train(training)
        self.last_collection = collection
        refuse_mass_failure(collection)
        return collection

    def _sampler_ready(self) -> AbstractContextManager[None]:
        """Give the sampler the weights of this step."""
        if not self.use_vllm:
            return whole_weights(self.model_wrapped, self.accelerator)
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
            self.accelerator.wait_for_everyone()  # one process may speak to the server for all
        return awake(self.vllm_generation)

    def _close_collector(self) -> None:
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    def _make_collector(self) -> Collector:
        args = self.args
        sampler, named = self.model, {}
        if self.use_vllm:
            named["name"], sampler = engine_of(self.vllm_generation)
        agent = self._agent_factory(
            sampler, self.processing_class, temperature=args.temperature, max_tokens=args.max_turn_tokens, **named
        )
        if hasattr(self.predictor, "listen"):
            self.predictor.listen(agent)
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return Collector(
            env_maker(args),
            agent,
            allocator=get_allocator(args.allocator, args.max_per_root),
            predictor=self.predictor,
            encoder=self._encoder,
            expansions=args.expansions,
            max_tokens=args.max_turn_tokens,
            max_context=min(filter(None, (args.max_context_tokens, positions)), default=None),
            step_timeout_s=args.step_timeout_s,
            completion_timeout_s=args.completion_timeout_s,
            seed=args.seed,
            processes=self.processes,
            executor=get_executor(args.executor, args.env_workers),
        )

    def _advantage(self) -> AdvantageRule:
        if self.args.advantage == "grpo":
            return partial(grpo, scale_rewards=self.args.scale_rewards)
        return get_advantage(self.args.advantage)

    def _prepare_packing(self) -> bool:
        """Prepare the models for packed rows; say so where they cannot take them."""
        policy = self.accelerator.unwrap_model(self.model)
        reason = why_not_packed(policy)
        if self.aux_loss_enabled:
            reason = "the load-balancing loss of its router counts every token of every row"
        if reason is not None:
            warnings.warn(f"Trees train as flat rows: {reason}.", stacklevel=3)
            return False
        for model in filter(None, (policy, self.ref_model)):
            prepare_model(model)
        return True

    def _split(self, rows: Sequence[Row]) -> list[list[MicroBatch]]:
        args = self.args
        return split_rows(
            rows,
            args.updates_per_step,
            Limits(args.per_device_train_batch_size, args.max_batch_tokens, self._packing),
            np.random.default_rng([args.seed, self.num_collections]),
            self.processes.size,
        )

    def _passes(self, updates: Sequence[Sequence[MicroBatch]]) -> list[Sequence[MicroBatch]]:
        """Divide this process's forward passes over the micro-batches of TRL's loop; those without any come first."""
        count = self.args.gradient_accumulation_steps
        ids = (self._tokenizer.pad_token_id,)
        filler = MicroBatch((Row(0, 0, ids, ids, (True,), (0.0,), 0.0),), share=0.0, count=1, tokens=2)
        found: list[Sequence[MicroBatch]] = []
        for update in updates:
            passes = passes_of(self.processes.rank, update, filler)
            found += sorted((passes[i::count] for i in range(count)), key=len)
        return found

    def _tensors(self, batch: MicroBatch, num_items: torch.Tensor) -> dict[str, Any]:
        """Return what TRL's loss reads, and the weight of its value."""
        args = self.args
        tensors = pad_rows(batch.rows, self._tokenizer.pad_token_id, self.pad_to_multiple_of)
        found: dict[str, Any] = {name: tensor.to(self.accelerator.device) for name, tensor in tensors.items()}
        is_corrected = self.use_vllm and self.vllm_importance_sampling_correction
        # TRL samples anew before weights change only if one optimizer step uses up all rows.
        if is_corrected or args.gradient_accumulation_steps % self._micro_batches_per_step != 0:
            found["old_per_token_logps"] = self._logps(self.model, found)
        if is_corrected:
            found["importance_sampling_ratio"] = self._importance_ratios(found, bool(batch.share))
        if self.beta != 0.0:
            found["ref_per_token_logps"] = self._reference_logps(found)
        # TRL gives every micro-batch of an update the same weight; here each weighs as much as it holds. Gradients of
        # several processes are averaged, not added.
        scale = args.gradient_accumulation_steps * self.processes.size
        weight = scale / batch.count if self.loss_type == "bnpo" and batch.share else scale * batch.share
        if self.loss_type in ("dapo", "cispo"):
            # Their policy term is a sum over all tokens: cancel the weight, which is for the other terms.
            num_items = num_items * weight
        return found | {"num_items_in_batch": num_items, "weight": weight}

    def _importance_ratios(self, inputs: dict[str, Any], is_counted: bool) -> torch.Tensor:
        """Return what corrects the loss for a sampler that is not quite the model, [B, T]."""
        args, trained = self.args, inputs["tool_mask"].bool()
        apart = (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]) * trained
        ratios = importance_ratios(
            apart,
            args.vllm_importance_sampling_mode,
            args.vllm_importance_sampling_clip_min,
            args.vllm_importance_sampling_clip_max,
        )
        if is_counted:
            for name, value in sampling_metrics(apart, ratios, trained).items():
                self._metrics["train"][name].append(value)
        return ratios

    def _logps(self, model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        self._scored = inputs["tool_mask"]
        logps, _, _ = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].size(1))
        return logps

    def _reference_logps(self, inputs: dict[str, Any]) -> torch.Tensor:
        if self.ref_model is not None:
            return self._logps(self.ref_model, inputs)
        # The base model of an adapter, or TRL's copy of an adapter that came trained.
        model = self.accelerator.unwrap_model(self.model)
        with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
            return self._logps(self.model, inputs)

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
            "step": self._step,
            "micro_batches": micro_batches if unfinished else None,
        }
        # The last file of a checkpoint, and never half-written: where it stands, the checkpoint is complete.
        torch.save(state, folder / f"{STATE_FILE}.part")
        (folder / f"{STATE_FILE}.part").rename(folder / STATE_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        path = Path(checkpoint) / STATE_FILE
        if not path.exists():
            raise StateError(
                f"{checkpoint} has no {STATE_FILE}; it is incomplete or not of this trainer. Resume from another."
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
        predictor = state["predictor"]
        self.predictor.set_state(json.loads(predictor) if isinstance(predictor, str) else predictor)
        self.num_collections = state["num_collections"]
        self.tokens_total = state["tokens_total"]
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

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._update_start = time.perf_counter()  # moved on if the step begins with a collection

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        trainer._metrics["train"]["time/policy_update"].append(time.perf_counter() - trainer._update_start)
        if trainer.budget_is_spent and trainer._step % trainer._micro_batches_per_step == 0:
            control.should_training_stop = True
        return control


def verified_outcome(**_: Any) -> list[float]:
    """Stand in for the reward function that TRL asks for; rewards come with the trees."""
    raise StateError("Rewards come from the environment's verified outcomes; TRL must not ask for them.")
