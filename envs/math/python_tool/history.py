"""The history of a Python session: what ran, what it showed, and the form that outlives it."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Literal

from trace_gym.envs.math.python_tool.sandbox import Process
from trace_gym.errors import StateError

Status = Literal["ok", "error", "timeout", "memory", "killed", "truncated"]

_FORMAT = "trace_gym/python-state"
_VERSION = 1
_NUMBER_0X = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")


@dataclass(frozen=True)
class CellResult:
    """What the model sees of one cell.

    Attributes:
        text: Everything printed, the value of a last expression, and in plain words what went
            wrong.
        status: ``ok``; ``truncated`` (ok, but part of the output is left out); ``error`` (an
            exception, the session goes on from there); ``timeout``, ``memory`` or ``killed`` (the
            cell was undone: the state is the one before it).
    """

    text: str
    status: Status

    @property
    def digest(self) -> str:
        """SHA-256 of the text with memory addresses blanked."""
        return hashlib.sha256(_NUMBER_0X.sub("0x", self.text).encode(errors="replace")).hexdigest()


@dataclass(frozen=True)
class Cell:
    """One entry of a history.

    Attributes:
        code: The source, as given.
        digest: Hash of what it showed.
        reseed: The seed given to `random` and numpy before it, or None where they ran on.
    """

    code: str
    digest: str
    reseed: int | None = None


class Node:
    """A point in the tree of sessions: how it is reached, and perhaps a process parked there."""

    def __init__(self, parent: Node | None, cell: Cell | None, seed: int) -> None:
        """Make the start of a session (no parent, no cell) or what follows after a cell."""
        self.parent = parent
        self.cell = cell
        self.seed = seed
        self.depth: int = parent.depth + 1 if parent else 0
        entry = [seed] if cell is None else [parent.key if parent else "", asdict(cell)]
        self.key: str = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
        self.process: Process | None = None
        self.handles = 0  # State objects
        self.pins = 0  # steps that run from here

    def path(self) -> list[Node]:
        """Return the nodes from the start of the session to here."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("numpy", "sympy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def encode(node: Node, reseed: int | None) -> bytes:
    """Write a node and the seed pending for its next cell as JSON."""
    return json.dumps(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "versions": _versions(),
            "seed": node.seed,
            "reseed": reseed,
            "cells": [asdict(step.cell) for step in node.path() if step.cell is not None],
        },
        sort_keys=True,
    ).encode()


def decode(data: bytes) -> tuple[Node, int | None]:
    """Rebuild the nodes of a saved state, without processes."""
    try:
        saved = json.loads(data)
        if saved["format"] != _FORMAT or saved["version"] != _VERSION:
            raise StateError(
                f"Expected {_FORMAT} version {_VERSION}, got {saved['format']} version {saved['version']}."
            )
        node = Node(None, None, int(saved["seed"]))
        for entry in saved["cells"]:
            cell = Cell(str(entry["code"]), str(entry["digest"]), entry["reseed"])
            node = Node(node, cell, node.seed)
        return node, saved["reseed"]
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"The data is not a saved Python state ({type(error).__name__}: {error}). "
            "Give load() what State.to_bytes() returned."
        ) from error
