"""Laws of what stops a run, and of what must not stop it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from trace_gym.errors import InfrastructureError, MissingExtraError
from trace_gym.messages import Completion, Request
from trace_gym.training import TraceGRPOConfig, TraceGRPOTrainer
from trace_gym.training import config as config_module
from trace_gym.training.guards import Retry

MakeTrainer = Callable[..., TraceGRPOTrainer]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trace_gym.training.guards.time.sleep", lambda seconds: None)


def weights(trainer: TraceGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def flaky(dice_agent: Any, broken: int) -> Any:
    """Return a factory whose first agents answer nobody; every try of a step makes an agent of its own."""
    made = []

    class Broken(dice_agent):
        async def complete(self, requests: Sequence[Request]) -> list[Completion]:
            raise InfrastructureError("generation", "the sampler is away")

    def factory(*args: Any, **options: Any) -> Any:
        made.append(None)
        return (Broken if len(made) <= broken else dice_agent)(*args, **options)

    return factory


@pytest.fixture
def dice_agent(make_trainer: MakeTrainer) -> Any:
    return make_trainer()._agent_factory


def test_a_step_that_succeeds_when_played_again_leaves_no_trace(make_trainer: MakeTrainer, dice_agent: Any) -> None:
    """The run ends with the weights of one that nothing happened to; the metrics tell of the tries."""
    small = {"max_steps": 2, "candidates": 2, "root_budget": 8}
    calm = make_trainer(**small)
    calm.train()
    shaken = make_trainer(agent_factory=flaky(dice_agent, broken=2), **small)
    shaken.train()
    assert all(torch.equal(a, b) for a, b in zip(weights(calm).values(), weights(shaken).values(), strict=True))
    assert shaken.tokens_total == calm.tokens_total
    first, second = shaken.state.log_history[:2]
    assert (first["failures/retries"], second["failures/retries"]) == (2, 0)
    assert first["failures/skipped_steps"] == 0


def test_a_step_that_keeps_failing_is_skipped_and_reported(make_trainer: MakeTrainer, dice_agent: Any) -> None:
    """Nothing is trained on it, and the next one is another step."""
    trainer = make_trainer(agent_factory=flaky(dice_agent, broken=3), max_steps=2)
    before = weights(trainer)
    with pytest.warns(UserWarning, match="skipped after 3 tries.*the sampler is away"):
        trainer.train()
    first, second = trainer.state.log_history[:2]
    assert (first["failures/skipped_steps"], second["failures/skipped_steps"]) == (1, 0)
    assert "tree/leaves" not in first and second["tree/leaves"] > 0
    assert trainer.num_collections == 2
    assert any(not torch.equal(before[name], now) for name, now in weights(trainer).items())


def test_a_fault_that_stays_ends_the_run() -> None:
    """After so many steps in a row; one that works in between begins the count anew."""

    def broken() -> Any:
        raise InfrastructureError("sandbox_died", "gone")

    restarts: list[None] = []
    retry = Retry(retries=1, most_skipped=2)
    for collect in (broken, broken, object, broken, broken):
        with pytest.warns(UserWarning) if collect is broken else pytest.MonkeyPatch.context():
            assert (retry(collect, lambda: restarts.append(None))[0] is None) == (collect is broken)
    with pytest.raises(InfrastructureError, match="sandbox_died: gone"):
        retry(broken, lambda: restarts.append(None))
    assert len(restarts) == 10


def test_rows_that_no_pass_can_hold_are_left_out_and_counted(make_trainer: MakeTrainer) -> None:
    """The memory guard: larger trees are cut, and only a single row that is too long is not trained."""
    whole = make_trainer()
    whole.train()
    rows = whole.state.log_history[0]["tree/trained_rows"]
    longest = max(len(tree.token_ids(leaf)) for tree in whole.last_collection.trees for leaf in tree.leaves())
    bounded = make_trainer(max_batch_tokens=longest - 1)
    with pytest.warns(UserWarning, match="were not trained"):
        bounded.train()
    log = bounded.state.log_history[0]
    assert log["tree/left_out"] > 0 and log["tree/trained_rows"] + log["tree/left_out"] == rows
    assert whole.state.log_history[0]["tree/left_out"] == 0


def test_a_place_for_metrics_that_is_not_installed_is_named_at_once(tmp_path: Any, monkeypatch: Any) -> None:
    """One line with what to install, before anything heavy starts."""
    monkeypatch.setattr(config_module, "get_available_reporting_integrations", list)
    with pytest.raises(MissingExtraError, match="pip install wandb"):
        TraceGRPOConfig(output_dir=str(tmp_path), report_to=["wandb"])
    with pytest.raises(ValueError, match="Did you mean 'trackio'"):
        TraceGRPOConfig(output_dir=str(tmp_path), report_to="trackoi")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("place", ["tensorboard", "wandb"])  # trackio writes into one place for all projects
def test_the_trees_metrics_reach_every_place(
    make_trainer: MakeTrainer, tmp_path: Any, monkeypatch: Any, place: str
) -> None:
    """Without a network, through the integrations of transformers."""
    pytest.importorskip(place)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
    make_trainer(report_to=place, max_steps=2, run_name="run", project="trace_gym_tests").train()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"effective_ratio_candidates" in written
