"""What cells cannot do, answered with one line that says what to do instead.

This is courtesy, no boundary: a cell can undo it. What must hold is held by the kernel or by what
surrounds the process; here its refusals become readable, and equal on every backend. Most are made by
an audit hook, which sees the attempt whatever function of Python leads to it.
"""

from __future__ import annotations

import _thread
import builtins
import errno
import io
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

NO_PROCESSES = "new processes are not allowed here: do the work in Python, in this cell"
NO_THREADS = "threads are not allowed here: call the function directly, or in a loop"
NO_NETWORK = "there is no network here: work with what the problem gives"
NO_FILES = "files cannot be written here: keep the data in variables, or in io.StringIO"
NO_INPUT = "input() does not work here, as no one can type: put the value into the code"
NO_DEBUGGER = "breakpoint() does not work here, as no one can type: print what you want to see"
LEFT_OUT = {
    "IPython": "display(x) works without it",
    "matplotlib": "plots cannot be seen here, print the numbers instead",
    "pip": "nothing can be installed here, use what can be imported",
}

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FILE_EVENTS = (
    "os.chmod os.chown os.link os.mkdir os.remove os.rename os.rmdir os.symlink os.truncate os.utime "
    "tempfile.mkdtemp tempfile.mkstemp"
).split()
_PROCESS_EVENTS = (
    "os.exec os.fork os.forkpty os.posix_spawn os.spawn os.startfile os.system pty.spawn subprocess.Popen "
    "webbrowser.open"
).split()
_NETWORK_EVENTS = "socket.__new__ socket.connect socket.getaddrinfo socket.gethostbyname urllib.Request".split()
# Imported when a process or one of its locks is made, not before.
_PROCESS_MODULES = frozenset(
    f"multiprocessing.{name}"
    for name in ("popen_fork", "popen_forkserver", "popen_spawn_posix", "popen_spawn_win32", "synchronize")
)


class Guard:
    """Refuses while `active`; the machinery around a cell goes its ways."""

    def __init__(self) -> None:
        """Put the refusals into this process, for ever."""
        self.active = False
        self._events: dict[str, Callable[[tuple[Any, ...]], None]] = dict.fromkeys(_PROCESS_EVENTS, _no_process)
        self._events |= dict.fromkeys(_NETWORK_EVENTS, _no_network)
        self._events |= dict.fromkeys(_FILE_EVENTS, _no_file)
        self._events |= {"open": _check_open, "import": _check_import}
        sys.addaudithook(self._audit)
        # Before these are audited, they ask the system for things that it may refuse with less to say.
        subprocess.Popen.__init__ = _no_process  # type: ignore[method-assign]
        for module in (_thread, threading):  # audited since Python 3.12 only
            for name in ("start_new_thread", "start_new", "start_joinable_thread"):
                for spelling in (name, f"_{name}"):
                    if hasattr(module, spelling):
                        setattr(module, spelling, _no_thread)
        for name in LEFT_OUT:  # so that importing one fails in the same way where it is installed
            sys.modules[name] = None  # type: ignore[assignment]
        # The bars of tqdm show times, which differ from run to run; and it warns where it cannot have a thread.
        os.environ["TQDM_DISABLE"] = "1"
        warnings.filterwarnings("ignore", "tqdm:")
        sys.breakpointhook = _no_debugger
        builtins.input = _no_input

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if self.active and event in self._events:
            self._events[event](args)


class NoInput(io.TextIOBase):
    """A standard input that says at once that nothing will come."""

    @property
    def buffer(self) -> NoInput:
        """The same for those who want bytes."""
        return self

    def read(self, *_: object) -> NoReturn:
        """Refuse."""
        _no_input()

    readline = readlines = __next__ = read

    def readable(self) -> bool:
        """Say that this stream is for reading."""
        return True

    def close(self) -> None:
        """Do nothing: `exit()` closes it, and the session goes on."""


def _check_open(args: tuple[Any, ...]) -> None:
    path, _, flags = args
    if isinstance(flags, int) and flags & _WRITING and path != os.devnull:
        _no_file(args)


def _check_import(args: tuple[Any, ...]) -> None:
    if args[0] in _PROCESS_MODULES:
        _no_process()


def _no_file(args: tuple[Any, ...]) -> NoReturn:
    raise PermissionError(errno.EPERM, NO_FILES, args[0])


def _no_network(*_: object) -> NoReturn:
    raise PermissionError(errno.EPERM, NO_NETWORK)


def _no_process(*_: object, **__: object) -> NoReturn:
    raise PermissionError(errno.EPERM, NO_PROCESSES)


def _no_thread(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(f"can't start new thread: {NO_THREADS}")


def _no_input(*_: object) -> NoReturn:
    raise EOFError(NO_INPUT)


def _no_debugger(*_: object, **__: object) -> NoReturn:
    raise RuntimeError(NO_DEBUGGER)
