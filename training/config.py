"""`TraceGRPOConfig`: TRL's `GRPOConfig` plus what a step of TRACE needs.

One step ("collection"): ``candidates`` prompts are looked at, ``root_budget`` rollouts are divided over them,
each gets ``expansions`` continuations; the leaves become rows, and the rows train ``updates_per_step``
optimizer steps. HF counts optimizer steps, so ``max_steps = collections * updates_per_step``.

TRL derives everything from a fixed group size. Here groups vary, so TRL's ``num_generations``,
``generation_batch_size`` and ``steps_per_generation`` are derived and need no thought;
``per_device_train_batch_size`` is the most rows of one forward pass, and ``gradient_accumulation_steps``
follows from it. Fields of TRL that would have no effect are refused rather than ignored;
``max_completion_length`` is only the constant in the loss type ``dr_grpo``.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
from transformers.integrations import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
    is_tensorboard_available,
)
from trl import GRPOConfig

from trace_gym.advantages import ADVANTAGES
from trace_gym.allocation import ALLOCATORS
from trace_gym.budget import nominal_cost
from trace_gym.errors import BadInputError, MissingExtraError, require, unknown_name
from trace_gym.executor import EXECUTORS
from trace_gym.predictor import MODEL_PREDICTORS, PREDICTORS

PREDICTOR_TARGETS = ("branch_point", "recursive")
VLLM_CORRECTIONS = ("token_truncate", "token_mask")

_CHECKED_REPORTERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")  # named as their packages
_LOSS_TYPES = ("dapo", "cispo", "grpo", "sapo", "bnpo", "dr_grpo")
_REFUSED_LOSS_TYPES = {
    "luspo": "it sums the tokens of a row and means over rows, so trees with more leaves or longer ones dominate",
    "vespo": "its weights are products over whole sequences, which explode over shared prefixes of many turns",
}

# Fields of TRL's generation, rewards and evaluation, none of which runs here.
_ELSEWHERE = {
    "the agent generates; give these to the agent": (
        "top_p top_k min_p repetition_penalty generation_kwargs cache_implementation chat_template_kwargs "
        "use_transformers_continuous_batching transformers_continuous_batching_config "
        "max_tool_calling_iterations vllm_structured_outputs_regex"
    ),
    "the environment gives the reward and `advantage` scales it": (
        "reward_weights multi_objective_aggregation mask_truncated_completions"
    ),
    "trees are logged instead; set trees_path": "log_completions log_unique_prompts log_completions_hub_repo",
    "evaluation on tasks is trace_gym.evaluate": "eval_strategy num_generations_eval",
    "rows hold whole trees, never an extra column": "remove_unused_columns",
}


@dataclass
class TraceGRPOConfig(GRPOConfig):
    """Configuration of `TraceGRPOTrainer`.

    Every field of `trl.GRPOConfig` and `transformers.TrainingArguments` exists too, with the exceptions named
    in this module's docstring. Defaults that differ: float32 where there is no GPU, no activation
    checkpointing, a constant learning rate, a log line per step, TensorBoard where it is installed.

    Raises:
        BadInputError: If fields contradict each other; says which value breaks which rule and what to do.
    """

    env_id: str = field(
        default="trace_gym/MathCode-v0",
        metadata={"help": "Id of the environment, as given to gymnasium.make."},
    )
    env_kwargs: dict | str | None = field(  # bare, as HF's command-line parser wants it
        default=None, metadata={"help": "Arguments of the environment, as JSON on a command line."}
    )
    candidates: int = field(
        default=64,
        metadata={
            "help": "Prompts looked at per step (B of TRACE). About a quarter of root_budget makes counts vary most."
        },
    )
    root_budget: int = field(default=256, metadata={"help": "Rollouts from prompts per step (M of TRACE)."})
    expansions: int = field(
        default=2,
        metadata={
            "help": "Continuations per rollout from its visited prefixes (N of TRACE); nominal cost of a "
            "step in rollouts is M(1 + N/2)."
        },
    )
    max_per_root: int = field(default=16, metadata={"help": "Most rollouts of one prompt; the trace allocator only."})
    allocator: str = field(
        default="trace",
        metadata={
            "help": "Who gets the budget: trace (predicted contrast), uniform (equal counts, expansions=0) "
            "or treepo (equal counts, random prefixes)."
        },
    )
    predictor: str = field(
        default="text",
        metadata={
            "help": "Predictor of success: text (features), posterior (counts), hidden (a probe on the policy's hidden "
            "states) or value_head (a small language model with a value head)."
        },
    )
    predictor_model: str | None = field(
        default=None,
        metadata={"help": "Language model of value_head, a name or a folder; None takes a copy of the policy."},
    )
    predictor_target: str = field(
        default="branch_point",
        metadata={
            "help": "Which outcomes teach the predictor about a prefix: branch_point (those played from "
            "there on, unbiased) or recursive (the mean of all leaves below, as published)."
        },
    )
    advantage: str = field(default="tree_grpo", metadata={"help": "Advantage rule: grpo, tree_grpo or treepo."})
    mask_prefix: bool = field(
        default=False,
        metadata={
            "help": "Train only what a continuation added, not the prefix it shares; the prefix then trains "
            "once, with the rollout it came from."
        },
    )
    packing: bool = field(
        default=True,
        metadata={
            "help": "Compute each unique token of a tree once, not once per leaf, for the same loss and gradient. "
            "Models that cannot take it train on flat rows."
        },
    )
    max_batch_tokens: int = field(
        default=16_384,
        metadata={
            "help": "Most tokens of one forward pass, shared ones counted once where trees are packed; bounds "
            "memory. A larger tree is cut, and what it shares above the cut computed in both parts; a single row that "
            "is longer is left out."
        },
    )
    max_loss: float = field(
        default=1e3,
        metadata={"help": "Stop, and save the batch, when a loss is larger than this or no number."},
    )
    max_grad_growth: float = field(
        default=1e2,
        metadata={
            "help": "Stop, and save the batch, when the norm of a gradient, before it is clipped, is more than so many "
            "times the median of the last ones, or no number."
        },
    )
    updates_per_step: int = field(
        default=1,
        metadata={
            "help": "Optimizer steps per collection; its rows are divided over them, all rows of a prompt together."
        },
    )
    max_turn_tokens: int = field(default=256, metadata={"help": "Longest answer of the policy in one turn, in tokens."})
    max_context_tokens: int | None = field(
        default=None,
        metadata={"help": "Longest conversation in tokens; None takes the model's number of positions."},
    )
    token_budget: int | None = field(
        default=None,
        metadata={
            "help": "Stop after the step in which this many tokens have been generated; None leaves it to max_steps."
        },
    )
    executor: str = field(
        default="threads",
        metadata={
            "help": "Where environments live: threads (of this process), processes (of this machine) or ray (actors of "
            "the cluster that was joined, else of this machine)."
        },
    )
    env_workers: int = field(default=4, metadata={"help": "Processes or actors for environments, per process."})
    step_timeout_s: float = field(default=120.0, metadata={"help": "Deadline of one environment call, in seconds."})
    completion_timeout_s: float = field(
        default=600.0, metadata={"help": "Deadline of one batch of the policy's answers, in seconds."}
    )
    trees_path: str | None = field(
        default=None,
        metadata={"help": "JSONL file to which trees are added; None writes none."},
    )
    trees_every: int = field(default=1, metadata={"help": "Write the trees of every n-th step to trees_path."})
    step_retries: int = field(
        default=2,
        metadata={"help": "Times that a step is played again in which most rollouts failed for infrastructure."},
    )
    max_skipped_steps: int = field(
        default=3,
        metadata={"help": "Steps in a row that are skipped if that does not help; the next one ends the run."},
    )

    vllm_importance_sampling_mode: str = field(
        default="token_truncate",
        metadata={
            "help": "How the loss is corrected, token by token, for what vLLM's probabilities differ from the model's: "
            "token_truncate clips ratios to vllm_importance_sampling_clip_min and _max, token_mask leaves out tokens "
            "beyond them."
        },
    )

    # Defaults of TRL and HF that do not suit a small policy on any machine.
    dataloader_pin_memory: bool = field(
        default=False, metadata={"help": "Pin memory of batches; a batch here is a list of task ids."}
    )
    per_device_train_batch_size: int = field(
        default=32,
        metadata={
            "help": "Most rows (leaves) of one forward pass; bounds memory. Gradient accumulation follows from it."
        },
    )
    gradient_checkpointing: bool | None = field(
        default=None, metadata={"help": "Deprecated alias of `activation_checkpointing`."}
    )
    bf16: bool | None = field(
        default=None, metadata={"help": "bfloat16 mixed precision; None uses it on GPUs that have it."}
    )
    lr_scheduler_type: str = field(
        default="constant",
        metadata={"help": "Learning rate schedule; with a token budget it runs over tokens, warm-up included."},
    )
    logging_steps: float = field(default=1, metadata={"help": "Log every this many optimizer steps."})
    report_to: None | str | list[str] = field(  # noqa: RUF036 (HF's parser wants this order)
        default=None, metadata={"help": "Where metrics go; None means TensorBoard if it is installed."}
    )

    # The base class parses strings of these from a command line.
    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "env_kwargs"]  # noqa: RUF012

    def __post_init__(self) -> None:
        """Check the fields, derive TRL's, and let TRL check the rest."""
        self._check_names()
        self._check_numbers()
        self._check_losses()
        self._check_vllm()
        self._check_elsewhere()
        self._derive_batches()
        if self.bf16 is None:
            self.bf16 = not self.fp16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
        # On a CPU accelerate joins processes only if it is told to stay there.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        if self.report_to is None:
            self.report_to = "tensorboard" if is_tensorboard_available() else "none"
        self._check_reporters()
        if self.token_budget is not None and self.max_steps <= 0:
            # A rollout costs a token at least, so this many steps never end a run before its budget does.
            self.max_steps = self.updates_per_step * (self.token_budget // self.root_budget + 1)
        super().__post_init__()
        self._check_env()
        if self.world_size > 1 and self.use_adaptive_entropy:
            raise BadInputError(
                f"use_adaptive_entropy is True in a run of {self.world_size} processes; each would adapt to its own "
                "rows. Set entropy_coef instead, or start one process."
            )

    def _check_names(self) -> None:
        named: tuple[tuple[str, str, Any], ...] = (
            ("allocator", self.allocator, ALLOCATORS),
            ("predictor", self.predictor, (*PREDICTORS, *MODEL_PREDICTORS)),
            ("predictor target", self.predictor_target, PREDICTOR_TARGETS),
            ("executor", self.executor, EXECUTORS),
            ("advantage", self.advantage, ADVANTAGES),
        )
        for what, given, allowed in named:
            if given not in allowed:
                raise unknown_name(what, given, allowed)

    def _check_numbers(self) -> None:
        least = {
            "candidates": 1,
            "root_budget": 2,
            "expansions": 0,
            "max_per_root": 2,
            "updates_per_step": 1,
            "max_turn_tokens": 1,
            "max_context_tokens": 1,
            "token_budget": 1,
            "per_device_train_batch_size": 1,
            "max_batch_tokens": 1,
            "trees_every": 1,
            "env_workers": 1,
            "step_retries": 0,
            "max_skipped_steps": 0,
        }
        reasons = {
            "root_budget": " A single rollout has nothing to be compared with.",
            "max_per_root": " A single rollout has nothing to be compared with.",
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                reason = reasons.get(name, "")
                raise BadInputError(f"{name} is {value}; it must be at least {minimum}.{reason} Raise it.")
        for name in ("step_timeout_s", "completion_timeout_s", "temperature", "max_loss", "max_grad_growth"):
            if getattr(self, name) <= 0:
                raise BadInputError(f"{name} is {getattr(self, name)}; it must be positive.")
        most = self.candidates * self.max_per_root
        if self.allocator == "trace" and self.root_budget > most:
            raise BadInputError(
                f"root_budget is {self.root_budget}, but {self.candidates} candidates with max_per_root="
                f"{self.max_per_root} take {most} at most. Raise candidates or max_per_root, or lower "
                "root_budget."
            )
        if self.expansions and self.allocator == "uniform":
            raise BadInputError(
                f"expansions is {self.expansions}, but allocator 'uniform' never continues a rollout. Set "
                "expansions=0, or allocator='treepo' for random prefixes."
            )

    def _check_losses(self) -> None:
        if self.loss_type in _REFUSED_LOSS_TYPES:
            raise BadInputError(
                f"loss_type {self.loss_type!r} is not exact with varying rows: "
                f"{_REFUSED_LOSS_TYPES[self.loss_type]}. Use one of {', '.join(_LOSS_TYPES)}."
            )
        if self.loss_type not in _LOSS_TYPES:
            raise unknown_name("loss type", self.loss_type, _LOSS_TYPES)
        if self.importance_sampling_level != "token":
            raise BadInputError(
                f"importance_sampling_level is {self.importance_sampling_level!r}; rows of a tree share "
                "prefixes, whose ratio would be counted in every row. Use 'token'."
            )
        if self.scale_rewards not in ("group", True) and (
            self.advantage != "grpo" or self.scale_rewards not in ("none", False)
        ):
            raise BadInputError(
                f"scale_rewards is {self.scale_rewards!r} with advantage {self.advantage!r}; 'grpo' knows "
                "'group' and 'none', the tree rules scale by their own formula. Leave it unset."
            )

    def _check_vllm(self) -> None:
        """Refuse what trees cannot use of vLLM, before anything heavy starts."""
        if not self.use_vllm:
            return
        require("vllm", "vllm")
        if self.vllm_importance_sampling_mode not in VLLM_CORRECTIONS:
            raise BadInputError(
                f"vllm_importance_sampling_mode is {self.vllm_importance_sampling_mode!r}; rows of a tree share "
                f"prefixes, whose ratio would be counted in every row. Use one of {', '.join(VLLM_CORRECTIONS)}."
            )
        if self.vllm_mode == "colocate" and self.vllm_tensor_parallel_size > 1:
            raise BadInputError(
                f"vllm_tensor_parallel_size is {self.vllm_tensor_parallel_size} with vllm_mode 'colocate'; processes "
                "that share an engine would need the same requests at the same time, but each grows trees of its own. "
                "Use 1, or vllm_mode='server'."
            )
        if self.vllm_enable_sleep_mode and not torch.accelerator.is_available():
            raise BadInputError(
                "vllm_enable_sleep_mode is True, but on a CPU vLLM gives no memory back while the model trains. Leave "
                "it unset, and bound the engine's share of the machine's memory with vllm_gpu_memory_utilization."
            )
        if self.vllm_mode == "server" and not torch.cuda.is_available():
            raise BadInputError(
                "vllm_mode is 'server', but new weights reach a server over NCCL only, and this machine has no GPU "
                "for it. Use vllm_mode='colocate'."
            )

    def _check_elsewhere(self) -> None:
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        for reason, names in _ELSEWHERE.items():
            for name in names.split():
                # HF replaces the default "no" by an enum that is equal to it.
                if getattr(self, name) not in (defaults[name], None):
                    raise BadInputError(
                        f"{name} is {getattr(self, name)!r}, which would have no effect: {reason}. Leave it unset."
                    )

    def _check_reporters(self) -> None:
        """Refuse a place for metrics that is unknown or not installed, before anything heavy starts."""
        names = [self.report_to] if isinstance(self.report_to, str) else self.report_to or []
        for name in names:
            if name in ("none", "all"):
                continue
            if name not in INTEGRATION_TO_CALLBACK:
                raise unknown_name("report_to", name, [*INTEGRATION_TO_CALLBACK, "all", "none"])
            if name in _CHECKED_REPORTERS and name not in get_available_reporting_integrations():
                raise MissingExtraError(
                    f"report_to is {name!r}, which is not installed. Install it with: pip install {name}"
                )

    def _derive_batches(self) -> None:
        """Set TRL's batch numbers from ours."""
        rows = self.root_budget * (1 + self.expansions) / self.updates_per_step
        if self.updates_per_step > 1:
            # Prompts stay whole, so an update can get one prompt more than its share.
            rows += self.max_per_root * (1 + self.expansions)
        if self.gradient_accumulation_steps == 1:
            self.gradient_accumulation_steps = math.ceil(rows / self.per_device_train_batch_size)
        elif self.gradient_accumulation_steps * self.per_device_train_batch_size < rows:
            raise BadInputError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} times "
                f"per_device_train_batch_size={self.per_device_train_batch_size} holds fewer than the "
                f"{math.ceil(rows)} rows that an update may have. Leave gradient_accumulation_steps unset: "
                "it follows from the other."
            )
        steps = self.gradient_accumulation_steps * self.updates_per_step
        derived = {
            "steps_per_generation": steps,
            "generation_batch_size": steps * self.per_device_train_batch_size,
            "num_generations": steps * self.per_device_train_batch_size,
        }
        defaults = {"steps_per_generation": None, "generation_batch_size": None, "num_generations": 8}
        for name, value in derived.items():
            if getattr(self, name) not in (defaults[name], value):
                raise BadInputError(
                    f"{name} is {getattr(self, name)}; the allocator decides how many rollouts a prompt "
                    "gets. Leave it unset and choose root_budget, per_device_train_batch_size and "
                    "updates_per_step."
                )
        self.steps_per_generation = steps
        self.generation_batch_size = None  # TRL refuses both, and derives this one
        self.num_generations = derived["num_generations"]

    def _check_env(self) -> None:
        kwargs = self.env_kwargs or {}
        if isinstance(kwargs, str):
            raise BadInputError(f"env_kwargs is {kwargs!r}; it must be a mapping, or JSON of one.")
        if self.expansions and kwargs.get("max_turns") == 1:
            raise BadInputError(
                f"expansions is {self.expansions}, but with max_turns=1 a rollout has no prefix to continue "
                "from. Set expansions=0 or allow more turns."
            )

    def writes_trees(self, step: int) -> bool:
        """Return whether the trees of a step go to `trees_path`."""
        return self.trees_path is not None and step % self.trees_every == 0

    @property
    def nominal_rollouts(self) -> float:
        """Nominal cost of one collection, ``M (1 + N/2)``, in rollouts."""
        return nominal_cost(self.root_budget, self.expansions)
