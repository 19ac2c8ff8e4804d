"""Analysis of scans as loops over a sequential index: the values around them that can be computed step by step, not stacked.

The leading axis of the values that a scan reads and stacks is the index of its steps, its *scan axis*. A value
that is pointwise in a scan axis can be computed inside the scan that reads it, one slice per step; a fold over the scan axis can be
accumulated in the carry of the scan whose results it folds; what is pointwise in it and computed from a scan's stacked results can be
computed by that scan and stacked in their place, where that is smaller; and stacked results of one scan can be rematerialised from its
carries by the scan that reads them. Values that no step changes can be computed in every step, also of ``while`` loops, and in
branches. This module determines these values; :mod:`eqsat_mem.transforms.scan_rewrite` rewrites the program.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Dot, Fold, Iota, Map, Program, Rename, Term, bits, children, mask_of
from eqsat_mem.ir.jaxprs import IMPURE, aval_bytes
from eqsat_mem.ir.ops.control import LOOPS
from eqsat_mem.transforms.control_flow import Scan, repeats

FEW_STEPS = 8
"""Scans of fewer steps than this store all their carries."""
REDUCED_SHARE = 1 / 2
"""What is stacked in place of a stacked result has at most this share of its bytes."""
SUNK_BYTES = 2**16
"""Values of fewer bytes that do not depend on the step are computed once, before the scan."""
SUNK_SHARE = 8
"""A value is rematerialised in every step from values that are smaller by at least this factor."""


class Stage(IntEnum):
    """The amount of a program that is computed step by step in scans; each stage takes less memory and more work than the one before."""

    WRITTEN = 0
    SLICES = 1
    """Elementwise values are computed in the scans that read them."""
    FUSE = 2
    """As before, and folds accumulate in carries; what is made of stacked results, step by step, is computed in the scan that made
    them."""
    RECOMPUTE = 3
    """All values pointwise in the steps are computed in the scans that read them, and results stacked for another scan from the carries:
    all of them, for those of another run may be far off where roundings grow."""
    BLOCKS = 4
    """Carries are stored only at the starts of blocks of steps (Griewank and Walther, 2000; Chen et al., 2016). The steps of a block run
    again before others read their results, which are stored for one block."""
    CHECKPOINT = 5
    """As before, with carries stored for one block in place of results that take more memory: each of its steps runs twice again."""
    NEST = 6
    """As before, with fewer and longer blocks, whose bodies are planned like other scans: in shorter blocks where there is no room."""


class How(Enum):
    """The ways in which a scan obtains a slice of a value."""

    INVARIANT = "the same in every step"
    STORED = "a slice of the whole value"
    COMPUTED = "computed from slices of its operands"
    OWN = "made by the step itself"
    AGAIN = "made by a step of another scan, which runs again"


Node = int | Scan
"""A value that a staged program computes whole: a term, or a scan with all its results."""


@dataclass(frozen=True)
class Slices:
    """The values of the surrounding program of which a step of a scan needs slices.

    Attributes:
        how: how the step obtains the slice of each term, in ascending order of terms.
        again: the other scans whose steps it runs again.
    """

    how: dict[int, How]
    again: tuple[Scan, ...]

    def of(self, *kinds: How) -> list[int]:
        """Return the terms whose slices are obtained in one of these ways."""
        return [t for t, how in self.how.items() if how in kinds]


def _is_made_in_parts(term: Term) -> bool:
    """Whether loops may make a value in chunks of its rows, or of what it folds, and runs of it give the same."""
    if isinstance(term, Block):
        call = term.call
        return bool(call.pointwise | call.folds) and call.inside is None and not call.effects and call.prim.name not in LOOPS | IMPURE
    return isinstance(term, Map | Fold | Dot | Rename)


@dataclass(eq=False)
class Stages:
    """The values of a program that its scans compute step by step in one stage.

    Attributes:
        ex: the program.
        stage: the stage.
        scans: the scans, loops and branches of the program.
        absorbed: the folds that are accumulated in the carry of a scan, with that scan.
        after: the values that steps of a scan compute from its stacked results, with that scan.
        reduced: those of them that are stacked in place of these results.
        again: the stacked results that are rematerialised where they are read instead of being stored.
    """

    ex: Extraction
    stage: Stage
    scans: list[Scan] = field(init=False)
    absorbed: dict[int, Scan] = field(default_factory=dict)
    after: dict[int, Scan] = field(default_factory=dict)
    reduced: dict[int, Scan] = field(default_factory=dict)
    again: frozenset[int] = frozenset()
    _slices: dict[Scan, Slices] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scans = list(repeats(self.ex.program))
        self.scan_of = {t: scan for scan in self.scans for t in scan.results.values()}
        self.stacked_by = {t: scan for scan in self.scans if scan.axes for t in scan.stepped_results()}
        if self.stage >= Stage.RECOMPUTE:
            self.again = frozenset(t for scan in self.scans if scan.repeatable for t in scan.stepped_results())
        self.absorbed = dict(self._absorbable()) if self.stage >= Stage.FUSE else {}
        latest = self._latest() if self.stage >= Stage.FUSE else {}
        for scan in self.scans:
            if self.stage >= Stage.FUSE and scan.axes:
                self._move_after(scan, latest)
        whole = {node for node in self.order() if isinstance(node, int)}
        self.again -= whole
        self.absorbed = {t: scan for t, scan in self.absorbed.items() if not self._made_by(t, scan) <= whole}
        self._slices.clear()

    @property
    def program(self) -> Program:
        return self.ex.program

    def decisions(self) -> Hashable:
        """Return a key that distinguishes the program of this stage from those of other stages."""
        computed = (tuple(self.slices(scan).of(How.COMPUTED, How.AGAIN)) for scan in self.scans)
        blocks = tuple((self.block_size(scan), self.keeps_results(scan), scan.order) for scan in self.checkpointed)
        sunk = tuple(t for scan in self.scans for t in self.invariants(scan) if self.sunk(t)[0])
        return tuple(computed), tuple(self.absorbed), sunk, blocks

    def changed(self, scan: Scan) -> bool:
        """Whether a scan computes slices, accumulates folds, or has its results rematerialised in another scan."""
        computes = bool(self.slices(scan).of(How.COMPUTED, How.AGAIN)) or any(self.sunk(t)[0] for t in self.invariants(scan))
        return computes or scan in self.absorbed.values() or any(scan in self.slices(other).again for other in self.scans)

    def folds(self, scan: Scan) -> list[int]:
        """Return the folds that are accumulated in the carry of a scan."""
        return [t for t, owner in self.absorbed.items() if owner is scan]

    def stacked_instead(self, scan: Scan) -> list[int]:
        """Return the values that a scan computes from its stacked results, and stacks in their place."""
        return [t for t, owner in self.reduced.items() if owner is scan]

    @cached_property
    def checkpointed(self) -> list[Scan]:
        """The scans that run in blocks: those whose carries others need to rematerialise their results, and those others."""
        if self.stage < Stage.BLOCKS:
            return []
        again = {scan for reader in self.scans for scan in self.slices(reader).again if scan.length >= FEW_STEPS}
        makers = {scan for scan in again if self.again_needs_carry(scan)}
        readers = {scan for scan in self.scans if makers.intersection(self.slices(scan).again)}
        return [scan for scan in self.scans if scan in makers | readers]

    def again_needs_carry(self, scan: Scan) -> bool:
        """Whether rematerialising the results of a scan takes its carries."""
        return scan.needs_carry(k for k, t in scan.stacked() if t in self.again)

    def keeps_results(self, scan: Scan) -> bool:
        """Return whether a checkpointed scan stores the results of its steps that others read for one block at a time, not its carries."""
        return self.stage is Stage.BLOCKS or self._carry_per_result[scan.length] >= 1

    def block_size(self, scan: Scan) -> int:
        """Return the number of steps between the checkpoints of a scan: the same for all scans of its length."""
        return block_size(scan.length, self.stage, self._carry_per_result[scan.length] if self.keeps_results(scan) else 1.0)

    @cached_property
    def _carry_per_result(self) -> Mapping[int, float]:
        """The bytes of the carries of all checkpointed scans of a length per byte of the results of a step that others read, by length."""
        carries, results = Counter[int](), Counter[int]()
        for scan in self.checkpointed:
            if self.again_needs_carry(scan):
                carries[scan.length] += aval_bytes(scan.body.out_avals[: scan.carries])
                results[scan.length] += sum(self.program.nbytes(t) for t in scan.stepped_results() if t in self.again)
        return {scan.length: carries[scan.length] * scan.length / max(results[scan.length], 1) for scan in self.checkpointed}

    # slices

    def slices(self, scan: Scan) -> Slices:
        """Return the slices that a step of a scan needs: those of its operands and of the operands of its folds."""
        known = self._slices.get(scan)
        if known is None:
            folded = (c for t in self.folds(scan) for c in children(self.program.terms[t]))
            roots = [*scan.sliced_xs, *folded, *self.stacked_instead(scan)]
            known = self._slices[scan] = self._closure(roots, scan.axes, scan)
        return known

    def _closure(self, roots: Iterable[int], scan_axes: int, own: Scan | None) -> Slices:
        found: dict[int, How] = {}
        again: set[Scan] = set()
        stack = list(roots)
        while stack:
            t = stack.pop()
            if t in found:
                continue
            how = found[t] = self.how(t, scan_axes, own)
            if how is How.COMPUTED:
                stack.extend(children(self.program.terms[t]))
            elif how is How.AGAIN:
                again.add(self.scan_of[t])
                stack.extend(self.scan_of[t].sliced_xs)
        return Slices(dict(sorted(found.items())), tuple(sorted(again, key=lambda scan: scan.order)))

    def how(self, t: int, scan_axes: int, own: Scan | None) -> How:
        """Return how a scan obtains slices of a term.

        Args:
            t: the term.
            scan_axes: the scan axes of the scan, as bits.
            own: the scan, or None if it is not known yet.
        """
        mine, term = self.program.free[t] & scan_axes, self.program.terms[t]
        if not mine:
            return How.INVARIANT
        if mine & (mine - 1):
            return How.STORED
        if t in self.stacked_by and self.stacked_by[t].axes == scan_axes:
            return How.OWN if self.stacked_by[t] is own else How.AGAIN if t in self.again else How.STORED
        if t in self.scan_of:
            return How.STORED  # a last carry, or stacked along other steps, which has the index of the steps for another reason
        if isinstance(term, Iota):
            return How.COMPUTED if self.stage else How.STORED
        simple = isinstance(term, Map | Rename) or self.stage >= Stage.RECOMPUTE or self.after.get(t, self) is own
        return How.COMPUTED if self.stage and simple and self._sliced(t, mine, scan_axes) else How.STORED

    def _one_axis(self, t: int, scan_axes: int) -> bool:
        """Whether a value has just one of the scan axes."""
        return (self.program.free[t] & scan_axes).bit_count() == 1

    def _sliced(self, t: int, mine: int, scan_axes: int) -> bool:
        """Whether a slice of ``t`` needs just the same slice of each operand that has a scan axis."""
        program, term = self.program, self.program.terms[t]
        read = [program.free[c] & scan_axes for c in children(term)]
        if isinstance(term, Rename):
            moved = dict(term.pairs)
            return len(list(bits(read[0]))) == 1 and mask_of(moved.get(i, i) for i in bits(read[0])) == mine
        if not read or not self.ex.splits.get(t, 0) & mine or getattr(term, "over", 0) & scan_axes:
            return False
        bound = isinstance(term, Block) and not term.call.pointwise & mine
        return not bound and all(r in (0, mine) for r in read)

    # values that do not depend on the step

    def invariants(self, scan: Scan) -> list[int]:
        """Return the values that every step of a scan reads whole: constants of the bodies that it runs, and invariants in its slices."""
        used = self.slices(scan)
        consts = [c for other in used.again for c in other.consts]
        return list(dict.fromkeys([*scan.consts, *consts, *used.of(How.INVARIANT)]))

    def sunk(self, t: int) -> tuple[list[int], list[int]]:
        """Return the terms that rematerialise a large value in every step, and the values from which they start, both ascending.

        If the value is stored instead, there are no such terms, and the only value is ``t`` itself. The plan of the body can split
        a rematerialised value, which the plan of the surrounding program could not.
        """
        program = self.program
        if self.stage < Stage.RECOMPUTE or program.nbytes(t) < SUNK_BYTES:
            return [], [t]
        inside: set[int] = set()
        outside: set[int] = set()
        stack = [t]
        while stack:
            u = stack.pop()
            if u not in self.absorbed and _is_made_in_parts(program.terms[u]) and SUNK_SHARE * program.nbytes(u) > program.nbytes(t):
                stack.extend(c for c in children(program.terms[u]) if c not in inside)
                inside.add(u)
            else:
                outside.add(u)
        kept = sum(program.nbytes(u) for u in outside if children(program.terms[u]))
        return (sorted(inside), sorted(outside)) if inside and 2 * kept < program.nbytes(t) else ([], [t])

    # folds

    def _absorbable(self) -> Iterator[tuple[int, Scan]]:
        """Yield the folds over the steps of a scan whose operands it computes or are available before it, with that scan."""
        program = self.program
        latest = self._latest()
        for t in program.reachable():
            term = program.terms[t]
            if not isinstance(term, Fold | Dot):
                continue
            for scan_axes in dict.fromkeys(scan.axes for scan in self.scans):
                over = term.over & scan_axes
                read = [program.free[c] & scan_axes for c in children(term)]
                if not over or over & (over - 1) or program.free[t] & scan_axes or not all(r in (0, over) for r in read):
                    continue
                if not self.ex.accumulates.get(t, 0) & over:
                    continue
                used = self._closure(children(term), scan_axes, None)
                makers = [self.stacked_by[u] for u in used.how if u in self.stacked_by and self.stacked_by[u].axes == scan_axes]
                last = max(makers, key=lambda scan: scan.order, default=None)
                leaves = (u for u in used.of(How.STORED, How.INVARIANT) if self.stacked_by.get(u) is not last)
                if last is not None and all(latest[u] < last.order for u in leaves):
                    yield t, last

    def _move_after(self, scan: Scan, latest: Mapping[int, int]) -> None:
        """Move what is computed from stacked results of a scan into its steps, where that leaves less to be stacked.

        A result need not be stacked if everything that reads it is computed by the steps as well or folded in the carry. It stays where
        what would be stacked instead is not much smaller.
        """
        program = self.program
        own = scan.stepped_results()
        made = {t: frozenset([t]) for t in own}  # the results from which each value is computed
        live = program.reachable() if own else []
        for t in live:
            mine, read = program.free[t] & scan.axes, children(program.terms[t])
            from_own = frozenset[int]().union(*(made.get(c, ()) for c in read))
            is_sliced = from_own and self._one_axis(t, scan.axes) and t not in self.scan_of and self._sliced(t, mine, scan.axes)
            if is_sliced and all(c in made or latest[c] < scan.order for c in read):
                made[t] = from_own
        inner = {*made, *self.folds(scan)}
        read_outside = {*program.roots(), *(c for t in live if t not in inner for c in children(program.terms[t]))}
        for result in own:
            inside = [t for t in made if t not in own and result in made[t]]
            instead = [t for t in inside if t in read_outside]
            is_small = sum(map(program.nbytes, instead)) <= REDUCED_SHARE * program.nbytes(result)
            if inside and result not in read_outside and is_small:
                self.after |= dict.fromkeys(inside, scan)
                self.reduced |= dict.fromkeys(instead, scan)

    def _latest(self) -> dict[int, int]:
        """Return, for every term, the order of the last scan on which it depends, -1 if there is none."""
        latest: dict[int, int] = {}
        for t in self.program.reachable():
            own = [self.scan_of[t].order] if t in self.scan_of else []
            latest[t] = max([-1, *own, *(latest[c] for c in children(self.program.terms[t]))])
        return latest

    def _made_by(self, t: int, scan: Scan) -> set[int]:
        """Return the stacked results of a scan that an absorbed fold reads."""
        used = self._closure(children(self.program.terms[t]), scan.axes, scan)
        return set(used.of(How.OWN))

    # order

    def order(self) -> list[Node]:
        """Return the nodes that are computed whole, each after the nodes that it needs: first those of the effects, then of the outputs."""
        roots = [*self.program.effects, *(o.term for o in self.program.outputs)]
        return list(_postorder(roots, self._needs))

    def _needs(self, node: Node) -> Sequence[Node]:
        if isinstance(node, Scan):
            used = self.slices(node)
            whole = [u for t in self.invariants(node) for u in self.sunk(t)[1]]
            laid_out = (t for scan in (node, *used.again) for t in scan.whole_xs.values())
            return [*used.again, *node.init, *laid_out, *whole, *used.of(How.STORED)]
        owner = self.absorbed.get(node) or self.reduced.get(node) or self.scan_of.get(node)
        return [owner] if owner is not None else children(self.program.terms[node])


def block_size(length: int, stage: Stage, carry_per_value: float = 1.0) -> int:
    """Return the number of steps between checkpoints; a divisor where one is near, so that no steps are left over.

    Checkpoints and what is stored for a block take least where both take as much: where they are as large, with the square root of the
    number of steps. With its power of 2/3 the blocks, whose scans are planned like others, leave two more levels as much.

    Args:
        length: the number of steps.
        stage: the stage.
        carry_per_value: the bytes of a carry per byte that is stored for each step of a block.
    """
    wanted = length ** (2 / 3) * carry_per_value ** (1 / 3) if stage is Stage.NEST else math.sqrt(length * carry_per_value)
    return near_divisor(length, min(max(wanted, 2.0), max(length / 2, 1.0)))


def near_divisor(length: int, wanted: float) -> int:
    """Return the divisor of a number of steps that is nearest to the wanted number, where one is within a factor of two."""
    near = [k for k in range(max(2, math.ceil(wanted / 2)), int(2 * wanted) + 1) if length % k == 0]
    return min(near, key=lambda k: abs(math.log(k / wanted))) if near else round(wanted)


def _postorder(roots: Iterable[Node], needs: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Yield every node that the roots need, each after the nodes that it needs itself."""
    done: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        node, ready = stack.pop()
        if node in done:
            continue
        if ready:
            done.add(node)
            yield node
        else:
            stack.append((node, True))
            stack.extend((other, False) for other in reversed(list(needs(node))))
