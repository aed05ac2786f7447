"""What a call may cost: data of bounded size, and no simulator that runs or grows without bound.

Most functions take time in proportion to the state, and the state grows with the text of the actions. The exceptions
are few, and are looked at before the call: powers and precisions, walks through directories that share their contents
(each copy of a copy can double the number of paths), and copies of directories.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_gym.tool_text import MAX_DEPTH

MAX_CHARS = 20_000  # of a call
MAX_BITS = 100_000  # of a power
MAX_PRECISION = 1_000  # digits
MAX_PATHS = 50_000  # that one walk goes along
MAX_ENTRIES = 20_000  # of all directories after a copy
# Directories in one another that a walk goes down. Upstream's ends with an error too, as in directories that contain
# themselves, but where depends on what Python was doing before.
MAX_NESTED = 300


class RefusedError(Exception):
    """A call is not made; the message says why."""


def own_value(value: Any) -> Any:
    """Return a copy of a call's arguments.

    Raises:
        RefusedError: If they are no JSON values, or too large.
    """
    left = MAX_CHARS

    def own(item: Any, depth: int) -> Any:
        nonlocal left
        kind = type(item)
        left -= len(item) if kind is str else item.bit_length() // 3 if kind is int else 1
        if left < 0:
            raise RefusedError(f"a call has at most {MAX_CHARS} characters")
        if item is None or kind in (bool, int, float, str):
            return item
        if depth > MAX_DEPTH:
            raise RefusedError(f"arguments are nested at most {MAX_DEPTH} levels deep")
        if kind in (list, tuple):
            return [own(part, depth + 1) for part in item]
        if isinstance(item, Mapping) and all(type(key) is str for key in item):
            return {own(key, depth): own(part, depth + 1) for key, part in item.items()}
        raise RefusedError(f"a {kind.__name__} is no JSON value")

    if not isinstance(value, Mapping):
        raise RefusedError("arguments are given by name")
    return own(value, 0)


def check_call(simulator: Any, name: str, values: Mapping[str, Any]) -> None:
    """Raise `RefusedError` if a call would cost too much."""
    if name == "power":
        _check_power(values.get("base"), values.get("exponent"))
    elif name in ("square_root", "logarithm"):
        if _whole(values.get("precision")) > MAX_PRECISION:
            raise RefusedError(f"precision must be at most {MAX_PRECISION}")
    elif name == "round_number":
        if abs(_whole(values.get("decimal_places"))) > MAX_PRECISION:
            raise RefusedError(f"decimal_places must be between -{MAX_PRECISION} and {MAX_PRECISION}")
    elif name in ("find", "du"):
        _check_walk(simulator)
    elif name == "cp":
        _check_copy(simulator, values.get("source"))


def _check_power(base: Any, exponent: Any) -> None:
    if not (isinstance(base, int) and isinstance(exponent, int)) or abs(base) < 2:
        return
    if base.bit_length() * exponent > MAX_BITS:
        raise RefusedError(f"the power has more than {MAX_BITS} bits")


def _whole(value: Any) -> int:
    """Return the whole number that a library would make of a value; 0 where it would refuse."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _check_walk(file_system: Any) -> None:
    """Count the paths from here and from the root, in the order in which upstream's recursion takes them."""
    for start in (file_system._current_dir, file_system.root):
        paths = 0
        stack = [iter(start.contents.values())]
        while stack:
            item = next(stack[-1], None)
            if item is None:
                stack.pop()
                continue
            paths += 1
            if paths > MAX_PATHS:
                raise RefusedError(f"the directories have more than {MAX_PATHS} paths")
            if hasattr(item, "contents"):
                stack.append(iter(item.contents.values()))
                if len(stack) > MAX_NESTED:
                    raise RefusedError("maximum recursion depth exceeded")


def _check_copy(file_system: Any, source: Any) -> None:
    entries, seen, stack = 0, set(), [file_system.root, file_system._current_dir]
    while stack:
        directory = stack.pop()
        if id(directory) not in seen:
            seen.add(id(directory))
            entries += len(directory.contents)
            stack += [item for item in directory.contents.values() if hasattr(item, "contents")]
    copied = file_system._current_dir.contents.get(source) if isinstance(source, str) else None
    if entries + len(getattr(copied, "contents", ())) > MAX_ENTRIES:
        raise RefusedError(f"the file system holds at most {MAX_ENTRIES} entries")
