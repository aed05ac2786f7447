"""Any endpoint that speaks the OpenAI chat-completions protocol as an agent.

Environments see one form: native tool calls in an answer are written back as text. In the other direction, an
assistant turn that ends exactly as such a rendering, and whose every call was answered, is sent as native
calls with ids; any other turn is sent as the text it was, with tool results as user messages. That is
accepted everywhere and never invents a call that the model did not make.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from trace_gym.errors import BadInputError, InfrastructureError, require
from trace_gym.messages import Completion, Message, Request, ToolCall
from trace_gym.tool_formats import TOOL_FORMATS, parse_tool_calls

# The one format that environments leave to endpoints; of tools in other formats their prompts tell, and all is text.
_FORMAT = TOOL_FORMATS["hermes"]
_NATIVE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class OpenAIAgent:
    """Answers over HTTP; requests run in parallel.

    Args:
        model: The model's name at the endpoint.
        base_url: The endpoint, such as ``http://localhost:8000/v1``; None for OpenAI's own.
        api_key: Its key; None takes ``OPENAI_API_KEY``, or a placeholder where ``base_url`` is given.
        temperature: Sampling temperature; None leaves it to the endpoint (some models refuse any).
        max_tokens: Longest answer in tokens; a request's own ``max_tokens`` can only lower it.
        timeout_s: Deadline of one attempt.
        max_concurrency: Most requests under way at once.
        max_retries: Further attempts after a timeout, a lost connection, or status 408, 409, 429 or 5xx.
        native_tools: Offer tools in the protocol's own form. False describes them in the system message, for
            endpoints that know no tools.
        send_seed: Pass each request's seed on; False for endpoints that refuse it.
        parameters: Further fields of the request, such as ``{"top_p": 0.9}`` or ``{"extra_body": {…}}``.

    Raises:
        BadInputError: If a number is out of range or there is no key.
        MissingExtraError: If the ``openai`` package is not installed.
    """

    batched = False

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        timeout_s: float = 120.0,
        max_concurrency: int = 16,
        max_retries: int = 4,
        native_tools: bool = True,
        send_seed: bool = True,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments; connections are made when they are needed."""
        if timeout_s <= 0 or max_concurrency < 1 or max_retries < 0:
            raise BadInputError(
                "timeout_s must be positive, max_concurrency at least 1, max_retries not negative; "
                f"got {timeout_s}, {max_concurrency} and {max_retries}."
            )
        self._sdk = require("openai", "openai")
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "timeout": timeout_s,
            "max_retries": max_retries,
        }
        # Kept-alive connections would outlive the event loop that they belong to.
        self._options["default_headers"] = {"Connection": "close"}
        self._options["api_key"] = api_key or (None if base_url is None else "unused")
        self._parameters: dict[str, Any] = {"model": model, **(parameters or {})}
        if temperature is not None:
            self._parameters["temperature"] = temperature
        self.max_tokens = max_tokens
        self.max_concurrency = max_concurrency
        self.native_tools = native_tools
        self.send_seed = send_seed
        # OpenAI's newer models know only the newer name, other servers often only the older one.
        self._limit_name = "max_completion_tokens" if base_url is None else "max_tokens"
        self._client = self._connect()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(max_concurrency)

    def _connect(self) -> Any:
        try:
            return self._sdk.AsyncOpenAI(**self._options)
        except self._sdk.OpenAIError as error:
            raise BadInputError(f"No API key: pass api_key or set OPENAI_API_KEY. ({error})") from error

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order.

        A conversation that the endpoint calls too long gets an empty answer, cut by length.

        Raises:
            InfrastructureError: Kind ``endpoint``, if a request failed after all retries; kind ``context``, if the
                conversation is too long before anything was said.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # neither clients nor semaphores can be carried from loop to loop
            self._loop, self._client = loop, self._connect()
            self._slots = asyncio.Semaphore(self.max_concurrency)
        answers = await asyncio.gather(*map(self._answer, requests), return_exceptions=True)
        done: list[Completion] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            done.append(answer)
        return done

    async def _answer(self, request: Request) -> Completion:
        try:
            async with self._slots:
                answer = await self._client.chat.completions.create(**self._body(request))
        except self._sdk.BadRequestError as error:
            if error.code == "context_length_exceeded" or "context length" in str(error):
                if all(message.role != "assistant" for message in request.messages):
                    raise InfrastructureError("context", f"the prompt does not fit the model: {error}") from error
                return Completion("", finish_reason="length")
            raise InfrastructureError("endpoint", str(error)) from error
        except (self._sdk.OpenAIError, ValueError) as error:  # ValueError: a body that is not JSON
            raise InfrastructureError("endpoint", f"{type(error).__name__}: {error}") from error
        try:
            return self._read(answer)
        except (AttributeError, TypeError, LookupError) as error:
            raise InfrastructureError("endpoint", f"The answer is no chat completion: {answer!r:.200}") from error

    def _body(self, request: Request) -> dict[str, Any]:
        """Return the request in the protocol's form."""
        body = {**self._parameters, "messages": self._messages(request)}
        limits = [limit for limit in (request.max_tokens, self.max_tokens) if limit is not None]
        if limits:
            body[self._limit_name] = min(limits)
        if request.tools and self.native_tools:
            body["tools"] = [dict(tool) for tool in request.tools]
        if self.send_seed:
            body["seed"] = request.seed
        return body

    def _read(self, answer: Any) -> Completion:
        """Return an answer as text, native calls and refusals included."""
        choice = answer.choices[0]
        message = choice.message
        parts = [message.content or getattr(message, "refusal", None) or ""]
        parts += [self._call_text(call.function) for call in message.tool_calls or ()]
        text = "\n".join(part for part in parts if part)
        usage = getattr(answer, "usage", None)
        # Servers that report no usage get words counted instead.
        num_tokens = usage.completion_tokens if usage is not None else len(text.split())
        reason: Literal["stop", "length"] = "length" if choice.finish_reason == "length" else "stop"
        return Completion(text, finish_reason=reason, num_tokens=num_tokens)

    def _call_text(self, function: Any) -> str:
        """Write a native call as text; arguments that are no JSON object are left to the environment."""
        raw = function.arguments or "{}"
        empty = _FORMAT.render(ToolCall(function.name, {}), {})
        text = raw.join(empty.rsplit("{}", 1))
        calls = parse_tool_calls(text).calls
        return _calls_text(calls) if len(calls) == 1 else text

    def _messages(self, request: Request) -> list[dict[str, Any]]:
        """Return the conversation in the protocol's form."""
        sent: list[dict[str, Any]] = []
        native = self.native_tools and bool(request.tools)
        if request.tools and not native:
            sent.append({"role": "system", "content": _FORMAT.describe(request.tools)})
        position = 0
        while position < len(request.messages):
            message = request.messages[position]
            position += 1
            calls = self._native_calls(request.messages, position) if native else ()
            if calls:
                sent.append(self._native_turn(message, calls, position))
                for call in sent[-1]["tool_calls"]:
                    content = request.messages[position].content
                    sent.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                    position += 1
            else:
                _append(sent, _as_text(message))
        return sent

    def _native_calls(self, messages: Sequence[Message], position: int) -> tuple[ToolCall, ...]:
        """Return the calls of the turn before ``position`` if it can be sent natively."""
        message = messages[position - 1]
        if message.role != "assistant":
            return ()
        parsed = parse_tool_calls(message.content)
        answers = [m.role for m in messages[position : position + len(parsed.calls) + 1]]
        is_answered = answers[: len(parsed.calls)] == ["tool"] * len(parsed.calls) and answers.count("tool") == len(
            parsed.calls
        )
        is_plain = message.content.endswith(_calls_text(parsed.calls)) and not parsed.errors
        is_named = all(_NATIVE_NAME.fullmatch(call.name) for call in parsed.calls)
        return parsed.calls if is_answered and is_plain and is_named else ()

    def _native_turn(self, message: Message, calls: Sequence[ToolCall], position: int) -> dict[str, Any]:
        said = message.content.removesuffix(_calls_text(calls)).rstrip()
        written = []
        for place, call in enumerate(calls):
            function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
            written.append({"id": f"call_{position}_{place}", "type": "function", "function": function})
        return {"role": "assistant", "content": said or None, "tool_calls": written}


def _calls_text(calls: Sequence[ToolCall]) -> str:
    return "\n".join(_FORMAT.render(call, {}) for call in calls)


def _as_text(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
    return {"role": message.role, "content": message.content}


def _append(sent: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message, to the one before it if both are of the user or both of the system.

    Many chat templates insist on alternating turns and on a single system message.
    """
    if sent and sent[-1]["role"] == message["role"] and message["role"] in ("user", "system"):
        sent[-1] = {**message, "content": f"{sent[-1]['content']}\n\n{message['content']}"}
    else:
        sent.append(message)
