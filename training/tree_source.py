"""Where the trees of a run come from: environments and the policy, played by a collector that lives as long as the run.

With vLLM the weights go to its engine when a step begins; else the model itself samples, whole on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trace_gym.allocation import get_allocator
from trace_gym.batching import run_to_end
from trace_gym.collect import Collection, Collector
from trace_gym.executor import get_executor
from trace_gym.messages import Agent
from trace_gym.training.processes import whole_weights
from trace_gym.training.tasks import env_maker
from trace_gym.training.vllm_sampling import awake, engine_of, send_weights

AgentFactory = Callable[..., Agent]


class TreeSource:
    """Plays the steps of a run with the policy as it is at the time.

    Args:
        trainer: The `trace_gym.training.trainer.TraceGRPOTrainer` whose policy plays.
        agent_factory: Makes the agent, see there.
    """

    def __init__(self, trainer: Any, agent_factory: AgentFactory) -> None:
        """Store both; the agent and the environments are made when they are needed."""
        self._trainer = trainer
        self._agent_factory = agent_factory
        self._collector: Collector | None = None

    @property
    def is_open(self) -> bool:
        """Whether there are environments to close."""
        return self._collector is not None

    @property
    def max_context(self) -> int | None:
        """Longest conversation in tokens, of the configuration and of the model."""
        args, config = self._trainer.args, self._trainer.model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        return min(filter(None, (args.max_context_tokens, positions)), default=None)

    @contextmanager
    def sampler(self) -> Iterator[Agent]:
        """Yield an agent of the caller's own that samples from the policy as it is, such as for an evaluation.

        Raises:
            InfrastructureError: If an engine or a server does not get the weights.
        """
        with self._weights_ready():
            yield self._make_agent()

    def collect(self, task_ids: Sequence[str], step: int) -> Collection:
        """Play a step.

        Args:
            task_ids: The candidates.
            step: Steps played before; seeds follow from it.

        Raises:
            InfrastructureError: If the agent cannot answer, or an engine or a server does not get the weights.
        """
        if self._collector is None:
            self._collector = self._make_collector()
        with self._weights_ready():
            return run_to_end(self._collector.collect(task_ids, self._trainer.args.root_budget, step=step))

    def close(self) -> None:
        """Close the environments; they and the agent are made anew if there is another step."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    @contextmanager
    def _weights_ready(self) -> Iterator[None]:
        """Let who samples have the weights as they are, once per step."""
        trainer = self._trainer
        if not trainer.use_vllm:
            sampling = whole_weights(trainer.model_wrapped, trainer.accelerator)
        else:
            if trainer.state.global_step != trainer._last_loaded_step:
                send_weights(trainer.vllm_generation, trainer.processes)
                trainer._last_loaded_step = trainer.state.global_step
            sampling = awake(trainer.vllm_generation)
        # Evaluation mode also turns activation checkpointing off, which would forbid the key-value cache.
        training = trainer.model.training
        trainer.model.eval()
        try:
            with sampling:
                yield
        finally:
            trainer.model.train(training)

    def _make_agent(self) -> Agent:
        trainer, args = self._trainer, self._trainer.args
        sampler, named = trainer.model, {}
        if trainer.use_vllm:
            named["name"], sampler = engine_of(trainer.vllm_generation)
        return self._agent_factory(
            sampler, trainer.processing_class, temperature=args.temperature, max_tokens=args.max_turn_tokens, **named
        )

    def _make_collector(self) -> Collector:
        trainer, args = self._trainer, self._trainer.args
        agent = self._make_agent()
        if hasattr(trainer.predictor, "listen"):
            trainer.predictor.listen(agent)
        return Collector(
            env_maker(args),
            agent,
            allocator=get_allocator(args.allocator, args.max_per_root),
            predictor=trainer.predictor,
            encoder=trainer.encoder,
            expansions=args.expansions,
            max_tokens=args.max_turn_tokens,
            max_context=self.max_context,
            step_timeout_s=args.step_timeout_s,
            completion_timeout_s=args.completion_timeout_s,
            seed=args.seed,
            processes=trainer.processes,
            executor=get_executor(args.executor, args.env_workers),
        )
