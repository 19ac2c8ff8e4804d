"""Sums that scans carry, and what is linear in them: each step adds its part of the end result, and the sum itself is never whole.

The gradient of a scan carries, for each value that all steps read, the sum of what the steps contribute to the value's cotangent. Where
the value is made from smaller ones, as a matrix of distances is from points, all that happens to the sum afterwards is linear, and ends
in reductions that are small again. So the contributions are taken as if they were stacked; the sum over the steps moves behind what is
linear in it; and the reductions, which are folds over the steps as well, accumulate in the carry
(:mod:`eqsat_mem.transforms.scan_analysis`). What is done once for the sum is then done for each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import lax

from eqsat_mem.frontend.roll import strong
from eqsat_mem.ir import Dot, Fold, Literal, Map, Program, Rename, Source, Term, children, mask_of, with_children
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.passes import SUMS, Pass
from eqsat_mem.transforms.control_flow import Scan, repeats
from eqsat_mem.transforms.retraced import Retracing, retraced
from eqsat_mem.transforms.steps import FlatStep, evaluate_equation, with_added

Array = Any
LARGE_BYTES = 2**16
"""Sums of fewer bytes stay in their carries."""
SMALLER = 2
"""What is linear in a sum is a sum of its own as soon as it is smaller by this factor."""
MOST_TERMS = 64
"""Terms linear in a sum that are computed in every step; where there are more, the sum stays."""


def with_step_sums(program: Program, passes: Sequence[Pass]) -> Program | None:
    """The program with sums over steps behind what is linear in them; None where no large sum is carried that is read so only."""
    if SUMS not in passes or program.effects:  # which have an order
        return None
    scans = (scan for scan in repeats(program) if scan.call.prim.name == "scan")
    carried = {scan: sums for scan in scans if (sums := _large_sums(scan, program)) is not None}
    if not carried:
        return None
    stacked = retraced(program, lambda args, consts: _Stacking(program, carried, args, consts).outputs(), passes)
    return _Behind(stacked).run()


# --- sums that are carried -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sums:
    """The step of a scan, and the large carries, by position, to which it only adds and whose last values the program reads."""

    step: FlatStep
    large: list[int]


def _large_sums(scan: Scan, program: Program) -> _Sums | None:
    avals = scan.body.in_avals[scan.first_carry :]
    read = [k for k, t in scan.results.items() if k < scan.carries and t not in program.roots() and aval_bytes([avals[k]]) >= LARGE_BYTES]
    step = FlatStep(scan) if read else None
    large = [] if step is None else [k for k in read if k in step.sums and _are_whole(step, k)]
    return _Sums(step, large) if step is not None and large else None


def _are_whole(step: FlatStep, k: int) -> bool:
    """Whether all that is added to a sum has its shape."""
    return all(step.flat.shapes[v] == step.flat.shapes[step.carried[k]] for v, _ in step.sums[k].parts)


@dataclass(eq=False)
class _Stacking(Retracing):
    """A program while it is traced with what steps add to sums stacked, and summed after the scan."""

    scans: Mapping[Scan, _Sums]

    def run(self, scan: Scan) -> dict[int, Array]:
        step, sums = self.scans[scan].step, self.scans[scan].large
        operands, flat = self.operands(scan), step.flat
        first, after = scan.first_carry, scan.first_carry + scan.carries
        init, kept = operands[first:after], [k for k in range(scan.carries) if k not in sums]
        adding = {eqn for k in sums for eqn in step.sums[k].equations}
        same: dict[int, Array] = {**flat.consts, **flat.literals, **dict(zip(flat.inputs[:first], operands))}

        def turn(carry: list[Array], x: list[Array]) -> tuple[list[Array], list[Array]]:
            values = same | {step.carried[k]: c for k, c in zip(kept, carry, strict=True)} | dict(zip(step.xs, x, strict=True))
            for eqn in flat.equations:
                if eqn not in adding:
                    evaluate_equation(eqn, values)
            added = [_added([(values[v], negated) for v, negated in step.sums[k].parts]) for k in sums]
            return [strong(values[step.after[k]]) for k in kept], [*(values[v] for v in step.ys), *added]

        start, unroll = [strong(init[k]) for k in kept], scan.call.params["unroll"]
        last, stacks = lax.scan(turn, start, operands[after:], length=scan.length, reverse=scan.reverse, unroll=unroll)
        parts = stacks[len(step.ys) :]
        results = dict(zip(kept, last)) | dict(enumerate(stacks, scan.carries))
        return results | {k: self._with_start(scan, k, init[k], lax.reduce_sum(part, (0,))) for k, part in zip(sums, parts, strict=True)}

    def _with_start(self, scan: Scan, k: int, start: Array, total: Array) -> Array:
        return total if _is_zero(self.program.terms[scan.init[k]]) else start + total


def _added(parts: Sequence[tuple[Array, bool]]) -> Array:
    """The value that a step adds to a sum, of its parts."""
    (first, negated), *rest = parts
    return with_added(-first if negated else first, rest)


# --- what is linear in sums ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sum:
    """A large value as a sum over some indices, among them the steps of a scan, of a term of the new program, and of what is added to it.

    Attributes:
        over: the indices, as bits.
        part: the term that is summed.
        rest: the term that is added to the sum; None if nothing is.
        starts: the sums over steps of which it is made.
        depth: the most terms between one of them and it.
    """

    over: int
    part: int
    rest: int | None
    starts: frozenset[int]
    depth: int = 0


class _Behind:
    """A program while it is written with sums over steps behind what is linear in them.

    Attributes:
        old: the program as it was.
        starts: the sums over steps that move.
        sums: the large values that are made of them, by their terms in the old program.
        whole: the sums over steps in the new program that are as large.
    """

    def __init__(self, old: Program):
        self.old, self.starts = old, frozenset(_over_steps(old))
        self.sums: dict[int, _Sum] = {}
        self.whole: dict[int, frozenset[int]] = {}

    def run(self) -> Program | None:
        """The new program, in which nothing as large as the sums that moved is left of them: those that other terms read stay."""
        while self.starts:
            self.sums.clear()
            self.whole.clear()
            new, _ = self.old.rewritten(self.write)
            staying = frozenset[int]().union(*(self.whole[t] for t in new.reachable() if t in self.whole))
            if not staying:
                new.passes |= {SUMS.name}
                return new
            self.starts -= staying
        return None

    def write(self, new: Program, t: int, ids: Mapping[int, int]) -> int | None:
        term, source = self.old.terms[t], self.old.source.get(t)
        if t in self.starts and isinstance(term, Fold):
            found: _Sum | None = _Sum(term.over, ids[term.arg], None, frozenset([t]))
        else:
            found = self.linear(new, t, ids)
        if found is None or found.depth > MOST_TERMS:
            return None
        total = new.add(Fold(term.dtype, "add", found.over, found.part), source)
        if SMALLER * self.old.nbytes(t) > max(map(self.old.nbytes, found.starts)):
            self.sums[t] = found
            self.whole[total] = found.starts
        return total if found.rest is None else new.add(Map(term.dtype, "add", (total, found.rest)), source)

    def linear(self, new: Program, t: int, ids: Mapping[int, int]) -> _Sum | None:
        """A term that is linear in sums: as the sum of what it is for each summand, and what it is for the rest."""
        term, read = self.old.terms[t], children(self.old.terms[t])
        own = {k: self.sums[c] for k, c in enumerate(read) if c in self.sums}
        if not own or not _is_linear(term, own) or (isinstance(term, Rename) and _clashes(term, new.free[own[0].part])):
            return None
        over, *others = (found.over for found in own.values())
        factors = {k: ids[c] for k, c in enumerate(read) if k not in own and not _is_added(term, k)}
        if any(other != over for other in others) or any(new.free[u] & over for u in factors.values()):
            return None
        rests: dict[int, int | None] = {k: None if _is_zero(self.old.terms[c]) else ids[c] for k, c in enumerate(read)}
        rests |= {k: found.rest for k, found in own.items()}
        parts = {k: own[k].part if k in own else factors.get(k) for k in range(len(read))}
        source = self.old.source.get(t)
        if isinstance(term, Fold):
            part, inside = parts[0], term.over
        else:
            part, inside = _applied(new, term, parts, source), 0
        if part is None or inside & over:
            return None
        starts = frozenset[int]().union(*(found.starts for found in own.values()))
        rest = _applied(new, term, rests, source)
        return _Sum(over | inside, part, rest, starts, 1 + max(found.depth for found in own.values()))


def _over_steps(program: Program) -> Iterator[int]:
    """Yield the large sums over all steps of what a scan stacks."""
    steps = {t: scan.axes for scan in repeats(program) if scan.axes for t in scan.stepped_results()}
    for t in program.reachable():
        term = program.terms[t]
        if not isinstance(term, Fold) or term.monoid != "add" or program.nbytes(t) < LARGE_BYTES:
            continue
        if term.over & steps.get(program.source_of(term.arg), 0) and term.over.bit_count() == 1:
            yield t


def _is_linear(term: Term, sums: Collection[int]) -> bool:
    """Whether a term is linear in its operands at the positions ``sums``, or in all that it adds, of which they are some."""
    match term:
        case Rename() | Map(op="neg" | "add" | "sub"):
            return True
        case Fold():
            return term.monoid == "add"
        case Dot() | Map(op="mul"):
            return len(sums) == 1
        case Map(op="div"):  # whole numbers are rounded down
            return [*sums] == [0] and np.dtype(term.dtype).kind not in "biu"
        case Map(op="select_n"):
            return 0 not in sums
    return False


def _is_added(term: Term, k: int) -> bool:
    """Whether a linear term is a sum of what it is for its operand at a position and of what it is for others."""
    return isinstance(term, Map) and (term.op in ("add", "sub") or (term.op == "select_n" and k > 0))


def _applied(new: Program, term: Term, operands: Mapping[int, int | None], source: Source | None) -> int | None:
    """A linear term on other operands, zeros where there is None; None if it is zero."""
    some = {k: u for k, u in operands.items() if u is not None}
    given = tuple(some.values())
    if len(given) < len(operands) and not (isinstance(term, Map) and term.op in ("add", "sub", "select_n")):
        return None
    match term:
        case Map(op="select_n"):
            if not some.keys() - {0}:
                return None
            zero = new.add(Literal.of(np.zeros((), term.dtype)[()], term.dtype))
            return new.add(with_children(term, tuple(some.get(k, zero) for k in operands)), source)
        case Map(op="add" | "sub") if len(given) < 2:
            return None if not given else new.add(Map(term.dtype, "neg", given), source) if term.op == "sub" and 1 in some else given[0]
        case Dot() if term.over & ~(new.free[given[0]] & new.free[given[1]]):  # an operand that is the same along what is contracted
            return new.add(Fold(term.dtype, "add", term.over, new.add(Map(term.dtype, "mul", given), source)), source)
    return new.add(with_children(term, given), source)


def _is_zero(term: Term) -> bool:
    return isinstance(term, Literal) and not term.value


def _clashes(term: Rename, free: int) -> bool:
    """Whether a value with these indices has one already that it would be given as a new name."""
    renamed = mask_of(before for before, _ in term.pairs)
    return bool(mask_of(after for _, after in term.pairs) & free & ~renamed)
