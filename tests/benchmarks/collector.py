"""What collecting costs: prompt tokens read, forward passes and time, beside collectors that restart or wait.

Run by hand: ``python tests/benchmarks/collector.py [--quick]``. The default policy, with random weights, talks to an
environment that takes its time. How long an answer is follows a log-normal law and, like the end of an episode, depends
on seeds alone, so all ways grow the same trees; this is checked. They take turns in one run; the last line is one JSON
object of ratios.

- *restart*: every turn reads its whole conversation, and all branches wait for the longest answer of the turn
- *stage*: keeps what it has read, but all branches wait for the longest answer of the turn, and no continuation starts
  before the last rollout has ended
- *continuous*: what trace_gym does
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trace_gym.agents.decoding import Finished, Row
from trace_gym.agents.transformers import Generation, TransformersAgent
from trace_gym.allocation import get_allocator
from trace_gym.chat import ChatEncoder
from trace_gym.collect import Collection, Collector
from trace_gym.envs.text_env import Episode, TextEnv, TurnResult
from trace_gym.messages import Completion, Message, Request
from trace_gym.predictor import PosteriorPredictor
from trace_gym.training.policy import PolicyShape, build_model, build_tokenizer

WORDS = "add the sum of two odd numbers then print what is left when it was divided by seven again".split()
MEDIAN, SIGMA, LONGEST = 12, 1.0, 256  # tokens of an answer
SHAPE = PolicyShape(context=1024)
STEP_S = 0.005


class Chat(TextEnv):
    """Ten words for an answer; every turn after the first may be the last."""

    task_ids = tuple(f"task-{number}" for number in range(1000))

    def __init__(self) -> None:
        """Allow for six turns."""
        super().__init__(max_turns=6)

    def _begin(self, task_id: str, seed: int) -> tuple[tuple[Message, ...], int]:
        rng = np.random.default_rng(int(task_id.removeprefix("task-")))
        return (Message("system", "Solve it."), Message("user", self._words(60, rng))), seed

    def _play(self, episode: Episode, action: str) -> TurnResult:
        time.sleep(STEP_S)
        rng = np.random.default_rng([episode.world, episode.turn])
        if episode.turn > 1 and rng.random() < 0.3:
            outcome = {"verdict": "drawn", "reason": "by lot"}
            return TurnResult((), episode.world, float(rng.random() < 0.5), outcome)
        return TurnResult((Message("tool", self._words(10, rng), "lot"),), episode.world, tool_calls=1)

    @staticmethod
    def _words(num: int, rng: np.random.Generator) -> str:
        return " ".join(rng.choice(WORDS, num))

    def _dump_world(self, world: int) -> int:
        return world

    def _load_world(self, data: int, live: Any, reseed: int | None) -> int:
        return data if reseed is None else reseed

    def _twin(self) -> Chat:
        return Chat()


class Talker(TransformersAgent):
    """Never ends a turn by itself: the seed of a request says how long its answer is."""

    def __init__(self, model: Any, tokenizer: Any, way: str) -> None:
        """Speak to a collector of this kind."""
        super().__init__(model, tokenizer, max_tokens=LONGEST)
        self.decoders: list[Any] = []
        self._sampler = replace(self._sampler, stops=self._sampler.stops[:0])
        self._way = way
        if way == "restart":
            self.generation = None  # the collector then asks for whole batches

    def generation(self) -> Generation:
        """Return a generation of this way."""
        return Generation(self) if self._way == "continuous" else Staged(self)

    def _row(self, key: Any, request: Request, group: int = 0) -> Row:
        length = np.random.default_rng([request.seed, 1]).lognormal(np.log(MEDIAN), SIGMA)
        return super()._row(key, replace(request, max_tokens=int(np.clip(length, 1, LONGEST))), group)

    def _decoder(self) -> Any:
        self.decoders.append(super()._decoder())
        return self.decoders[-1]


class Staged(Generation):
    """Answers all branches of a turn before any of them plays on, and continuations once no rollout is left."""

    def __init__(self, agent: TransformersAgent) -> None:
        """Start with nothing known."""
        super().__init__(agent)
        self.slack = 0
        self._held: list[tuple[Any, Request]] = []

    async def burst(
        self, requests: Sequence[tuple[Any, Request]], finished: Finished, closed: Sequence[int] = ()
    ) -> None:
        """Work until everything is answered."""
        wanted = [*self._held, *requests]
        roots = [(key, request) for key, request in wanted if len(key) == 2]
        self._held = [(key, request) for key, request in wanted if roots and len(key) > 2]
        answers: list[tuple[Any, Completion]] = []
        await super().burst(roots or wanted, lambda *answer: answers.append(answer), closed)
        while self._decoder.num_left:
            await super().burst([], lambda *answer: answers.append(answer))
        for key, answer in answers:
            finished(key, answer)


class Counted:
    """A model whose forward passes are counted."""

    def __init__(self, model: Any) -> None:
        """Count from now on."""
        self.passes = 0
        model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.passes += 1


def play(model: Any, tokenizer: Any, way: str, tasks: int, roots: int) -> tuple[Collection, int, float, float]:
    """Grow the trees in one way; return them, the prompt tokens that were read, and the seconds, by clock and CPU."""
    agent = Talker(model, tokenizer, way)
    with Collector(
        Chat,
        agent,
        allocator=get_allocator("trace"),
        predictor=PosteriorPredictor(),
        encoder=ChatEncoder(tokenizer),
        expansions=2,
        max_context=SHAPE.context,
    ) as collector:
        start, cpu = time.perf_counter(), time.process_time()
        collection = asyncio.run(collector.grow(Chat.task_ids[:tasks], [roots] * tasks))
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return collection, sum(decoder.num_read for decoder in agent.decoders), seconds, cpu


def shape(collection: Collection) -> list[list[tuple[int, int, float | None]]]:
    """Return what is the same however the trees were grown."""
    return [[(node.parent, node.num_generated, node.reward) for node in tree.nodes] for tree in collection.trees]


def main() -> None:
    """Print the table and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer trees and rounds, under 50 seconds")
    quick = parser.parse_args().quick
    tasks, roots, rounds = (4, 4, 2) if quick else (32, 4, 5)
    torch.set_num_threads(1)
    tokenizer = build_tokenizer([" ".join(WORDS), *WORDS, "Solve it."], SHAPE)
    model = build_model(tokenizer, SHAPE, seed=0)
    counted = Counted(model)
    ways = ("restart", "stage", "continuous")
    times: dict[str, list[float]] = {way: [] for way in ways}
    cpus: dict[str, list[float]] = {way: [] for way in ways}
    read: dict[str, int] = {}
    passes: dict[str, int] = {}
    expected = None
    for _ in range(rounds):
        for way in ways:
            counted.passes = 0
            collection, read[way], seconds, cpu = play(model, tokenizer, way, tasks, roots)
            passes[way] = counted.passes
            times[way].append(seconds)
            cpus[way].append(cpu)
            expected = expected or shape(collection)
            if shape(collection) != expected:
                raise SystemExit(f"The way {way!r} grew other trees than {ways[0]!r}: one is wrong.")
    tokens, cost = collection.cost.tokens, collection.cost
    print(
        f"{cost.rollouts} rollouts, {cost.continuations} continuations, {cost.turns} turns, {tokens} tokens generated"
    )
    row = "{:<12}{:>18}{:>16}{:>12}{:>12}{:>14}".format
    print(row("way", "read/generated", "forward passes", "seconds", "CPU", "tokens/s"))
    for way in ways:
        seconds, cpu = statistics.median(times[way]), statistics.median(cpus[way])
        shown = (f"{read[way] / tokens:.2f}", passes[way], f"{seconds:.2f}", f"{cpu:.2f}", f"{tokens / seconds:.0f}")
        print(row(way, *shown))
    ratios = {"read_over_restart": read["continuous"] / read["restart"]}
    for way in ways[:-1]:
        pairs = zip(times[way], times["continuous"], strict=True)
        ratios[f"{way}_over_continuous"] = statistics.median(a / b for a, b in pairs)
        pairs = zip(cpus[way], cpus["continuous"], strict=True)
        ratios[f"{way}_cpu_over_continuous"] = statistics.median(a / b for a, b in pairs)
        ratios[f"{way}_passes_over_continuous"] = passes[way] / passes["continuous"]
    print(json.dumps({name: round(value, 3) for name, value in ratios.items()}))


if __name__ == "__main__":
    main()
