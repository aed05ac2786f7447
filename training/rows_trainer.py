"""TRL's `GRPOTrainer` on rows of uneven trees: its loss, on packed rows, exact for micro-batches of any size.

Where rows come from is the matter of `trace_gym.training.trainer`; these two files hold all knowledge of TRL's inside.
They are written against ``trl==1.16.*``, and a test of the signatures fails if they change. Overridden are here:

- `_compute_loss`: TRL's loss, weighted so that micro-batches of unequal size give exact means.
- `_get_per_token_logps_and_entropies`: log-probabilities of packed rows (see `trace_gym.training.packing`).
- `_get_grad_norm`: an update that diverges ends the run before it changes the weights.
- `log`: metrics of all processes.

Several processes (DDP, FSDP 2, DeepSpeed): all of them know all rows, and so decide alike about updates; each trains
the rows dealt to it. Those with fewer forward passes fill up with passes of weight 0, since a model that is shared or
sharded wants all processes in every one.

With vLLM the loss is corrected for the difference between its log-probabilities and the model's (see
`trace_gym.training.vllm_sampling`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DistributedType
from trl import GRPOTrainer
from trl.trainer.utils import use_adapter

from trace_gym.training.config import TraceGRPOConfig
from trace_gym.training.guards import Divergence
from trace_gym.training.packing import pack_rows, prepare_model, why_not_packed
from trace_gym.training.processes import launched, local_metrics, refuse_engine
from trace_gym.training.split import Limits, MicroBatch, passes_of, split_rows
from trace_gym.training.tree_batch import Row, pad_rows
from trace_gym.training.vllm_sampling import engine_start, importance_ratios, sampling_metrics

# What TRL's loop serves at a time: tensors of the forward passes of one micro-batch.
Passes = list[dict[str, Any]]


class RowsTrainer(GRPOTrainer):
    """Trains a policy on the rows of a step.

    Args:
        args (`TraceGRPOConfig`): The configuration.
        options: Everything else that `trl.GRPOTrainer` takes.
    """

    args: TraceGRPOConfig
    model: Any

    def __init__(self, args: TraceGRPOConfig, **options: Any) -> None:
        """Let TRL build its parts, then prepare the model for packed rows."""
        with warnings.catch_warnings():
            # peft asks transformers for an attribute by its old name.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            with engine_start() if args.use_vllm else nullcontext():
                super().__init__(args=args, **options)
        self.processes = launched()
        refuse_engine(self.accelerator, self.processes)
        self.divergence = Divergence(args.max_loss, args.max_grad_growth, Path(args.output_dir), self.processes)
        self._scored = torch.empty(0)  # completion tokens of the current forward pass that are trained
        self._flex = self.model.config._attn_implementation == "flex_attention"
        self._packing = args.packing and self._prepare_packing()

    @property
    def _micro_batches_per_step(self) -> int:
        """Micro-batches of TRL's loop that the rows of one step serve, repeated iterations included."""
        return int(self.args.updates_per_step * self.args.gradient_accumulation_steps * self.num_iterations)

    def _prepare_packing(self) -> bool:
        """Prepare the models for packed rows; say so where they cannot take them."""
        policy = self.accelerator.unwrap_model(self.model)
        reason = why_not_packed(policy)
        if self.aux_loss_enabled:
            reason = "the load-balancing loss of its router counts every token of every row"
        if reason is not None:
            warnings.warn(f"Trees train as flat rows: {reason}.", stacklevel=4)
            return False
        for model in filter(None, (policy, self.ref_model)):
            prepare_model(model)
        return True

    # From rows to tensors.

    def _split(self, rows: Sequence[Row], step: int) -> list[list[MicroBatch]]:
        """Divide the rows of a step over its updates, the processes, and forward passes."""
        args = self.args
        return split_rows(
            rows,
            args.updates_per_step,
            Limits(args.per_device_train_batch_size, args.max_batch_tokens, self._packing),
            np.random.default_rng([args.seed, step]),
            self.processes.size,
        )

    def _micro_batches(self, updates: Sequence[Sequence[MicroBatch]], trained: int) -> list[Passes]:
        """Return this process's forward passes by micro-batch of TRL's loop; those without any come first.

        Args:
            updates: What `_split` returned.
            trained: Tokens that are trained in the whole step.
        """
        count = self.args.gradient_accumulation_steps
        ids = (self._tokenizer.pad_token_id,)
        filler = MicroBatch((Row(0, 0, ids, ids, (True,), (0.0,), 0.0),), share=0.0, count=1, tokens=2)
        num_items = torch.tensor(trained, device=self.accelerator.device)
        found: list[Passes] = []
        for update in updates:
            passes = passes_of(self.processes.rank, update, filler)
            with torch.no_grad():
                for part in sorted((passes[i::count] for i in range(count)), key=len):
                    found.append([self._tensors(batch, num_items) for batch in part])
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

    # Log-probabilities.

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

    # The loss, and what watches over it.

    def _compute_loss(self, model: torch.nn.Module, inputs: Passes) -> torch.Tensor:
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
        self.divergence.watch(part, batch)
        return part

    @property
    def _backward_options(self) -> dict[str, Any]:
        """As transformers calls it: accumulated gradients are not scaled."""
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        return {"scale_wrt_gas": False} if is_deepspeed else {}

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of an update's gradient, unless it says that the run diverges."""
        norm = super()._get_grad_norm(model, grad_norm)
        known = None if norm is None else float(norm)
        if self.accelerator.scaler is not None and not math.isfinite(known or 0.0):
            known = None  # half precision overflows now and then; its scaler leaves such an update out by itself
        self.divergence.check(known, self.state.global_step)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics of all processes since the last log."""
        if self.processes.size > 1:
            metrics = self._metrics["train"]
            parts = self.processes.gather(dict(metrics))
            for name in dict.fromkeys(name for part in parts for name in part):
                metrics[name] = [value for part in parts for value in part.get(name, ())]
        super().log(logs, start_time)
