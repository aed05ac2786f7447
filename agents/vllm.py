"""vLLM as an agent: an engine in this process, or a server through TRL's client; token ids in, token ids out.

Both keep what they have read of a prefix (vLLM's prefix cache), so that turns and forks read only what is new, and both
put a new request into the running batch as soon as there is room. Log-probabilities are those of the distribution that
was sampled from, temperature included, if the engine runs with ``logprobs_mode="processed_logprobs"``, as TRL makes it.
Every request brings the seed of its own generator, so an answer is that of the request alone up to rounding.

Who made the engine also gives it new weights, and empties its prefix cache then: in training, TRL.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm import LLM, RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from trace_gym.chat import ChatEncoder
from trace_gym.errors import BadInputError, InfrastructureError
from trace_gym.messages import Completion, Request

BURST = 16  # tokens of every answer; short, so that answers that are done are not held up
DONE_SHARE = 0.25

_FAILURES = (RuntimeError, MemoryError, EngineDeadError, EngineGenerateError)
_names = itertools.count()  # of requests; several agents may have one engine

Finished = Callable[[Any, Completion], None]


class _Sampling:
    """What the two agents share."""

    def __init__(
        self, tokenizer: Any, temperature: float, top_p: float, max_tokens: int, max_context: int | None
    ) -> None:
        if temperature < 0 or not 0 < top_p <= 1 or max_tokens < 1:
            raise BadInputError(
                f"Need temperature >= 0, 0 < top_p <= 1 and max_tokens >= 1; got {temperature}, {top_p}, {max_tokens}."
            )
        self.encoder = ChatEncoder(tokenizer)
        self.temperature = temperature
        self.top_p = top_p
        self.max_tokens = max_tokens
        self.max_context = max_context

    def _read(self, request: Request) -> tuple[list[int], int]:
        """Return the prompt's ids, and how many more there may be."""
        ids = request.prompt_ids
        if ids is None:
            ids = self.encoder.prompt(request.messages, request.tools)
        limit = self.max_tokens if request.max_tokens is None else min(request.max_tokens, self.max_tokens)
        if not ids or limit < 1:
            raise BadInputError(f"A request needs a prompt and max_tokens >= 1; got {len(ids)} ids, {limit}.")
        if self.max_context is not None:
            limit = max(0, min(limit, self.max_context - len(ids)))
        return list(ids), limit

    def _extras(self, request: Request) -> dict[str, Any]:
        """Return what vLLM is told besides temperature, nucleus and limit; it adds the model's own ends of a turn."""
        return {"seed": request.seed, "stop_token_ids": [self.encoder.eos_id]}

    def _completion(self, ids: Sequence[int], logprobs: Sequence[float | None], limit: int) -> Completion:
        numbers = tuple(math.nan if value is None else float(value) for value in logprobs)
        if not all(map(math.isfinite, numbers)):
            raise InfrastructureError("generation", "The model's logits are not finite.")
        was_cut = len(ids) == limit and ids[-1] != self.encoder.eos_id
        return Completion(self.encoder.text(ids), tuple(ids), numbers, "length" if was_cut else "stop", len(ids))


class VLLMAgent(_Sampling):
    """Answers with a vLLM engine in this process.

    Args:
        model: A ``vllm.LLM``; several agents may have it, but only one at a time may use it.
        tokenizer: Its tokenizer, with a chat template (see `trace_gym.chat.ChatEncoder`).
        temperature: Divides the logits; 0 decodes greedily.
        top_p: Samples from the smallest set of tokens with at least this probability; 1 turns it off.
        max_tokens: Longest answer in tokens; a request's own ``max_tokens`` can only lower it.
        slack: As for `trace_gym.agents.transformers.TransformersAgent`.

    Attributes:
        max_context: The longest sequence that the engine takes, in tokens.

    Raises:
        BadInputError: If an argument is out of range or the tokenizer's template does not fit.
    """

    batched = True

    def __init__(
        self,
        model: LLM,
        tokenizer: Any,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        slack: int = 1,
    ) -> None:
        """Check the arguments."""
        super().__init__(tokenizer, temperature, top_p, max_tokens, model.llm_engine.model_config.max_model_len)
        if slack < 0:
            raise BadInputError(f"slack must be at least 0; got {slack}.")
        self.slack = slack
        self._engine = model.llm_engine
        self._owners: dict[str, Generation] = {}  # of what the engine works on, by the request's name
        # An engine belongs to one thread, whose current device is the one that the engine was made on.
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None
        self._thread = ThreadPoolExecutor(1, "trace_gym_vllm", _prepare_thread, (device,))

    @classmethod
    def from_pretrained(
        cls, name_or_path: str, *, engine: Mapping[str, Any] | None = None, **options: Any
    ) -> VLLMAgent:
        """Load a model into an engine of its own.

        Args:
            name_or_path: A folder or a name on the hub.
            engine: Arguments of ``vllm.LLM``.
            **options: Passed to the constructor.
        """
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: equal calls, equal batches
        llm = LLM(name_or_path, logprobs_mode="processed_logprobs", **(engine or {}))
        return cls(llm, AutoTokenizer.from_pretrained(name_or_path), **options)

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order; see `TransformersAgent.complete`."""
        answers: dict[int, Completion] = {}
        generation = self.generation()
        asked = list(enumerate(requests))
        while len(answers) < len(requests):
            await generation.burst(asked, answers.__setitem__)
            asked = []
        return [answers[index] for index in range(len(requests))]

    def generation(self) -> Generation:
        """Return what answers requests side by side as they come."""
        return Generation(self)

    def _step(self) -> None:
        """Decode a token of every answer; hand what is finished to who asked."""
        try:
            outputs = self._engine.step()
        except Exception as error:
            for generation in self._owners.values():
                generation._failure = error
            self._drop(list(self._owners))
            # It counts prefixes as known from when it is about to read them.
            with suppress(*_FAILURES):
                self._engine.reset_prefix_cache()
            return
        for output in outputs:
            if output.finished and (owner := self._owners.pop(output.request_id, None)) is not None:
                owner._finished.append(output)

    def _drop(self, names: Sequence[str]) -> None:
        """Make the engine forget requests."""
        self._engine.abort_request(names)
        for name in names:
            self._owners.pop(name, None)


class Generation:
    """Answers requests side by side as they come; see `trace_gym.batching.Generation`.

    Args:
        agent: Whose engine and settings to use.

    Attributes:
        slack: See there.
        num_read: Prompt tokens that the engine has read for finished answers; cached prefixes are not read again.
    """

    def __init__(self, agent: VLLMAgent) -> None:
        """Start with nothing asked."""
        self.slack = agent.slack
        self.num_read = 0
        self._agent = agent
        self._asked: dict[str, tuple[Any, int]] = {}  # key and limit of what the engine works on
        self._finished: list[RequestOutput] = []  # not delivered yet
        self._failure: Exception | None = None  # of the engine, whoever made it work
        self._is_over = False

    async def burst(
        self, requests: Sequence[tuple[Any, Request]], finished: Finished, closed: Sequence[int] = ()
    ) -> None:
        """Take in requests, work for a while, and give every answer away as soon as it is there."""
        new: list[tuple[Any, Request, list[int], int]] = []
        for key, request in requests:
            ids, limit = self._agent._read(request)
            if limit:
                new.append((key, request, ids, limit))
            else:
                finished(key, Completion("", (), (), "length"))
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(
            self._agent._thread, self._work, new, lambda *answer: loop.call_soon_threadsafe(finished, *answer)
        )
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            # Whoever comes next must find the engine at rest, and nothing in it that nobody waits for.
            self._is_over = True
            await asyncio.gather(work, return_exceptions=True)
            raise

    def _work(self, new: Sequence[tuple[Any, Request, list[int], int]], deliver: Finished) -> None:
        try:
            for key, request, ids, limit in new:
                self._ask(key, request, ids, limit)
            num_asked, tokens = len(self._asked), 0
            self._deliver(deliver)
            while len(self._asked) > (1 - DONE_SHARE) * num_asked and tokens < BURST and not self._is_over:
                self._agent._step()
                self._deliver(deliver)
                tokens += 1
        except BaseException as error:
            self._drop()
            if isinstance(error, _FAILURES):
                raise InfrastructureError("generation", f"{type(error).__name__}: {error}") from error
            raise
        if self._is_over:
            self._drop()

    def _ask(self, key: Any, request: Request, ids: list[int], limit: int) -> None:
        name = f"trace_gym-{next(_names)}"
        parameters = SamplingParams(
            temperature=self._agent.temperature,
            top_p=self._agent.top_p,
            max_tokens=limit,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **self._agent._extras(request),
        )
        self._agent._engine.add_request(name, {"prompt_token_ids": ids}, parameters)
        self._agent._owners[name] = self
        self._asked[name] = key, limit

    def _drop(self) -> None:
        """Forget what is asked: nobody hears of it any more, and it must not fill the engine's places."""
        self._agent._drop(list(self._asked))
        self._asked.clear()
        self._finished.clear()

    def _deliver(self, deliver: Finished) -> None:
        """Give away what is finished."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        while self._finished:
            output = self._finished.pop(0)
            key, limit = self._asked.pop(output.request_id)
            answer = output.outputs[0]
            if answer.finish_reason not in ("stop", "length"):
                raise InfrastructureError("generation", f"The engine gave a request up: {answer.finish_reason}.")
            self.num_read += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
            logprobs = [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
            deliver(key, self._agent._completion(answer.token_ids, logprobs, limit))


class VLLMServerAgent(_Sampling):
    """Answers with a vLLM server, through TRL's client; the server batches.

    Args:
        model: A ``trl.generation.vllm_client.VLLMClient``.
        tokenizer: The tokenizer of the model that is served, with a chat template.
        temperature: As for `VLLMAgent`.
        top_p: Likewise.
        max_tokens: Likewise.
        max_concurrency: Most requests under way at once.

    Attributes:
        max_context: The longest sequence that the server takes, in tokens.

    Raises:
        BadInputError: If an argument is out of range or the tokenizer's template does not fit.
    """

    batched = False

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        max_concurrency: int = 64,
    ) -> None:
        """Check the arguments and ask the server how long a sequence may be."""
        served = model.session.get(f"{model.base_url}/v1/models").json()["data"][0]
        super().__init__(tokenizer, temperature, top_p, max_tokens, served.get("max_model_len"))
        if max_concurrency < 1:
            raise BadInputError(f"max_concurrency must be at least 1; got {max_concurrency}.")
        self._client = model
        self._threads = ThreadPoolExecutor(max_concurrency, "trace_gym_vllm")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        *,
        base_url: str = "http://localhost:8000",
        connection_timeout_s: float = 0.0,
        **options: Any,
    ) -> VLLMServerAgent:
        """Connect to a server.

        Args:
            name_or_path: Where the tokenizer is.
            base_url: The server.
            connection_timeout_s: How long to wait for the server to be up.
            **options: Passed to the constructor.

        Raises:
            InfrastructureError: Kind ``generation``, if it is not up by then.
        """
        from trl.generation.vllm_client import VLLMClient

        try:
            client = VLLMClient(base_url, connection_timeout=connection_timeout_s)
        except OSError as error:
            raise InfrastructureError("generation", str(error)) from error
        return cls(client, AutoTokenizer.from_pretrained(name_or_path), **options)

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order.

        Raises:
            BadInputError: If a request has an empty prompt or a ``max_tokens`` below 1.
            InfrastructureError: Kind ``generation``, if the server failed or its logits are not finite.
        """
        loop = asyncio.get_running_loop()
        answers = [loop.run_in_executor(self._threads, self._answer, request) for request in requests]
        return list(await asyncio.gather(*answers))

    def _answer(self, request: Request) -> Completion:
        ids, limit = self._read(request)
        if not limit:
            return Completion("", (), (), "length")
        try:
            output = self._client.generate(
                [ids],
                temperature=self.temperature,
                top_p=self.top_p,
                max_tokens=limit,
                logprobs=0,  # of the sampled token alone
                generation_kwargs=self._extras(request),
            )
        except Exception as error:  # TRL's client raises no class of its own
            raise InfrastructureError("generation", f"{type(error).__name__}: {error}") from error
        return self._completion(output["completion_ids"][0], [step[0] for step in output["logprobs"][0]], limit)


def _prepare_thread(index: int | None) -> None:
    # A thread learns from torch how many others may help it. vLLM's kernels for CPUs count on one number throughout,
    # and would ask before torch does.
    torch.get_num_threads()
    if index is not None:
        torch.accelerator.set_device_index(index)
