"""Frozen values that every room speaks: messages, tool calls, requests, completions.

Messages follow the chat form of TRL and transformers: ``{"role", "content"}``, tool calls as
``{"type": "function", "function": {"name", "arguments": dict}}``, results as ``{"role": "tool", "name", "content"}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    Attributes:
        name: The tool's name.
        arguments: JSON-like arguments by name.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the chat form."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: Who speaks.
        content: The text; for an assistant the whole text it wrote, tool calls included.
        name: For ``role="tool"``, the tool that answered.
    """

    role: Role
    content: str
    name: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the chat form."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            shown["name"] = self.name
        return shown

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:
        """Read the chat form."""
        return cls(role=data["role"], content=data["content"], name=data.get("name"))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode has no outcome.

    Attributes:
        kind: Short machine-readable name, such as ``"sandbox_died"`` or ``"deadline"``.
        reason: One sentence for people.
    """

    kind: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        """Return ``{"kind", "reason"}``."""
        return {"kind": self.kind, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Request:
    """What an agent is asked to continue.

    Attributes:
        messages: The conversation so far.
        tools: The tools on offer, as JSON schema.
        prompt_ids: The exact token ids of the conversation, for agents that own a tokenizer.
        max_tokens: Upper bound of the answer's length in tokens; None leaves it to the agent.
        seed: Seed of this answer's sampling; equal requests with equal seeds get equal answers.
        hint: The scripted demonstrator's next action, where the environment offers one.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    seed: int = 0
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What an agent answered.

    Attributes:
        text: The answer, without end-of-turn markup.
        token_ids: The sampled ids, end-of-turn token included, where the agent has them.
        logprobs: Log-probability of each sampled id under the sampling distribution.
        finish_reason: ``"stop"`` if the agent ended its turn, ``"length"`` if it was cut.
        num_tokens: Tokens generated; counted by the backend where the ids are not known.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    finish_reason: Literal["stop", "length"] = "stop"
    num_tokens: int = 0


class Agent(Protocol):
    """Anything that answers conversations; a policy in training is one agent among others.

    Attributes:
        batched: Whether the agent wants the requests of all live branches in one call (a local model does; that also
            makes its batches, and so its rounding, independent of timing) or each as it comes (an endpoint). A batched
            agent may answer continuously as well, see `trace_gym.batching.Generation`.
    """

    batched: bool

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order.

        Raises:
            InfrastructureError: If the backend failed; the episodes are then marked failed, not scored.
        """
        ...
