"""Decoding for models with a recurrent state, which can neither be cut at a prefix nor joined to that of others."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from trace_gym.agents.decoding import Finished, Row, Sampler


class WholeBatchDecoder:
    """Decodes one batch to its end before it takes another, and reads every prompt from its start.

    Args:
        sampler: The model and how to sample from it.
        places: Most rows decoded together.

    Attributes:
        waiting: Rows without a place; add new ones at the end.
        num_read: Prompt tokens read so far.
    """

    def __init__(self, sampler: Sampler, places: int) -> None:
        """Start with nothing to do."""
        self.sampler = sampler
        self.places = places
        self.waiting: list[Row] = []
        self.num_read = 0

    @property
    def num_left(self) -> int:
        """Rows that are not done yet."""
        return len(self.waiting)

    def release(self, group: int) -> None:
        """Nothing is kept."""

    def burst(self, finished: Finished) -> None:
        """Answer the rows that wait, as many as have a place; see `Decoder.burst`."""
        rows, self.waiting = self.waiting[: self.places], self.waiting[self.places :]
        device = self.sampler.model.device
        ids = self.sampler.left_pad([row.ids for row in rows])
        self.num_read += sum(len(row.ids) for row in rows)
        lengths = torch.tensor([len(row.ids) for row in rows], device=device)[:, None]
        place = torch.arange(ids.shape[1], device=device) - (ids.shape[1] - lengths)
        mask, positions = (place >= 0).long(), place.clamp(min=0)
        cache = DynamicCache(config=self.sampler.config)
        while True:
            logits = self.sampler.forward(ids, mask, positions, cache)
            self.sampler.on_read([row.read for row in rows])
            uniforms = torch.tensor([row.draws[len(row.sampled)] for row in rows], device=device)
            chosen, logprobs = self.sampler.choose(logits, uniforms)
            for row, token, logprob in zip(rows, chosen.tolist(), logprobs.tolist(), strict=True):
                row.sampled.append(token)
                row.logprobs.append(logprob)
            done = torch.isin(chosen, self.sampler.stops).tolist()
            living = [i for i, row in enumerate(rows) if not done[i] and len(row.sampled) < row.limit]
            for i in set(range(len(rows))) - set(living):
                finished(rows[i].key, self.sampler.completion(rows[i]))
            if not living:
                return
            if len(living) < len(rows):
                rows = [rows[i] for i in living]
                kept = torch.tensor(living, device=device)
                cache.reorder_cache(kept)
                chosen, mask, positions = chosen[kept], mask[kept], positions[kept]
            ids, positions = chosen[:, None], positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
