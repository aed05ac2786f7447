"""A local model as an agent: batched decoding with exact token ids and log-probabilities.

The decode loop is our own because ``generate`` samples from torch's global generator and keeps finished rows
in the batch. Invariants:

- The answer to a request depends on the request alone, seed included: its uniforms come from a generator of
  its own, and a batch is sorted before it is decoded, so the order of requests changes nothing. Among *other*
  requests the answer is the same up to rounding, because floating-point sums depend on a batch's shape.
- ``logprobs`` are ``log_softmax(logits / temperature)`` at the sampled ids in float32, before any top-p
  truncation, as TRL's trainer computes them. With ``temperature=0`` (greedy) the logits are not scaled.

Equal prompts are read once. Prompts are read in chunks of a few thousand tokens, on a CPU three times as fast
as one large batch, and their keys and values go into one right-aligned buffer that decoding extends in place.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer

from trace_gym.chat import ChatEncoder
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Completion, Request

PREFILL_TOKENS = 2048
GROWTH = 64


@dataclass(frozen=True, slots=True)
class _Row:
    """One request on its way through the decoder."""

    index: int
    ids: tuple[int, ...]
    seed: int
    limit: int

    @property
    def order(self) -> tuple[int, tuple[int, ...], int, int]:
        """Sort key: neighbours have similar lengths, and the order of arrival does not matter."""
        return len(self.ids), self.ids, self.seed, self.limit


class _BufferLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room to grow, [rows, heads, capacity, dim].

    ``update`` writes behind the used part and returns views; ``reorder_cache`` moves only rows that change
    place. The stock layer copies everything in both cases.
    """

    def __init__(self, rows: int, width: int, like: DynamicLayer) -> None:
        super().__init__()
        self._rows, self._used = rows, width
        shape = (rows, like.keys.shape[1], width + GROWTH)
        self._buffers = [x.new_zeros(*shape, x.shape[-1]) for x in (like.keys, like.values)]
        self.dtype, self.device, self.is_initialized = like.keys.dtype, like.keys.device, True
        self._expose()

    def fill(self, rows: slice, source: torch.Tensor, layer: DynamicLayer) -> None:
        """Write the prompts ``source`` of a prefilled layer to ``rows``, right-aligned."""
        start = self._used - layer.keys.shape[2]
        for buffer, new in zip(self._buffers, (layer.keys, layer.values), strict=True):
            buffer[rows, :, start : self._used] = new[source]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self._used + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            self._buffers = [torch.nn.functional.pad(b, (0, 0, 0, GROWTH)) for b in self._buffers]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self._rows, :, self._used : end] = new
        self._used = end
        return self._expose()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        moved = torch.nonzero(beam_idx != torch.arange(len(beam_idx), device=beam_idx.device))[:, 0]
        for buffer in self._buffers:
            buffer[moved, :, : self._used] = buffer[beam_idx[moved], :, : self._used]
        self._rows = len(beam_idx)
        self._expose()

    def _expose(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = (b[: self._rows, :, : self._used] for b in self._buffers)
        return self.keys, self.values


class TransformersAgent:
    """Answers with a transformers causal language model, peft-wrapped or not.

    Args:
        model: The model; its device is used, its train/eval mode is put back after each call.
        tokenizer: Its tokenizer, with a chat template (see `trace_gym.chat.ChatEncoder`).
        temperature: Divides the logits; 0 decodes greedily.
        top_p: Samples from the smallest set of tokens with at least this probability; 1 turns it off.
        max_tokens: Longest answer in tokens; a request's own ``max_tokens`` can only lower it.
        batch_size: Most requests decoded together.

    Attributes:
        max_context: The longest sequence that the model takes, in tokens; None if it has no limit.

    Raises:
        BadInputError: If an argument is out of range or the tokenizer's template does not fit.
    """

    batched = True

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        batch_size: int = 256,
    ) -> None:
        """Check the arguments and find out what the model's forward accepts."""
        if temperature < 0 or not 0 < top_p <= 1:
            raise BadInputError(f"Need temperature >= 0 and 0 < top_p <= 1; got {temperature} and {top_p}.")
        if max_tokens < 1 or batch_size < 1:
            raise BadInputError(f"max_tokens and batch_size must be positive; got {max_tokens}, {batch_size}.")
        self.model = model
        self.encoder = ChatEncoder(tokenizer)
        self.temperature = temperature
        self.top_p = top_p
        self.max_tokens = max_tokens
        self.batch_size = batch_size
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._accepted = set(inspect.signature(type(base).forward).parameters)
        self._config = base.config
        text_config = base.config.get_text_config(decoder=True)
        self.max_context: int | None = getattr(text_config, "max_position_embeddings", None)
        self._is_plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.config).layers)
        # Some models end turns with several tokens; an ordinary token here is a config's untouched default.
        stops = getattr(getattr(base, "generation_config", None), "eos_token_id", None) or []
        stops = {stops} if isinstance(stops, int) else set(stops)
        self._stops = torch.tensor(
            sorted((stops & set(tokenizer.all_special_ids)) | {self.encoder.eos_id}), device=model.device
        )
        self._lock = threading.Lock()

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *, device: str | None = None, dtype: Any = "auto", **options: Any
    ) -> TransformersAgent:
        """Load a model (or a peft adapter with its base) and its tokenizer.

        Args:
            name_or_path: A folder or a name on the hub.
            device: Where to put it; None takes an accelerator if there is one.
            dtype: As in ``AutoModelForCausalLM.from_pretrained``.
            **options: Passed to the constructor.
        """
        if device is None:
            found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
            device = found.type if found else "cpu"
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype).to(device)
        return cls(model, AutoTokenizer.from_pretrained(name_or_path), **options)

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order.

        A prompt that leaves no room in the model's context gets an empty answer, cut by length.

        Raises:
            BadInputError: If a request has an empty prompt or a ``max_tokens`` below 1.
            InfrastructureError: Kind ``generation``, if the model failed or its logits are not finite.
        """
        rows = [self._row(index, request) for index, request in enumerate(requests)]
        return await asyncio.to_thread(self._complete, rows)

    def _row(self, index: int, request: Request) -> _Row:
        ids = request.prompt_ids
        if ids is None:
            ids = self.encoder.prompt(request.messages, request.tools)
        limit = self.max_tokens if request.max_tokens is None else min(request.max_tokens, self.max_tokens)
        if not ids or limit < 1:
            raise BadInputError(f"A request needs a prompt and max_tokens >= 1; got {len(ids)} ids, {limit}.")
        if self.max_context is not None:
            limit = min(limit, self.max_context - len(ids))
        return _Row(index, tuple(ids), request.seed, limit)

    def _complete(self, rows: list[_Row]) -> list[Completion]:
        answers = {row.index: Completion("", (), (), "length") for row in rows if row.limit < 1}
        waiting = sorted((row for row in rows if row.limit > 0), key=lambda row: row.order)
        with self._lock, torch.inference_mode():
            was_training = self.model.training
            self.model.eval()
            try:
                for batch in self._batches(waiting):
                    answers.update(self._decode(batch))
            except (RuntimeError, MemoryError) as error:
                raise InfrastructureError("generation", f"{type(error).__name__}: {error}") from error
            finally:
                self.model.train(was_training)
        return [answers[row.index] for row in rows]

    def _batches(self, rows: list[_Row]) -> Iterator[list[_Row]]:
        for start in range(0, len(rows), self.batch_size):
            yield rows[start : start + self.batch_size]

    def _decode(self, rows: list[_Row]) -> dict[int, Completion]:
        """Answer one batch; rows that are done leave it."""
        logits, cache, mask = self._prefill(rows)
        device = logits.device
        limits = torch.tensor([row.limit for row in rows], device=device)
        longest = int(limits.max())
        draws = np.stack([np.random.default_rng(row.seed).random(longest, np.float32) for row in rows])
        # Below 1 by more than rounding can undo: u * mass must stay under the last step of the CDF.
        uniforms = torch.from_numpy(draws).clamp(max=1 - 2**-22).to(device)
        positions = mask.sum(dim=1)
        alive = torch.arange(len(rows), device=device)
        width = mask.shape[1]
        mask = torch.nn.functional.pad(mask, (0, longest), value=1)
        ids = torch.zeros(len(rows), longest, dtype=torch.long, device=device)
        logprobs = torch.zeros(len(rows), longest, device=device)
        lengths = limits.clone()
        for step in range(longest):
            chosen, logprob = self._choose(logits, uniforms[alive, step])
            ids[alive, step], logprobs[alive, step] = chosen, logprob
            is_done = torch.isin(chosen, self._stops) | (limits[alive] == step + 1)
            if is_done.any():
                lengths[alive[is_done]] = step + 1
                kept = _compact(~is_done)
                if not len(kept):
                    break
                cache.reorder_cache(kept)
                alive, chosen, mask = alive[kept], chosen[kept], mask[kept]
            logits = self._forward(chosen[:, None], mask[:, : width + step + 1], positions[alive, None] + step, cache)
        return self._completions(rows, ids, logprobs, lengths)

    def _prefill(self, rows: list[_Row]) -> tuple[torch.Tensor, DynamicCache, torch.Tensor]:
        """Read the prompts; return the next logits [B, V], the cache, and the prompt mask [B, P]."""
        width = len(rows[-1].ids)
        prompts = list(dict.fromkeys(row.ids for row in rows))
        place = {prompt: i for i, prompt in enumerate(prompts)}
        source = torch.tensor([place[row.ids] for row in rows], device=self.model.device)
        joint: list[_BufferLayer] = []
        logits = []
        for start, end in self._chunks(prompts):
            ids, mask = self._left_pad(prompts[start:end])
            cache = DynamicCache(config=self._config)
            logits.append(self._forward(ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0), cache))
            if self._is_plain:
                joint = joint or [_BufferLayer(len(rows), width, layer) for layer in cache.layers]
                # Rows are sorted, so those of a chunk lie together.
                inside = torch.nonzero((source >= start) & (source < end))[:, 0]
                block = slice(int(inside[0]), int(inside[-1]) + 1)
                for target, layer in zip(joint, cache.layers, strict=True):
                    target.fill(block, source[block] - start, layer)
        if self._is_plain:
            cache.layers = joint
        else:
            cache.reorder_cache(source)
        _, mask = self._left_pad([row.ids for row in rows])
        return torch.cat(logits)[source], cache, mask

    def _chunks(self, prompts: list[tuple[int, ...]]) -> Iterator[tuple[int, int]]:
        """Split prompts, shortest first, into ranges of about `PREFILL_TOKENS` padded tokens."""
        start = 0
        for end in range(1, len(prompts) + 1):
            is_last = end == len(prompts)
            # Sliding windows and recurrent states cannot be written into a joint buffer: one chunk.
            if is_last or (self._is_plain and len(prompts[end]) * (end + 1 - start) > PREFILL_TOKENS):
                yield start, end
                start = end

    def _left_pad(self, prompts: list[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), self.encoder.eos_id, dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        device = self.model.device
        return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Return the logits after the last token of each row, [B, V]."""
        options: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self._accepted}
        output = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        last: torch.Tensor = output.logits[:, -1]
        return last

    def _choose(self, logits: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick a token per row by inverse CDF: the first whose cumulative probability exceeds u * mass."""
        logits = logits.float()
        if self.temperature == 0:
            logprobs = logits.log_softmax(dim=-1)
            chosen = logprobs.argmax(dim=-1, keepdim=True)
        else:
            logprobs = (logits / self.temperature).log_softmax(dim=-1)
            probs, order = logprobs.exp(), None
            if self.top_p < 1:
                probs, order = probs.sort(dim=-1, descending=True, stable=True)
            cdf = probs.cumsum(dim=-1)
            mass = cdf[:, -1:]
            if self.top_p < 1:
                cut = torch.searchsorted(cdf, mass * self.top_p)
                mass = cdf.gather(1, cut.clamp(max=cdf.shape[1] - 1))
            chosen = torch.searchsorted(cdf, uniforms[:, None] * mass, right=True)
            chosen = chosen.clamp(max=cdf.shape[1] - 1)
            if order is not None:
                chosen = order.gather(1, chosen)
        return chosen[:, 0], logprobs.gather(1, chosen)[:, 0]

    def _completions(
        self, rows: list[_Row], ids: torch.Tensor, logprobs: torch.Tensor, lengths: torch.Tensor
    ) -> dict[int, Completion]:
        stops = set(self._stops.tolist())
        answers = {}
        for row, sampled, logprob, length in zip(rows, ids.tolist(), logprobs.tolist(), lengths.tolist(), strict=True):
            tokens, values = tuple(sampled[:length]), tuple(logprob[:length])
            if not np.isfinite(values).all():
                raise InfrastructureError("generation", "The model's logits are not finite.")
            reason: Literal["stop", "length"] = "stop" if tokens[-1] in stops else "length"
            answers[row.index] = Completion(self.encoder.text(tokens), tokens, values, reason, length)
        return answers


def _compact(is_kept: torch.Tensor) -> torch.Tensor:
    """Return the indices of the kept rows, [K], such that as many as possible stay in their place.

    Holes among the first K places are filled with kept rows from behind them.
    """
    kept = torch.nonzero(is_kept)[:, 0]
    order = torch.arange(len(kept), device=kept.device)
    order[~is_kept[: len(kept)]] = kept[kept >= len(kept)]
    return order
