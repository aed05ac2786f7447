"""A run with vLLM beside the trainer, in a process of its own: ``python vllm_run.py FOLDER [lora]``.

Prints the number of steps, how far the engine's log-probabilities ever were from the model's, and how far the weights
moved.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import torch
from conftest import DIGITS, ENV_ID, GuessEnv
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from trace_gym.agents import make_agent
from trace_gym.chat import ChatEncoder
from trace_gym.messages import Message
from trace_gym.training import TraceGRPOConfig, TraceGRPOTrainer
from trace_gym.training.policy import PolicyShape, build_model, build_tokenizer


def guessing_policy(folder: Path) -> Any:
    """Save a small Llama that has learned to guess a digit, whatever is asked; return its tokenizer."""
    shape = PolicyShape(hidden=64, layers=2, heads=2, mlp=64, vocabulary=300, context=128)  # heads as vLLM takes them
    tokenizer = build_tokenizer(["guess", "higher", "lower", *GuessEnv.task_ids], shape)
    model = build_model(tokenizer, shape, seed=0)
    encoder = ChatEncoder(tokenizer)
    shown = [
        (*encoder.prompt((Message("user", f"guess {task}"),)), *encoder.encode(DIGITS[7 * i % 4]), encoder.eos_id)
        for i, task in enumerate(GuessEnv.task_ids)
    ]
    ids = torch.tensor(shown)
    labels = ids.clone()
    labels[:, :-2] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        model(ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def main(folder: Path, lora: bool) -> None:
    """Train for a few steps."""
    torch.set_num_threads(1)
    gymnasium.register(id=ENV_ID, entry_point=GuessEnv)
    tokenizer = guessing_policy(folder / "policy")
    trainer = TraceGRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "policy"),
        TraceGRPOConfig(
            output_dir=str(folder / "run"),
            env_id=ENV_ID,
            candidates=4,
            root_budget=24,
            max_steps=4,
            learning_rate=3e-3,
            max_turn_tokens=4,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            use_vllm=True,
        ),
        agent_factory=lambda model, tokenizer, **options: make_agent(model=model, tokenizer=tokenizer, **options),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None,
    )
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    before = [parameter.detach().clone() for parameter in trained]
    trainer.train()
    moved = max((new - old).abs().max().item() for new, old in zip(trained, before, strict=True))
    name = "sampling/sampling_logp_difference/max"
    apart = [line[name] for line in trainer.state.log_history if name in line]
    print("RESULT", len(apart), max(apart), moved)


if __name__ == "__main__":
    main(Path(sys.argv[1]), lora="lora" in sys.argv[2:])
