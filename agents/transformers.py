"""A local model as an agent: batched decoding with exact token ids and log-probabilities.

The decode loop is our own because ``generate`` samples from torch's global generator, keeps finished rows in the batch
and forgets between turns what it has read. Invariants:

- The answer to a request depends on the request alone, seed included: its uniforms come from a generator of its own,
  and `complete` sorts its requests, so their order changes nothing. Among *other* requests the answer is the same up to
  rounding, because floating-point sums depend on a batch's shape; what is in a batch is never a matter of timing.
- ``logprobs`` are ``log_softmax(logits / temperature)`` at the sampled ids in float32, before any top-p truncation, as
  TRL's trainer computes them. With ``temperature=0`` (greedy) the logits are not scaled.
- Keys and values are kept from turn to turn within one `Generation` only, and never across a change of weights.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from trace_gym.agents.decoding import Decoder, Finished, Row, Sampler
from trace_gym.agents.whole_batch import WholeBatchDecoder
from trace_gym.chat import ChatEncoder
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Completion, Request


class TransformersAgent:
    """Answers with a transformers causal language model, peft-wrapped or not.

    Args:
        model: The model; its device is used, its train/eval mode is put back after each call.
        tokenizer: Its tokenizer, with a chat template (see `trace_gym.chat.ChatEncoder`).
        temperature: Divides the logits; 0 decodes greedily.
        top_p: Samples from the smallest set of tokens with at least this probability; 1 turns it off.
        max_tokens: Longest answer in tokens; a request's own ``max_tokens`` can only lower it.
        batch_size: Most requests decoded together.
        cache_bytes: Most bytes of keys and values to keep from turn to turn, for a `Generation`.
        slack: Bursts of decoding that an environment may take before the others wait for it, see `Generation`. More
            hide slower environments; then again fewer branches are decoded together.

    Attributes:
        max_context: The longest sequence that the model takes, in tokens; None if it has no limit.
        on_read: Called with the token ids of rows right after the forward pass that read them, for who looks into the
            model; None for nobody.

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
        cache_bytes: int = 2**31,
        slack: int = 1,
    ) -> None:
        """Check the arguments and find out what the model's forward accepts."""
        if temperature < 0 or not 0 < top_p <= 1:
            raise BadInputError(f"Need temperature >= 0 and 0 < top_p <= 1; got {temperature} and {top_p}.")
        for name, value, least in (
            ("max_tokens", max_tokens, 1),
            ("batch_size", batch_size, 1),
            ("cache_bytes", cache_bytes, 0),
            ("slack", slack, 0),
        ):
            if value < least:
                raise BadInputError(f"{name} must be at least {least}; got {value}.")
        self.model = model
        self.encoder = ChatEncoder(tokenizer)
        self.temperature = temperature
        self.top_p = top_p
        self.max_tokens = max_tokens
        self.batch_size = batch_size
        self.cache_bytes = cache_bytes
        self.slack = slack
        self.on_read: Callable[[Sequence[tuple[int, ...]]], None] | None = None
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        text_config = base.config.get_text_config(decoder=True)
        self.max_context: int | None = getattr(text_config, "max_position_embeddings", None)
        kinds = {type(layer) for layer in DynamicCache(config=base.config).layers}
        self._keeps_all_tokens = kinds <= {DynamicLayer, DynamicSlidingWindowLayer}
        # Some models end turns with several tokens; an ordinary token here is a config's untouched default.
        stops = getattr(getattr(base, "generation_config", None), "eos_token_id", None) or []
        stops = {stops} if isinstance(stops, int) else set(stops)
        self._sampler = Sampler(
            model=model,
            config=base.config,
            choose=self._choose,
            text=self.encoder.text,
            stops=torch.tensor(
                sorted((stops & set(tokenizer.all_special_ids)) | {self.encoder.eos_id}), device=model.device
            ),
            pad=self.encoder.eos_id,
            accepted=frozenset(inspect.signature(type(base).forward).parameters),
            max_positions=self.max_context,
            on_read=lambda rows: self.on_read(rows) if self.on_read is not None else None,
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
        # Neighbours have similar lengths, and the order of arrival does not matter.
        rows.sort(key=lambda row: (len(row.ids), row.ids, row.seed, row.limit))
        answers: dict[int, Completion] = {}
        decoder = self._decoder()
        self._take(decoder, rows, answers.__setitem__)
        while decoder.num_left:
            await self._burst(decoder, answers.__setitem__)
        return [answers[index] for index in range(len(requests))]

    def generation(self) -> Generation:
        """Return what answers requests side by side as they come, and keeps what it has read until it is closed."""
        return Generation(self)

    def _row(self, key: Any, request: Request, group: int = 0) -> Row:
        ids = request.prompt_ids
        if ids is None:
            ids = self.encoder.prompt(request.messages, request.tools)
        limit = self.max_tokens if request.max_tokens is None else min(request.max_tokens, self.max_tokens)
        if not ids or limit < 1:
            raise BadInputError(f"A request needs a prompt and max_tokens >= 1; got {len(ids)} ids, {limit}.")
        if self.max_context is not None:
            limit = max(0, min(limit, self.max_context - len(ids)))
        return Row(key, tuple(ids), request.seed, limit, group)

    def _decoder(self) -> Decoder | WholeBatchDecoder:
        if self._keeps_all_tokens:
            return Decoder(self._sampler, self.batch_size, self.cache_bytes)
        return WholeBatchDecoder(self._sampler, self.batch_size)

    @staticmethod
    def _take(decoder: Decoder | WholeBatchDecoder, rows: Sequence[Row], finished: Finished) -> None:
        """Hand rows to a decoder; those without room in the context are done."""
        for row in rows:
            if row.limit:
                decoder.waiting.append(row)
            else:
                finished(row.key, Completion("", (), (), "length"))

    async def _burst(self, decoder: Decoder | WholeBatchDecoder, finished: Finished) -> None:
        """Let a decoder work for a while in a thread."""
        await asyncio.to_thread(self._work, decoder, finished)

    def _work(self, decoder: Decoder | WholeBatchDecoder, finished: Finished) -> None:
        with self._lock, torch.inference_mode():
            was_training = self.model.training
            self.model.eval()
            try:
                decoder.burst(finished)
            except (RuntimeError, MemoryError) as error:
                raise InfrastructureError("generation", f"{type(error).__name__}: {error}") from error
            finally:
                self.model.train(was_training)

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


class Generation:
    """Answers requests side by side as they come; see `trace_gym.batching.Generation`.

    Args:
        agent: Whose model and settings to use.

    Attributes:
        slack: See there.
        num_read: Prompt tokens that the model has read so far; kept prefixes are not read again.
    """

    def __init__(self, agent: TransformersAgent) -> None:
        """Start with nothing known."""
        self.slack = agent.slack
        self._agent = agent
        self._decoder = agent._decoder()

    @property
    def num_read(self) -> int:
        """See the class."""
        return self._decoder.num_read

    async def burst(
        self, requests: Sequence[tuple[Any, Request]], finished: Finished, closed: Sequence[int] = ()
    ) -> None:
        """Take in requests, work for a while, and give every answer away as soon as it is there."""
        for tree in closed:
            self._decoder.release(tree)
        rows = [self._agent._row(key, request, key[0]) for key, request in requests]
        self._agent._take(self._decoder, rows, finished)
        if self._decoder.num_left:
            deliver: Callable[..., Any] = asyncio.get_running_loop().call_soon_threadsafe
            await self._agent._burst(self._decoder, lambda key, answer: deliver(finished, key, answer))
