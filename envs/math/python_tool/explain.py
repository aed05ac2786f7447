"""How the end of a cell is put into few lines: its own lines that led there, the error, what to do."""

from __future__ import annotations

import builtins
import linecache
import re
import sys
import traceback
from collections import deque
from types import TracebackType
from typing import Any

from trace_gym.envs.math.python_tool.refusals import LEFT_OUT, NO_FILES, NO_PROCESSES

CELL = "<cell "  # every file name of a cell starts like this
_MESSAGE_CHARS = 1_000
_LINE_CHARS = 200
_MAX_FRAMES = 4
_MAX_MEMBERS = 6  # of an exception group

_NO_ASYNCIO = "asyncio does not work here: write plain functions and call them"
_NO_MAGIC = "magic commands (%) do not work here: leave the line out"
_NO_SHELL = "shell commands do not work here, and nothing can be installed: leave the line out"
_NO_FENCE = "a cell is plain Python: leave the markdown fence (```) out"
_BY_MODULE = {"asyncio": _NO_ASYNCIO, "multiprocessing": NO_PROCESSES, "tempfile": NO_FILES}
_INSTEAD_OF = {"'await'": _NO_ASYNCIO, "'async ": _NO_ASYNCIO, "asynchronous": _NO_ASYNCIO}
_INSTEAD_OF |= {"'return' outside function": "print the value instead"}
_SHELL_LINE = re.compile(r"\s*(!|%?(pip3?|conda|apt|apt-get)\s+(install|list|show)\b)")
_CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")


def explain(error: BaseException, name: str, lines: list[str], namespace: dict[str, Any]) -> tuple[str, str]:
    """Say how a cell was stopped; never raises, whatever the error does when it is looked at.

    Args:
        error: What it raised.
        name: The file name of the cell.
        lines: Its source.
        namespace: The session's variables.

    Returns:
        The status, ``ok`` (it called `exit`), ``error`` or ``memory``, and the text to show.
    """
    try:
        if isinstance(error, MemoryError):
            return "memory", ""
        if isinstance(error, SystemExit):
            return _explain_exit(error)
        if isinstance(error, SyntaxError) and error.filename in (name, None) and not _frames(error.__traceback__):
            shown = _explain_syntax(error, lines)
        else:
            shown = _explain_error(error, name, namespace)
        return "error", "\n".join(shown) + "\n"
    except BaseException:
        return "error", "The cell raised an error that cannot be shown.\n"


def _explain_exit(error: SystemExit) -> tuple[str, str]:
    failed = error.code not in (None, 0)
    code = f" with {_cut(str(error.code))!r}" if failed else ""
    text = f"exit() was called{code}: the cell ended here, the session goes on.\n"
    return "error" if failed else "ok", text


def _explain_syntax(error: SyntaxError, lines: list[str]) -> list[str]:
    """Show the line, with a caret below the place unless that is its end."""
    number = error.lineno or 0
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    foreign = _foreign(line)
    if foreign:
        return [f"line {number}: {_cut(line.strip())}", f"SyntaxError: {foreign}"]
    shown = []
    if line.strip():
        prefix = f"line {number}: "
        at = min(max((error.offset or 1) - 1, 0), len(line))
        first = len(line) - len(line.lstrip())
        if at - first > _LINE_CHARS // 2:
            first = at - _LINE_CHARS // 2
        shown.append(prefix + line[first : first + _LINE_CHARS].rstrip())
        if error.offset and first <= at < len(line.rstrip()) - 1:
            shown.append(" " * (len(prefix) + at - first) + "^")
    message = f"{type(error).__name__}: {error.msg}"
    instead = next((instead for start, instead in _INSTEAD_OF.items() if str(error.msg).startswith(start)), "")
    return [*shown, _join(message, instead)]


def _foreign(line: str) -> str:
    """Say what to do about a line that is for a shell, for a notebook or for markdown."""
    if _SHELL_LINE.match(line):
        return _NO_SHELL
    if line.lstrip().startswith("%"):
        return _NO_MAGIC
    return _NO_FENCE if line.lstrip().startswith("```") else ""


def _explain_error(error: BaseException, name: str, namespace: dict[str, Any]) -> list[str]:
    shown, line = [], ""
    frames = _frames(error.__traceback__)
    for file, number, function in frames:
        cell = "" if file == name else f"{file.strip('<>')}, "
        where = "" if function == "<module>" else f", in {function}"
        line = linecache.getline(file, number).strip()
        shown.append(f"{cell}line {number}{where}: {_cut(line)}".rstrip())
    shown.append(_absent(error) or _join(_message(error), _hint(error, line, namespace)))
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions
        shown += [f"  {_message(member)}" for member in members[:_MAX_MEMBERS]]
        if len(members) > _MAX_MEMBERS:
            shown.append(f"  and {len(members) - _MAX_MEMBERS} more")
    return shown


def _frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    """Return file, line and function of the first and the last frames in cells; a recursion has a million."""
    head: list[tuple[str, int, str]] = []
    tail: deque[tuple[str, int, str]] = deque(maxlen=_MAX_FRAMES - 1)
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_filename.startswith(CELL):
            (tail if head else head).append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return [*head, *tail]


def _message(error: BaseException) -> str:
    """Return the type and the text of an error; of one in other source text only the last line."""
    text = traceback.format_exception_only(error)
    message = text[-1] if isinstance(error, SyntaxError) else "".join(text)
    return _cut(message.rstrip(), _MESSAGE_CHARS)


def _hint(error: BaseException, line: str, namespace: dict[str, Any]) -> str:
    """Say what to do instead, where the message alone does not."""
    if isinstance(error, OSError):
        modules = _modules(error.__traceback__)
        for module, instead in _BY_MODULE.items():
            if module in modules and instead not in str(error):
                return instead
    if isinstance(error, TypeError) and "not callable" in str(error):
        for called in _CALLED.findall(line):
            if called in namespace and hasattr(builtins, called) and not callable(namespace[called]):
                return f"{called} was assigned a value: `del {called}` brings the built-in back"
    return ""


def _absent(error: BaseException) -> str:
    """Say that a module is not there, and what is; nothing where the package of the module is there."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    root = error.name.partition(".")[0]
    if root in LEFT_OUT:
        return f"ModuleNotFoundError: there is no {root}: {LEFT_OUT[root]}"
    if root in sys.modules:
        return ""
    there = ", ".join(known for known in ("numpy", "sympy") if known in sys.modules)
    instead = f"use {there and f'{there} or '}the standard library"
    return f"ModuleNotFoundError: No module named {root!r}. Nothing can be installed here: {instead}"


def _modules(trace: TracebackType | None) -> set[str]:
    """Return the packages that the way to an error leads through."""
    found = set()
    while trace is not None:
        found.add(str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0])
        trace = trace.tb_next
    return found


def _join(message: str, instead: str) -> str:
    if not instead:
        return message
    stop = "" if message.endswith((".", "!", "?")) else "."
    return f"{message}{stop} {instead[0].upper()}{instead[1:]}"


def _cut(text: str, length: int = _LINE_CHARS) -> str:
    return text if len(text) <= length else text[:length] + " …"
