"""A two-turn guessing game, a tiny Llama with its tokenizer, and an agent that needs no model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from trace_gym.chat import ChatEncoder
from trace_gym.envs.text_env import Episode, TextEnv, TurnResult
from trace_gym.errors import InfrastructureError
from trace_gym.messages import Completion, Message, Request
from trace_gym.training import TraceGRPOConfig, TraceGRPOTrainer
from trace_gym.training.policy import PolicyShape, build_model, build_tokenizer

ENV_ID = "trace_gym_tests/Guess-v0"
DIGITS = "0123"
SHAPE = PolicyShape(hidden=16, layers=2, heads=2, mlp=32, vocabulary=300, context=128)


class GuessEnv(TextEnv):
    """Guess the first character of the task's id; a wrong first guess is told where to look.

    Args:
        failing: Tasks whose last turn breaks the infrastructure.
        max_turns: Guesses.
    """

    task_ids = tuple(f"{digit}{letter}" for letter in "abcdef" for digit in DIGITS)

    def __init__(self, failing: Sequence[str] = (), max_turns: int = 2, **options: Any) -> None:
        super().__init__(max_turns=max_turns, max_action_chars=64, max_observation_chars=64, **options)
        self.failing = tuple(failing)

    def _begin(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], Any]:
        return (Message("user", f"guess {task_id}"),), {"seed": seed}

    def _play(self, episode: Episode, action: str) -> TurnResult:
        secret, guess = episode.task_id[0], action[:1]
        if episode.turn < self.max_turns and guess != secret:
            hint = "higher" if guess < secret else "lower"
            return TurnResult((Message("user", hint),), episode.world, tool_calls=1)
        if episode.task_id in self.failing:
            raise InfrastructureError("sandbox_died", "the sandbox died")
        verdict = "correct" if guess == secret else "wrong"
        reward = float(guess == secret)
        return TurnResult((), episode.world, reward, {"verdict": verdict, "reason": "compared"})

    def _dump_world(self, world: Any) -> Any:
        return dict(world)

    def _load_world(self, data: Any, live: Any, reseed: int | None) -> Any:
        return data

    def _twin(self) -> GuessEnv:
        return GuessEnv(self.failing, self.max_turns)


class DiceAgent:
    """Draws up to three digits from a request's seed; knows neither model nor task."""

    batched = True

    def __init__(self, model: Any, tokenizer: Any, *, temperature: float, max_tokens: int) -> None:
        self.encoder = ChatEncoder(tokenizer)
        self.digits = [tokenizer.encode(digit, add_special_tokens=False)[0] for digit in DIGITS]
        self.max_tokens = max_tokens

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Completion:
        rng = np.random.default_rng(request.seed)
        length = int(rng.integers(1, min(4, self.max_tokens + 1)))
        ids = tuple(int(i) for i in rng.choice(self.digits, size=length))
        if rng.random() < 0.8:  # else the answer is cut, and the encoder closes the turn
            ids = (*ids, self.encoder.eos_id)
        logprobs = tuple(np.log(rng.uniform(0.1, 0.9, size=len(ids))).tolist())
        return Completion(self.encoder.text(ids), ids, logprobs, "stop", num_tokens=len(ids))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _less_garbage() -> None:
    """Every run collects garbage when it begins, and would look at all that the libraries consist of."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _guess_env() -> None:
    gymnasium.register(id=ENV_ID, entry_point=GuessEnv)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer(["guess", "higher", "lower", *GuessEnv.task_ids], SHAPE)


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return build_model(tokenizer, SHAPE, seed=0)


@pytest.fixture
def dice_agent() -> type[DiceAgent]:
    return DiceAgent


@pytest.fixture
def make_trainer(tokenizer: Any, tmp_path: Any) -> Callable[..., TraceGRPOTrainer]:
    """Return a function that builds a trainer, of a fresh tiny model if not given; options go to the configuration."""

    def make(
        agent_factory: Any = DiceAgent,
        callbacks: Any = None,
        peft_config: Any = None,
        train_dataset: Any = None,
        model: Any = None,
        **options: Any,
    ) -> TraceGRPOTrainer:
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "env_id": ENV_ID,
            "candidates": 4,
            "root_budget": 24,
            "max_steps": 1,
            "learning_rate": 1e-2,
            "max_turn_tokens": 4,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "max_grad_norm": 0.0,
        }
        return TraceGRPOTrainer(
            build_model(tokenizer, SHAPE, seed=0) if model is None else model,
            TraceGRPOConfig(**(defaults | options)),
            agent_factory=agent_factory,
            processing_class=tokenizer,
            callbacks=callbacks,
            train_dataset=train_dataset,
            peft_config=peft_config,
        )

    return make
