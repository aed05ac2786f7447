"""Laws of what stops a run, and of what must not stop it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from trace_gym.errors import InfrastructureError, MissingExtraError, TraceGymError
from trace_gym.messages import Completion, Request
from trace_gym.training import TraceGRPOConfig, TraceGRPOTrainer
from trace_gym.training import config as config_module
from trace_gym.training.guards import Divergence, Retry

MakeTrainer = Callable[..., TraceGRPOTrainer]


class After(TrainerCallback):
    """Does something after the first step that is made here, or before it, if the run is resumed."""

    def __init__(self, act: Callable[[Any], None]) -> None:
        self.act = act

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step:
            self.act(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            self.act(model)


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


@pytest.mark.parametrize("value", [float("nan"), 1e9])
def test_a_diverging_loss_stops_before_it_harms_the_weights(
    make_trainer: MakeTrainer, tmp_path: Any, value: float
) -> None:
    """The rows are kept, with the numbers that made it diverge."""
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = make_trainer(beta=0.1, peft_config=adapter)
    before = weights(trainer)
    trainer._reference_logps = lambda inputs: torch.full(inputs["tool_mask"].shape, value)
    with pytest.raises(TraceGymError, match=r"The loss is (nan|inf).* rows are in .*diverged-0.pt.* raise max_loss"):
        trainer.train()
    saved = torch.load(tmp_path / "run" / "diverged-0.pt", weights_only=True)
    assert all(rows["prompt_ids"].shape[0] == rows["advantages"].shape[0] > 0 for rows in saved["passes"])
    assert len(saved["passes"]) == len(saved["losses"]) > 0
    assert all(torch.equal(before[name], now) for name, now in weights(trainer).items())


def test_a_gradient_that_is_no_number_stops_before_it_harms_the_weights(
    make_trainer: MakeTrainer, tmp_path: Any
) -> None:
    """A learning rate far too large: the loss still looks well when the gradient does not."""
    after_one: list[dict[str, torch.Tensor]] = []
    trainer = make_trainer(
        callbacks=[After(lambda _: after_one.append(weights(trainer)))], learning_rate=1e3, max_steps=3
    )
    with pytest.raises(TraceGymError, match=r"gradient has a norm of nan after 1 .*lower learning_rate"):
        trainer.train()
    assert all(torch.equal(after_one[0][name], now) for name, now in weights(trainer).items())
    saved = torch.load(tmp_path / "run" / "diverged-1.pt", weights_only=True)
    assert math.isnan(saved["grad_norm"]) and all(map(math.isfinite, saved["losses"])) and saved["passes"]


@torch.no_grad()
def blow_up(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.mul_(1e4)


def test_a_gradient_far_beyond_the_last_ones_stops_the_run(make_trainer: MakeTrainer, tmp_path: Any) -> None:
    """What is usual is known after some updates, and by a resumed run as well."""
    options = {"candidates": 2, "root_budget": 8, "max_steps": 10}
    whole = make_trainer(**options, save_strategy="steps", save_steps=9)
    whole.train()
    assert len(whole.divergence.norms) == 10
    resumed = make_trainer(**options, callbacks=[After(blow_up)])
    with pytest.raises(TraceGymError, match=r"a norm of \S+, where \S+ is usual, after 9 .*max_grad_growth is 100"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-9"))


def test_processes_stop_together_and_an_update_without_rows_is_no_measure(tmp_path: Any) -> None:
    """Also those whose own rows are well."""

    class Two:
        rank, size, other = 1, 2, None

        def gather(self, value: Any) -> list[Any]:
            return [self.other, value]

    two = Two()
    guard = Divergence(max_loss=10.0, max_grad_growth=10.0, folder=tmp_path, processes=two)
    for norm in (1.0, 0.0, None, 3.0):
        guard.check(norm, step=0)
    assert list(guard.norms) == [1.0, 3.0]
    two.other = ("The loss is 99", "max_loss")
    guard.watch(torch.tensor(1.0), {"advantages": torch.ones(2)})
    with pytest.raises(TraceGymError, match=r"loss is 99 after 4 .*max_loss is 10.*diverged-4-rank1.pt"):
        guard.check(1.0, step=4)
    assert torch.load(tmp_path / "diverged-4-rank1.pt", weights_only=True)["losses"] == [1.0]


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
@pytest.mark.parametrize("place", ["tensorboard", "wandb", "trackio"])
def test_the_trees_metrics_reach_every_place(
    make_trainer: MakeTrainer, tmp_path: Any, monkeypatch: Any, place: str
) -> None:
    """Without a network, through the integrations of transformers."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "places"))
    pytest.importorskip(place)
    for name, module in list(sys.modules.items()):  # trackio reads its place when it is imported
        if name.partition(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "places")
    make_trainer(report_to=place, max_steps=2, run_name="run", project="trace_gym_tests").train()
    if place == "wandb":  # its service process would outlive the test
        sys.modules["wandb"].teardown()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"effective_ratio_candidates" in written
