"""A real small language model, LoRA on it and vLLM as its sampler, in one run from one file, as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trace_gym.cache import cache_folder
from trace_gym.training.report import read_jsonl

for name, reason in (("vllm", "vLLM"), ("gguf", "gguf")):
    pytest.importorskip(name, reason=f"{reason} is not installed; 'make vllm' installs a CPU build and runs this")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

HERE = Path(__file__).parent
SHORT = {
    "token_budget": 1_500,
    "eval_tasks": 4,
    "curve_tasks": 4,
    "threads": 1,
}
# What trains and what evaluates can only be vLLM: there is no other agent with token ids.
COMMAND = (
    "import sys; sys.modules['trace_gym.agents.transformers'] = None; "
    "from trace_gym.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture(scope="module")
def model() -> Path:
    """Return the folder of the model. Without an index the test is skipped, in CI it fails."""
    folder = cache_folder("models") / "smollm2-135m-instruct"
    done = subprocess.run([sys.executable, HERE / "smollm2.py", folder], capture_output=True, text=True)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return folder


def trace_gym(*words: Any) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", COMMAND, *map(str, words)]


def test_a_run_from_one_file_is_killed_resumed_and_merged(model: Path, tmp_path: Path) -> None:
    """It trains and evaluates with vLLM, whose log-probabilities are the model's; what is left loads by itself."""
    out, merged = tmp_path / "run", tmp_path / "merged"
    short = [word for name, value in SHORT.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    config = tmp_path / "smollm2.toml"
    config.write_text((HERE / "smollm2.toml").read_text().replace("runs/smollm2", str(model)))
    start = trace_gym("train", "--config", config, "--out", out, *short)
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        told = []
        for line in job.stdout:
            told.append(line)
            if line.startswith("trace: step 2,"):
                job.kill()
                break
        assert told and told[-1].startswith("trace: step 2,"), job.communicate()[1][-3000:]
    assert job.returncode == -signal.SIGKILL and not (out / "trace" / "result.json").exists()
    done = subprocess.run(trace_gym("train", "--resume", out), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

    lines = read_jsonl(out / "trace" / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 2
    assert max(line.get("sampling/sampling_logp_difference/max", 0.0) for line in lines) < 1e-3
    assert any("eval/accuracy" in line for line in lines)
    for name in ("before.json", "trace/result.json"):
        assert json.loads((out / name).read_text()), name
    homes = [out / "trace" / home / "adapter_model.safetensors" for home in ("best", "model")]
    ups = [tensor for home in homes for key, tensor in load_file(home).items() if "lora_B" in key]
    assert ups and all(torch.isfinite(tensor).all() for tensor in ups)
    assert any(tensor.any() for tensor in ups), "nothing was trained"

    assert subprocess.run(trace_gym("merge", out / "trace" / "model", merged), capture_output=True).returncode == 0
    weights, base = load_file(merged / "model.safetensors"), load_file(model / "model.safetensors")
    assert weights.keys() == base.keys()
    assert any(not torch.equal(weights[name], base[name]) for name in weights)
