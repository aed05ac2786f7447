"""How a cell runs and what it gives back; part of every process that runs model code.

Nothing here needs Linux. A cell gives back what a notebook would show, as text: what it printed (standard output and
standard error in order), warnings in one line each, the value of a last expression, and an error in few lines. Where
something is not possible here, one line says so and what to do instead (refusals.py, explain.py).
"""

from __future__ import annotations

import builtins
import linecache
import signal
import sys
import types
import warnings
from io import TextIOWrapper
from typing import Any, TextIO

from trace_gym.envs.math.python_tool.explain import CELL, explain
from trace_gym.envs.math.python_tool.refusals import Guard, NoInput
from trace_gym.envs.math.python_tool.screen import Memory, Screen
from trace_gym.envs.math.python_tool.source import compile_cell, plain

_CHUNK_CHARS = 1 << 16  # a long text is encoded by pieces, as a copy of it may not fit into memory
_WARNING_CHARS = 300
_LEAST_RECURSION = 1_000
_TIMERS = [getattr(signal, name) for name in ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF") if hasattr(signal, name)]


class Interpreter:
    """The namespace of a session, and how a cell runs in it."""

    def __init__(self, half: int) -> None:
        """Take over `__main__`, the standard streams and what cells must not use; once in a process.

        Args:
            half: How many bytes of output are kept at each end; see `Screen`.
        """
        self._screen = Screen(half)
        self._guard = Guard()
        self._module = types.ModuleType("__main__")
        sys.modules["__main__"] = self._module
        self._cell = ""
        self._warned: set[str] = set()
        self._stdin = NoInput()
        sys.displayhook = self._display
        sys.unraisablehook = self._show_unraisable
        warnings.showwarning = self._show_warning
        builtins.display = self._display_all  # type: ignore[attr-defined]
        self._builtins = vars(builtins)
        self._sound_builtins = dict(self._builtins)

    def run(self, code: str, number: int, memory: Memory) -> str:
        """Run one cell; never raises.

        Args:
            code: Python source, as the model wrote it.
            number: Which cell of the session this is, from 1; shown in tracebacks of later cells.
            memory: Where its output goes: see `Screen.open`; read it with `read_screen`.

        Returns:
            How it ended: ``ok``, ``error``, or ``memory``.
        """
        self._screen.open(memory)
        namespace = self._prepare(number)
        text = plain(code)
        lines = text.split("\n")
        status = "ok"
        try:
            try:
                source = compile_cell(text, self._cell)
                lines = source.lines
                linecache.cache[self._cell] = (len(text), None, [f"{line}\n" for line in lines], self._cell)
                self._guard.active = True
                for step in source.steps:
                    exec(step, namespace)
            finally:
                self._recover()
        except BaseException as error:  # whatever a cell raises is its result
            status, message = explain(error, self._cell, lines, namespace)
            self._say(message)
            self._screen.shut()  # now: with the error, the cell's objects go, and they may have something to say
        self._screen.shut()
        return status

    def _prepare(self, number: int) -> dict[str, Any]:
        """Give the cell sound streams and names, whatever the cells before did to them."""
        self._cell = f"{CELL}{number}>"
        self._warned.clear()
        # A new one each time: the last may be closed, detached or recoded. All write to the one screen.
        self._stream = TextIOWrapper(
            self._screen,  # type: ignore[type-var]  # a raw stream does
            "utf-8",
            errors="backslashreplace",
            newline="\n",
            write_through=True,
        )
        sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = self._stream  # type: ignore[assignment, misc]
        sys.stdin = sys.__stdin__ = self._stdin  # type: ignore[assignment, misc]
        if not callable(getattr(sys, "displayhook", None)):
            sys.displayhook = self._display
        namespace = vars(self._module)
        namespace["__builtins__"] = builtins
        namespace.setdefault("__name__", "__main__")
        namespace.pop("__warningregistry__", None)  # each cell shows its own warnings
        return namespace

    def _recover(self) -> None:
        """Take back what a cell may have done to the interpreter; uses no built-in name before they are back."""
        if sys.getrecursionlimit() < _LEAST_RECURSION:
            sys.setrecursionlimit(_LEAST_RECURSION)
        self._guard.active = False
        self._builtins.update(self._sound_builtins)
        sys.settrace(None)
        sys.setprofile(None)
        for timer in _TIMERS:
            signal.setitimer(timer, 0)
        _flush(self._stream)

    def _display(self, value: object) -> None:
        """Show the value of a last expression; None is not shown."""
        if value is None:
            return
        text = repr(value)
        self._builtins["_"] = value
        self._say(text)
        self._screen.write(b"\n")

    def _display_all(self, *values: object, **_: object) -> None:
        """Show values as a notebook does: its function `display`."""
        for value in values:
            self._say(f"{value!r}\n")

    def _show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        place = ""
        if filename.startswith(CELL):
            place = f"{'' if filename == self._cell else filename.strip('<>') + ', '}line {lineno}: "
        text = f"{place}{category.__name__}: {str(message)[:_WARNING_CHARS]}\n"
        if text not in self._warned:
            self._warned.add(text)
            self._say(text)

    def _show_unraisable(self, unraisable: Any) -> None:
        """Show in one line an error that Python cannot raise, such as one in a cell's `__del__`."""
        if getattr(unraisable.object, "__module__", "") != "__main__":
            return
        text = str(unraisable.exc_value)[:_WARNING_CHARS]
        self._say(f"Ignored in {unraisable.object.__qualname__}: {unraisable.exc_type.__name__}: {text}\n")

    def _say(self, text: str) -> None:
        """Put a line of the tool's own on the screen, below what was printed."""
        if text and not self._screen.is_at_line_start:
            self._screen.write(b"\n")
        for start in range(0, len(text), _CHUNK_CHARS):
            self._screen.write(text[start : start + _CHUNK_CHARS].encode("utf-8", "backslashreplace"))


def _flush(own: object) -> None:
    """Write out what a stream that the cell put into the place of standard output still holds back."""
    stream = getattr(sys, "stdout", None)
    if stream is None or stream is own:
        return
    try:
        stream.flush()
    except BaseException:  # the cell's own code, and its loss
        return
