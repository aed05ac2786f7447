"""Laws of the configuration: what contradicts itself is refused before anything heavy starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import transformers
from given_trees import MakeTrainer

from trace_gym.errors import BadInputError, MissingExtraError
from trace_gym.training import TraceGRPOConfig, TraceGRPOTrainer


def test_the_configuration_can_be_given_on_a_command_line(tmp_path: Any) -> None:
    parser = transformers.HfArgumentParser(TraceGRPOConfig)
    line = f"--output_dir {tmp_path} --report_to none --token_budget 1000 --env_kwargs".split()
    (config,) = parser.parse_args_into_dataclasses([*line, '{"max_turns": 4}'])
    assert (config.env_kwargs, config.token_budget, config.bf16) == ({"max_turns": 4}, 1000, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root_budget": 1}, "root_budget is 1; it must be at least 2"),
        ({"candidates": 4}, "root_budget is 256, but 4 candidates with max_per_root=16 take 64 at most"),
        ({"allocator": "uniform"}, "expansions is 2, but allocator 'uniform'"),
        ({"env_kwargs": {"max_turns": 1}}, "with max_turns=1 a rollout has no prefix"),
        ({"allocator": "treep"}, "Unknown allocator 'treep'. Did you mean 'treepo'"),
        ({"advantage": "gae"}, "Unknown advantage 'gae'"),
        ({"predictor": "oracle"}, "Unknown predictor 'oracle'"),
        ({"predictor_target": "all"}, "Unknown predictor target 'all'"),
        ({"loss_type": "luspo"}, "loss_type 'luspo' is not exact with varying rows"),
        ({"loss_type": "vespo"}, "loss_type 'vespo' is not exact with varying rows"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level is 'sequence'"),
        ({"scale_rewards": "batch"}, "scale_rewards is 'batch'"),
        ({"num_generations": 4}, "num_generations is 4; the allocator decides"),
        ({"gradient_accumulation_steps": 2}, "holds fewer than the 768 rows"),
        ({"top_p": 0.9}, "top_p is 0.9, which would have no effect"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be positive"),
    ],
)
def test_contradictions_are_refused_with_value_rule_and_remedy(
    tmp_path: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        TraceGRPOConfig(output_dir=str(tmp_path), report_to="none", **options)


def test_a_configuration_can_be_changed_in_part(tmp_path: Any) -> None:
    config = TraceGRPOConfig(output_dir=str(tmp_path), report_to="none", updates_per_step=2)
    changed = replace(config, seed=7)
    assert changed.seed == 7 and changed.steps_per_generation == config.steps_per_generation


def test_every_field_explains_itself() -> None:
    assert all(f.metadata.get("help") for f in TraceGRPOConfig.__dataclass_fields__.values())


def test_a_missing_peft_is_named_before_the_model_is_loaded(
    make_trainer: MakeTrainer, tokenizer: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    args = TraceGRPOConfig(output_dir=str(tmp_path), report_to="none")
    with pytest.raises(MissingExtraError, match=r"trace-gym\[train\]"):
        TraceGRPOTrainer("no/such-model", args, agent_factory=None, processing_class=tokenizer, peft_config=object())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": 25}, "candidates is 25, but there are 24 tasks"),
        ({"env_kwargs": {"max_turns": 1}}, "a rollout has no prefix"),
    ],
)
def test_a_configuration_that_does_not_fit_the_environment_is_refused(
    make_trainer: MakeTrainer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        make_trainer(**options)
