r"""Cuts a notation at its outer level: at commas, at signs, at ``"or"``, outside all brackets."""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"\\(?:begin|end)\{[a-zA-Z]*\*?\}|\\[{}]|\\(?:langle|rangle|lfloor|rfloor|lceil|rceil|cup|setminus|in|ni|le|ge|ne"
    r"|approx|equiv|subseteq)(?![A-Za-z])|\"[^\"]*\"|[()\[\]{}]|[,;:=<>]|\\[A-Za-z]+|\\?.",
    re.DOTALL,
)
_OPENING = {"(": "(", "[": "[", "{": "(brace", "\\{": "{", "\\langle": "<", "\\lfloor": "f", "\\lceil": "c"}
_CLOSING = {")": "(", "]": "[", "}": "(brace", "\\}": "{", "\\rangle": "<", "\\rfloor": "f", "\\rceil": "c"}
_MIXED = frozenset({"(", "["})  # [a, b) is an interval
_MAX_DEPTH = 60


class UnbalancedError(ValueError):
    """Brackets do not match."""


def cut(text: str, separators: frozenset[str]) -> tuple[list[str], list[str]]:
    """Cut a text at separators outside all brackets.

    Args:
        text: A notation.
        separators: Commas, words in quotes, or signs of relations.

    Returns:
        The parts, one more than separators, and the separators found.

    Raises:
        UnbalancedError: If the brackets do not match.
    """
    stack: list[str] = []
    parts, found, start = [], [], 0
    for match in _PIECE.finditer(text):
        piece = match[0]
        if piece in _OPENING or piece.startswith("\\begin"):
            stack.append(_OPENING.get(piece, "b"))
            if len(stack) > _MAX_DEPTH:
                raise UnbalancedError("too many levels of brackets")
        elif piece in _CLOSING or piece.startswith("\\end"):
            _close(stack, _CLOSING.get(piece, "b"))
        elif not stack and piece in separators:
            parts.append(text[start : match.start()].strip())
            found.append(piece)
            start = match.end()
    if stack:
        raise UnbalancedError("a bracket is not closed")
    return [*parts, text[start:].strip()], found


def _close(stack: list[str], kind: str) -> None:
    if not stack or (stack[-1] != kind and not {stack[-1], kind} <= _MIXED):
        raise UnbalancedError("a bracket closes what was not open")
    stack.pop()


def enclosing(text: str) -> tuple[str, str, str] | None:
    """Return the opening bracket, the inside and the closing bracket if one pair encloses all of a text."""
    stack = 0
    first: re.Match[str] | None = None
    for match in _PIECE.finditer(text):
        if match[0] in _OPENING:
            first = first or match
            stack += 1
        elif match[0] in _CLOSING:
            stack -= 1
        if first is None or first.start() > 0:
            return None
        if stack == 0:
            if match.end() < len(text):
                return None
            inside = text[first.end() : match.start()].strip()
            opening, closing = first[0], match[0]
            return _plain(opening), inside, _plain(closing)
    return None


def _plain(bracket: str) -> str:
    return {"\\langle": "<", "\\rangle": ">", "\\{": "{", "\\}": "}", "{": "{}", "}": "{}"}.get(bracket, bracket)
