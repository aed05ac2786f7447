"""Rollout trees on disk: JSONL, one tree a line, and rows for other libraries.

Invariants:

- Exact: ``read_trees`` gives back every field of every node as it was written. Only environment
  states are left out unless asked for; their content hash is always kept as ``state_key``.
- A node's row holds what differs from the defaults of `trace_gym.tree.Node`, under the names of its
  fields.
- Lines are ASCII and end with a line feed; text that contains other line breaks (U+2028 and the
  like) is escaped, so tools that split lines differently see the same lines. NaN and infinity are
  refused, never written.
- An interrupt can leave a half-written last line. Readers pass over it and writers cut it off; a
  broken line anywhere else is an error that names the file and the line.

The layout follows the traces of verifiers v1: a flat list of nodes with parent indices and token
deltas.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

from trace_gym.errors import BadInputError, StateError, unknown_name
from trace_gym.messages import Failure, Message, Role
from trace_gym.snapshot import EnvState
from trace_gym.tree import Node, RolloutTree, Status

SCHEMA = 1

_START = b'{"schema":'
_HEADER = {"schema", "env_id", "task_id", "step", "nodes", "advantages"}
_FIELDS = {f.name: f.default for f in fields(Node) if f.name != "state"}


def write_trees(path: str | Path, trees: Iterable[RolloutTree], append: bool = True, with_states: bool = False) -> None:
    """Write trees to a JSONL file, one a line.

    Args:
        path: The file; its folder must exist.
        trees: What to write, in order.
        append: Add to an existing file, after cutting off a half-written last line; False replaces
            the file.
        with_states: Store environment states too, so that episodes can be taken up again.

    Raises:
        BadInputError: If a tree holds NaN or infinity, or the file to add to is not one of trees.
    """
    path = Path(path)
    lines = [json.dumps(_tree_row(tree, with_states), separators=(",", ":")) for tree in trees]
    if append and path.exists():
        _cut_half_line(path)
    with path.open("ab" if append else "wb") as file:
        for line in lines:
            file.write(line.encode("ascii") + b"\n")
            file.flush()


def read_trees(path: str | Path, strict: bool = False) -> Iterator[RolloutTree]:
    """Yield the trees of a JSONL file, one at a time.

    Args:
        path: What `write_trees` wrote.
        strict: Refuse a half-written last line, which is otherwise passed over.

    Raises:
        BadInputError: If there is no such file, or a line is not a tree; names the file, the line and what was
            expected.
    """
    path = Path(path)
    if not path.is_file():
        raise BadInputError(f"There is no file {path}; give the trees.jsonl of a run.")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip() or (_is_half(line) and not strict):
                continue
            try:
                tree = _tree(json.loads(line, parse_constant=_refuse_constant))
            except (ValueError, KeyError, TypeError, RecursionError, StateError) as error:
                raise BadInputError(
                    f"{path}, line {number}: {_reason(error)} Expected a tree as "
                    f"trace_gym.record.write_trees writes it: a JSON object with schema {SCHEMA} "
                    f"and {', '.join(sorted(_HEADER - {'schema'}))}."
                ) from error
            yield tree


def to_messages(tree: RolloutTree) -> list[dict[str, Any]]:
    """Return one row per leaf in the ``messages`` form of Hugging Face datasets.

    Failed leaves are included; their ``reward`` is None, as they have no outcome.

    Returns:
        Rows of plain values: ``messages`` (the whole conversation), ``reward``, ``status``,
        ``advantage`` (None for leaves that were not trained on), ``env_id``, ``task_id``, ``step``,
        ``leaf`` and ``birth`` (node indices).
    """
    return [
        {
            "messages": [message.to_dict() for message in tree.prefix(leaf).messages],
            "reward": tree.nodes[leaf].reward,
            "status": tree.nodes[leaf].status,
            "advantage": tree.advantages.get(leaf),
            "env_id": tree.env_id,
            "task_id": tree.task_id,
            "step": tree.step,
            "leaf": leaf,
            "birth": tree.nodes[leaf].birth,
        }
        for leaf in tree.leaves()
    ]


# Writing.


def _tree_row(tree: RolloutTree, with_states: bool) -> dict[str, Any]:
    try:
        return {
            "schema": SCHEMA,
            "env_id": tree.env_id,
            "task_id": tree.task_id,
            "step": int(tree.step),
            "nodes": [_node_row(node, with_states) for node in tree.nodes],
            "advantages": {str(leaf): _finite(value) for leaf, value in tree.advantages.items()},
        }
    except ValueError as error:
        raise BadInputError(f"Tree {tree.task_id!r} (step {tree.step}) cannot be written: {error}") from error


def _node_row(node: Node, with_states: bool) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, default in _FIELDS.items():
        value = getattr(node, name)
        if default is MISSING or value != default:
            write: Callable[[Any], Any] = _WRITERS.get(name, int)
            row[name] = write(value)
    if node.state is not None:
        row["state_key"] = node.state.key
        if with_states:
            row["state"] = node.state.to_bytes().decode()
    return row


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"it holds the number {value}; JSON has none for it, use None for what is unknown.")
    return float(value)


# Counts and indices are written by `int`, which also takes numpy's integers.
_WRITERS: dict[str, Callable[[Any], Any]] = {
    "messages": lambda messages: [message.to_dict() for message in messages],
    "token_ids": lambda ids: [int(i) for i in ids],
    "sampled": lambda flags: [int(flag) for flag in flags],
    "logprobs": lambda values: [_finite(value) for value in values],
    "status": str,
    "reward": _finite,
    "value": _finite,
    "outcome": dict,
    "failure": Failure.to_dict,
}


def _cut_half_line(path: Path) -> None:
    if not path.stat().st_size:
        return
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
    data = path.read_bytes()
    start = data.rfind(b"\n") + 1
    last = data[start:]
    if _is_half(last):
        with path.open("r+b") as file:
            file.truncate(start)
    elif last.startswith(_START):
        with path.open("ab") as file:
            file.write(b"\n")
    else:
        raise BadInputError(
            f"{path} does not end with a line of trees, so none are added to it; it ends with "
            f"{last[:40]!r}. Choose another file, or append=False to replace it."
        )


# Reading. Every reader raises ValueError, KeyError or TypeError; read_trees adds where and what.


def _is_half(line: bytes) -> bool:
    """Return whether a line is the mere beginning of a tree; no beginning is valid JSON."""
    if line.endswith(b"\n") or not (line.startswith(_START) or _START.startswith(line)):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON.")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg} at column {error.colno})."
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing."
    if isinstance(error, RecursionError):
        return "nested too deeply."
    return str(error)


def _tree(row: Any) -> RolloutTree:
    _check(isinstance(row, dict), f"it is a {type(row).__name__}, not an object.")
    _check(
        row["schema"] == SCHEMA,
        f"it has schema {row['schema']!r}; this version reads schema {SCHEMA}.",
    )
    for name in row:
        if name not in _HEADER:
            raise unknown_name("field of a tree", name, _HEADER)
    rows = row["nodes"]
    _check(isinstance(rows, list) and bool(rows), "nodes is not a list that begins with the prompt.")
    tree = RolloutTree(_text(row["env_id"]), _text(row["task_id"]), _node(rows[0], 0), _integer(row["step"]))
    for index, node in enumerate(rows[1:], start=1):
        tree.add(_node(node, index))
    for leaf, value in row["advantages"].items():
        _check(
            leaf.isdecimal() and int(leaf) < len(tree),
            f"advantages names node {leaf!r}, which does not exist.",
        )
        tree.advantages[int(leaf)] = _number(value)
    return tree


def _node(row: Any, index: int) -> Node:
    _check(isinstance(row, dict), f"node {index} is a {type(row).__name__}, not an object.")
    values: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("state", "state_key"):
            continue
        if name not in _FIELDS:
            raise unknown_name(f"field of node {index}", name, _FIELDS)
        read: Callable[[Any], Any] = _READERS.get(name, _integer)
        try:
            values[name] = read(value)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name} of node {index} cannot be {str(value)[:60]!r}: {_reason(error)}") from error
    if "state" in row:
        values["state"] = state = EnvState.from_bytes(_text(row["state"]).encode())
        _check(state.key == row["state_key"], f"the state of node {index} does not fit its state_key.")
    return Node(**values)


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _integer(value: Any) -> int:
    _check(type(value) is int, f"{value!r} is not an integer.")
    return int(value)


def _number(value: Any) -> float:
    _check(type(value) in (int, float) and math.isfinite(value), f"{value!r} is not a number.")
    return float(value)


def _text(value: Any) -> str:
    _check(isinstance(value, str), f"{value!r} is not a text.")
    return str(value)


def _flag(value: Any) -> bool:
    _check(value in (0, 1), f"{value!r} is not 0 or 1.")
    return bool(value)


def _one_of(allowed: Sequence[str], value: Any) -> str:
    _check(value in allowed, f"{value!r} is not one of {', '.join(allowed)}.")
    return str(value)


def _messages(rows: Any) -> tuple[Message, ...]:
    messages = tuple(Message.from_dict(row) for row in rows)
    for message in messages:
        _one_of(get_args(Role), message.role)
        _text(message.content)
    return messages


_READERS: dict[str, Callable[[Any], Any]] = {
    "messages": _messages,
    "token_ids": lambda ids: tuple(_integer(i) for i in ids),
    "sampled": lambda flags: tuple(_flag(flag) for flag in flags),
    "logprobs": lambda values: tuple(_number(value) for value in values),
    "status": lambda value: _one_of(get_args(Status), value),
    "reward": _number,
    "value": _number,
    "outcome": lambda row: {_text(key): _text(value) for key, value in row.items()},
    "failure": lambda row: Failure(_text(row["kind"]), _text(row["reason"])),
}
