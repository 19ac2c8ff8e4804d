"""Unification of the axes of values that are the same index: union-find over axes, with axes that split into products.

A *variable* represents an axis of a value; unified variables are one index. Two variables that occur in the same value are
never unified. A reshape splits a variable into factors, outermost first, and every value with the variable has the factors from
then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Variables = list[int]


class AxisTable:
    """Variables with their extents, unions and splits. All operations are amortised near-linear."""

    def __init__(self) -> None:
        self.extent: list[int] = []
        self._parent: list[int] = []
        self._parts: dict[int, tuple[int, int]] = {}
        self._owners: list[set[int]] = []
        self._apart: list[tuple[int, int]] = []

    def fresh(self, extent: int) -> Variables:
        """Return a new axis: no variable if its extent is one, else one variable."""
        if extent == 1:
            return []
        self.extent.append(extent)
        self._parent.append(len(self._parent))
        self._owners.append(set())
        return [len(self._parent) - 1]

    def own(self, owner: int, axes: Iterable[Variables]) -> None:
        """Declare that these axes occur together in one value, so that no two of them may be unified."""
        for axis in axes:
            for leaf in self.leaves(axis):
                self._owners[leaf].add(owner)

    def leaves(self, axis: Sequence[int]) -> tuple[int, ...]:
        """Return the indices whose product is an axis, outermost first."""
        for v in axis:
            if self._parent[v] != v or v in self._parts:
                break
        else:
            return tuple(axis)
        out: list[int] = []
        stack = list(axis)[::-1]
        while stack:
            root = self._find(stack.pop())
            if root in self._parts:
                stack.extend(self._parts[root][::-1])
            else:
                out.append(root)
        return tuple(out)

    def unify(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Unify two products of axes with equally many elements, as far as this is allowed."""
        if a != b:
            self._align(a, b, merge=True)

    def settle(self) -> None:
        """Split axes that could not be unified into the same factors, so that reading one as the other is a renaming."""
        changed = True
        while changed:
            before = len(self.extent)
            for a, b in self._apart:
                self._align([a], [b], merge=False)
            changed = len(self.extent) != before

    # unions and splits

    def _find(self, v: int) -> int:
        root = v
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[v] != root:
            self._parent[v], v = root, self._parent[v]
        return root

    def _merge(self, a: int, b: int) -> None:
        """Unify two indices unless a value has both; the one with more owners keeps its name."""
        a, b = self._find(a), self._find(b)
        if a == b:
            return
        if len(self._owners[a]) < len(self._owners[b]):
            a, b = b, a
        if not self._owners[b].isdisjoint(self._owners[a]):
            self._apart.append((a, b))
            return
        self._parent[b] = a
        self._owners[a] |= self._owners[b]
        self._owners[b] = set()

    def _split(self, v: int, outer: int) -> tuple[int, int]:
        """Split an index into the product of two, the outer of which has extent ``outer``."""
        (first,), (second,) = self.fresh(outer), self.fresh(self.extent[v] // outer)
        self._owners[first] = set(self._owners[v])
        self._owners[second] = self._owners[v]
        self._parts[v] = (first, second)
        return first, second

    def _align(self, a: Sequence[int], b: Sequence[int], merge: bool) -> None:
        """Align two products segment by segment from the outermost factor, splitting factors and, with ``merge``, unifying them."""
        first, second = self.leaves(a), self.leaves(b)
        if first == second:
            return
        left, right = list(first[::-1]), list(second[::-1])
        for outer_left, outer_right in _segments([self.extent[v] for v in first], [self.extent[v] for v in second]):
            part_left, part_right = left[-outer_left:], right[-outer_right:]
            del left[-outer_left:], right[-outer_right:]
            if _divisible([self.extent[v] for v in part_left], [self.extent[v] for v in part_right]):
                self._align_segment(part_left, part_right, merge)

    def _align_segment(self, left: list[int], right: list[int], merge: bool) -> None:
        """Align two segments, which are stacks of factors with the outermost on top and have a common refinement."""
        while left and right:
            x, y = self._top(left), self._top(right)
            p, q = self.extent[x], self.extent[y]
            if p != q and p % q and q % p:  # a split made meanwhile changed the factors
                return
            if p > q:
                left[-1:] = self._split(x, q)[::-1]
            elif q > p:
                right[-1:] = self._split(y, p)[::-1]
            else:
                left.pop(), right.pop()
                if merge:
                    self._merge(x, y)

    def _top(self, stack: list[int]) -> int:
        """Return the outermost index of a stack, which may have been split since it was pushed."""
        stack.extend(self.leaves([stack.pop()])[::-1])
        return stack[-1]


def _segments(a: Sequence[int], b: Sequence[int]) -> list[tuple[int, int]]:
    """Divide two lists of factors into the shortest segments with equal products, and return the lengths of each pair of segments."""
    pieces: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start_i, start_j, p, q = i, j, a[i], b[j]
        i, j = i + 1, j + 1
        while p != q:
            if p < q and i < len(a):
                p, i = p * a[i], i + 1
            elif q < p and j < len(b):
                q, j = q * b[j], j + 1
            else:
                return pieces
        pieces.append((i - start_i, j - start_j))
    return pieces


def _divisible(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two stacks of factors with the same product, the outermost on top, have a common refinement."""
    if 0 in a or 0 in b:
        return a == b
    left, right = list(a), list(b)
    while left and right:
        p, q = left.pop(), right.pop()
        if p > q:
            if p % q:
                return False
            left.append(p // q)
        elif q > p:
            if q % p:
                return False
            right.append(q // p)
    return not left and not right


# --- names and order --------------------------------------------------------------------------------

_LETTERS = "ijklmnopqrstuvwxyzabcdefgh"


def index_names(count: int) -> list[str]:
    """Return the names ``i, j, k ... h, i2, j2 ...`` of ``count`` indices."""
    return [_LETTERS[n % 26] + (str(n // 26 + 1) if n >= 26 else "") for n in range(count)]


def index_order(indices: Sequence[int], *layouts: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """Order indices such that outer axes precede inner ones, with priority to large arrays.

    Args:
        indices: the indices; ties keep this order.
        layouts: for each array, its bytes and its indices from the outermost axis to the innermost. Layouts are satisfied in
            descending order of their total bytes, each as far as the earlier ones allow; those of one list before those of the next.
    """
    before = dict.fromkeys(indices, 0)
    after = dict.fromkeys(indices, 0)
    bit = {v: 1 << k for k, v in enumerate(indices)}
    for group in layouts:
        weight: dict[tuple[int, ...], int] = {}
        for size, chain in group:
            key = tuple(chain)
            if len(key) > 1:
                weight[key] = weight.get(key, 0) + size
        for chain in sorted(weight, key=lambda c: -weight[c]):
            for k, u in enumerate(chain):
                for v in chain[k + 1 :]:
                    if not (before[v] & bit[u] or after[v] & bit[u]):
                        _precede(u, v, before, after, bit, indices)
    first = {v: k for k, v in enumerate(indices)}
    return sorted(indices, key=lambda v: (before[v].bit_count(), first[v]))


def _precede(u: int, v: int, before: dict[int, int], after: dict[int, int], bit: dict[int, int], indices: Sequence[int]) -> None:
    """Record that ``u`` precedes ``v``, and keep both relations transitive."""
    sources, targets = before[u] | bit[u], after[v] | bit[v]
    for w in _members(targets, indices):
        before[w] |= sources
    for w in _members(sources, indices):
        after[w] |= targets


def _members(mask: int, indices: Sequence[int]) -> list[int]:
    out = []
    while mask:
        low = mask & -mask
        out.append(indices[low.bit_length() - 1])
        mask ^= low
    return out
