"""The ways in which models write tool calls, by name.

| format | a call | a result |
|---|---|---|
| `hermes` | ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` | a message of the role ``tool`` |
| `llama_json` | ``{"name": …, "parameters": {…}}`` | the same |
| `pythonic` | ``[search(query="K2 height")]`` | the same |
| `python_fence` | a ```` ```python ```` block | an ```` ```output ```` block, in the user's name |
| `react` | ``<search> K2 height </search>``, or ``Action:`` lines | ``<information>``, in the user's name |

Only for hermes do chat templates and endpoints announce the tools; for the others the system prompt says what there is
and how to call it (`ToolFormat.describe`), so that a model is never told of two formats at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trace_gym.errors import BadInputError, unknown_name
from trace_gym.messages import Message, ToolCall
from trace_gym.tool_fence import fence_around, parse_fence, render_fence
from trace_gym.tool_json import parse_hermes, parse_llama, render_hermes, render_llama
from trace_gym.tool_pythonic import parse_pythonic, render_pythonic
from trace_gym.tool_react import parse_react, render_react
from trace_gym.tool_text import ParsedCalls, Signatures, get_signatures

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls, and how it reads about tools and their results.

    Attributes:
        parse: Text and signatures to calls.
        render: Call and signatures to text; may raise what `render_tool_call` turns into one error.
        example: A call of a tool ``NAME``, for error messages.
        describe: What the system prompt says of tools, given as JSON schema.
        observe: A tool's name and the text of its result to the message that the model sees.
        stops: Strings after which nothing that a model writes counts, so that sampling can end there.
        is_native: Whether chat templates and endpoints announce the tools in this format by themselves.
    """

    parse: Callable[[str, Signatures], ParsedCalls]
    render: Callable[[ToolCall, Signatures], str]
    example: str
    describe: Callable[[Tools], str]
    observe: Callable[[str, str], Message]
    stops: tuple[str, ...]
    is_native: bool = False


def parse_tool_calls(text: str, tool_format: str = "hermes", tools: Tools = ()) -> ParsedCalls:
    """Find the tool calls in what a model wrote.

    Args:
        text: The whole text of one assistant turn. Text inside ``<think>`` is never a call.
        tool_format: A name in `TOOL_FORMATS`.
        tools: The tools on offer, as JSON schema. They name what `pythonic` gives by position and what `react` gives
            as plain text, and they say which tags are tools; without them only ``python`` and ``search`` are known. A
            call of another tool is still a call: whether there is such a tool is for the environment to say.

    Raises:
        BadInputError: If the format is unknown. Never for what the text contains.
    """
    return get_tool_format(tool_format).parse(text, get_signatures(tools))


def render_tool_call(call: ToolCall, tool_format: str = "hermes", tools: Tools = ()) -> str:
    """Return the text with which a model makes a call; `parse_tool_calls` reads exactly that call from it.

    Raises:
        BadInputError: If the format is unknown or cannot express the call.
    """
    found = get_tool_format(tool_format)
    signatures = get_signatures(tools)
    try:
        text = found.render(call, signatures)
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, BadInputError):
            raise
        raise BadInputError(f"The arguments of {call.name!r} are not JSON-like: {error}.") from error
    parsed = found.parse(text, signatures)
    if parsed.errors or parsed.calls != (ToolCall(call.name, dict(call.arguments)),):
        why = parsed.errors[0].detail if parsed.errors else "it would be read differently."
        raise BadInputError(f"The format {tool_format} cannot express this call of {call.name!r}: {why}")
    return text


def get_tool_format(name: str) -> ToolFormat:
    """Return a format by name.

    Raises:
        BadInputError: If there is none; lists the formats.
    """
    if name not in TOOL_FORMATS:
        raise unknown_name("tool format", name, TOOL_FORMATS)
    return TOOL_FORMATS[name]


def _by_schema(example: str) -> Callable[[Tools], str]:
    def describe(tools: Tools) -> str:
        listed = "\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in tools)
        return (
            f"You can use these tools, given as JSON schema:\n{listed}\n"
            f"To call one, write\n{example}\nand wait for its result."
        )

    return describe


def _describe_fence(tools: Tools) -> str:
    if [_function(tool)["name"] for tool in tools] != ["python"] or get_signatures(tools)["python"] != ("code",):
        names = ", ".join(str(_function(tool)["name"]) for tool in tools)
        raise BadInputError(f"The format python_fence is for one tool, python, with one argument, code; got {names}.")
    what = _function(tools[0]).get("description", "")
    return f"To use Python, write\n{_FENCE_EXAMPLE}\nand wait for the ```output block. {what}".rstrip()


def _describe_react(tools: Tools) -> str:
    lines = []
    for tool in tools:
        function = _function(tool)
        name, parameters = function["name"], get_signatures([tool])[function["name"]]
        if len(parameters) == 1:
            written = f"<{name}> {parameters[0]} </{name}>"
        else:
            example = json.dumps(dict.fromkeys(parameters, "…"), ensure_ascii=False)
            written = f"Action: {name}\nAction Input: {example}"
        lines.append(f"{written}\n{function.get('description', '')}".rstrip())
    return (
        "You can use these tools by writing\n" + "\n".join(lines) + "\nand waiting for the result, which comes between "
        "<information> and </information>."
    )


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool.get("function", tool)
    return function


def _tool_message(name: str, text: str) -> Message:
    return Message("tool", text, name)


def _output_block(name: str, text: str) -> Message:
    fence = fence_around(text)
    return Message("user", f"{fence}output\n{text}\n{fence}")


def _information(name: str, text: str) -> Message:
    return Message("user", f"<information>{text.replace('</information>', '< /information>')}</information>")


_HERMES_EXAMPLE = '<tool_call>\n{"name": "NAME", "arguments": {…}}\n</tool_call>'
_LLAMA_EXAMPLE = '{"name": "NAME", "parameters": {…}}'
_PYTHONIC_EXAMPLE = "[NAME(argument=value, …)]"
_FENCE_EXAMPLE = "```python\n…\n```"
_RESPONSE = ("<tool_response>",)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        parse_hermes,
        render_hermes,
        _HERMES_EXAMPLE,
        _by_schema(_HERMES_EXAMPLE),
        _tool_message,
        _RESPONSE,
        is_native=True,
    ),
    "llama_json": ToolFormat(
        parse_llama, render_llama, _LLAMA_EXAMPLE, _by_schema(_LLAMA_EXAMPLE), _tool_message, _RESPONSE
    ),
    "pythonic": ToolFormat(
        parse_pythonic, render_pythonic, _PYTHONIC_EXAMPLE, _by_schema(_PYTHONIC_EXAMPLE), _tool_message, _RESPONSE
    ),
    "python_fence": ToolFormat(
        parse_fence, render_fence, _FENCE_EXAMPLE, _describe_fence, _output_block, ("```output",)
    ),
    "react": ToolFormat(
        parse_react,
        render_react,
        "<NAME> … </NAME>",
        _describe_react,
        _information,
        ("<information>", "\nObservation:"),
    ),
}
