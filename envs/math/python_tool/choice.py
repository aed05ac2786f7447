"""Which backend runs the cells on this machine.

| backend | state | Python | isolation |
|---|---|---|---|
| `fork` | exact, all that is in memory | CPython with numpy and sympy | the kernel's (Linux) |
| `monty` | exact, monty's own dump | a subset of Python, no numpy, no sympy | monty's interpreter |
| `replay` | the cells, run again and compared | CPython with numpy and sympy | the kernel's on Linux, else none |
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Literal

from trace_gym.envs.math.python_tool.backend import Backend, Limits
from trace_gym.envs.math.python_tool.capabilities import capabilities
from trace_gym.errors import BadInputError, require, unknown_name

BACKENDS = ("fork", "replay", "monty")
_SUFFICIENT = ("full", "seccomp")
_FILES_PER_PROCESS = {"fork": 3, "replay": 4}


def choose_backend(name: str, allow_weak_isolation: bool) -> str:
    """Return the name of the backend to use.

    With ``auto``, full Python comes first where the kernel confines it or `allow_weak_isolation`
    does without: ``fork`` if this system has it, else ``replay``. Where neither holds, it is
    ``monty`` if that is installed.

    Args:
        name: A name in `BACKENDS`, or ``auto``.
        allow_weak_isolation: Whether unconfined code is acceptable.

    Raises:
        BadInputError: If there is no such backend, or it may not run here.
        MissingExtraError: If monty is asked for and not installed.
    """
    if name not in ("auto", *BACKENDS):
        raise unknown_name("backend", name, ("auto", *BACKENDS))
    if name == "monty":
        require("pydantic_monty", "monty")
        return name
    machine = capabilities()
    if name == "fork" and name not in machine.backends:
        raise BadInputError("The backend 'fork' needs Linux 5.3. Available here: 'auto', 'replay', 'monty'.")
    if allow_weak_isolation or machine.isolation in _SUFFICIENT:
        return name if name != "auto" else "fork" if "fork" in machine.backends else "replay"
    if name == "auto" and importlib.util.find_spec("pydantic_monty") is not None:
        return "monty"
    raise BadInputError(
        f"This machine cannot confine the Python code of a model (it lacks {'; '.join(machine.missing)}). Install the "
        "extra 'monty', whose interpreter is a sandbox of its own, or accept that the code can read your files and "
        "use your network: allow_weak_isolation=True."
    )


def snapshot_kind(name: str) -> Literal["exact", "replay"]:
    """Return whether a backend keeps all that is in memory, or makes a state again from its cells."""
    return "replay" if name == "replay" else "exact"


def most_live(name: str) -> int:
    """Return how many processes of a backend the limit of open files allows."""
    try:
        import resource
    except ImportError:  # not on Windows
        return sys.maxsize
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY or name not in _FILES_PER_PROCESS:
        return sys.maxsize
    return int(max(1, (files - 64) // _FILES_PER_PROCESS[name]))


def make_backend(name: str, limits: Limits, max_running: int, allow_weak_isolation: bool) -> Backend:
    """Make a backend that `choose_backend` named; it starts nothing yet."""
    if name == "fork":
        from trace_gym.envs.math.python_tool.fork_backend import ForkBackend

        return ForkBackend(limits)
    if name == "replay":
        from trace_gym.envs.math.python_tool.replay_backend import ReplayBackend

        return ReplayBackend(limits, must_isolate=not allow_weak_isolation)
    from trace_gym.envs.math.python_tool.monty_backend import MontyBackend

    return MontyBackend(limits, max_running)
