"""Rollout trees to look at: one self-contained HTML file, and plain text for the terminal.

The page answers one question first: where did the outcome flip, and why was the tree branched
there? It opens on the most telling tree, with the two sides of a flip next to each other.

Text in a tree was written by a model and is hostile. In the page it travels as escaped JSON, is
shown through ``textContent`` only, and a content security policy allows the page's own script and
style, by hash, and nothing else: no network. In the terminal, control characters are replaced.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trace_gym.errors import BadInputError
from trace_gym.tree import NO_PARENT, ROOT, Node, RolloutTree

_SLOT = re.compile(r"\{\{(policy|title|data)\}\}")
_TAGS = re.compile(r"</?(?:think|tool_call)>")
_SUMMARY_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Flip:
    """A continuation that ended with another outcome than the rollout it was started from.

    Attributes:
        anchor: Node from which the continuation was started.
        kept: Leaf of the rollout that went through the anchor first.
        other: Leaf of the continuation.
    """

    anchor: int
    kept: int
    other: int


def flips(tree: RolloutTree) -> list[Flip]:
    """Return the flips of a tree.

    Those that set a wrong rollout right come first, among them those after a later turn than the
    first.
    """
    children = tree.children()
    found = []
    for leaf in tree.leaves():
        anchor = tree.nodes[leaf].birth
        if anchor == ROOT:
            continue
        kept = _own_leaf(tree, children, anchor)
        before, after = tree.nodes[kept].reward, tree.nodes[leaf].reward
        if before is not None and after is not None and before != after:
            rank = (before > after, tree.nodes[anchor].parent == ROOT, leaf)
            found.append((rank, Flip(anchor, kept, leaf)))
    return [flip for _, flip in sorted(found, key=lambda item: item[0])]


def most_telling(trees: Iterable[RolloutTree]) -> RolloutTree:
    """Return the tree that shows best what branching is good for.

    Wanted, in this order: a flip at a continuation, both outcomes, a flip after the first turn,
    several turns, few nodes. Among equals the first.

    Raises:
        BadInputError: If there is no tree.
    """
    found = max(trees, key=_telling, default=None)
    if found is None:
        raise BadInputError("There is no tree to choose from; give at least one.")
    return found


def write_html(trees: Iterable[RolloutTree], path: str | Path, title: str = "Rollout trees") -> None:
    """Write one HTML file that shows trees without a server and without a network.

    Args:
        trees: What to show, in the order of the picker; the page opens on the most telling one.
        path: The file to write.
        title: Heading of the page.

    Raises:
        BadInputError: If there is no tree.
    """
    shown = list(trees)
    start = shown.index(most_telling(shown))
    data = {"start": start, "trees": [_tree_data(tree) for tree in shown]}
    # Inside <script> only "<" can end the element; the other escapes keep the text inert anywhere
    # else, too.
    text = json.dumps(data, separators=(",", ":"))
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    template = resources.files("trace_gym.assets").joinpath("viewer.html").read_text(encoding="utf-8")
    heading = html.escape(title).encode("utf-8", "replace").decode()
    slots = {"policy": _policy(template), "title": heading, "data": text}
    page = _SLOT.sub(lambda slot: slots[slot[1]], template)
    Path(path).write_text(page, encoding="utf-8", newline="\n")


def print_tree(tree: RolloutTree) -> str:
    """Return a tree as plain text, one turn a line.

    A branch is a block at one indentation; continuations stand right below their anchor, one step
    further in.
    """
    shape = _shape(tree)
    kinds = Counter(_kind(tree.nodes[leaf]) for leaf in tree.leaves())
    found = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"
    lines = [
        f"{_plain(tree.task_id)}  ({_plain(tree.env_id)}, step {tree.step})",
        f"{len(tree.leaves())} leaves: {found}; flips: {len(flips(tree))}",
        _line(tree, ROOT, 0, shape),
    ]

    def branch(first: int, turn: int, indent: str, last: bool) -> Iterator[str]:
        lead, follow = ("└─ ", "   ") if last else ("├─ ", "│  ")
        index: int | None = first
        while index is not None:
            yield indent + lead + _line(tree, index, turn, shape)
            lead = follow
            own = _own_child(tree, shape.children, index)
            started = [child for child in shape.children[index] if child != own]
            for child in started:
                yield from branch(child, turn + 1, indent + follow, child == started[-1] and own is None)
            index, turn = own, turn + 1

    for child in shape.children[ROOT]:
        lines.extend(branch(child, 1, "", child == shape.children[ROOT][-1]))
    return "\n".join(lines)


# What both views show.


@dataclass(frozen=True, slots=True)
class _Shape:
    """Of each node: children, leaves below, those of them with a reward, their mean reward."""

    children: list[list[int]]
    leaves: NDArray[np.int64]
    scored: NDArray[np.int64]
    means: NDArray[np.float64]


def _shape(tree: RolloutTree) -> _Shape:
    returns = tree.returns()
    scored = (~np.isnan(returns)).astype(np.int64)
    total = np.nan_to_num(returns)
    leaves = np.array([node.status != "open" for node in tree.nodes], dtype=np.int64)
    for index in range(len(tree) - 1, ROOT, -1):
        for column in (scored, total, leaves):
            column[tree.nodes[index].parent] += column[index]
    means = np.where(scored > 0, total / np.maximum(scored, 1), np.nan)
    return _Shape(tree.children(), leaves, scored, means)


def _own_child(tree: RolloutTree, children: Sequence[Sequence[int]], index: int) -> int | None:
    """Return the next node of the same branch; the prompt belongs to no branch."""
    if index == ROOT:
        return None
    birth = tree.nodes[index].birth
    return next((child for child in children[index] if tree.nodes[child].birth == birth), None)


def _own_leaf(tree: RolloutTree, children: Sequence[Sequence[int]], index: int) -> int:
    while (child := _own_child(tree, children, index)) is not None:
        index = child
    return index


def _kind(node: Node) -> str:
    """Return how an episode ended, in one word."""
    if node.status in ("open", "failed"):
        return node.status
    if (node.outcome or {}).get("verdict") == "ungradable":
        return "ungradable"
    if node.reward is not None and node.reward > 0.5:
        return "correct"
    return "truncated" if node.status == "truncated" else "wrong"


def _telling(tree: RolloutTree) -> tuple[bool, bool, bool, int, int]:
    found = flips(tree)
    late = any(tree.nodes[flip.anchor].parent != ROOT for flip in found)
    turns = max((len(tree.path(leaf)) - 1 for leaf in tree.leaves()), default=0)
    return bool(found), tree.is_mixed(), late, min(turns, 4), -len(tree)


# The page.


def _tree_data(tree: RolloutTree) -> dict[str, Any]:
    shape = _shape(tree)
    return {
        "env_id": tree.env_id,
        "task_id": tree.task_id,
        "step": tree.step,
        "flips": [asdict(flip) for flip in flips(tree)],
        "nodes": [
            {
                **_node_data(node),
                "advantage": _number(tree.advantages.get(index)),
                "mean": _number(float(shape.means[index])),
                "leaves": int(shape.leaves[index]),
            }
            for index, node in enumerate(tree.nodes)
        ],
    }


def _node_data(node: Node) -> dict[str, Any]:
    """Return what the page needs of a node; only sampled tokens have a logprob worth showing."""
    sampled = [i for i, flag in enumerate(node.sampled) if flag]
    return {
        "parent": node.parent,
        "birth": node.birth,
        "messages": [message.to_dict() for message in node.messages],
        "kind": _kind(node),
        "reward": _number(node.reward),
        "value": _number(node.value),
        "reason": node.failure.reason if node.failure else (node.outcome or {}).get("reason"),
        "failure": node.failure.kind if node.failure else None,
        "generated": node.num_generated,
        "calls": node.num_tool_calls,
        "errors": node.num_tool_errors,
        "ids": [int(node.token_ids[i]) for i in sampled],
        "logprobs": [_number(node.logprobs[i]) for i in sampled],
        "context": len(node.token_ids) - len(sampled),
    }


def _number(value: float | None) -> float | None:
    """Return a number for JSON, which knows no NaN and no infinity."""
    return None if value is None or not math.isfinite(value) else round(float(value), 4)


def _policy(template: str) -> str:
    """Return a content security policy that allows exactly the template's own script and style."""

    def digest(tag: str) -> str:
        found = re.search(f"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
        if found is None:
            raise BadInputError(f"The template of the viewer has no <{tag}> element.")
        return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; "
        f"style-src 'sha256-{digest('style')}'; base-uri 'none'; form-action 'none'"
    )


# The terminal.


def _line(tree: RolloutTree, index: int, turn: int, shape: _Shape) -> str:
    node = tree.nodes[index]
    parts = [f"{index} turn {turn}" if node.parent != NO_PARENT else "prompt"]
    if node.status != "open":
        reward = "" if node.reward is None else f" {node.reward:g}"
        parts.append(f"[{_kind(node)}{reward}]")
    elif shape.scored[index]:
        parts.append(f"mean {shape.means[index]:.2f} of {shape.scored[index]}")
    if node.value is not None:
        parts.append(f"v {node.value:.2f}")
    if index in tree.advantages:
        parts.append(f"adv {tree.advantages[index]:+.2f}")
    born = sum(tree.nodes[child].birth == index for child in shape.children[index])
    if born and index != ROOT:
        parts.append(f"anchor of {born}")
    if node.failure is not None:
        parts.append(_plain(node.failure.kind))
    said = [m.content for m in node.messages if m.role == "assistant"] or [m.content for m in node.messages[-1:]]
    return "  ".join([*parts, *map(_plain, said[:1])]).rstrip()


def _plain(text: str) -> str:
    """Return text without markup tags, line breaks and control characters, cut to one line."""
    text = _TAGS.sub(" ", text[:1000])
    shown = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return shown if len(shown) <= _SUMMARY_WIDTH else shown[: _SUMMARY_WIDTH - 1] + "…"
