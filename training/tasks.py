"""What a run trains on: its tasks, and the order in which they are shown."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

from trace_gym.errors import BadInputError
from trace_gym.task_list import LazyIds
from trace_gym.training.config import TraceGRPOConfig


@dataclass(frozen=True)
class Group:
    """Tasks that are drawn together.

    Attributes:
        task_ids: Their ids; read one by one, when a task is played.
        weight: Share of the candidates that come from here; the weights of all groups add up to 1.
    """

    task_ids: Sequence[str]
    weight: float = 1.0


class Tasks(Dataset[int]):
    """The tasks of a run by number, one group after the other; an id is read when its task is played.

    Args:
        groups: At least one.
        mixed: Whether they are of a mixture, so that their ids begin with the name of their source.
    """

    def __init__(self, groups: Sequence[Group], mixed: bool = False) -> None:
        """Count them."""
        self.groups = tuple(groups)
        self.mixed = mixed
        self._ends = list(accumulate(len(group.task_ids) for group in groups))

    def __len__(self) -> int:
        """Return how many there are."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> int:
        """Return the number of a task; TRL's loop asks for it once for every micro-batch."""
        return index

    def task_id(self, number: int) -> str:
        """Return the id of a task."""
        group = bisect_right(self._ends, number)
        ids = self.groups[group].task_ids
        return str(ids[number - self._ends[group] + len(ids)])


class CandidateSampler(Sampler[int]):
    """Yields batches of ``candidates`` different prompts, of each group by its weight, shuffled by seed.

    A group is gone through again and again, each time in another order; prompts that do not fill a batch have their
    turn in another pass. A batch is repeated for every micro-batch it trains, as TRL's loop asks for it. Stateless, so
    a resumed run sees the prompts that the interrupted one would have. Memory: eight bytes a prompt.

    Args:
        groups: Size and weight of each group; the weights add up to 1.
        candidates: Prompts of a batch.
        repeats: Micro-batches a batch is trained in.
        seed: Seed of the order; None keeps the order of the tasks.
    """

    def __init__(self, groups: Sequence[tuple[int, float]], candidates: int, repeats: int, seed: int | None) -> None:
        """Start in epoch 0."""
        self.sizes = [size for size, _ in groups]
        self.weights = [weight for _, weight in groups]
        self.candidates = candidates
        self.repeats = repeats
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the data loader calls this."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Yield indices of prompts."""
        steps = sum(self.sizes) // self.candidates
        starts = [0, *accumulate(self.sizes)]
        orders: dict[int, tuple[int, NDArray[np.int64]]] = {}
        for parts in islice(self._plan(), self.epoch * steps, (self.epoch + 1) * steps):
            batch = []
            for group, (turn, place, count) in enumerate(parts):
                if orders.get(group, (-1,))[0] != turn:
                    orders[group] = turn, self._order(group, turn)
                batch += (orders[group][1][place : place + count] + starts[group]).tolist()
            for _ in range(self.repeats):
                yield from batch

    def __len__(self) -> int:
        """Return the number of indices of an epoch."""
        return sum(self.sizes) // self.candidates * self.candidates * self.repeats

    def _plan(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yield for each step what comes of each group: the pass, the place in it, and how many."""
        credit = [0.0] * len(self.sizes)
        turns, places = [0] * len(self.sizes), [0] * len(self.sizes)
        while True:
            credit = [due + self.candidates * weight for due, weight in zip(credit, self.weights, strict=True)]
            counts = [max(0, math.floor(due)) for due in credit]
            while (missing := self.candidates - sum(counts)) != 0:
                sign = 1 if missing > 0 else -1
                open_groups = [g for g in range(len(counts)) if counts[g] + sign >= 0]
                counts[max(open_groups, key=lambda g: sign * (credit[g] - counts[g]))] += sign
            credit = [due - count for due, count in zip(credit, counts, strict=True)]
            for group, count in enumerate(counts):
                if places[group] + count > self.sizes[group]:
                    turns[group], places[group] = turns[group] + 1, 0
            yield list(zip(turns, places, counts, strict=True))
            places = [place + count for place, count in zip(places, counts, strict=True)]

    def _order(self, group: int, turn: int) -> NDArray[np.int64]:
        order = np.arange(self.sizes[group])
        if self.seed is None:
            return order
        place = [self.seed, turn] if group == 0 else [self.seed, turn, group]
        return np.random.default_rng(place).permutation(order)


def env_maker(args: TraceGRPOConfig) -> partial[gymnasium.Env[Any, Any]]:
    """Return what makes an environment of a run, here or in another process."""
    # The passive checker warns of the NaN reward by which an environment reports an infrastructure failure.
    return partial(gymnasium.make, args.env_id, disable_env_checker=True, **(args.env_kwargs or {}))


def training_tasks(args: TraceGRPOConfig, given: Any = None) -> Tasks:
    """Return the tasks, after checking that the configuration fits them and the environment.

    Args:
        args: The configuration.
        given: Ids of tasks, a data set with a column ``task_id``, or None for all tasks of the environment, where those
            of a mixture come by weight.

    Raises:
        BadInputError: If they do not fit.
    """
    env = env_maker(args)()
    try:
        max_turns = getattr(env.unwrapped, "max_turns", None)
        ids: Any = env.unwrapped.task_ids if given is None else given  # type: ignore[attr-defined]
        sources = getattr(env.unwrapped, "sources", ())
    finally:
        env.close()
    if args.expansions and max_turns == 1:
        raise BadInputError(
            f"expansions is {args.expansions}, but {args.env_id} has a single turn, so a rollout has no "
            "prefix to continue from. Set expansions=0."
        )
    if columns := getattr(ids, "column_names", None):
        if "task_id" not in columns:
            raise BadInputError(f"train_dataset has the columns {columns}; it needs one named 'task_id'.")
        rows = ids
        ids = LazyIds(len(rows), lambda place: rows[place]["task_id"])
    weighted = [Group(source.task_ids, source.weight) for source in sources] if given is None else []
    groups = weighted or [Group(ids)]
    for group in groups:
        # Weights seldom give whole numbers; what is left over comes with another step.
        wanted = args.candidates if len(groups) == 1 else math.ceil(args.candidates * group.weight) + 1
        if len(group.task_ids) < wanted:
            where = "" if len(groups) == 1 else f" like {group.task_ids[0]!r}, which has a weight of {group.weight:.3g}"
            raise BadInputError(
                f"candidates is {args.candidates}, but there are {len(group.task_ids)} tasks{where}, and a step shows "
                "each prompt once. Lower candidates or add tasks."
            )
    return Tasks(groups, mixed=bool(sources))
