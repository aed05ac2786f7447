"""Conversations as tokens, and tool calls in the text of a model.

Token exactness: a model sees ``prompt ids + sampled ids + observation ids + sampled ids + …``. `ChatEncoder` renders
only what is new, so history is never re-tokenised and a prefix is shared exactly when its ids are equal. A template
that rewrites history (dropping old thoughts, say) therefore has no effect on ids that were already sampled.

Tool calls: the text comes from a stranger. It is parsed, never evaluated; whatever is wrong with it becomes a
`CallError` for the environment to answer with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trace_gym.errors import BadInputError, unknown_name
from trace_gym.messages import Message, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAGS = re.compile(r"<tool_call>|<think>|</think>")
_PROBE = "\ue000"  # for private use, and no white space that a template would trim


@dataclass(frozen=True, slots=True)
class CallError:
    """What was wrong with a piece of text that was meant as a tool call.

    Attributes:
        kind: ``invalid_json``, ``missing_name``, ``arguments_not_object`` or ``unclosed_think``.
        detail: One sentence for the model.
    """

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """The tool calls found in a text, in order, and what could not be read."""

    calls: tuple[ToolCall, ...] = ()
    errors: tuple[CallError, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        parse: Text to calls.
        render: Call to text.
        example: One call of a tool ``NAME``, for error messages.
    """

    parse: Callable[[str], ParsedCalls]
    render: Callable[[ToolCall], str]
    example: str


def parse_tool_calls(text: str, tool_format: str = "hermes") -> ParsedCalls:
    """Find the tool calls in what a model wrote.

    Args:
        text: The whole text of one assistant turn. Text inside ``<think>`` is never a call.
        tool_format: A name in `TOOL_FORMATS`.

    Raises:
        BadInputError: If the format is unknown. Never for what the text contains.
    """
    return get_tool_format(tool_format).parse(text)


def render_tool_call(call: ToolCall, tool_format: str = "hermes") -> str:
    """Return the text with which a model makes a call."""
    return get_tool_format(tool_format).render(call)


def get_tool_format(name: str) -> ToolFormat:
    """Return a format by name.

    Raises:
        BadInputError: If there is none; lists the formats.
    """
    if name not in TOOL_FORMATS:
        raise unknown_name("tool format", name, TOOL_FORMATS)
    return TOOL_FORMATS[name]


def _parse_hermes(text: str) -> ParsedCalls:
    """Read ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` blocks.

    A call ends where its JSON ends, not at the first closing tag, because arguments may contain the tag. An orphan
    ``</think>`` closes a thought that began in the prompt: whatever was found before it was only thought.
    """
    calls: list[ToolCall] = []
    errors: list[CallError] = []
    position = 0
    while match := _TAGS.search(text, position):
        position = match.end()
        if match.group() == "<think>":
            end = text.find("</think>", position)
            if end < 0:
                if OPEN in text[position:]:
                    errors.append(CallError("unclosed_think", "The thought was never closed with </think>."))
                break
            position = end + len("</think>")
        elif match.group() == "</think>":
            calls, errors = [], []
        else:
            position = _read_block(text, position, calls, errors)
    return ParsedCalls(tuple(calls), tuple(errors))


def _read_block(text: str, position: int, calls: list[ToolCall], errors: list[CallError]) -> int:
    """Read the objects of one block; return where to go on."""
    found = 0
    while True:
        while position < len(text) and text[position].isspace():
            position += 1
        if found and not text.startswith("{", position):
            return position
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", None) or type(error).__name__
            errors.append(CallError("invalid_json", f"The call is not valid JSON: {reason}."))
            end = text.find(CLOSE, position)
            return len(text) if end < 0 else end + len(CLOSE)
        found += 1
        call = _to_call(value)
        if isinstance(call, ToolCall):
            calls.append(call)
        else:
            errors.append(call)


def _to_call(value: Any) -> ToolCall | CallError:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return CallError("missing_name", 'A call is a JSON object with "name" and "arguments".')
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            pass  # stays a string, which the next line refuses
    if not isinstance(arguments, dict):
        return CallError("arguments_not_object", '"arguments" must be a JSON object.')
    return ToolCall(value["name"], arguments)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _render_hermes(call: ToolCall) -> str:
    payload = {"name": call.name, "arguments": dict(call.arguments)}
    return f"{OPEN}\n{json.dumps(payload, ensure_ascii=False)}\n{CLOSE}"


# strict=False: models write real line breaks inside strings.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        _parse_hermes,
        _render_hermes,
        '<tool_call>\n{"name": "NAME", "arguments": {…}}\n</tool_call>',
    ),
}


class ChatEncoder:
    """Renders a conversation into token ids piece by piece.

    Args:
        tokenizer: A transformers tokenizer with a chat template and an end-of-turn token.

    Raises:
        BadInputError: If the tokenizer has no chat template, or the template does not end an assistant turn with the
            end-of-sequence token (then sampled turns could not be continued exactly).
    """

    def __init__(self, tokenizer: Any) -> None:
        """Check the template and learn what it writes around an assistant turn."""
        if not getattr(tokenizer, "chat_template", None):
            raise BadInputError("The tokenizer has no chat template; give it one (tokenizer.chat_template = …).")
        self.tokenizer = tokenizer
        self.eos_id: int = tokenizer.eos_token_id
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        markup = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        self._markup = sorted(token for token in markup if len(token) > 1)
        for following in ([], [{"role": "user", "content": "more"}]):
            self._after_answer(following)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[int, ...]:
        """Return the ids of a conversation that the model is to continue."""
        text = self._render([self._data(m) for m in messages], tools=tools, add_generation_prompt=True)
        return self.encode(text)

    def observation(self, messages: Sequence[Message], closed: bool) -> tuple[int, ...]:
        """Return the ids between a sampled turn and the next one.

        Args:
            messages: What the environment answered.
            closed: Whether the sampled ids end with the end-of-turn token; if the turn was cut, it is added.
        """
        text = self._after_answer([self._data(m) for m in messages], add_generation_prompt=True)
        return (() if closed else (self.eos_id,)) + self.encode(text)

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled ids, end-of-turn markup removed."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text, markup included, nothing added."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def _data(self, message: Message) -> dict[str, Any]:
        """Return the chat form; the template's own markup in what a user or a tool says is spelled apart.

        A cell could print an end of turn and words for the other side; they must stay text.
        """
        data = message.to_dict()
        if message.role in ("user", "tool"):
            for token in self._markup:
                data["content"] = data["content"].replace(token, f"{token[0]} {token[1:]}")
        return data

    def _after_answer(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return what the template writes after an assistant turn that such messages follow, end of turn left out.

        The turn is found by its text, not by its place: templates write other things before it once it is history.
        """
        probe = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PROBE}]
        _, found, tail = self._render([*probe, *messages], **options).partition(_PROBE)
        end = str(self.tokenizer.eos_token)
        if not found or not tail.startswith(end):
            raise BadInputError(
                f"The chat template must end an assistant turn with the end-of-sequence token {end!r}; "
                f"it writes {tail[:40]!r}."
            )
        return tail[len(end) :]

    def _render(self, messages: list[dict[str, Any]], tools: Sequence[Any] = (), **options: Any) -> str:
        return str(self.tokenizer.apply_chat_template(messages, tools=list(tools) or None, tokenize=False, **options))
