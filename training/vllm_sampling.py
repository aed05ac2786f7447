"""vLLM as the sampler in training, an engine in this process or a server, both as TRL sets them up.

TRL sends the weights. What it does around its own generation, which does not run here, stands in this file: waking and
putting to sleep, and the importance correction for the difference between the sampler's probabilities and the model's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from trace_gym.errors import InfrastructureError, require
from trace_gym.processes import Processes


@contextmanager
def engine_start() -> Iterator[None]:
    """Let TRL start an engine or find a server.

    Raises:
        InfrastructureError: If there is no server.
    """
    requests = require("requests", "vllm")
    with nullcontext() if torch.accelerator.is_available() else _engine_on_cpu():
        try:
            yield
        except requests.ConnectionError as error:
            raise InfrastructureError("generation", str(error)) from error


@contextmanager
def _engine_on_cpu() -> Iterator[None]:
    """Set what TRL has no options for: no compiler, float32, no pinned threads, and weights that can be replaced."""
    from vllm import _custom_ops

    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    engine, packs = vllm_generation.LLM, _custom_ops._supports_onednn
    vllm_generation.LLM = partial(engine, enforce_eager=True, dtype="float32")
    _custom_ops._supports_onednn = False  # its kernels compute with packed copies, which new weights do not reach
    try:
        yield
    finally:
        vllm_generation.LLM, _custom_ops._supports_onednn = engine, packs


def engine_of(generation: VLLMGeneration) -> tuple[str, Any]:
    """Return the name of the agent that samples, and the engine or the client that it speaks to."""
    if generation.mode == "colocate":
        return "vllm", generation.llm
    if generation.accelerator.is_main_process:
        return "vllm_server", generation.vllm_client
    url = generation.server_base_url or f"http://{generation.server_host}:{generation.server_port}"
    return "vllm_server", VLLMClient(url, connection_timeout=generation.server_timeout)


def send_weights(generation: VLLMGeneration, processes: Processes) -> None:
    """Send the model's weights to what samples, all processes together; what it knows of prefixes is forgotten.

    Raises:
        InfrastructureError: Kind ``weights``, in every process, if the server of one has failed.
    """
    failure = None
    if _is_merged_here(generation):
        generation._iter_named_params = partial(merged_weights, generation.model)
    try:
        generation.sync_weights()
        if generation.mode == "colocate":
            # TRL's own call does nothing while an answer that nobody waits for any more is still being decoded.
            generation.llm.reset_prefix_cache(reset_running_requests=True)
    except Exception as error:  # TRL's client raises no class of its own
        if generation.mode == "colocate":
            raise
        failure = f"{type(error).__name__}: {error}"
    # Others wait here: one process speaks to a server for all.
    for reason in processes.gather(failure):
        if reason is not None:
            raise InfrastructureError("weights", reason)


def _is_merged_here(generation: VLLMGeneration) -> bool:
    """Whether there are adapters to merge, and whole weights to merge them into."""
    sharded = (DistributedType.FSDP, DistributedType.DEEPSPEED)
    return is_peft_model(generation.model) and generation.accelerator.distributed_type not in sharded


def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of the base model by name, with its adapters added.

    TRL adds adapters to the base model itself and takes them away again, which leaves rounding errors in it, in
    bfloat16 large ones, and more with every step. Here the sum is made of a copy, one layer at a time.

    Args:
        model: A ``peft.PeftModel`` whose weights are whole.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, parameter in model.named_parameters():
        if model.prefix in name or "original_module" in name:
            continue
        around = [layer for home, layer in layers.items() if name.startswith(f"{home}.base_layer.")]
        with _merged(around):
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            yield name.replace("modules_to_save.default.", ""), parameter.data


@contextmanager
def _merged(layers: Sequence[Any]) -> Iterator[None]:
    """Add adapters to their common base layer; afterwards it is what it was, to the last bit."""
    own = [each for layer in layers[:1] for each in layer.get_base_layer().parameters()]
    kept = [each.data for each in own]
    for each in own:
        each.data = each.data.clone()
    try:
        for layer in layers:
            layer.merge()
        yield
    finally:
        for each, data in zip(own, kept, strict=True):
            each.data = data
        for layer in layers:
            layer.merged_adapters.clear()


@contextmanager
def awake(generation: VLLMGeneration) -> Iterator[None]:
    """Give an engine that sleeps while the model trains its memory back for a while."""
    if generation.mode != "colocate" or not generation.enable_sleep_mode:
        yield
        return
    if generation._llm_weights_sleeping:  # its weights are gone, not only away
        generation.sync_weights()
    generation.llm.wake_up(tags=["kv_cache"])
    try:
        yield
    finally:
        generation.llm.sleep(level=2)
        generation._llm_weights_sleeping = True


def importance_ratios(log_ratios: torch.Tensor, mode: str, least: float | None, most: float | None) -> torch.Tensor:
    """Return the weight of every token, [B, T], as TRL's option ``vllm_importance_sampling_mode`` says.

    Args:
        log_ratios: Log-probability by the model less that by the sampler, [B, T]; 0 where nothing is trained.
        mode: ``"token_truncate"`` (ratios are clipped) or ``"token_mask"`` (those out of range weigh nothing).
        least: Lowest ratio; None for no bound.
        most: Highest ratio; None for no bound.
    """
    ratios = log_ratios.exp()
    clipped = ratios.clamp(least, most) if (least, most) != (None, None) else ratios
    return clipped if mode == "token_truncate" else ratios * (ratios == clipped)


def sampling_metrics(log_ratios: torch.Tensor, ratios: torch.Tensor, trained: torch.Tensor) -> dict[str, float]:
    """Return how far sampler and model are apart, under TRL's names; nothing if no token is trained.

    Args:
        log_ratios: See `importance_ratios`, [B, T].
        ratios: What it returned, [B, T].
        trained: Which tokens count, [B, T].
    """
    if not trained.any():
        return {}
    apart, ratios = log_ratios[trained].abs(), ratios[trained]
    return {
        "sampling/sampling_logp_difference/mean": apart.mean().item(),
        "sampling/sampling_logp_difference/max": apart.max().item(),
        "sampling/importance_sampling_ratio/min": ratios.min().item(),
        "sampling/importance_sampling_ratio/mean": ratios.mean().item(),
        "sampling/importance_sampling_ratio/max": ratios.max().item(),
    }
