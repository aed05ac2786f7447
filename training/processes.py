"""The processes that ``accelerate launch`` or ``torchrun`` started, and what of them the trainer has to know.

What processes tell each other goes over a gloo group of its own: it may wait for the slowest rollout as long as it
takes, which a group for gradients must not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from trl.models import unwrap_model_for_generation

from trace_gym.errors import BadInputError
from trace_gym.processes import ALONE, Processes

PATIENCE = timedelta(days=1)  # a process that died is noticed at once; one that works may work
_LAUNCHER = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE ACCELERATE_USE_FSDP ACCELERATE_USE_DEEPSPEED".split()

T = TypeVar("T")


class LaunchedProcesses:
    """The processes of a launcher, see `trace_gym.processes.Processes`."""

    def __init__(self) -> None:
        """Open a group; all processes must do so."""
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)

    def gather(self, value: T) -> list[T]:
        """Return the value of every process, in order of rank; all of them must call it."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found


@cache
def launched() -> Processes:
    """Return the processes of this run, which are one where no launcher started several."""
    # Joins the others if the launcher's variables stand in the environment and no configuration has done so yet.
    PartialState(cpu=not torch.accelerator.is_available())
    return LaunchedProcesses() if dist.is_initialized() and dist.get_world_size() > 1 else ALONE


@contextmanager
def not_launched() -> Iterator[int]:
    """Hide the launcher, so that a process can train something by itself; only before `launched` was called.

    Yields:
        Its rank.
    """
    rank = int(os.environ.get("RANK", 0))
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        yield rank
    finally:
        os.environ |= hidden
        PartialState._reset_state()


def refuse_engine(accelerator: Accelerator, processes: Processes) -> None:
    """Refuse processes that do not train together, and ways to shard a model that let none sample by itself.

    Raises:
        BadInputError: If the accelerator knows of other processes, or shards the model by the first version of FSDP.
    """
    if accelerator.num_processes != processes.size:
        raise BadInputError(
            f"{processes.size} processes were launched, but accelerate knows of {accelerator.num_processes}. Make the "
            "configuration of the trainer before anything else joins the processes."
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise BadInputError(
            "FSDP version 1 does not show a sampler the whole weights of a model. Set fsdp_version: 2 in the "
            "configuration of accelerate."
        )


@contextmanager
def local_metrics(accelerator: Accelerator) -> Iterator[None]:
    """Let TRL take the metrics of a forward pass from this process only: others have other rows, or none."""
    collectives = ("gather", "gather_for_metrics", "reduce", "pad_across_processes")
    vars(accelerator).update(dict.fromkeys(collectives, lambda tensor, *_, **__: tensor))
    try:
        yield
    finally:
        for name in collectives:
            delattr(accelerator, name)


@contextmanager
def whole_weights(model: Any, accelerator: Accelerator) -> Iterator[None]:
    """Keep the whole weights on every process, so that each can sample as much as it likes without the others.

    Costs nothing where every process has them anyway (DDP, ZeRO 1 and 2).

    Args:
        model: As the accelerator has prepared it.
        accelerator: Of the trainer.
    """
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with ExitStack() as stack:
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            stack.enter_context(unwrap_model_for_generation(model, accelerator))  # ZeRO 3
        if shards:  # parts of the model may be called before the whole, which must not take them for wholes
            shards[0]._get_fsdp_state()._lazy_init()
        for module in shards:
            stack.enter_context(_unsharded(module))
        yield


@contextmanager
def _unsharded(module: FSDPModule) -> Iterator[None]:
    """Keep the parameters of one module of FSDP 2 whole, forward passes included."""
    # torch has a setter only.
    reshards = any(group._reshard_after_forward for group in module._get_fsdp_state()._fsdp_param_groups)
    module.set_reshard_after_forward(False, recurse=False)
    module.unshard()
    try:
        yield
    finally:
        module.set_reshard_after_forward(reshards, recurse=False)
        module.reshard()
