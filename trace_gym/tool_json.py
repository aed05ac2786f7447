"""Tool calls as JSON: in ``<tool_call>`` blocks (hermes), or bare as Llama writes them.

JSON is read strictly, since a guess could run what nobody meant: no ``NaN``, no key twice, no number beyond a double or
`MAX_DIGITS` digits, no nesting beyond `MAX_DEPTH`. Three things are allowed because models write them and they mean one
thing only: real line breaks inside strings, arguments that are JSON in a string, and ``parameters`` for ``arguments``.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from trace_gym.messages import ToolCall
from trace_gym.tool_text import (
    FORGED,
    MAX_DEPTH,
    THOUGHTS,
    CallError,
    Found,
    ParsedCalls,
    Signatures,
    read_calls,
)

MAX_DIGITS = 4000  # fewer than Python's own limit, which a program may lift

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HERMES = re.compile(rf"{THOUGHTS}|(?P<result>{FORGED})|(?P<call>{OPEN})")
_HERMES_END = re.compile(rf"{CLOSE}|{OPEN}|<think>|</think>|{FORGED}")
_HERMES_START = re.compile(r"\s*(?:```(?:json)?\s*)?")
_HERMES_NEXT = re.compile(r"\s*+[,;]?+\s*+(?=\{)")  # possessive, as below: giving back what cannot help takes forever

# A call is told from other braces by its first key, and by its place: the first thing on a line that is no prose. An
# object inside of something else, the argument of a broken call perhaps, is no call.
_PROSE = r"[^{=(\[\"`\n<>]*+"
_OBJECT = r"\{(?=\s*[\"'](?:name|type|id|arguments|parameters)[\"'])"
_LLAMA = re.compile(
    rf"{THOUGHTS}|(?P<result>{FORGED})|(?P<tag><\|python_tag\|>(?!\s*[\[{{]))"
    rf"|(?:^|(?<=>)){_PROSE}(?P<call>(?:\[\s*)?{_OBJECT})",
    re.MULTILINE,
)
_LLAMA_NEXT = re.compile(rf"(?:\s*+[,;]?+\s*+|{_PROSE})(?={_OBJECT})")


def parse_hermes(text: str, signatures: Signatures) -> ParsedCalls:
    """Read ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` blocks.

    A call ends where its JSON ends, not at the first closing tag, because arguments may contain the tag. A block that
    cannot be read does not hide the next one.
    """
    return read_calls(text, _HERMES, _read_block)


def render_hermes(call: ToolCall, signatures: Signatures) -> str:
    """Write a block."""
    return f"{OPEN}\n{to_json({'name': call.name, 'arguments': dict(call.arguments)})}\n{CLOSE}"


def parse_llama(text: str, signatures: Signatures) -> ParsedCalls:
    """Read ``{"name": …, "parameters": {…}}``, one or several, perhaps after ``<|python_tag|>`` or among prose.

    After an object that cannot be read nothing is looked at: what comes next may be inside of it.
    """
    return read_calls(text, _LLAMA, _read_object)


def render_llama(call: ToolCall, signatures: Signatures) -> str:
    """Write an object."""
    return to_json({"name": call.name, "parameters": dict(call.arguments)})


def decode_json(text: str, position: int = 0) -> tuple[Any, int]:
    """Read the JSON value at a place; return it and where it ends.

    Raises:
        ValueError: If it is no JSON, or beyond the limits; the message is a clause without a full stop.
    """
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise ValueError(error.msg) from None
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value, end
    raise ValueError(_TOO_DEEP)


def to_json(value: Any) -> str:
    """Write JSON that a model reads well.

    Raises:
        ValueError: If JSON has no such value.
        TypeError: If JSON has no such type.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _read_block(match: re.Match[str], found: Found) -> int:
    text = match.string
    start = match.end()
    lead = _HERMES_START.match(text, start)
    start = lead.end() if lead else start
    end = _read_values(text, start, _HERMES_NEXT, found)
    close = _HERMES_END.search(text, start if end is None else end)
    if close is None:
        return len(text) if end is None else end
    if close.group() != CLOSE:
        return close.start()
    # A brace too many and a fence around the object mean nothing.
    if end is not None and text[end : close.start()].strip(" \t\r\n}])`;,"):
        found.add(CallError("extra_data", "A block holds JSON objects, one for each call, and nothing else."))
    return close.end()


def _read_object(match: re.Match[str], found: Found) -> int:
    if match.lastgroup == "tag":
        found.stop("invalid_json", "A call is a JSON object; other syntax is not read.")
        return match.end()
    end = _read_values(match.string, match.start("call"), _LLAMA_NEXT, found)
    if end is None:
        found.is_over = True
        return match.end()
    return end


def _read_values(text: str, position: int, following: re.Pattern[str], found: Found) -> int | None:
    """Read the values that stand one after another; return where the last ends, None if one cannot be read."""
    while True:
        try:
            value, position = decode_json(text, position)
        except ValueError as error:
            found.add(CallError("invalid_json", f"The call is not valid JSON: {error}."))
            return None
        has_room = all(
            [found.add(_to_call(item)) for item in (value if isinstance(value, list) and value else [value])]
        )
        another = following.match(text, position)
        if another is None or not has_room:
            return position
        position = another.end()


def _to_call(value: Any) -> ToolCall | CallError:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return CallError("missing_name", 'A call is a JSON object with "name" and "arguments".')
    given = [key for key in ("arguments", "parameters") if key in value]
    others = [key for key in value if key not in ("name", "type", "id")]
    if others and not given:
        # Leaving them out could run a tool with its defaults.
        return CallError("wrong_arguments_key", f'The arguments belong under "arguments", not {others[0][:64]!r}.')
    arguments = value[given[0]] if given else None
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        try:
            inner, end = decode_json(arguments, len(arguments) - len(arguments.lstrip()))
            arguments = arguments if arguments[end:].strip() else inner
        except ValueError:
            pass  # stays a string, which the next line refuses
    if not isinstance(arguments, dict):
        return CallError("arguments_not_object", '"arguments" must be a JSON object.')
    return ToolCall(value["name"], arguments)


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is given twice")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError("a number is too long")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError("a number is too large")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    strict=False,  # models write real line breaks inside strings
    object_pairs_hook=_unique,
    parse_int=_integer,
    parse_float=_finite,
    parse_constant=_refuse_constant,
)
