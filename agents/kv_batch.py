"""Keys and values of the rows that are decoded together, in one buffer that is extended in place.

Rows are right-aligned and have no holes: the newest token of every row stands in the last used column, and a row's
older tokens before it. What transformers makes of a left-padded attention mask is then right for every row, sliding
windows included, whenever a row joined; a row that leaves is filled with one from behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

ROOM = 128  # columns to grow into at least; then everything is moved

Shape = tuple[int, int]  # heads, dim


def kv_shapes(cache: DynamicCache) -> list[tuple[Shape, Shape] | None]:
    """Return the shapes of each layer's keys and values after a forward pass (None: the layer has none of its own)."""
    return [
        (layer.keys.shape[1::2], layer.values.shape[1::2]) if layer.is_initialized else None for layer in cache.layers
    ]


class KVBatch:
    """The buffer, and the cache that a model's forward reads and extends.

    Args:
        shapes: Heads and dim of the keys and of the values of every layer, see `kv_shapes`.
        like: A tensor of the dtype and on the device of the keys.
        places: Rows that there will be at most, give or take one.

    Attributes:
        cache: To be passed to the model.
        lengths: Cached tokens of each row; the newest is in the last used column.
    """

    def __init__(self, shapes: Sequence[tuple[Shape, Shape] | None], like: torch.Tensor, places: int) -> None:
        """Start without rows."""
        own = [shape for pair in shapes if pair is not None for shape in pair]
        self._size = tuple(max(sizes) for sizes in zip(*own, strict=True))
        self._parts = len(own)
        self._like = like
        self._places = places
        self._buffer = like.new_zeros(self._parts, 0, self._size[0], 0, self._size[1])
        self._end = 0
        self.lengths: list[int] = []
        self.cache = DynamicCache()
        self.cache.layers = []
        self.cache.layer_class_to_replicate = None
        part = 0
        for pair in shapes:
            self.cache.layers.append(_Layer(self, part, pair) if pair is not None else DynamicLayer())
            part += 2 * (pair is not None)
        self._window(slice(0, 0), 0, None)

    # Rows.

    def reserve(self, rows: int, width: int, columns: int = 0) -> None:
        """Make room for so many rows as wide as this, and for columns to come."""
        _, held, _, capacity, _ = self._buffer.shape
        if rows <= held and width <= self._end and self._end + columns <= capacity:
            return
        num, used = len(self.lengths), max(self.lengths, default=0)
        old = self._buffer[:, :num, :, self._end - used : self._end]
        rows = max(rows, min(2 * num, self._places))
        width = max(width, used)
        room = max(ROOM, width // 4)
        self._end = width + room // 4  # rows that join later may be wider
        # What stands before a row's first token is masked, but it must be finite, since 0 * NaN is NaN.
        self._buffer = self._like.new_zeros(self._parts, rows, self._size[0], self._end + room, self._size[1])
        self._buffer[:, :num, :, self._end - used : self._end] = old

    def join(self, prefixes: Sequence[Sequence[torch.Tensor]], added: Sequence[int]) -> None:
        """Append rows: known prefixes, in pieces, behind each of which room is left for tokens still to be read."""
        known = [sum(piece.shape[2] for piece in pieces) for pieces in prefixes]
        lengths = [old + new for old, new in zip(known, added, strict=True)]
        first = len(self.lengths)
        self.reserve(first + len(lengths), max(lengths))
        for row, (pieces, length) in enumerate(zip(prefixes, lengths, strict=True), start=first):
            at = self._end - length
            for piece in pieces:
                self._buffer[:, row, :, at : at + piece.shape[2]] = piece
                at += piece.shape[2]
        self.lengths += lengths

    def part(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Return a view of a row's tokens from ``start`` to ``stop``, [parts, heads, stop - start, dim]."""
        first = self._end - self.lengths[row]
        return self._buffer[:, row, :, first + start : first + stop]

    def keep(self, order: Sequence[int]) -> None:
        """Keep these rows in this order; those that stay in their place are not touched."""
        for place, row in enumerate(order):
            if place != row:
                start = self._end - self.lengths[row]
                self._buffer[:, place, :, start : self._end] = self._buffer[:, row, :, start : self._end]
        self.lengths = [self.lengths[row] for row in order]

    # What the next forward pass reads and writes.

    def reading(self, first: int, added: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the rows from ``first`` on read the tokens that they left room for, right-aligned, most first.

        Returns:
            Attention mask [rows, tokens cached] and positions [rows, tokens read].
        """
        width = max(added)
        counts = torch.tensor(added, device=self._like.device)
        is_new = torch.arange(width, device=counts.device) >= width - counts[:, None]
        return self._window(slice(first, first + len(added)), width, is_new)

    def extending(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Let every row read one more token; return as `reading`."""
        self.reserve(len(self.lengths), max(self.lengths), 1)
        self._end += 1
        self.lengths = [length + 1 for length in self.lengths]
        return self._window(slice(0, len(self.lengths)), 1, None)

    def _window(self, rows: slice, read: int, is_new: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        self._rows, self._read = rows, read
        lengths = torch.tensor(self.lengths[rows], device=self._like.device, dtype=torch.long)
        width = max(self.lengths[rows], default=0)
        self._start = self._end - width
        self._is_new = None if is_new is None or bool(is_new.all()) else is_new[:, None, :, None]
        place = torch.arange(width, device=lengths.device) - (width - lengths[:, None])
        return (place >= 0).long(), place[:, width - read :].clamp(min=0)

    def _write(self, part: int, shape: Shape, new: torch.Tensor) -> torch.Tensor:
        """Write keys or values of the tokens that are read; return those of all tokens, [rows, heads, width, dim]."""
        heads, dim = shape
        rows = self._buffer[part, self._rows, :heads, :, :dim]
        target = rows[:, :, self._end - self._read : self._end]
        target.copy_(new if self._is_new is None else torch.where(self._is_new, new, target))
        return rows[:, :, self._start : self._end]


class _Layer(DynamicLayer):
    """One layer of a `KVBatch`, as transformers wants to see it."""

    def __init__(self, batch: KVBatch, part: int, shapes: tuple[Shape, Shape]) -> None:
        super().__init__()
        self._batch, self._part, self._shapes = batch, part, shapes
        self.dtype, self.device, self.is_initialized = batch._like.dtype, batch._like.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write what is new and return all."""
        self.keys = self._batch._write(self._part, self._shapes[0], key_states)
        self.values = self._batch._write(self._part + 1, self._shapes[1], value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the width of what is cached besides the tokens that are being read."""
        return self._batch._end - self._batch._start - self._batch._read
