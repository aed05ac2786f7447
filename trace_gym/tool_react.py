"""Tool calls in the manner of ReAct: tags as in Search-R1 and Tree-GRPO, or lines of thought, action and input.

``<search> K2 height </search>`` is a call of the tool ``search`` with its first parameter, given as plain text; a turn
may hold several. ``Action: search`` and, on the next line, ``Action Input: {"query": "K2 height"}`` is a call with any
arguments, as is ``Action: search[K2 height]``; a turn holds one, since what follows was meant to be said after its
result. Neither counts inside of a fence, which is an example, or after a final answer (``<answer>``, ``Final Answer:``,
``Action: Finish[…]``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from trace_gym.errors import BadInputError
from trace_gym.messages import ToolCall
from trace_gym.tool_fence import INFO, find_block_end
from trace_gym.tool_json import decode_json, to_json
from trace_gym.tool_text import FORGED, THOUGHT_END, THOUGHTS, CallError, Found, ParsedCalls, Signatures, read_calls

_COLON = r"(?:[ \t]++\d++)?+[ \t*]*+:"
_LINE = r"(?:^|(?<=>))[ \t*]*+"
_RESULT = rf"<information>|{_LINE}Observation{_COLON}"
_ACTION = re.compile(
    r"[ \t*`'\"]*+([^\W\d][\w.-]*+)[*`'\"]*+[ \t\r]*+(?:(?P<bracket>\[)|$|(?=Action Input))", re.MULTILINE
)
_BRACKET = re.compile(r"[\[\]\n]")
_INPUT = re.compile(rf"\s*+\**+Action[ \t]++Input{_COLON}[ \t*]*+")
_INPUT_END = re.compile(
    rf"{THOUGHT_END}|{FORGED}|<information>|<answer>|(?<=\s)Observation{_COLON}"
    rf"|^[ \t*]*+(?:Thought|Action|Final Answer){_COLON}",
    re.MULTILINE,
)
_JSON = re.compile(r"\s*+(?=\{\s*+[\"}])")
_FENCE = re.compile(rf"\s*+(`{{3,}}+|~{{3,}}+){INFO}\n")
_BLANK_LINES = re.compile(r"(?:[ \t\r]*+\n)++")
_TOOL_NAME = re.compile(r"[^\W\d][\w.-]*")


@lru_cache(maxsize=64)
def _markers(names: tuple[str, ...]) -> re.Pattern[str]:
    tags = "|".join(map(re.escape, names)) or "(?!)"
    return re.compile(
        rf"{THOUGHTS}|(?P<result>{FORGED}|{_RESULT})|(?P<answer><answer>|{_LINE}Final Answer{_COLON})"
        rf"|^[ \t]*+(?P<fence>(?:`{{3,}}+|~{{3,}}+){INFO})$|{_LINE}(?P<action>Action{_COLON})|(?P<tag><(?:{tags})>)",
        re.MULTILINE,
    )


def parse_react(text: str, signatures: Signatures) -> ParsedCalls:
    """Read tags of the tools that are known, or the first action."""

    def read(match: re.Match[str], found: Found) -> int:
        if match.lastgroup == "tag":
            return _read_tag(match, found, signatures)
        if match.lastgroup == "action":
            return _read_action(match, found, signatures)
        if match.lastgroup == "answer":
            found.is_over = True
            end = match.end()
        else:
            opener = match.group("fence")
            end = find_block_end(text, match.end(), opener.removesuffix(opener.lstrip(opener[0]))).after
        found.hear(text[match.start(str(match.lastgroup)) : end])
        return end

    return read_calls(text, _markers(tuple(name for name, parameters in signatures.items() if parameters)), read)


def render_react(call: ToolCall, signatures: Signatures) -> str:
    """Write a tag if the call is one text that a tag can hold, else an action with its input.

    Raises:
        BadInputError: If the tool's name cannot stand in an action.
    """
    parameters = signatures.get(call.name, ())
    text = call.arguments.get(parameters[0]) if parameters and len(call.arguments) == 1 else None
    if isinstance(text, str) and f"</{call.name}>" not in text and THOUGHT_END not in text and _tidy(text) == text:
        inner = f"\n{text}\n" if "\n" in text or call.name == "python" else f" {text} "
        return f"<{call.name}>{inner}</{call.name}>"
    if not _TOOL_NAME.fullmatch(call.name):
        raise BadInputError(f"An action names a tool of letters, digits, '.', '_' and '-'; got {call.name!r}.")
    return f"Action: {call.name}\nAction Input: {to_json(dict(call.arguments))}"


def _read_tag(match: re.Match[str], found: Found, signatures: Signatures) -> int:
    text, name = match.string, match.group("tag")[1:-1]
    end = text.find(f"</{name}>", match.end())
    if end < 0:
        found.stop("unclosed_tag", f"<{name}> was never closed with </{name}>.")
        return match.end()
    thought_end = text.find(THOUGHT_END, match.end(), end)
    if thought_end >= 0:
        return thought_end
    found.add(ToolCall(name, {signatures[name][0]: _tidy(text[match.end() : end])}))
    return end + len(name) + 3


def _read_action(match: re.Match[str], found: Found, signatures: Signatures) -> int:
    text = match.string
    found.is_over = True
    action = _ACTION.match(text, match.end())
    end = action and (_bracket_end(text, action.end()) if action.group("bracket") else action.end())
    if action is None or end is None:
        example = 'Write "Action: NAME" and, on the next line, "Action Input: {…}".'
        found.add(CallError("bad_action_format", example))
        return match.end()
    name = action.group(1)
    parameter = next(iter(signatures.get(name, ())), "input")
    arguments: Mapping[str, Any] | CallError = {}
    if action.group("bracket"):
        if name.lower() == "finish":
            found.hear(text[match.start("action") : end])
            return end
        arguments = _to_arguments(text[action.end() : end - 1], parameter)
    elif following := _INPUT.match(text, end):
        arguments, end = _read_input(text, following.end(), parameter)
    found.add(arguments if isinstance(arguments, CallError) else ToolCall(name, arguments))
    return end


def _bracket_end(text: str, start: int) -> int | None:
    """Return where a bracket ends that is open here; None if not on this line."""
    depth = 1
    for match in _BRACKET.finditer(text, start):
        depth += {"[": 1, "]": -1, "\n": 0}[match.group()]
        if depth == 0:
            return match.end()
        if match.group() == "\n":
            break
    return None


def _read_input(text: str, start: int, parameter: str) -> tuple[Mapping[str, Any] | CallError, int]:
    """Return an action's arguments and where they end: a JSON object, a fence, or text up to the next line of ReAct."""
    if lead := _JSON.match(text, start):
        try:
            return decode_json(text, lead.end())
        except ValueError as error:
            return CallError("invalid_json", f"The action's input is not valid JSON: {error}."), start
    if fence := _FENCE.match(text, start):
        block = find_block_end(text, fence.end(), fence.group(1))
        return _to_arguments(text[fence.end() : block.end].removesuffix("\n"), parameter), block.after
    stop = _INPUT_END.search(text, start)
    end = stop.start() if stop else len(text)
    return {parameter: _tidy(text[start:end])}, end


def _to_arguments(content: str, parameter: str) -> Mapping[str, Any]:
    """Return the arguments of a JSON object; any other text is one argument."""
    if lead := _JSON.match(content):
        try:
            value, end = decode_json(content, lead.end())
        except ValueError:
            end = 0
        if end and not content[end:].strip():
            arguments: Mapping[str, Any] = value
            return arguments
    return {parameter: _tidy(content)}


def _tidy(text: str) -> str:
    """Return a text without the blank lines and spaces around it; the first line of several keeps its indentation."""
    text = text.rstrip()
    blank = _BLANK_LINES.match(text)
    text = text[blank.end() :] if blank else text
    return text if "\n" in text else text.lstrip()
