"""Laws of merging: the merged model says what the adapter on its base says, and loads by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from trace_gym.cli import main
from trace_gym.errors import BadInputError
from trace_gym.training.merge import merge_adapter

peft = pytest.importorskip("peft")
# peft asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture
def run(model: Any, tokenizer: Any, tmp_path: Path) -> Path:
    """A run with one method, whose adapter has been trained somewhere."""
    model.save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(loaded, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.1, generator=torch.Generator().manual_seed(0))
    for home in ("model", "best"):
        adapted.save_pretrained(tmp_path / "run" / "trace" / home)
        tokenizer.save_pretrained(tmp_path / "run" / "trace" / home)
    return tmp_path / "run"


def test_the_merged_model_equals_adapter_and_base(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["merge", str(run), str(tmp_path / "merged")]) == 0
    assert "trace/best" in capsys.readouterr().out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(run / "trace" / "best")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.arange(20)[None]
    expected, got = adapted(ids).logits, merged(ids).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(base(ids).logits, expected, atol=1e-3)
    assert (tmp_path / "merged" / "tokenizer.json").exists()


def test_what_cannot_be_merged_is_refused_with_the_reason(run: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="whole model"):
        merge_adapter(tmp_path / "base", tmp_path / "out")
    with pytest.raises(BadInputError, match="no adapter in"):
        merge_adapter(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(BadInputError, match="not empty"):
        merge_adapter(run, tmp_path / "base")
    (run / "trace").rename(run / "treepo")
    merge_adapter(run / "treepo", tmp_path / "out")
    (tmp_path / "base").rename(tmp_path / "gone")
    with pytest.raises(BadInputError, match=r"base model .* cannot be loaded"):
        merge_adapter(run, tmp_path / "other")
