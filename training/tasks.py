"""What a run trains on: its tasks, and the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from datasets import Dataset
from torch.utils.data import Sampler

from trace_gym.errors import BadInputError
from trace_gym.training.config import TraceGRPOConfig


class CandidateSampler(Sampler[int]):
    """Yields each prompt once per epoch, in batches of ``candidates``, shuffled by seed and epoch.

    A batch is repeated for every micro-batch it trains, as TRL's loop asks for it; prompts that do not fill a
    batch have their turn in another epoch. Stateless, so a resumed run sees the prompts that the interrupted
    one would have.

    Args:
        num_prompts: Prompts in the data set.
        candidates: Prompts of a batch.
        repeats: Micro-batches a batch is trained in.
        seed: Seed of the order; None keeps the order of the data set.
    """

    def __init__(self, num_prompts: int, candidates: int, repeats: int, seed: int | None) -> None:
        """Start in epoch 0."""
        self.num_prompts = num_prompts
        self.candidates = candidates
        self.repeats = repeats
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch; the data loader calls this."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Yield indices of prompts."""
        order = np.arange(self.num_prompts)
        if self.seed is not None:
            order = np.random.default_rng([self.seed, self.epoch]).permutation(order)
        for start in range(0, len(self) // self.repeats, self.candidates):
            for _ in range(self.repeats):
                yield from order[start : start + self.candidates].tolist()

    def __len__(self) -> int:
        """Return the number of indices of an epoch."""
        return self.num_prompts // self.candidates * self.candidates * self.repeats


def make_env(args: TraceGRPOConfig) -> gymnasium.Env[Any, Any]:
    """Return a new environment of a run."""
    # The passive checker warns of the NaN reward by which an environment reports an infrastructure failure.
    return gymnasium.make(args.env_id, disable_env_checker=True, **(args.env_kwargs or {}))


def training_tasks(args: TraceGRPOConfig, given: Dataset | Sequence[str] | None = None) -> Dataset:
    """Return the tasks as a data set, after checking that the configuration fits them and the environment.

    Raises:
        BadInputError: If it does not.
    """
    env = make_env(args)
    try:
        max_turns = getattr(env.unwrapped, "max_turns", None)
        ids: Sequence[str] = env.unwrapped.task_ids if given is None else given  # type: ignore[attr-defined]
    finally:
        env.close()
    if args.expansions and max_turns == 1:
        raise BadInputError(
            f"expansions is {args.expansions}, but {args.env_id} has a single turn, so a rollout has no "
            "prefix to continue from. Set expansions=0."
        )
    if not isinstance(ids, Dataset):
        ids = Dataset.from_dict({"task_id": list(ids)})
    if "task_id" not in ids.column_names:
        raise BadInputError(f"train_dataset has the columns {ids.column_names}; it needs one named 'task_id'.")
    if len(ids) < args.candidates:
        raise BadInputError(
            f"candidates is {args.candidates}, but there are {len(ids)} tasks, and a step shows each prompt "
            "once. Lower candidates or add tasks."
        )
    return ids
