"""Tool calls in the text of a model: what every format has in common.

The text comes from a stranger. It is read, never evaluated, and no text makes a reader raise. Whatever the format:

- Thoughts never run. What stands between ``<think>`` and ``</think>`` is skipped, and an orphan ``</think>`` closes a
  thought that began in the prompt: what was found before it was only thought.
- Results come from the environment. After a result that the model made up, nothing counts any more, since it was said
  on the strength of an invention.
- Reading takes time in proportion to the text: one pass, and at most `MAX_READ` calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trace_gym.messages import ToolCall

MAX_READ = 512  # calls of one text that are read, good or bad
MAX_DEPTH = 64  # of lists and objects in the arguments of a call

THOUGHT_END = "</think>"
THOUGHTS = r"(?P<thought><think>)|(?P<thought_end></think>)"
# How templates write a tool's result or open somebody else's turn.
FORGED = r"<tool_response>|<\|im_start\|>|<\|start_header_id\|>"

Signatures = Mapping[str, Sequence[str]]
# What is known of tools whose schema is not given.
USUAL_TOOLS: Signatures = {"python": ("code",), "search": ("query",)}


@dataclass(frozen=True, slots=True)
class CallError:
    """What was wrong with a piece of text that was meant as a tool call.

    Attributes:
        kind: Short machine-readable name, such as ``invalid_json``.
        detail: One sentence for the model.
    """

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """What a model's turn comes to.

    Attributes:
        calls: The tool calls, in order.
        errors: What was meant as a call and could not be read.
        said: The text outside of calls and thoughts, up to the first invented result: where an answer may stand.
        is_cut: Whether a result was invented; nothing after it counts.
    """

    calls: tuple[ToolCall, ...] = ()
    errors: tuple[CallError, ...] = ()
    said: str = ""
    is_cut: bool = False


@dataclass
class Found:
    """What has been found so far in a text that is being read.

    Attributes:
        calls: As in `ParsedCalls`, as are ``errors``, ``said`` (in pieces) and ``is_cut``.
        is_over: Whether no further call counts.
        is_full: Whether there were more calls than are read.
    """

    calls: list[ToolCall] = field(default_factory=list)
    errors: list[CallError] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    is_over: bool = False
    is_cut: bool = False
    is_full: bool = False

    def hear(self, text: str) -> None:
        """Take in what is no call."""
        if not self.is_cut:
            self.said.append(text)

    def add(self, item: ToolCall | CallError) -> bool:
        """Take in a call or an error; return whether there is room for more."""
        if len(self.calls) + len(self.errors) >= MAX_READ:
            self.is_full = True
        elif isinstance(item, ToolCall):
            self.calls.append(item)
        else:
            self.errors.append(item)
        return not self.is_full

    def stop(self, kind: str, detail: str) -> None:
        """Take in an error after which nobody can tell where the next call would begin."""
        self.add(CallError(kind, detail))
        self.is_over = True

    def result(self) -> ParsedCalls:
        """Return the finished value."""
        if self.is_full:
            self.errors.append(CallError("too_many_calls", f"Only the first {MAX_READ} calls of a turn are read."))
        return ParsedCalls(tuple(self.calls), tuple(self.errors), "".join(self.said), self.is_cut)


# Takes the match of a marker, adds to what was found and returns where to go on: past the marker's start.
Reader = Callable[["re.Match[str]", Found], int]


def read_calls(text: str, markers: re.Pattern[str], read: Reader) -> ParsedCalls:
    """Go through the markers of a text.

    Args:
        text: One turn of a model.
        markers: One named group for each kind of marker: those of `THOUGHTS`, ``result`` where a result is invented,
            and any others for ``read``. A match may begin before its group, with text that is no marker.
        read: Reads what begins at a marker.
    """
    found = Found()
    position = num_read = 0
    while match := markers.search(text, position):
        kind = str(match.lastgroup)
        found.hear(text[position : match.start(kind)])
        position = match.end()
        if kind == "thought":
            end = text.find(THOUGHT_END, position)
            if end < 0:
                others = ("thought", "thought_end", "result")
                if any(later.lastgroup not in others for later in markers.finditer(text, position)):
                    found.add(CallError("unclosed_think", "The thought was never closed with </think>."))
                return found.result()
            position = end + len(THOUGHT_END)
        elif kind == "thought_end":
            found = Found()
        elif kind == "result":
            found.is_cut = found.is_over = True
        elif found.is_over or num_read == MAX_READ:
            found.is_full = found.is_full or not found.is_over
            found.hear(match.group(kind))
        else:
            num_read += 1
            position = read(match, found)
    found.hear(text[position:])
    return found.result()


def get_signatures(tools: Sequence[Mapping[str, Any]]) -> Signatures:
    """Return the parameters of each tool in the order of its schema; `USUAL_TOOLS` if no tools are given."""
    found: dict[str, tuple[str, ...]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        found[function["name"]] = tuple(function.get("parameters", {}).get("properties", {}))
    return found or USUAL_TOOLS
