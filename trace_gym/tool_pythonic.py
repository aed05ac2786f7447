"""Tool calls in the syntax of Python: ``[search(query="K2 height"), python(code='print(1)')]``.

Read by a small reader of our own, since ``ast.parse`` on a stranger's text may exhaust the C stack, takes some hundred
times the text's size in memory, and warns about escapes. Values are literals: strings (joined where they stand side by
side), numbers, ``True``, ``False``, ``None``, lists, dicts; tuples and sets become lists. Names, operators, f-strings
and calls inside of calls are refused: nothing is evaluated. Beyond Python, real line breaks inside of quotes,
parameters with reserved names and JSON's ``true``, ``false`` and ``null`` are understood.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from trace_gym.messages import ToolCall
from trace_gym.tool_json import MAX_DIGITS
from trace_gym.tool_text import FORGED, MAX_DEPTH, THOUGHT_END, THOUGHTS, Found, ParsedCalls, Signatures, read_calls

_NAME = r"[^\W\d]\w*+(?:\.[^\W\d]\w*+)*+"
_MARKERS = re.compile(
    rf"{THOUGHTS}|(?P<result>{FORGED})|(?:^|(?<=>))[ \t]*+(?P<call>\[\s*+(?={_NAME}\())", re.MULTILINE
)
_BARE = re.compile(rf"(?:`{{1,3}}(?:\w+\n)?)?\s*+(?={_NAME}\()")  # a whole turn without the brackets
_SPACE = re.compile(rf"(?:\s++|\#(?:(?!{THOUGHT_END})[^\n])*+)*+")
_FUNCTION = re.compile(rf"({_NAME})\(")
_KEYWORD = re.compile(r"([^\W\d]\w*+)\s*+=(?!=)")
_STRING = re.compile(r"([A-Za-z]{0,2})('''|\"\"\"|'|\")")
_NUMBER = re.compile(r"([+-]?)\s*+(0[xXoObB]\w++|(?:\d[\d_]*+\.?+[\d_]*+|\.\d[\d_]*+)(?:[eE][+-]?\d++)?+)(?![\w.])")
_FRACTION = re.compile(r"[.eE]")
_WORD = re.compile(r"[^\W\d]\w*+")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_QUOTE_ENDS = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ("'''", '"""', "'", '"')}
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\r?\n|.))", re.DOTALL)
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": "", "\r\n": ""}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"'}


def parse_pythonic(text: str, signatures: Signatures) -> ParsedCalls:
    """Read lists of calls, each at the start of a line; or a whole turn that is calls without the brackets.

    A list that cannot be read runs nothing, and nothing after it is looked at. Positional arguments get their names
    from the signatures.
    """

    def read(match: re.Match[str], found: Found) -> int:
        reader = _Reader(text, match.start("call"), signatures)
        try:
            calls = list(reader.sequence("]", reader.call))
        except _RefusedError as error:
            found.stop(error.kind, error.detail)
            return match.end()
        for call in calls:
            found.add(call)
        return reader.position

    parsed = read_calls(text, _MARKERS, read)
    bare = _BARE.match(parsed.said.strip())
    if bare is not None and not parsed.calls and not parsed.errors:
        found = Found(is_cut=parsed.is_cut)
        try:
            for call in _Reader(parsed.said.strip(), bare.end(), signatures).bare():
                found.add(call)
        except _RefusedError:
            return parsed  # prose that begins like a call
        return found.result()
    return parsed


def render_pythonic(call: ToolCall, signatures: Signatures) -> str:
    """Write a list of one call; every argument is named."""
    return f"[{call.name}({', '.join(f'{name}={_literal(value)}' for name, value in call.arguments.items())})]"


def _literal(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)


class _RefusedError(Exception):
    """Something in a call is not allowed."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class _Reader:
    """Reads calls and literals from a place in a text on; its methods raise `_RefusedError`."""

    def __init__(self, text: str, position: int, signatures: Signatures) -> None:
        self.text = text
        self.position = position
        self.depth = 0
        self.signatures = signatures

    def bare(self) -> Iterator[ToolCall]:
        """Read calls up to the end of the text, one after another."""
        while self.position < len(self.text):
            yield self.call()
            while self.take(",;`"):
                pass

    def sequence(self, close: str, item: Callable[[], Any]) -> Iterator[Any]:
        """Read what stands between the bracket here and its closing one, separated by commas."""
        self.position += 1
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _RefusedError("invalid_syntax", f"The call is nested more than {MAX_DEPTH} levels deep.")
        while not self.take(close):
            yield item()
            if not self.take(",") and self.peek() != close:
                self.fail(f"expected a comma or {close!r}")
        self.depth -= 1

    def call(self) -> ToolCall:
        self.space()
        match = _FUNCTION.match(self.text, self.position)
        if match is None:
            self.fail("expected NAME(…)")
        name = match.group(1)
        self.position = match.end() - 1
        names = list(self.signatures.get(name, ()))
        arguments: dict[str, Any] = {}
        for place, (keyword, value) in enumerate(self.sequence(")", self.argument)):
            if not keyword and place >= len(names):
                raise _RefusedError("positional_argument", f"Name the arguments of {name[:64]}, as in NAME(x=1).")
            key = keyword or names[place]
            if key in arguments:
                raise _RefusedError("duplicate_argument", f"The argument {key[:64]} is given twice.")
            arguments[key] = value
        return ToolCall(name, arguments)

    def argument(self) -> tuple[str, Any]:
        """Return an argument's name, empty if there is none, and its value."""
        self.space()
        match = _KEYWORD.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return (match.group(1) if match else ""), self.value()

    def value(self) -> Any:
        self.space()
        first = self.peek()
        if first == "[":
            return list(self.sequence("]", self.value))
        if first == "(":
            return self.parentheses()
        if first == "{":
            return self.braces()
        if _STRING.match(self.text, self.position):
            return self.string()
        if match := _NUMBER.match(self.text, self.position):
            self.position = match.end()
            return self.number(match.group(1), match.group(2))
        word = _WORD.match(self.text, self.position)
        if word is not None and word.group() in _WORDS:
            self.position = word.end()
            return _WORDS[word.group()]
        raise _RefusedError("not_literal", "An argument is a string, a number, True, False, None, a list or a dict.")

    def parentheses(self) -> Any:
        """Return a list for a tuple, and what stands inside of mere parentheses."""
        before = self.position
        values = list(self.sequence(")", self.value))
        is_tuple = len(values) != 1 or self.text[before : self.position - 1].rstrip().endswith(",")
        return values if is_tuple else values[0]

    def braces(self) -> Any:
        """Return a dict, or a list for a set."""
        items = list(self.sequence("}", self.entry))
        pairs = {key: value for is_pair, key, value in items if is_pair}
        if not all(is_pair for is_pair, _, _ in items):
            if pairs:
                self.fail("a dict and a set in one")
            return [value for _, _, value in items]
        if len(pairs) < len(items):
            raise _RefusedError("duplicate_argument", "A key of a dict is given twice.")
        return pairs

    def entry(self) -> tuple[bool, str, Any]:
        """Return whether a dict's entry was read, its key and its value."""
        first = self.value()
        if not self.take(":"):
            return False, "", first
        if not isinstance(first, str):
            raise _RefusedError("not_literal", "The keys of a dict are strings.")
        return True, first, self.value()

    def string(self) -> str:
        """Read one string, or several side by side."""
        pieces = []
        while match := _STRING.match(self.text, self.position):
            prefix, quote = match.group(1).lower(), match.group(2)
            if prefix not in ("", "r", "u"):
                raise _RefusedError("not_literal", f"Strings with the prefix {prefix!r} are not read.")
            ends = _QUOTE_ENDS[quote].finditer(self.text, match.end())
            end = next((found for found in ends if found.group() == quote), None)
            if end is None:
                self.fail("a string is not closed")
            body = self.text[match.end() : end.start()]
            pieces.append(body if prefix == "r" else _ESCAPE.sub(self.escape, body))
            self.position = end.end()
            self.space()
        return "".join(pieces)

    def escape(self, match: re.Match[str]) -> str:
        octal, *codes, other = match.groups()
        code = int(octal, 8) if octal else int(next(filter(None, codes), "-1"), 16)
        if code > 0x10FFFF or (other and other in "xuUN"):
            self.fail("an escape in a string is not valid")
        return chr(code) if code >= 0 else _ESCAPES.get(other, match.group())

    def number(self, sign: str, digits: str) -> int | float:
        is_float = _FRACTION.search(digits) and digits[1:2] not in tuple("xXoObB")
        if len(digits) > MAX_DIGITS:
            self.fail("a number is too long")
        try:
            value = float(sign + digits) if is_float else int(sign + digits, 0)
        except ValueError:
            self.fail("a number cannot be read")
        if is_float and math.isinf(value):  # an integer may be beyond a double
            self.fail("a number is too large")
        return value

    def take(self, wanted: str) -> bool:
        """Go past white space and comments, and past one of the wanted characters if it comes next."""
        self.space()
        is_next = self.peek() in tuple(wanted)
        self.position += is_next
        return is_next

    def space(self) -> None:
        match = _SPACE.match(self.text, self.position)
        self.position = match.end() if match else self.position

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def fail(self, what: str) -> NoReturn:
        raise _RefusedError("invalid_syntax", f"The call cannot be read: {what}.")
