"""State of the simulators as data.

A state is a graph, not a tree: a copied directory shares its files with the original, a moved one leaves its children's
parent behind, a directory can contain itself. The codec writes nodes in the order of the first visit and refers to them
by number, with a stack of its own, so that identity, order of keys, the difference of 1 and 1.0 and any depth survive.
Reading a graph builds instances of the simulators' classes without calling any of their code.

In the graph ``{"root": value, "nodes": [...]}`` a value is a JSON scalar, ``[number]`` (a node) or ``["inf"]`` and its
kin. A node is ``["list", values]``, ``["set", values]``, ``["dict", keys and values by turns]``,
``["dice", [seed, words]]`` or ``[class, attributes and values by turns]``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from trace_gym.envs.bfcl.stand_ins import MAX_WORDS, Dice
from trace_gym.errors import StateError

_SCALARS = (bool, int, float, str)
_NON_FINITE = ("inf", "-inf", "nan")
_CONTAINERS: Mapping[str, type] = MappingProxyType({"list": list, "set": set, "dict": dict})


def to_graph(root: Any, classes: Mapping[str, type]) -> dict[str, Any]:
    """Return a value as JSON-like data.

    Args:
        root: A value of JSON types, sets, dice and instances of the classes.
        classes: Classes by name.

    Raises:
        StateError: If it holds anything else.
    """
    names = {class_: name for name, class_ in classes.items()}
    numbers: dict[int, int] = {}
    seen: list[Any] = []  # keeps what is numbered alive

    def value(item: Any) -> Any:
        if item is None or type(item) in _SCALARS:
            return [repr(item)] if type(item) is float and not math.isfinite(item) else item
        number = numbers.get(id(item))
        if number is None:
            number = numbers[id(item)] = len(seen)
            seen.append(item)
        return [number]

    def node(item: Any) -> list[Any]:
        kind = type(item)
        if kind is dict:
            return ["dict", [value(part) for part in chain.from_iterable(item.items())]]
        if kind is list:
            return ["list", [value(part) for part in item]]
        if kind is set:
            return ["set", [value(part) for part in sorted(item, key=repr)]]
        if kind is Dice:
            return ["dice", [item.seed, item.words]]
        if kind in names:
            return [names[kind], [value(part) for part in chain.from_iterable(vars(item).items())]]
        raise StateError(f"The state holds a {kind.__name__}, which is not data.")

    start = value(root)
    nodes: list[list[Any]] = []
    while len(nodes) < len(seen):
        nodes.append(node(seen[len(nodes)]))
    return {"root": start, "nodes": nodes}


def from_graph(graph: Any, classes: Mapping[str, type]) -> Any:
    """Return the value that `to_graph` wrote down, from data of any origin.

    Raises:
        StateError: If the data is no such graph.
    """
    try:
        nodes = [list(node) for node in graph["nodes"]]
        made = [_empty(node, classes) for node in nodes]

        def value(item: Any) -> Any:
            if item is None or type(item) in _SCALARS:
                return item
            (part,) = item
            if isinstance(part, str) and part in _NON_FINITE:
                return float(part)
            if type(part) is not int or part < 0:
                raise ValueError(f"{part!r} is no reference")
            return made[part]

        for item, (_, content) in zip(made, nodes, strict=True):
            if not isinstance(item, Dice):
                _fill(item, (value(part) for part in content))
        return value(graph["root"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise StateError(f"These are not the simulators' data: {error!r}.") from error


def digest(graph: Mapping[str, Any]) -> str:
    """Return a hash of a graph: equal for states that no call can tell apart."""
    text = json.dumps(graph, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _empty(node: list[Any], classes: Mapping[str, type]) -> Any:
    """Return a node's value, still without what it holds."""
    kind, content = node
    if kind == "dice":
        seed, words = content
        if type(seed) is not int or type(words) is not int or not 0 <= words <= MAX_WORDS:
            raise ValueError(f"dice have a seed and a number of words, not {content!r}")
        return Dice(seed, words)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]()
    return object.__new__(classes[kind])


def _fill(item: Any, values: Iterator[Any]) -> None:
    if isinstance(item, list):
        item.extend(values)
    elif isinstance(item, set):
        item.update(values)
    else:
        fields = item if isinstance(item, dict) else vars(item)
        fields.update(zip(values, values, strict=True))
