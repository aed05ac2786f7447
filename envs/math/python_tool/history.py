"""The history of a Python session: what ran, what it showed, and the form that outlives it."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from types import MappingProxyType
from typing import Literal

from trace_gym.envs.math.python_tool.backend import Process
from trace_gym.errors import StateError

Status = Literal["ok", "error", "timeout", "memory", "killed", "truncated"]

_FORMAT = "trace_gym/python-state"
_VERSION = 2
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
        reseed: The seed given to the random generators before it, or None where they ran on.
    """

    code: str
    digest: str
    reseed: int | None = None


class Lineage:
    """What all states of one session have in common: the tree that grows from one start."""

    def __init__(self, seed: int, made_with: Mapping[str, str] | None = None) -> None:
        """Start a tree.

        Args:
            seed: Seeds the random generators.
            made_with: For a restored session, the versions with which it was saved.
        """
        self.seed = seed
        self.made_with = made_with
        self.is_closed = False
        self.running: set[Process] = set()  # those in which a cell runs just now


class Node:
    """A point in the tree of a session: how it is reached, and perhaps a process parked there."""

    def __init__(self, lineage: Lineage, parent: Node | None = None, cell: Cell | None = None) -> None:
        """Make the start of a session (no parent, no cell) or what follows after a cell."""
        self.lineage = lineage
        self.parent = parent
        self.cell = cell
        self.depth: int = parent.depth + 1 if parent else 0
        entry = [lineage.seed] if cell is None else [parent.key if parent else "", asdict(cell)]
        self.key: str = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
        self.process: Process | None = None
        self.weight = 0  # bytes that the process needs, by estimate
        self.handles = 0  # State objects
        self.pins = 0  # steps that run from here

    @property
    def stands(self) -> bool:
        """Whether a process is parked here and alive."""
        process = self.process  # read once: another thread may take it away
        return process is not None and process.is_alive

    def path(self) -> list[Node]:
        """Return the nodes from the start of the session to here."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def encode(node: Node, reseed: int | None, made_with: Mapping[str, str]) -> bytes:
    """Write a node, the seed pending for its next cell, and the versions at hand, as JSON."""
    return json.dumps(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "made_with": dict(made_with),
            "seed": node.lineage.seed,
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
        made_with = {str(name): str(version) for name, version in saved["made_with"].items()}
        node = Node(Lineage(int(saved["seed"]), made_with))
        for entry in saved["cells"]:
            cell = Cell(str(entry["code"]), str(entry["digest"]), _seed(entry["reseed"]))
            node = Node(node.lineage, node, cell)
        return node, _seed(saved["reseed"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise StateError(
            f"The data is not a saved Python state ({type(error).__name__}: {error}). "
            "Give load() what State.to_bytes() returned."
        ) from error


def _seed(value: object) -> int | None:
    if value is None or isinstance(value, int):
        return value
    raise ValueError(f"a seed is an integer or null, not {value!r}")


@lru_cache(maxsize=1)
def python_versions() -> Mapping[str, str]:
    """Return the versions of this Python, numpy and sympy, as far as installed."""
    versions = {"python": platform.python_version()}
    for name in ("numpy", "sympy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return MappingProxyType(versions)


def differences(made_with: Mapping[str, str] | None, here: Mapping[str, str]) -> str:
    """Say which versions differ between where a state was saved and here; empty if none do."""
    if made_with is None:
        return ""
    names = [name for name in sorted({*made_with, *here}) if made_with.get(name) != here.get(name)]
    if not names:
        return ""
    then = ", ".join(f"{name} {made_with.get(name, '(none)')}" for name in names)
    now = ", ".join(f"{name} {here.get(name, '(none)')}" for name in names)
    return f" It was saved with {then}; here is {now}."
