"""What tests ask of the system: which processes descend from which, open files, and waiting for a condition."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path


def descendants(pid: int | None = None) -> set[int]:
    """Return every live process below `pid`, by default this one; none where there is no /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found: set[int] = set()
    level = {os.getpid() if pid is None else pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level}
        found |= level
    return found


def are_gone(pids: Iterable[int]) -> bool:
    """Whether none of the processes is left."""
    return not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids)


def open_files() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether the condition holds now or soon."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
