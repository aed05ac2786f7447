"""The few errors of trace_gym.

Everything raised on purpose derives from `TraceGymError`. An infrastructure failure (a dead sandbox, a hung
grader) has a class of its own because it is never an outcome: it must not become a reward of 0.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class TraceGymError(Exception):
    """Base of every error that trace_gym raises on purpose."""


class BadInputError(TraceGymError, ValueError):
    """A value given by the caller is not allowed; the message says what is."""


class StateError(TraceGymError):
    """A saved state cannot be read or does not fit the environment it is given to."""


class ReplayDivergenceError(StateError):
    """A replayed state did not reproduce what was observed when it was recorded."""


class InfrastructureError(TraceGymError):
    """Something around the task broke; says nothing about the agent and is never scored.

    Attributes:
        kind: Short machine-readable name, such as ``"sandbox_died"``.
        reason: One sentence for people.
    """

    def __init__(self, kind: str, reason: str) -> None:
        """Store the kind and the reason."""
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason


class MissingExtraError(TraceGymError, ImportError):
    """An optional dependency is not installed; the message names the extra."""


def unknown_name(what: str, given: object, allowed: Iterable[str]) -> BadInputError:
    """Build the error for a name that does not exist.

    Args:
        what: The kind of thing, such as ``"allocator"``.
        given: What the caller wrote.
        allowed: Every name that exists.

    Returns:
        An error that lists the names and the nearest match, for the caller to raise.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    return BadInputError(f"Unknown {what} {given!r}.{hint} Available: {shown}.")


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module.

    Args:
        module: Dotted module name.
        extra: The extra of this package that installs it.

    Raises:
        MissingExtraError: If the module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{module!r} is not installed. Install it with: pip install 'trace-gym[{extra}]'"
        ) from error
