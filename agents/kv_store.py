"""Keys and values of prefixes that were read once: a tree over token ids, bounded in bytes.

A node holds what its token ids add to its parent's, so that a prefix shared by many branches is kept once and a fork
costs nothing. A lookup copies nothing; it returns the pieces of the longest known prefix.

The content depends on the calls alone, never on a clock: the least recently used leaves go first, and a group (a
rollout tree) that is released takes along what no other group has used. The form is that of SGLang's radix cache
(arXiv 2312.07104, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

Ids = tuple[int, ...]


class _Node:
    """Keys and values, [parts, heads, tokens, dim], of the token ids between a parent and this node."""

    __slots__ = ("children", "groups", "ids", "kv", "parent", "used")

    def __init__(self, ids: Ids, kv: torch.Tensor, parent: _Node | None) -> None:
        self.ids = ids
        self.kv = kv
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.groups: set[int] = set()
        self.used = 0


class PrefixStore:
    """Keeps keys and values by the token ids that they belong to.

    Args:
        limit: Most bytes to keep.

    Attributes:
        bytes: What is kept now.
    """

    def __init__(self, limit: int) -> None:
        """Start empty."""
        self.limit = limit
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._root = _Node((), torch.empty(0), None)
        self._clock = 0
        self.bytes = 0

    def find(self, ids: Ids, group: int) -> tuple[int, list[torch.Tensor]]:
        """Return how many leading ids are known, and their keys and values in pieces, [parts, heads, n, dim]."""
        pieces: list[torch.Tensor] = []
        known = 0
        for node, count in self._walk(ids, group):
            pieces.append(node.kv if count == len(node.ids) else node.kv[:, :, :count])
            known += count
        return known, pieces

    def add(self, ids: Ids, kv: torch.Tensor, group: int) -> None:
        """Keep keys and values of the last ids; they are copied.

        Args:
            ids: A prefix. If what stands before those last ids is not known any more, nothing is kept.
            kv: Of its last n ids, [parts, heads, n, dim].
            group: Who uses it.
        """
        first = len(ids) - kv.shape[2]
        parent, known = self._root, 0
        for node, count in self._walk(ids, group):
            parent = node if count == len(node.ids) else self._split(node, count)
            known += count
        if first <= known < len(ids):
            child = _Node(ids[known:], kv[:, :, known - first :].clone(), parent)
            child.groups, child.used = {group}, self._clock
            parent.children[child.ids[0]] = child
            self.bytes += _size(child)
            self._evict()

    def release(self, group: int) -> None:
        """Say that a group needs nothing any more."""
        for node in list(self._nodes()):
            node.groups.discard(group)
        for node in list(self._nodes()):
            if not node.groups and not node.children:
                self._remove(node)

    def _walk(self, ids: Ids, group: int) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes along the ids, and how many of the node's own ids are the same."""
        self._clock += 1
        node, known = self._root, 0
        while known < len(ids) and (child := node.children.get(ids[known])) is not None:
            count = num_common(child.ids, ids[known : known + len(child.ids)])
            child.groups.add(group)
            child.used = self._clock
            is_whole = count == len(child.ids)
            yield child, count
            if not is_whole:
                return
            node, known = child, known + count

    def _split(self, node: _Node, count: int) -> _Node:
        """Cut a node after some of its ids; return the new upper part."""
        assert node.parent is not None
        upper = _Node(node.ids[:count], node.kv[:, :, :count].clone(), node.parent)
        upper.groups, upper.used = set(node.groups), node.used
        node.parent.children[upper.ids[0]] = upper
        node.ids, node.kv, node.parent = node.ids[count:], node.kv[:, :, count:].clone(), upper
        upper.children[node.ids[0]] = node
        return upper

    def _nodes(self) -> Iterator[_Node]:
        """Yield all nodes, children before their parents."""
        stack, order = list(self._root.children.values()), []
        while stack:
            order.append(node := stack.pop())
            stack += node.children.values()
        return reversed(order)

    def _evict(self) -> None:
        """Drop leaves until there is some room again."""
        while self.bytes > self.limit:
            leaves = sorted((node for node in self._nodes() if not node.children), key=lambda node: node.used)
            for leaf in leaves:
                if self.bytes <= 0.9 * self.limit:
                    break
                self._remove(leaf)

    def _remove(self, leaf: _Node) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[leaf.ids[0]]
        self.bytes -= _size(leaf)


def _size(node: _Node) -> int:
    return node.kv.numel() * node.kv.element_size()


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading items are equal."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
