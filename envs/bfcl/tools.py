"""The simulators' functions as tools: upstream's documents in the form that chat templates and endpoints take.

``official`` is what upstream gives its models of that form: its own type names turned into those of JSON schema,
floats marked as such, and the ``response`` left in, which is no part of the form. ``compact`` leaves the responses out,
and what every function of a simulator repeats about it: together more than half of the text.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trace_gym.envs.bfcl.backend import load_backend
from trace_gym.envs.bfcl.tasks import BFCLTask
from trace_gym.errors import unknown_name
from trace_gym.tool_text import Signatures, get_signatures

TOOL_DOCS = ("official", "compact")

# Upstream's type names; what is not here becomes a string, as there.
_TYPES = {"integer": "integer", "number": "number", "float": "number", "boolean": "boolean", "bool": "boolean"}
_TYPES |= {"array": "array", "list": "array", "tuple": "array", "dict": "object", "object": "object"}
_FLOAT = " This is a float type value."
_REPEATED = " Tool description: "  # ends what a description says of the whole simulator


@dataclass(frozen=True)
class Offer:
    """The tools on offer in a turn.

    Attributes:
        tool_doc: How they are written.
        names: Their names.
        callable_names: Names that run if called; besides those on offer, the ones that the ground truth calls before
            they are (one task does).
        new: Those that were not on offer in the turn before.
        signatures: Their parameters, in order.
        tools: The tools; shared, not to be changed.
    """

    tool_doc: str
    names: tuple[str, ...]
    callable_names: frozenset[str]
    new: tuple[Mapping[str, Any], ...]
    signatures: Signatures
    tools: tuple[Mapping[str, Any], ...]

    def copy_tools(self) -> list[Any]:
        """Return a copy of the tools, with which one may do what one likes."""
        return list(pickle.loads(_packed(self.names, self.tool_doc)))  # our own bytes; quicker than a deep copy


def get_offer(task: BFCLTask, turn: int, tool_doc: str, with_held_out: bool = False) -> Offer:
    """Return what is on offer in a turn.

    Args:
        task: The task.
        turn: Its turn, from 0.
        tool_doc: One of `TOOL_DOCS`.
        with_held_out: Whether functions run before they are on offer, as they do upstream.
    """
    added = task.missed_functions
    stage = max((start for start in added if start <= turn), default=0) if added else 0
    return _offer(task, stage, tool_doc, with_held_out)


@lru_cache(maxsize=4096)
def _offer(task: BFCLTask, turn: int, tool_doc: str, with_held_out: bool) -> Offer:
    names = task.offered(turn)
    tools = _tools(tool_doc)
    everything = task.offered(len(task.turns))
    before = task.held_out(turn - 1) if turn else frozenset()
    early = everything if with_held_out else (*names, *_called_early(task))
    return Offer(
        tool_doc=tool_doc,
        names=names,
        callable_names=frozenset(early),
        new=tuple(tools[name] for name in names if name in before),
        signatures=_signatures(everything),
        tools=tuple(tools[name] for name in names),
    )


@lru_cache(maxsize=1024)
def _packed(names: tuple[str, ...], tool_doc: str) -> bytes:
    tools = _tools(tool_doc)
    return pickle.dumps([tools[name] for name in names], pickle.HIGHEST_PROTOCOL)


@lru_cache(maxsize=1024)
def _signatures(names: tuple[str, ...]) -> Signatures:
    tools = _tools(TOOL_DOCS[0])
    return get_signatures([tools[name] for name in names])


def _called_early(task: BFCLTask) -> set[str]:
    """Return the functions that the ground truth calls before they are on offer."""
    return {
        name
        for turn, calls in enumerate(task.ground_truth)
        for name in {call.partition("(")[0] for call in calls} & task.held_out(turn)
    }


@lru_cache(maxsize=len(TOOL_DOCS))
def _tools(tool_doc: str) -> Mapping[str, Mapping[str, Any]]:
    """Return every tool by name."""
    return {doc["name"]: to_tool(doc, tool_doc) for docs in load_backend().docs.values() for doc in docs}


def to_tool(doc: Mapping[str, Any], tool_doc: str = "official") -> dict[str, Any]:
    """Return a function's document as a tool in JSON schema.

    Raises:
        BadInputError: If there is no such way to write it.
    """
    if tool_doc not in TOOL_DOCS:
        raise unknown_name("tool_doc", tool_doc, TOOL_DOCS)
    function = copy.deepcopy(dict(doc))
    function["parameters"]["type"] = "object"
    _cast(function["parameters"]["properties"])
    if tool_doc == "compact":
        function.pop("response", None)
        function["description"] = function["description"].partition(_REPEATED)[2] or function["description"]
    return {"type": "function", "function": function}


def _cast(properties: dict[str, Any]) -> None:
    """Turn upstream's type names into those of JSON schema, in place."""
    for value in properties.values():
        if value.get("type") == "float":
            value["format"] = "float"
            value["description"] += _FLOAT
        value["type"] = _TYPES.get(value.get("type", "string"), "string")
        _cast_items(value)


def _cast_items(value: dict[str, Any]) -> None:
    if value["type"] == "object" and "properties" in value:
        _cast(value["properties"])
    elif value["type"] in ("array", "object") and "items" in value:
        items = value["items"]
        items["type"] = _TYPES.get(items["type"], "string")
        if items["type"] == "object" and "properties" in items:
            _cast(items["properties"])
        elif items["type"] == "array" and "items" in items:
            items["items"]["type"] = _TYPES.get(items["items"]["type"], "string")
