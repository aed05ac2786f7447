"""How a cell runs and what it gives back; part of every process that runs model code."""

from __future__ import annotations

import ast
import builtins
import io
import linecache
import mmap
import os
import re
import signal
import struct
import sys
import textwrap
import traceback
import types
from typing import Any, NoReturn

HEADER = struct.Struct("<Q")  # of the shared memory: how many bytes were printed
_REPR_CHARS = 65_536
_MESSAGE_CHARS = 1_000
_MAX_FRAMES = 4


class Screen(io.RawIOBase):
    """What a cell prints: the first and the last bytes, in memory shared with the driver.

    Layout: HEADER, then `half` bytes of head, then a ring of `half` bytes with the latest of the
        rest.
    """

    def __init__(self, half: int) -> None:
        """Make a screen that keeps `half` bytes at each end."""
        self._half = half
        self._memory: mmap.mmap | None = None
        self._total = 0

    def open(self, fd: int) -> None:
        """Show a new cell on the shared memory `fd`."""
        self._memory = mmap.mmap(fd, HEADER.size + 2 * self._half)
        self._total = 0

    def shut(self) -> None:
        """Let go of the memory; what is printed now is lost."""
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def close(self) -> None:
        """Do nothing: `sys.stdout.close()` in a cell must not silence the later ones."""

    def writable(self) -> bool:
        """Say that this stream takes output."""
        return True

    def write(self, data: Any) -> int:
        """Take bytes; never fails and never grows."""
        view = memoryview(data).cast("B")
        size, memory, half, total = len(view), self._memory, self._half, self._total
        if memory is None:
            return size
        kept = 0
        if total < half:
            kept = min(size, half - total)
            memory[HEADER.size + total : HEADER.size + total + kept] = view[:kept].tobytes()
        skipped = max(kept, size - half)  # of a huge write only the end can stay
        position = total + skipped - half
        while skipped < size:
            at = position % half
            part = min(size - skipped, half - at)
            start = HEADER.size + half + at
            memory[start : start + part] = view[skipped : skipped + part].tobytes()
            skipped += part
            position += part
        self._total = total + size
        memory[: HEADER.size] = HEADER.pack(self._total)
        return size


class Interpreter:
    """The namespace of a session, and how a cell runs in it."""

    def __init__(self, half: int) -> None:
        """Take over `__main__`, the standard streams and the built-in functions."""
        self._screen = Screen(half)
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module
        self._new_stream()
        builtins.input = _no_input
        self._builtins = dict(vars(builtins))

    def _new_stream(self) -> None:
        self._stream = io.TextIOWrapper(
            self._screen, "utf-8", errors="backslashreplace", newline="\n", write_through=True
        )

    def run(self, code: str, number: int, memory_fd: int) -> str:
        """Run one cell.

        Args:
            code: Python source, as the model wrote it.
            number: Which cell of the session this is, from 1; shown in tracebacks of later cells.
            memory_fd: The shared memory for its output; closed here.

        Returns:
            How it ended: ``ok``, ``error``, or ``memory``.
        """
        self._screen.open(memory_fd)
        os.close(memory_fd)
        if self._stream.closed:
            self._new_stream()
        sys.stdout = sys.stderr = self._stream
        sys.stdin = io.StringIO()
        namespace = vars(self._module)
        namespace["__builtins__"] = builtins
        name = f"<cell {number}>"
        try:
            try:
                status = self._execute(code, name, namespace)
            finally:
                vars(builtins).update(self._builtins)
                sys.settrace(None)
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # whatever a cell raises is its result
            status, text = _explain(error, name)
            if self._stream.closed:
                self._new_stream()
            self._stream.write(text)
        self._screen.shut()
        return status

    def _execute(self, code: str, name: str, namespace: dict[str, Any]) -> str:
        code = tidy(code)
        tree = ast.parse(code, name)
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                namespace["_"] = value
                self._stream.write(repr(value)[:_REPR_CHARS] + "\n")
        return "ok"


def tidy(code: str) -> str:
    """Undo what models do to a cell: a markdown fence around all of it, an indent before all of it.

    A fence is taken off only where it wraps the whole cell and no other fence stands inside;
    backticks in a string are left alone. An indent is taken off only where the cell does not parse
    as it is.
    """
    fenced = re.fullmatch(r"\s*```[\w+-]*[ \t]*\n(.*?)\n?[ \t]*```\s*", code, re.DOTALL)
    if fenced and not re.search(r"^[ \t]*```", fenced[1], re.MULTILINE):
        code = fenced[1]
    try:
        ast.parse(code)
    except IndentationError:
        return textwrap.dedent(code)
    except (SyntaxError, ValueError):
        pass
    return code


def _explain(error: BaseException, name: str) -> tuple[str, str]:
    """Describe in few lines how a cell was stopped: its lines that led there, and the error."""
    if isinstance(error, SystemExit):
        failed = error.code not in (None, 0)
        code = f" with {str(error.code)[:200]!r}" if failed else ""
        return (
            "error" if failed else "ok",
            f"exit() was called{code}: the cell ended here, the session goes on.\n",
        )
    if isinstance(error, MemoryError):
        return "memory", ""
    lines = []
    if isinstance(error, SyntaxError) and error.filename == name:
        if error.text:
            lines.append(f"line {error.lineno}: {error.text.strip()[:200]}")
        lines.append(f"{type(error).__name__}: {error.msg}")
        return "error", "\n".join(lines) + "\n"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith("<cell ")]
    if len(frames) > _MAX_FRAMES:
        frames = frames[:1] + frames[1 - _MAX_FRAMES :]
    for frame in frames:
        cell = "" if frame.filename == name else f"{frame.filename.strip('<>')}, "
        function = "" if frame.name == "<module>" else f", in {frame.name}"
        lines.append(f"{cell}line {frame.lineno}{function}: {(frame.line or '')[:200]}")
    message = "".join(traceback.format_exception_only(error)).rstrip()
    if len(message) > _MESSAGE_CHARS:
        message = message[:_MESSAGE_CHARS] + " …"
    lines.append(message)
    return "error", "\n".join(lines) + "\n"


def _no_input(*_: object) -> NoReturn:
    raise EOFError("input() does not work here, as no one can type: put the value into the code")
