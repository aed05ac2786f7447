"""Decoding rows side by side: each leaves when it is done, others take its place, and no prefix is read twice.

A `Decoder` works in bursts. A burst takes in the rows that wait, reads what is not known of their prompts, and decodes
until `DONE_SHARE` of its rows are done or `BURST` tokens were sampled. What a burst does depends on the calls before it
and on no clock, so the same calls bring the same numbers to the last bit.

Prompts are read in chunks of a few thousand tokens, on a CPU three times as fast as one large batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from trace_gym.agents.kv_batch import KVBatch, kv_shapes
from trace_gym.agents.kv_store import PrefixStore, num_common
from trace_gym.errors import InfrastructureError
from trace_gym.messages import Completion

BURST = 16
DONE_SHARE = 0.25
PREFILL_TOKENS = 2048
PASS_TOKENS = 64  # one more forward pass costs about as much as reading so many tokens

Finished = Callable[[Any, Completion], None]


@dataclass(slots=True, eq=False)
class Row:
    """One request on its way through the decoder.

    Attributes:
        key: The caller's name for it.
        ids: The prompt's ids; then also what was sampled.
        seed: Seed of its uniforms.
        limit: Most tokens to sample.
        group: Who shares its prefix, see `PrefixStore`.
    """

    key: Any
    ids: tuple[int, ...]
    seed: int = 0
    limit: int = 1
    group: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    draws: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        """Draw the uniforms, [limit]."""
        draws = np.random.default_rng(self.seed).random(self.limit, np.float32)
        # Below 1 by more than rounding can undo: u * mass must stay under the last step of the CDF.
        self.draws = draws.clip(max=np.float32(1 - 2**-22))

    @property
    def read(self) -> tuple[int, ...]:
        """All ids so far."""
        return (*self.ids, *self.sampled)


@dataclass(frozen=True, slots=True)
class Sampler:
    """What a decoder needs of an agent.

    Attributes:
        model: The model; its weights may change between bursts.
        config: Its configuration.
        choose: Picks tokens: logits [B, V], uniforms [B] -> ids [B], log-probabilities [B].
        text: Spells ids.
        stops: Ids that end an answer, [S].
        pad: An id to fill in.
        accepted: Names of the arguments that the model's forward takes.
        max_positions: Positions that the model has; None if it has no limit.
        on_read: Called with the ids of rows right after the forward pass that read them.
    """

    model: Any
    config: Any
    choose: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    text: Callable[[Sequence[int]], str]
    stops: torch.Tensor
    pad: int
    accepted: frozenset[str]
    max_positions: int | None
    on_read: Callable[[Sequence[tuple[int, ...]]], None] = lambda rows: None

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Return the logits after the last token of each row, [B, V]."""
        if self.max_positions is not None:
            positions = positions.clamp(max=self.max_positions - 1)  # rows that are done may run on for a while
        options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self.accepted}
        output = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        last: torch.Tensor = output.logits[:, -1]
        return last

    def left_pad(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return right-aligned ids, [B, T]."""
        width = max(map(len, rows))
        ids = np.full((len(rows), width), self.pad, dtype=np.int64)
        for place, row in enumerate(rows):
            ids[place, width - len(row) :] = row
        return torch.from_numpy(ids).to(self.model.device)

    def completion(self, row: Row) -> Completion:
        """Return the answer of a row that is done."""
        if not np.isfinite(row.logprobs).all():
            raise InfrastructureError("generation", "The model's logits are not finite.")
        tokens = tuple(row.sampled)
        reason: Literal["stop", "length"] = "stop" if tokens[-1] in self.stops else "length"
        return Completion(self.text(tokens), tokens, tuple(row.logprobs), reason, len(tokens))


class Decoder:
    """Decodes rows with a model whose layers keep keys and values.

    Args:
        sampler: The model and how to sample from it.
        places: Most rows decoded together.
        store_bytes: Most bytes of keys and values to keep besides those of the rows that are being decoded.

    Attributes:
        waiting: Rows without a place; add new ones at the end.
        rows: Rows that are being decoded.
        num_read: Prompt tokens read so far; what was known is not counted.
    """

    def __init__(self, sampler: Sampler, places: int, store_bytes: int) -> None:
        """Start with nothing to do."""
        self.sampler = sampler
        self.places = places
        self.store = PrefixStore(store_bytes)
        self.waiting: list[Row] = []
        self.rows: list[Row] = []
        self.num_read = 0
        self._logits: list[torch.Tensor] = []  # after what each row has read so far, [V]
        self._batch: KVBatch | None = None
        self._weights: object = None

    @property
    def num_left(self) -> int:
        """Rows that are not done yet."""
        return len(self.rows) + len(self.waiting)

    def release(self, group: int) -> None:
        """Forget what only this group has used."""
        self.store.release(group)

    def burst(self, finished: Finished) -> None:
        """Work on the rows for a while; ``finished`` is called with the key and the answer of each that is done."""
        self._notice_new_weights()
        free = self.places - len(self.rows)
        new, self.waiting = self.waiting[:free], self.waiting[free:]
        if new:
            self._admit(new)
        if self.rows:
            self._decode(finished)

    def _decode(self, finished: Finished) -> None:
        rows, device = self.rows, self.sampler.model.device
        draws = np.zeros((len(rows), BURST), dtype=np.float32)
        for place, row in enumerate(rows):
            left = row.draws[len(row.sampled) : len(row.sampled) + BURST]
            draws[place, : len(left)] = left
        uniforms = torch.from_numpy(draws).to(device)
        left = torch.tensor([row.limit - len(row.sampled) for row in rows], device=device)
        alive = torch.ones(len(rows), dtype=torch.bool, device=device)
        ids, logprobs, logits = [], [], torch.stack(self._logits)
        last: list[int] = []  # places of rows that are done
        for step in range(BURST):
            chosen, logprob = self.sampler.choose(logits, uniforms[:, step])
            ids.append(chosen)
            logprobs.append(logprob)
            ended = alive & (torch.isin(chosen, self.sampler.stops) | (left == step + 1))
            if ended.any():
                alive &= ~ended
                done = torch.nonzero(ended)[:, 0].tolist()
                last += done
                self._record(done, ids, logprobs)
                for place in done:
                    finished(rows[place].key, self.sampler.completion(rows[place]))
                if len(last) >= DONE_SHARE * len(rows):
                    break
            if step < BURST - 1:
                logits = self._step(chosen)
        living = torch.nonzero(alive)[:, 0].tolist()
        self._record(living, ids, logprobs)
        self._retire(last)
        self._logits = []
        if self.rows:
            self._logits = list(self._step(torch.tensor([row.sampled[-1] for row in self.rows], device=device)))

    def _step(self, newest: torch.Tensor) -> torch.Tensor:
        """Let every row read one token; return the logits after it, [B, V]."""
        mask, positions = self._batch.extending()
        return self.sampler.forward(newest[:, None], mask, positions, self._batch.cache)

    def _record(self, places: list[int], ids: Sequence[torch.Tensor], logprobs: Sequence[torch.Tensor]) -> None:
        """Write down what the rows at these places sampled."""
        chosen, values = (torch.stack([*columns])[:, places].T.tolist() for columns in (ids, logprobs))
        for place, tokens, numbers in zip(places, chosen, values, strict=True):
            self.rows[place].sampled += tokens
            self.rows[place].logprobs += numbers

    def _retire(self, done: Sequence[int]) -> None:
        """Keep what the rows that are done have read, and give their places away."""
        batch, rows = self._batch, self.rows
        for place in done:
            read = rows[place].read[:-1]  # the last sampled token was never read
            self.store.add(read, batch.part(place, len(rows[place].ids), len(read)), rows[place].group)
        kept = len(rows) - len(done)
        living = set(range(len(rows))) - set(done)
        behind = iter(sorted(place for place in living if place >= kept))
        order = [place if place in living else next(behind) for place in range(kept)]
        batch.keep(order)
        self.rows = [rows[place] for place in order]

    # Reading prompts.

    def _admit(self, new: Sequence[Row]) -> None:
        """Give places to rows; what several of them would have to read is read once, if that is worth a pass."""
        batch = self._batch = self._batch or self._make_batch()
        batch.reserve(len(self.rows) + len(new), max(len(row.read) for row in new))
        distinct = {row.read: row for row in reversed(new)}
        low, high = min(distinct), max(distinct)
        shared = Row(None, low[: min(num_common(low, high), len(low) - 1)], group=new[0].group)
        if (len(distinct) - 1) * self._num_unknown(shared) > PASS_TOKENS:
            self._read([shared])
            batch.keep(range(len(self.rows) - 1))
            del self.rows[-1], self._logits[-1]
        firsts = set(map(id, distinct.values()))
        repeats = [row for row in new if id(row) not in firsts]
        if sum(map(self._num_unknown, repeats)) - len(repeats) > PASS_TOKENS:
            self._read([row for row in new if id(row) in firsts])
            self._read(repeats)
        else:
            self._read(new)

    def _num_unknown(self, row: Row) -> int:
        """Return how many ids of a row would have to be read."""
        return len(row.read) - self.store.find(row.read[:-1], row.group)[0]

    def _read(self, rows: Sequence[Row]) -> None:
        """Read what is not known of the rows' ids, and start to decode them."""
        batch = self._batch
        found = [(row, *self.store.find(row.read[:-1], row.group)) for row in rows]
        found.sort(key=lambda item: (len(item[0].read) - item[1], len(item[0].read)))
        for chunk in self._chunks(found):
            added = [len(row.read) - known for row, known, _ in chunk]
            self.num_read += sum(added)
            first = len(self.rows)
            batch.join([pieces for _, _, pieces in chunk], added)
            mask, positions = batch.reading(first, added)
            ids = self.sampler.left_pad([row.read[known:] for row, known, _ in chunk])
            self._logits += self.sampler.forward(ids, mask, positions, batch.cache)
            self.sampler.on_read([row.read for row, _, _ in chunk])
            for place, (row, known, _) in enumerate(chunk, start=first):
                self.store.add(row.read, batch.part(place, known, len(row.read)), row.group)
                self.rows.append(row)

    @staticmethod
    def _chunks(found: list[Any]) -> Iterator[list[Any]]:
        """Split rows, those with least to read first, into chunks of about `PREFILL_TOKENS` padded tokens."""
        start = 0
        for end in range(1, len(found) + 1):
            if end == len(found) or (len(found[end][0].read) - found[end][1]) * (end + 1 - start) > PREFILL_TOKENS:
                yield found[start:end]
                start = end

    def _make_batch(self) -> KVBatch:
        cache = DynamicCache(config=self.sampler.config)
        one = torch.ones(1, 1, dtype=torch.long, device=self.sampler.model.device)
        self.sampler.forward(one * self.sampler.pad, one, one - 1, cache)
        like = next(layer.keys for layer in cache.layers if layer.is_initialized)
        return KVBatch(kv_shapes(cache), like, self.places)

    def _notice_new_weights(self) -> None:
        """Forget everything that was read with other weights; rows that are being decoded are read anew."""
        weights = [(p.data_ptr(), p._version) for p in self.sampler.model.parameters()]
        if weights != self._weights:
            self._weights = weights
            self.store.clear()
            self.waiting = self.rows + self.waiting
            self.rows, self._batch, self._logits = [], None, []
