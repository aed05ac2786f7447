"""Laws of vLLM as the sampler: its weights are the model's at every step, and the loss knows where it differs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from trace_gym.errors import BadInputError, MissingExtraError
from trace_gym.training import TraceGRPOConfig
from trace_gym.training.split import MicroBatch
from trace_gym.training.tree_batch import Row
from trace_gym.training.vllm_sampling import importance_ratios


@pytest.mark.parametrize(
    ("mode", "least", "most", "expected"),
    [
        ("token_truncate", None, 3.0, [0.1, 1.0, 3.0, 1.0]),
        ("token_truncate", 0.5, None, [0.5, 1.0, 8.0, 1.0]),
        ("token_truncate", None, None, [0.1, 1.0, 8.0, 1.0]),
        ("token_mask", None, 3.0, [0.1, 1.0, 0.0, 1.0]),
        ("token_mask", 0.5, 3.0, [0.0, 1.0, 0.0, 1.0]),
    ],
)
def test_ratios_are_bounded_as_the_mode_says(mode, least, most, expected):
    """Clipped or left out beyond the bounds, as they are within."""
    log_ratios = torch.tensor([[0.1, 1.0, 8.0, 1.0]]).log()
    torch.testing.assert_close(importance_ratios(log_ratios, mode, least, most), torch.tensor([expected]))


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_the_loss_weighs_what_the_model_thinks_likelier_than_the_sampler_did(make_trainer: Any, loss_type: str) -> None:
    """A sampler twice as sure halves loss and gradient; one that is ten times less sure counts three times at most."""
    trainer = make_trainer(loss_type=loss_type, expansions=0, advantage="grpo")
    trainer.use_vllm = True
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    row = Row(0, 1, (9, 10, 11), (12, 13, 14, 15), (True, True, False, True), (0.0,) * 4, 1.0)

    def train(logprobs: Any) -> tuple[float, torch.Tensor, dict[str, Any]]:
        rows = (Row(row.tree, row.leaf, row.prompt, row.completion, row.trained, tuple(logprobs), row.advantage),)
        tensors = trainer._tensors(MicroBatch(rows, share=1.0, count=1, tokens=7), torch.tensor(3))
        tensors["old_per_token_logps"] = tensors["old_per_token_logps"].detach()
        tensors["importance_sampling_ratio"] = tensors["importance_sampling_ratio"].detach()
        loss = trainer._compute_loss(trainer.model, [tensors])
        trainer.model.zero_grad()
        loss.backward()
        return loss.item(), next(trainer.model.parameters()).grad.clone(), tensors

    _, _, tensors = train(row.logprobs)
    exact = tensors["old_per_token_logps"][0]
    loss, gradient, _ = train(exact.tolist())
    for shift, factor in ((math.log(2), 0.5), (-math.log(10), 3.0)):
        other, other_gradient, tensors = train((exact + shift).tolist())
        assert other == pytest.approx(factor * loss, rel=1e-4)
        torch.testing.assert_close(other_gradient, factor * gradient, rtol=1e-4, atol=1e-7)
        assert tensors["importance_sampling_ratio"][0, 2] == 1  # nothing is trained there


def test_vllm_that_is_missing_is_named_with_its_extra(monkeypatch, tmp_path):
    """Before anything heavy starts."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"'vllm' is not installed.*trace-gym\[vllm\]"):
        TraceGRPOConfig(output_dir=str(tmp_path), use_vllm=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vllm_importance_sampling_mode": "sequence_mask"}, "whose ratio would be counted in every row"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size is 2 with vllm_mode 'colocate'"),
        ({"vllm_mode": "server"}, "over NCCL only"),
        ({"vllm_structured_outputs_regex": "a*"}, "which would have no effect: the agent generates"),
    ],
)
def test_what_trees_cannot_use_of_vllm_is_refused(monkeypatch, tmp_path, options, message):
    """With value, reason and remedy."""
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInputError, match=message):
        TraceGRPOConfig(output_dir=str(tmp_path), use_vllm=True, **options)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_engine_beside_the_trainer_samples_with_the_weights_of_every_step(tmp_path: Path, kind: str) -> None:
    """Its log-probabilities are those of the model to 1e-4, step after step, while the weights move."""
    pytest.importorskip("vllm", reason="vLLM is not installed; 'make vllm' installs a CPU build and runs this")
    command = [sys.executable, str(Path(__file__).with_name("vllm_run.py")), str(tmp_path), kind]
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    steps, apart, moved = done.stdout.rpartition("RESULT")[2].split()
    assert int(steps) == 4
    assert float(apart) < 1e-4 < 1e-3 < float(moved)
