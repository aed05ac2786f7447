"""Conversations as tokens; tool calls in text are in `trace_gym.tool_formats`, offered here as well.

Token exactness: a model sees ``prompt ids + sampled ids + observation ids + sampled ids + …``. `ChatEncoder` renders
only what is new, so history is never re-tokenised and a prefix is shared exactly when its ids are equal. A template
that rewrites history (dropping old thoughts, say) therefore has no effect on ids that were already sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trace_gym.errors import BadInputError
from trace_gym.messages import Message
from trace_gym.tool_formats import TOOL_FORMATS, ToolFormat, get_tool_format, parse_tool_calls, render_tool_call
from trace_gym.tool_text import CallError, ParsedCalls

__all__ = [
    "TOOL_FORMATS",
    "CallError",
    "ChatEncoder",
    "ParsedCalls",
    "ToolFormat",
    "get_tool_format",
    "parse_tool_calls",
    "render_tool_call",
]

_PROBE = "\ue000"  # for private use, and no white space that a template would trim


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
