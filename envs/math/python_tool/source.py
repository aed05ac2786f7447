"""From what a model wrote to Python: the few repairs that cannot change what valid code means."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from types import CodeType

_FENCE = "```"
_INNER_FENCE = re.compile(r"^[ \t]*```", re.MULTILINE)
_ONE_STATEMENT = re.compile(r"[^\n;:]+")  # at most one, and nothing inside it is one
_COMMENT = re.compile(r"#.*")


@dataclass
class Source:
    """A cell that can be run.

    Attributes:
        steps: What to execute, in order; the last one may show a value through `sys.displayhook`.
        lines: The text, by lines; numbered as in what the model wrote.
    """

    steps: list[CodeType]
    lines: list[str]


def plain(code: str) -> str:
    """Take off what is not code: a mark of the byte order, and a markdown fence that wraps all of it.

    The lines keep their numbers. Where other fences stand inside, the outer two are taken for a wrapping only if what
    is between them parses.
    """
    code = code.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    opening, _, inner = code.strip().partition("\n")
    if not opening.startswith(_FENCE) or "`" in opening.removeprefix(_FENCE) or not inner.endswith(_FENCE):
        return code
    before = code[: code.index(_FENCE)].count("\n") + 1
    inner = "\n" * before + inner.removesuffix(_FENCE)
    return code if _INNER_FENCE.search(inner) and not _parses(inner) else inner


def compile_cell(text: str, name: str) -> Source:
    """Compile what `plain` returned, and mend the indentation where it does not parse as it is.

    Mended is what comes of cutting a cell out of indented text: all lines are indented, or all but the first.

    Args:
        text: The cell.
        name: Its file name for tracebacks.

    Raises:
        SyntaxError: If it is no Python; also where it is too deeply nested to be compiled.
        ValueError: If it contains a NUL character (Python 3.11) or a lone surrogate.
    """
    try:
        return _compile(text, name)
    except (MemoryError, RecursionError):
        raise SyntaxError("the code is nested too deeply") from None


def _compile(text: str, name: str) -> Source:
    if _ONE_STATEMENT.fullmatch(text):
        try:  # a third of the time, as no tree is made
            return Source([compile(text, name, "single", dont_inherit=True)], [text])
        except (SyntaxError, ValueError):
            pass
    tree, shown, lines = parse(text, name)
    steps = [compile(tree, name, "exec", dont_inherit=True)] if tree.body else []
    if shown is not None:
        steps.append(compile(ast.Interactive([shown]), name, "single", dont_inherit=True))
    return Source(steps, lines)


def parse(text: str, name: str) -> tuple[ast.Module, ast.Expr | None, list[str]]:
    """Parse what `plain` returned, mending it as `compile_cell` does; raises what parsing raises.

    Returns:
        The statements to run, the expression after them whose value is shown, if there is one, and the text by lines.
    """
    try:
        tree = ast.parse(text, name)
    except IndentationError:
        mended = _mend(text, name)
        if mended is None:
            raise
        text, tree = mended
    lines = text.split("\n")
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or _is_hushed(last, lines):
        return tree, None, lines
    tree.body.pop()
    return tree, last, lines


def _mend(text: str, name: str) -> tuple[str, ast.Module] | None:
    lines = text.split("\n")
    code = [line for line in lines if line.strip()]
    candidates = [text]
    if len(code) > 1:
        indent = code[1][: len(code[1]) - len(code[1].lstrip())]
        first = lines.index(code[0])
        candidates.append("\n".join([*lines[:first], indent + code[0], *lines[first + 1 :]]))
    for candidate in candidates:
        try:
            tree = ast.parse(f"if True:\n{candidate}", name)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        block = tree.body[0]
        if isinstance(block, ast.If) and not block.orelse:
            tree.body[:1] = block.body
            ast.increment_lineno(tree, -1)
            return candidate, tree
    return None


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True


def _is_hushed(last: ast.Expr, lines: list[str]) -> bool:
    """Whether a semicolon follows: a notebook then keeps the value to itself."""
    line, column = last.end_lineno or 1, last.end_col_offset or 0
    rest = [lines[line - 1].encode(errors="replace")[column:].decode(errors="replace"), *lines[line:]]
    return any(";" in _COMMENT.sub("", part) for part in rest)
