"""The cheapest arcs of a network without which no way leads from its source to its sink.

Source of the algorithm: E. A. Dinic, Algorithm for solution of a problem of maximum flow in networks with power estimation, 1970. That of
SciPy counts in 32 bits, in which parts of a byte do not fit (1.17 returns a flow of 0 for capacities of 2^40), and takes 0.3 s to import.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def sink_side(arcs: Iterable[tuple[Node, Node, int]], source: Node, sink: Node) -> set[Node]:
    """The nodes on the side of the sink where the arcs from the other side cost least together; of several such sides the smallest.

    Each arc leads from its first node to its second and has a price that is not negative.

    >>> sorted(sink_side([("s", "a", 3), ("a", "b", 2), ("b", "t", 2)], "s", "t"))
    ['t']
    """
    network = _Network[Node]()
    for begin, end, price in arcs:
        network.add(begin, end, price)
    while source in (distance := network.distances(sink)):
        network.fill(distance, source, sink)
    return set(distance)


class _Network(dict[Node, dict[Node, int]]):
    """The amounts that may still flow from each node to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.into: defaultdict[Node, set[Node]] = defaultdict(set)

    def add(self, begin: Node, end: Node, capacity: int) -> None:
        """Add an arc, over which nothing flows so far."""
        self.setdefault(begin, {})[end] = self.get(begin, {}).get(end, 0) + capacity
        self.setdefault(end, {}).setdefault(begin, 0)
        self.into[end].add(begin)
        self.into[begin].add(end)

    def distances(self, sink: Node) -> dict[Node, int]:
        """The number of arcs on the shortest way to the sink, for the nodes that have one."""
        found, waiting = {sink: 0}, deque([sink])
        while waiting:
            end = waiting.popleft()
            for begin in self.into[end]:
                if begin not in found and self[begin][end] > 0:
                    found[begin] = found[end] + 1
                    waiting.append(begin)
        return found

    def fill(self, distance: dict[Node, int], source: Node, sink: Node) -> None:
        """Let as much flow over shortest ways as they have room for."""
        ahead = {begin: [end for end in self[begin] if distance.get(end, -1) == distance[begin] - 1] for begin in distance}
        way = [source]
        while way:
            here = way[-1]
            if here == sink:
                steps = [*pairwise(way)]
                amount = min(self[begin][end] for begin, end in steps)
                for begin, end in steps:
                    self[begin][end] -= amount
                    self[end][begin] += amount
                full = next(k for k, (begin, end) in enumerate(steps) if not self[begin][end])
                del way[full + 1 :]
            elif ahead[here] and self[here][ahead[here][-1]] > 0:
                way.append(ahead[here][-1])
            elif ahead[here]:
                ahead[here].pop()
            else:
                way.pop()
                if way:
                    ahead[way[-1]].pop()
