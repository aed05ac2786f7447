"""One tool for all environments of a process that ask for equal settings."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from trace_gym.envs.math.python_tool.tool import PythonTool

_shares: dict[PythonTool, int] = {}  # how many leases
_shared_lock = threading.RLock()  # reentrant: collecting a lease may interrupt a caller that holds it


class ToolLease:
    """A share of a tool that several environments of one process use.

    Has the tool's `new`, `load` and `owns`; closing the last share closes the tool. A share that is forgotten is given
    back when it is collected.
    """

    def __init__(self, tool: PythonTool) -> None:
        """Make a lease; use `shared_tool`."""
        self.tool = tool
        self.new = tool.new
        self.load = tool.load
        self.owns = tool.owns
        self._give_back = weakref.finalize(self, _give_back, tool)

    def close(self) -> None:
        """Give the share back; doing so again does nothing."""
        self._give_back()

    def __enter__(self) -> ToolLease:
        """Return the lease."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the lease."""
        self.close()


def shared_tool(**settings: Any) -> ToolLease:
    """Lease the tool that everyone in this process with equal settings shares.

    Args:
        **settings: As for `PythonTool`.

    Returns:
        A lease, used like a tool; the tool is open until every lease is closed.
    """
    fresh = PythonTool(**settings)
    with _shared_lock:
        tool = next((tool for tool in _shares if tool._settings == fresh._settings), fresh)
        _shares[tool] = _shares.get(tool, 0) + 1
        if tool._sessions.is_closed:  # its last share was collected just now
            del _shares[tool]
            tool = fresh
            _shares[tool] = 1
    return ToolLease(tool)


def _give_back(tool: PythonTool) -> None:
    with _shared_lock:
        _shares[tool] -= 1
        if _shares[tool]:
            return
        del _shares[tool]
    tool.close()


def _reset_lock() -> None:
    global _shared_lock
    _shared_lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_lock)
