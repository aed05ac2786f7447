"""Which states have a process: handles, pins, and the cap on processes."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from trace_gym.envs.math.python_tool.history import Node
from trace_gym.envs.math.python_tool.sandbox import Process


class LiveSet:
    """The parked processes of a tool, least recently used first.

    A process stands as long as its node has a handle or a pin; beyond the cap the least recently
    used without a pin are ended, to be rebuilt when needed.
    """

    def __init__(self, cap: int) -> None:
        """Keep at most `cap` processes, besides those that are pinned."""
        self._cap = cap
        self._lock = threading.Lock()
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        self._unheld: deque[Node] = deque()  # let go of, and not yet counted

    def __len__(self) -> int:
        """Return the number of parked processes."""
        return len(self._nodes)

    def hold(self, node: Node) -> None:
        """Count one handle more."""
        with self._lock:
            node.handles += 1

    def let_go(self, node: Node) -> None:
        """Count one handle less. The garbage collector calls this anywhere, so it never waits."""
        self._unheld.append(node)
        self.sweep(blocking=False)

    def sweep(self, blocking: bool = True) -> None:
        """End the processes of states that nobody holds."""
        if not self._unheld or not self._lock.acquire(blocking=blocking):
            return
        try:
            while self._unheld:
                node = self._unheld.popleft()
                node.handles -= 1
                self._end_if_unused(node)
        finally:
            self._lock.release()

    @contextmanager
    def pinned(self, node: Node) -> Iterator[None]:
        """Keep the node's process from being evicted or ended meanwhile."""
        with self._lock:
            node.pins += 1
        try:
            yield
        finally:
            with self._lock:
                node.pins -= 1
                self._end_if_unused(node)
            self.sweep()

    def park(self, node: Node, process: Process) -> None:
        """Give the node its process; beyond the cap the least recently used lose theirs."""
        with self._lock:
            node.process = process
            self._nodes[node] = None
            self._nodes.move_to_end(node)
            self._evict(len(self._nodes) - self._cap, node)

    def touch(self, node: Node) -> None:
        """Note that the node was used."""
        with self._lock:
            if node in self._nodes:
                self._nodes.move_to_end(node)

    def halve(self, keep: Node) -> None:
        """End the processes of half of the states, where the system allows no more of them."""
        with self._lock:
            self._evict(len(self._nodes) // 2, keep)

    def clear(self) -> None:
        """End all processes."""
        with self._lock:
            nodes = list(self._nodes)
            self._nodes.clear()
        for node in nodes:
            process, node.process = node.process, None
            if process is not None:
                process.kill()

    def reset_after_fork(self) -> None:
        """In a forked copy of the driver: drop what threads that are not in this copy held."""
        self._lock = threading.Lock()
        for node in self._nodes:
            node.pins = 0

    def _end_if_unused(self, node: Node) -> None:
        if node.handles or node.pins or node.process is None:
            return
        node.process.kill()
        node.process = None
        self._nodes.pop(node, None)

    def _evict(self, count: int, keep: Node) -> None:
        idle = [node for node in self._nodes if not node.pins and node is not keep]
        for node in idle[: max(0, count)]:
            if node.process is not None:
                node.process.kill()
            node.process = None
            del self._nodes[node]
