"""A run with vLLM beside the trainer, in a process of its own: ``python vllm_run.py FOLDER [lora]``.

Prints, as JSON: the number of steps, how far the engine's log-probabilities ever were from the model's while it played
them, how far the trained weights moved, and the others, and how far the engine is from the model on a prompt that
was in its cache before it got new weights.
"""

from __future__ import annotations

import asyncio
import json
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
from trace_gym.messages import Message, Request
from trace_gym.training import TraceGRPOConfig, TraceGRPOTrainer
from trace_gym.training.policy import PolicyShape, build_model, build_tokenizer

PROMPT = [8 + 7 * i % 250 for i in range(300)]  # several blocks of the engine's cache


def guessing_policy(folder: Path) -> Any:
    """Save a small Llama that has learned to guess a digit, whatever is asked; return its tokenizer."""
    shape = PolicyShape(hidden=64, layers=2, heads=2, mlp=64, vocabulary=300, context=512)  # heads as vLLM takes them
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


def apart(trainer: TraceGRPOTrainer) -> float:
    """Return the largest difference between sampler and model on answers to `PROMPT`."""
    with trainer.sampler() as agent:
        asked = [Request((), prompt_ids=tuple(PROMPT), seed=seed, max_tokens=4) for seed in range(4)]
        answers = asyncio.run(agent.complete(asked))
    found = []
    for answer in answers:
        with torch.inference_mode():
            logits = trainer.model(torch.tensor([[*PROMPT, *answer.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
        logprobs = logits.log_softmax(dim=-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        found.append((logprobs - torch.tensor(answer.logprobs)).abs().max().item())
    return max(found)


def forsake(trainer: TraceGRPOTrainer) -> None:
    """Leave an answer in the engine that nobody waits for, and with it what the engine knows of `PROMPT`."""
    from vllm import SamplingParams

    engine = trainer.vllm_generation.llm.llm_engine
    engine.add_request("forsaken", {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=200, ignore_eos=True))
    engine.step()


def moved(new: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> float:
    """Return the largest change of a weight."""
    return max(((new[name] - old[name]).abs().max().item() for name in new), default=0.0)


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
    named = list(trainer.model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named}
    first = apart(trainer)
    forsake(trainer)
    trainer.train()
    key = "sampling/sampling_logp_difference/max"
    steps = [line[key] for line in trainer.state.log_history if key in line]
    result = {
        "steps": len(steps),
        "apart": max(steps),
        "trained_moved": moved({name: p for name, p in named if p.requires_grad}, before),
        "others_moved": moved({name: p for name, p in named if not p.requires_grad}, before),
        "cached": max(first, apart(trainer)),
    }
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), lora="lora" in sys.argv[2:])
