"""Which states have a process: handles, pins, and the caps on number and memory of processes."""

from __future__ import annotations

import heapq
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trace_gym.envs.math.python_tool.backend import Process
from trace_gym.envs.math.python_tool.history import Lineage, Node
from trace_gym.envs.math.python_tool.memory import Gauge

_WEIGHED_AGAIN = 8  # the heaviest, once the budget is exceeded, and every so many steps


class LiveSet:
    """The parked processes of a tool, least recently used first.

    A process stands as long as its node has a handle or a pin; beyond the caps the least recently
    used without a pin are ended, to be rebuilt when needed.
    """

    def __init__(self, cap: int, budget: int, gauge: Gauge) -> None:
        """Keep at most `cap` processes of together `budget` bytes, besides those that are pinned."""
        self._cap = cap
        self._budget = budget
        self._gauge = gauge
        self._lock = threading.Lock()
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        self._weight = 0
        self._parked = 0
        self._next_weighing = 0
        self._unheld: deque[Node] = deque()  # let go of, and not yet counted

    def __len__(self) -> int:
        """Return the number of parked processes."""
        return len(self._nodes)

    @property
    def weight(self) -> int:
        """Bytes that the parked processes need, by estimate."""
        return self._weight

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
            ended = []
            while self._unheld:
                node = self._unheld.popleft()
                node.handles -= 1
                ended += self._remove_if_unused(node)
        finally:
            self._lock.release()
        _kill(ended)

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
                ended = self._remove_if_unused(node)
            _kill(ended)
            self.sweep()

    def park(self, node: Node, process: Process) -> None:
        """Give the node its process; beyond the caps the least recently used lose theirs."""
        weight = self._gauge.weigh(process)
        with self._lock:
            ended = self._remove(node)  # another thread was faster, if there is one
            node.process, node.weight = process, weight
            self._nodes[node] = None
            self._weight += weight
            excess = len(self._nodes) - self._cap
            if excess > 0:
                ended += self._evict(lambda count: count < excess, node)
            self._parked += 1
            if self._weight > self._budget and self._parked >= self._next_weighing:
                self._weigh_again()
            if self._weight > self._budget:
                ended += self._evict(lambda _: self._weight > self._budget, node)
        _kill(ended)

    def take(self, node: Node) -> Process | None:
        """Take the node's process away for the caller; None if there is none that lives."""
        with self._lock:
            taken = self._remove(node)
        if taken and not taken[0].is_alive:
            _kill(taken)
            return None
        return taken[0] if taken else None

    def touch(self, node: Node) -> None:
        """Note that the node was used."""
        with self._lock:
            if node in self._nodes:
                self._nodes.move_to_end(node)

    def halve(self, keep: Node) -> None:
        """End the processes of half of the states, where the system allows no more of them."""
        with self._lock:
            half = len(self._nodes) // 2
            ended = self._evict(lambda count: count < half, keep)
        _kill(ended)

    def end(self, lineage: Lineage | None = None) -> None:
        """End the processes of one tree, or all."""
        with self._lock:
            nodes = [node for node in self._nodes if lineage in (None, node.lineage)]
            ended = [process for node in nodes for process in self._remove(node)]
        _kill(ended)

    def reset_after_fork(self) -> None:
        """In a forked copy of the driver: drop what threads that are not in this copy held."""
        self._lock = threading.Lock()
        for node in self._nodes:
            node.pins = 0

    # With the lock held. Processes are returned rather than killed, as killing may take a while.

    def _remove(self, node: Node) -> list[Process]:
        process, node.process = node.process, None
        if process is None:
            return []
        self._weight -= node.weight
        self._nodes.pop(node, None)
        return [process]

    def _remove_if_unused(self, node: Node) -> list[Process]:
        return [] if node.handles or node.pins else self._remove(node)

    def _evict(self, goes_on: Callable[[int], bool], keep: Node) -> list[Process]:
        """Take the processes of idle nodes, least recently used first, as long as `goes_on(count)`."""
        ended: list[Process] = []
        for node in [node for node in self._nodes if not node.pins and node is not keep]:
            if not goes_on(len(ended)):
                break
            ended += self._remove(node)
        return ended

    def _weigh_again(self) -> None:
        """Correct the weights of the heaviest, as those they shared with may have come or gone."""
        self._next_weighing = self._parked + _WEIGHED_AGAIN
        for node in heapq.nlargest(_WEIGHED_AGAIN, self._nodes, key=lambda node: node.weight):
            weight = self._gauge.weigh_again(node.process)
            self._weight += weight - node.weight
            node.weight = weight


def _kill(processes: list[Process]) -> None:
    for process in processes:
        process.kill()
