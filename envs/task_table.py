"""Tables of tasks and their splits: what the environments that load tasks have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from trace_gym.errors import BadInputError, unknown_name

SPLITS = ("train", "eval")
EVAL_SHARE = 5  # one question in five belongs to the eval split
MAX_NAMED = 10_000  # ids among which a near miss is looked for


class IdTable(Sequence[str]):
    """A fixed sequence of task ids.

    Args:
        ids: The ids in order, each once.
    """

    def __init__(self, ids: Iterable[str]) -> None:
        """Keep the ids."""
        self.ids = tuple(ids)

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        """Return the id at a place, or the ids of a slice."""
        return self.ids[index]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids in order."""
        return iter(self.ids)

    def unknown(self, task_id: str) -> BadInputError:
        """Return the error of an id that is not there: it has the nearest id, or the first and last of many."""
        if len(self.ids) <= MAX_NAMED:
            return unknown_name("task id", task_id, self.ids)
        return BadInputError(
            f"Unknown task id {task_id!r}. There are {len(self.ids)}, from {self.ids[0]!r} to {self.ids[-1]!r}."
        )


def side_of_text(text: str, fold: int = 0) -> str:
    """Return the split that a text belongs to: ``"eval"`` for one in five, by its digest; another one in each fold."""
    digest = hashlib.sha256(text.encode(errors="replace")).digest()
    return "eval" if int.from_bytes(digest[:8], "big") % EVAL_SHARE == fold else "train"


def check_split(split: str | None) -> None:
    """Raise `BadInputError` unless the name is that of a split, or None."""
    if split is not None and split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
