"""Kernels that XLA:GPU makes one of: all their results are there at once, and what any of them reads.

A pass of XLA (``multi_output_fusion``) joins elementwise ones that read the same array, be it a vector, and do not need one another, and
one with another that reads its result, unless that is folded in the kernel that writes it, or the first result by another kernel. Another
pass (``dot_merger``) joins products of one matrix with several, side by side, that do not need one another: their results are one array.
The kernel runs where the last of them could.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from eqsat_mem.backends.gpu import habits
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Dot, Fold, Map, Program, mask_of
from eqsat_mem.ir.loop_tree import Step, made
from eqsat_mem.schedule.fusion import Fused


def joined(program: Program, kernels: Fused, is_whole: bool) -> Fused:
    """The kernels of a region, ``is_whole`` unless it is in a loop, in an order in which those that are one stand side by side."""
    maker = {t: k for k, step in enumerate(kernels.kept) for t in made(step)}
    waits = [{maker[t] for t in operands if t in maker} for operands in kernels.operands]
    groups = _Groups(waits)
    for one, other in _alike(program, kernels, is_whole):
        groups.join(one, other)
    for one, other in _in_turn(program, kernels, maker):
        groups.join(one, other, in_turn=True)
    for one, other in _of_one_matrix(program, kernels, is_whole):
        groups.join(one, other)
    if not groups.are_joined:
        return kernels
    order, read = groups.order(), list(kernels.operands)
    arrays: list[frozenset[int]] = []
    for together in groups.several():
        results = [step for k in together if isinstance(step := kernels.kept[k], int)]
        if isinstance(program.terms[results[0]], Dot):
            arrays.append(frozenset(results))
        inside = {kernels.kept[k] for k in together}
        everything = frozenset().union(*(read[k] for k in together)).difference(inside)
        for k in together:
            read[k] = everything if k == together[-1] else frozenset()
    return replace(
        kernels,
        kept=tuple(kernels.kept[k] for k in order),
        operands=tuple(read[k] for k in order),
        members=tuple(kernels.members[k] for k in order),
        arrays=tuple(arrays),
    )


def _alike(program: Program, kernels: Fused, is_whole: bool) -> Iterator[tuple[int, int]]:
    """Pairs of elementwise kernels of one size that read the same array, of any size but a single number. In loops, where sizes depend on
    chunks, they have the same indices."""
    readers: dict[tuple[int, int], list[int]] = {}
    for k, (step, operands) in enumerate(zip(kernels.kept, kernels.operands, strict=True)):
        if isinstance(step, int) and isinstance(program.terms[step], Map):
            size = program.extent(program.free[step]) if is_whole else program.free[step]
            for t in operands:
                if program.extent(program.free[t]) > 1:
                    readers.setdefault((t, size), []).append(k)
    for together in readers.values():
        yield from combinations(together, 2)


def _of_one_matrix(program: Program, kernels: Fused, is_whole: bool) -> Iterator[tuple[int, int]]:
    """Pairs of products of the same matrix, over the same indices and in the same batches, one of which is small enough: in loops, where
    sizes depend on chunks, all are taken to be."""
    products: dict[tuple[int, int, int], list[int]] = {}
    for k, step in enumerate(kernels.kept):
        if not isinstance(step, int) or not isinstance(term := program.terms[step], Dot) or term.lhs == term.rhs:
            continue
        for one, other in ((term.lhs, term.rhs), (term.rhs, term.lhs)):
            batch = program.free[one] & program.free[other] & ~term.over
            if program.free[other] & ~batch & ~term.over:
                products.setdefault((one, term.over, batch), []).append(k)
    for (matrix, _, _), together in products.items():
        small = [k for k in together if not is_whole or _bytes_beside(program, kernels.kept[k], matrix) <= habits.MERGED_BYTES]
        yield from ((small[0], other) for other in together if small and other != small[0])


def _bytes_beside(program: Program, product: Step, matrix: int) -> int:
    """The bytes of a product and of its operand beside a matrix."""
    return sum(program.nbytes(t) for t in (product, *program.operands(product)) if t != matrix) if isinstance(product, int) else 0


def _in_turn(program: Program, kernels: Fused, maker: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Pairs of elementwise kernels of one size of which the second reads the result of the first, element by element and at no other
    places, and no fold reads either: a fold of the first is one kernel with the second, and no other joins them."""
    kept = set(kernels.kept)
    steps = zip(kernels.kept, kernels.operands, strict=True)
    folded = {t for step, operands in steps if isinstance(step, int) and isinstance(program.terms[step], Fold) for t in operands}
    for k, (step, operands) in enumerate(zip(kernels.kept, kernels.operands, strict=True)):
        if not isinstance(step, int) or not isinstance(program.terms[step], Map):
            continue
        if any(isinstance(program.terms[r], Fold) and r in kept for r in program.readers(step)):
            continue
        moved = {t for m in kernels.members[k] if isinstance(program.terms[m], Block) for t in program.operands(m)}
        for t in sorted((operands & kept) - folded - moved):
            if isinstance(program.terms[t], Map) and program.free[t] == program.free[step] != 0:
                yield maker[t], k


def are_joined(ex: Extraction, kernels: Collection[int]) -> bool:
    """Whether a value and kernels that read it run over as many elements, and no kernel needs another: the first one is the value, others
    are elementwise or folds."""
    program, (value, *readers) = ex.program, kernels
    if not all(_elements(ex, t) == program.free[value] for t in readers):
        return False
    return not any(program.made_of(later) >> earlier & 1 for earlier, later in combinations(sorted(readers), 2))


def _elements(ex: Extraction, t: int) -> int | None:
    """The indices that an elementwise kernel or a fold runs over; None for other kernels."""
    program, term = ex.program, ex.program.terms[t]
    if isinstance(term, Fold) and not ex.unrolls.get(t):
        return program.free[term.arg]
    return program.free[t] if isinstance(term, Map) else None


def spreads(program: Program, t: int, fold: int) -> bool:
    """Whether a fold reads an element of a value for several of what it folds."""
    term = program.terms[fold]
    return isinstance(term, Fold) and any(program.free[u] & ~program.free[t] & program.free[term.arg] for u in program.readers(t))


def separate(program: Program, kernels: Collection[int]) -> int:
    """The number of kernels that read the result of no other, nor what is made of it element by element: a softmax is one kernel, and what
    is written out for another kernel is not needed beside what that makes of it."""
    every = mask_of(kernels)
    return sum(not _reads_any(program, t, every & ~(1 << t)) for t in kernels)


def _reads_any(program: Program, t: int, others: int) -> bool:
    """Whether a term reads one of some others, or what elementwise operations make of it."""
    seen, pending = set[int](), [*program.operands(t)]
    while pending:
        c = pending.pop()
        if others >> c & 1:
            return True
        if c not in seen and program.made_of(c) & others and isinstance(program.terms[c], Map):
            pending.extend(program.operands(c))
        seen.add(c)
    return False


class _Groups:
    """Kernels of which some are one, and what each of them waits for. Sets of kernels have a bit for each."""

    def __init__(self, waits: Sequence[set[int]]):
        self.waits = waits
        self.group = list(range(len(waits)))
        self.own = {k: [k] for k in self.group}
        self.are_joined = False
        self.needed: list[int] = []
        """The kernels that the group of a kernel cannot begin before, directly or by way of others."""
        for k, before in enumerate(waits):
            found = 0
            for w in before - {k}:
                found |= self.needed[w] | 1 << w
            self.needed.append(found)

    def join(self, one: int, other: int, in_turn: bool = False) -> None:
        """Make one kernel of two, unless one of them needs the other: but for the result of the first, where they run ``in_turn``."""
        a, b = self.group[one], self.group[other]
        if a == b or self._needs(a, b) or (self._needs_by_others(b, a) if in_turn else self._needs(b, a)):
            return
        for k in self.own[b]:
            self.group[k] = a
        self.own[a] = sorted(self.own[a] + self.own.pop(b))
        self.are_joined = True
        own = mask_of(self.own[a])
        self.needed[a] = needed = (self.needed[a] | self.needed[b]) & ~own
        for g in self.own:
            if self.needed[g] & own:
                self.needed[g] |= needed | own

    def several(self) -> Iterator[list[int]]:
        """The kernels of each group of more than one."""
        return (together for together in self.own.values() if len(together) > 1)

    def _needs(self, group: int, before: int) -> bool:
        """Whether a group cannot begin before another has run."""
        return bool(self.needed[group] >> before & 1)

    def _needs_by_others(self, group: int, before: int) -> bool:
        """Whether a group needs another that needs a third."""
        first = {self.group[w] for k in self.own[group] for w in self.waits[k]}
        return any(self._needs(g, before) for g in first - {group, before})

    def order(self) -> list[int]:
        """All kernels, those of a group one after the other, else as they stand."""
        done: dict[int, None] = {}
        left = dict.fromkeys(range(len(self.waits)))
        while left:
            for k in left:
                own = self.own[self.group[k]]
                if all(w in done or w in own for m in own for w in self.waits[m]):
                    break
            done |= dict.fromkeys(own)
            for m in own:
                del left[m]
        return [*done]
