"""Tool calls as fenced blocks of Python: each ```` ```python ```` block is a call of ``python`` with its ``code``.

Several blocks are several calls, in order. Blocks of other languages and of none are speech, except that an ``output``
block is an invented result. Where code ends is told by reading its strings and comments: a fence inside of them is no
fence. Fences of four and more backticks are plain Markdown instead: the first line that is such a fence ends the block,
so any code can be written down. A block that is open at the end counts, since generation may stop at its fence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trace_gym.errors import BadInputError
from trace_gym.messages import ToolCall
from trace_gym.tool_text import FORGED, THOUGHT_END, THOUGHTS, CallError, Found, ParsedCalls, Signatures, read_calls

_RUN = r"(?:(?<!`)`{3,}+|(?<!~)~{3,}+)"  # tried once for each run: a million backticks must not take a trillion steps
INFO = rf"(?:(?!{THOUGHT_END})[^\n`])*+"  # the rest of a fence's line
_INDENT = r"(?:^[ \t]*)?"
_PYTHON = rf"{_RUN}[ \t]*(?i:python3?|py)"
_OUTPUT = rf"{_RUN}[ \t]*(?i:outputs?|stdout|results?|observation)"
_LINE_END = r"[ \t]*\r?(?:\n|\Z)"
_MARKERS = re.compile(
    rf"{THOUGHTS}|(?P<result>{FORGED}|{_INDENT}{_OUTPUT}[ \t]*\r?$)"
    # The name of the language and nothing more opens a block anywhere, other fences on a line of their own.
    rf"|(?P<code>{_INDENT}{_PYTHON}{_LINE_END}|^[ \t]*{_PYTHON}[ \t{{]{INFO}(?:\n|\Z))"
    rf"|^[ \t]*(?P<block>{_RUN}{INFO})$",
    re.MULTILINE,
)
_OWN_LINE = rf"^[ \t]*(?P<own>{_RUN})(?P<info>{INFO})$"
_THOUGHT_END = rf"(?P<thought_end>{THOUGHT_END})"
_FENCE = re.compile(rf"{_THOUGHT_END}|{_OWN_LINE}", re.MULTILINE)
_CODE = re.compile(
    rf"{_THOUGHT_END}|{_OWN_LINE}|(?P<last>{_RUN})[ \t]*\r?$"
    rf"|(?P<quote>'''|\"\"\"|'|\")|\\[^<]|\#(?:(?!{THOUGHT_END})[^\n])*+",
    re.MULTILINE | re.DOTALL,
)
_QUOTE_ENDS = {
    quote: re.compile(rf"\\.|{quote}" + ("|\n" if len(quote) == 1 else ""), re.DOTALL)
    for quote in ("'''", '"""', "'", '"')
}
_TRICKY = re.compile(r"`{3}|~{3}|'{3}|\"{3}|\\(?:\n|\Z)")  # what could hide the end of a block of three backticks


@dataclass(frozen=True, slots=True)
class Block:
    """Where a fenced block ends.

    Attributes:
        end: Where its content ends.
        after: Where the text goes on.
        is_closed: Whether there is a closing fence.
    """

    end: int
    after: int
    is_closed: bool


def parse_fence(text: str, signatures: Signatures) -> ParsedCalls:
    """Read the blocks of a turn."""
    return read_calls(text, _MARKERS, _read_block)


def render_fence(call: ToolCall, signatures: Signatures) -> str:
    """Write a block.

    Raises:
        BadInputError: If it is no call of ``python`` with ``code``.
    """
    code = call.arguments.get("code")
    if call.name != "python" or set(call.arguments) != {"code"} or not isinstance(code, str):
        raise BadInputError(
            f"The format python_fence holds calls of python with one argument, code; got {call.name!r} with "
            f"{sorted(map(str, call.arguments))}."
        )
    fence = fence_around(code, least=4 if _TRICKY.search(code) else 3)
    return f"{fence}python\n{code}\n{fence}"


def fence_around(text: str, least: int = 3) -> str:
    """Return a fence that is longer than any inside of a text."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def find_block_end(text: str, start: int, fence: str, is_orphan_allowed: bool = False) -> Block:
    """Find the end of a block of anything but code.

    Args:
        text: The whole text.
        start: Where the content begins.
        fence: The opening fence, without a language.
        is_orphan_allowed: Whether the fence may be one that closes a block nobody opened; the next one with a language
            then opens a block of its own.
    """
    for match in _FENCE.finditer(text, start):
        if match.group("thought_end"):  # no block after all, if a thought ends inside of it
            return Block(match.start(), match.start(), False)
        if _closes(match.group("own"), fence):
            if not match.group("info").strip():
                return Block(match.start(), match.end(), True)
            if is_orphan_allowed:
                return Block(match.start(), match.start(), False)
    return Block(len(text), len(text), False)


def _find_code_end(text: str, start: int, fence: str) -> Block:
    position = start
    is_plain = len(fence) == 3
    unclosed: set[str] = set()
    while match := _CODE.search(text, position):
        position = match.end()
        kind = match.lastgroup
        if kind == "thought_end":
            return Block(match.start(), match.start(), False)
        if kind == "quote" and is_plain:
            position = _skip_string(text, match, unclosed)
        elif kind == "info" and _closes(match.group("own"), fence):
            is_closed = not match.group("info").strip()
            if is_closed or is_plain:
                return Block(match.start(), match.end() if is_closed else match.start(), is_closed)
        elif kind == "last" and is_plain and _closes(match.group("last"), fence):
            return Block(match.start(), match.end(), True)
    return Block(len(text), len(text), False)


def _skip_string(text: str, match: re.Match[str], unclosed: set[str]) -> int:
    """Return where the string that begins here ends; if it never does, its quote is taken for a letter."""
    quote = match.group()
    if quote in unclosed:
        return match.end()
    ends = _QUOTE_ENDS[quote].finditer(text, match.end())
    end = next((found for found in ends if not found.group().startswith("\\")), None)
    if end is None:
        unclosed.add(quote)
        return match.end()
    if end.group() != "\n":
        return end.end()
    thought_end = text.find(THOUGHT_END, match.end(), end.start())  # no string after all
    return end.start() if thought_end < 0 else thought_end


def _closes(run: str, fence: str) -> bool:
    return run[0] == fence[0] and len(run) >= len(fence)


def _read_block(match: re.Match[str], found: Found) -> int:
    text, kind = match.string, str(match.lastgroup)
    opener = match.group(kind).strip()
    language = opener.lstrip(opener[0])
    fence = opener.removesuffix(language)
    if kind == "block":
        is_orphan_allowed = not language and len(fence) == 3
        block = find_block_end(text, match.end(), fence, is_orphan_allowed)
        end = match.end() if is_orphan_allowed and not block.is_closed else block.after
        found.hear(text[match.start(kind) : end])
        return end
    block = _find_code_end(text, match.end(), fence)
    code = text[match.end() : block.end].replace("\r\n", "\n").removesuffix("\n")
    indent = match.group(kind).index(opener[0])
    if indent:
        code = re.sub(rf"^[ \t]{{1,{indent}}}", "", code, flags=re.MULTILINE)
    if code.strip():
        found.add(ToolCall("python", {"code": code}))
    else:
        found.add(CallError("no_code", "The block of Python is empty."))
    return block.after
