"""Laws of evaluation during training: the best model is kept, and training stops where patience ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_gym.errors import BadInputError
from trace_gym.evaluate import EpisodeResult, Report
from trace_gym.training import TraceGRPOTrainer
from trace_gym.training.held_out import HeldOut, evaluations_since_best

MakeTrainer = Callable[..., TraceGRPOTrainer]
ACCURACIES = [0.25, 0.5, 0.25, 0.5, 0.0, 1.0]  # of the evaluations of a run


def report(accuracy: float) -> Report:
    return Report.of([EpisodeResult(str(i), 0, float(i < 4 * accuracy)) for i in range(4)])


def watched(make_trainer: MakeTrainer, folder: Path, patience: int, **options: Any) -> tuple[TraceGRPOTrainer, dict]:
    """Return a trainer that is evaluated after every step, and the weights it had then by step."""
    trainer = make_trainer(max_steps=6, candidates=2, root_budget=6, **options)
    weights = {}

    def evaluate() -> Report:
        named = trainer.model.named_parameters()
        weights[trainer.state.global_step] = {name: p.detach().clone() for name, p in named}
        return report(ACCURACIES[trainer.state.global_step - 1])

    told = HeldOut(trainer, evaluate, every=1, patience=patience, best=folder / "best", progress=lambda line: None)
    trainer.add_callback(told)
    return trainer, weights


def test_the_best_model_is_kept_and_loads_by_itself(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Of equal ones the first; with its tokenizer, in the form that every tool loads."""
    trainer, weights = watched(make_trainer, tmp_path, patience=3)
    trainer.train()
    assert trainer.state.global_step == 5, "three evaluations without a new best"
    logged = [row["eval/accuracy"] for row in trainer.state.log_history if "eval/accuracy" in row]
    assert logged == ACCURACIES[:5]
    assert json.loads((tmp_path / "best" / "held_out.json").read_text())["step"] == 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert all(torch.equal(p, weights[2][name]) for name, p in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path / "best").chat_template
    assert not list(tmp_path.glob("*.part"))


def test_patience_survives_an_interrupt(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """A resumed run remembers when it was best, and stops where the uninterrupted one does."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    watched(make_trainer, tmp_path, patience=3, **saving)[0].train()
    resumed, _ = watched(make_trainer, tmp_path, patience=3, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert resumed.state.global_step == 5


def test_a_run_that_was_stopped_stays_so(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    """Interrupted after its last step, before anybody took note: no step, no evaluation, no task is added."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    stopped, weights = watched(make_trainer, tmp_path, patience=3, **saving)
    stopped.train()
    resumed, evaluated = watched(make_trainer, tmp_path, patience=3, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert (resumed.state.global_step, resumed.last_collection, evaluated) == (5, None, {})
    assert all(torch.equal(p, weights[5][name]) for name, p in resumed.model.named_parameters())
    patient, _ = watched(make_trainer, tmp_path, patience=4, **saving)
    patient.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert patient.state.global_step == 6


def test_without_patience_training_goes_on(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer, _ = watched(make_trainer, tmp_path, patience=0)
    trainer.train()
    assert trainer.state.global_step == 6
    assert json.loads((tmp_path / "best" / "held_out.json").read_text())["step"] == 6


def test_the_first_of_equal_bests_counts() -> None:
    assert [evaluations_since_best(ACCURACIES[:n]) for n in range(1, 7)] == [0, 0, 1, 2, 3, 0]


@pytest.mark.parametrize("numbers", [{"every": 0}, {"every": 1, "patience": -1}])
def test_numbers_out_of_range_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(BadInputError, match="every must be at least 1"):
        HeldOut(None, lambda: report(1.0), **numbers)
