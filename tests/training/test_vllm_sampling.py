"""Laws of vLLM as the sampler: its weights are the model's at every step, and the loss knows where it differs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from trace_gym.errors import BadInputError, InfrastructureError, MissingExtraError
from trace_gym.evaluate import EpisodeResult, Report
from trace_gym.training import TraceGRPOConfig
from trace_gym.training.held_out import HeldOut
from trace_gym.training.split import MicroBatch
from trace_gym.training.tree_batch import Row
from trace_gym.training.vllm_sampling import importance_ratios, merged_weights


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


# peft asks transformers for an attribute by its old name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_sent_merged_and_the_base_model_stays_what_it_was(model: Any, dtype: torch.dtype) -> None:
    """Names and values are those of the merged model; the base model does not change by a bit."""
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["norm"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model.to(dtype), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    before = {name: parameter.clone() for name, parameter in adapted.named_parameters()}
    sent = {name: tensor for _ in range(2) for name, tensor in merged_weights(adapted)}  # kept beyond its turn
    assert all(torch.equal(parameter, before[name]) for name, parameter in adapted.named_parameters())
    merged = dict(adapted.merge_and_unload().named_parameters())
    assert sent.keys() == merged.keys()
    assert all(torch.equal(tensor, merged[name]) for name, tensor in sent.items())


class FakeServer:
    """What the trainer sees of a server: TRL's side of it, which sends weights and may fail to."""

    mode = "server"
    accelerator = types.SimpleNamespace(is_main_process=True, distributed_type="NO")
    vllm_client = "the client"

    def __init__(self, trainer: Any, failing: int = 0) -> None:
        self.trainer, self.model, self.failing = trainer, trainer.model, failing
        self.sent: list[int] = []

    def sync_weights(self) -> None:
        if self.failing:
            self.failing -= 1
            raise Exception("Request failed: 500, out of order")
        self.sent.append(self.trainer.state.global_step)


@pytest.fixture
def served(make_trainer: Any, dice_agent: Any) -> Any:
    """Return a function that makes a trainer that samples from a fake server, and what its agents are made of."""

    def make(failing: int = 0, **options: Any) -> tuple[Any, list[tuple[Any, str]]]:
        made = []

        def agent_factory(model: Any, tokenizer: Any, *, name: str, **named: Any) -> Any:
            made.append((model, name))
            return dice_agent(model, tokenizer, **named)

        trainer = make_trainer(agent_factory=agent_factory, **options)
        trainer.use_vllm, trainer._last_loaded_step = True, -1
        trainer.vllm_generation = FakeServer(trainer, failing)
        return trainer, made

    return make


def test_training_and_evaluation_sample_from_the_same_weights_of_the_same_server(served: Any) -> None:
    """Weights are sent once per step, before whoever samples first, and no agent is made of anything else."""
    trainer, made = served(max_steps=4)
    evaluated = []

    def evaluate() -> Report:
        with trainer.sampler():
            evaluated.append((trainer.state.global_step, trainer.vllm_generation.sent[-1]))
        return Report.of([EpisodeResult("a", 0, 1.0)])

    trainer.add_callback(HeldOut(trainer, evaluate, every=2, progress=lambda line: None))
    trainer.train()
    assert trainer.vllm_generation.sent == [0, 1, 2, 3, 4]
    assert evaluated == [(2, 2), (4, 4)]
    assert len(made) == 3 and set(made) == {("the client", "vllm_server")}


def test_weights_that_do_not_arrive_are_sent_again_before_anything_is_sampled(served: Any) -> None:
    """A failed server is an infrastructure failure: the step is played again, and never with old weights."""
    trainer, _ = served(failing=1, max_steps=2)
    trainer.train()
    assert trainer.vllm_generation.sent == [0, 1]
    assert [line["failures/retries"] for line in trainer.state.log_history if "failures/retries" in line] == [1, 0]
    trainer, _ = served(failing=1)
    with pytest.raises(InfrastructureError, match="weights: Exception: Request failed: 500"), trainer.sampler():
        pass


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
        ({"vllm_enable_sleep_mode": True}, "gives no memory back"),
        ({"vllm_structured_outputs_regex": "a*"}, "which would have no effect: the agent generates"),
    ],
)
def test_what_trees_cannot_use_of_vllm_is_refused(monkeypatch, tmp_path, options, message):
    """With value, reason and remedy."""
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(BadInputError, match=message):
        TraceGRPOConfig(output_dir=str(tmp_path), use_vllm=True, **options)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_engine_beside_the_trainer_samples_with_the_weights_of_every_step(tmp_path: Path, kind: str) -> None:
    """Its log-probabilities are those of the model to 1e-4, step after step, while the weights move.

    Also on a prompt that it had in its cache; and what is not trained does not change by a bit.
    """
    pytest.importorskip("vllm", reason="vLLM is not installed; 'make vllm' installs a CPU build and runs this")
    command = [sys.executable, str(Path(__file__).with_name("vllm_run.py")), str(tmp_path), kind]
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("RESULT")[2])
    assert found["steps"] == 4
    assert found["apart"] < 1e-4 and found["cached"] < 1e-4
    assert found["trained_moved"] > 1e-3 and found["others_moved"] == 0.0
