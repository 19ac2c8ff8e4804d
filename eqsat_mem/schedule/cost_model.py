"""Seconds of single terms: a roofline of contraction rate, elementwise rate and memory traffic.

The roofline (Williams, Waterman and Patterson 2009) bounds the speed of a kernel by its arithmetic and by the data that it moves. Rates are
the device's; what a compiler does with an operation, its backend says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.take_lowering import as_block
from eqsat_mem.ir import Block, Const, Dot, DotPlus, Fold, Input, Iota, Literal, Map, Program, Rename, Take, children, folded, itemsize
from eqsat_mem.ir.ops.collectives import EXCHANGES, SENT_BY, received_bytes, rounds
from eqsat_mem.ir.precision import of_rules
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.loop_bodies import loop_s
from eqsat_mem.schedule.sizes import extent_of


def spread_weight(program: Program, members: Iterable[int], backend: Backend) -> float:
    """The cost of an addition of an unrolled fold in the kernel of these terms."""
    maps = (term for t in members if isinstance(term := program.terms[t], Map))
    crowded = any(backend.weights.of_map(term) >= backend.crowding_weight for term in maps)
    return backend.crowded_weight if crowded else backend.unrolled_weight


def arithmetic_s(
    program: Program, t: int, extents: Sequence[int], backend: Backend, spread: float | None = None, added: bool = False
) -> float:
    """Seconds of arithmetic of one term at the given extents of its indices, its operands ready.

    ``spread`` is the cost of an addition, where the term is a fold that is unrolled, or is itself repeated for each element of one. What
    is ``added`` to the sum of a loop as it is computed makes no array.
    """
    term, device = program.terms[t], backend.device
    out = extent_of(extents, program.free[t])
    width = backend.element_factor(term.dtype)
    match term:
        case Map():
            weight = backend.weights.of_map(term)
            return out * width * (weight if spread is None or weight > 1 else weight * spread) / device.elements
        case Fold():
            count = extent_of(extents, program.free[term.arg] & term.over)
            weight = backend.fold_weight(program, t, extents, count) if spread is None else spread
            return out * count * width * weight / device.elements
        case Dot():
            return dot_s(program, term, extents, backend)
        case DotPlus():
            return _dot_plus_s(program, term, extents, backend)
        case Block() | Take():
            call = term.call if isinstance(term, Block) else as_block(program, term).call
            ins = [_shape(extents, axes) for axes in call.in_axes]
            outs = [(0,) if added else _shape(extents, axes) for axes in call.out_axes]
            if isinstance(term, Block) and call.prim.name in EXCHANGES:
                return exchange_s(program, t, extents, backend)
            known = loop_s(call, ins, outs, backend)
            if known is not None:
                return known
            weight = backend.weights.of_block(call, ins, outs)
            return weight * width * (1.0 if spread is None else spread) / device.elements
    return 0.0


def exchange_s(program: Program, t: int, extents: Sequence[int], backend: Backend) -> float:
    """Seconds in which devices exchange values for a term; none unless it is a collective."""
    term = program.terms[t]
    if not isinstance(term, Block) or term.call.prim.name not in EXCHANGES:
        return 0.0
    call = term.call
    read = sum(math.prod(_shape(extents, axes)) * itemsize(program.terms[a].dtype) for axes, a in zip(call.in_axes, term.args, strict=True))
    made = sum(math.prod(_shape(extents, axes)) * itemsize(dtype) for axes, dtype in zip(call.out_axes, call.out_dtypes, strict=True))
    assert program.shares is not None, "a program of one device exchanges nothing"
    name, params, times = call.prim.name, call.params, rounds(call.prim.name, call.params)
    if not times:
        return 0.0
    received = received_bytes(name, params, read, made) / times
    return times * backend.exchange_s(SENT_BY.get(name, name), received, params["names"], program.shares.devices)


def again_s(ex: Extraction, t: int, extents: Sequence[int], backend: Backend) -> float:
    """Seconds of computing a term again where it is read; none for an elementwise one, which fuses."""
    term = ex.program.terms[t]
    if not isinstance(term, Dot | Block) and not folded(term):
        return 0.0
    return arithmetic_s(ex.program, t, extents, backend, backend.unrolled_weight if ex.unrolls.get(t) else None)


def dot_s(program: Program, term: Dot, extents: Sequence[int], backend: Backend) -> float:
    """Seconds of a contraction, or of the same as products and sums where that is faster, as it is for vectors."""
    m, n, k, batch = sides(program, term, extents)
    device = backend.device
    vector = batch * m * n * k * backend.element_factor(term.dtype) * (1 + device.reduce_weight) / device.elements
    if m == n == 1:  # no matrix: XLA multiplies elementwise, having copied an operand into the layout of the other
        return 2 * vector
    return min(backend.contraction_s(term, batch, m, n, k), vector)


def _dot_plus_s(program: Program, term: DotPlus, extents: Sequence[int], backend: Backend) -> float:
    """An augmented contraction as extraction sees it: the contraction and the sums that are joined to its operands.

    The time of the columns that hold these sums is left out, for they save digits: where rules expand a distance, its sums are part of
    the contraction also where adding them to its result would be as fast.
    """
    product = Dot(term.dtype, term.over, term.lhs, term.rhs, of_rules(term.dtype, backend.rounds_operands))
    elements = sum(extent_of(extents, program.free[s]) for s in (term.left, term.right))
    sums = elements * backend.element_factor(term.dtype) * backend.device.reduce_weight / backend.device.elements
    return dot_s(program, product, extents, backend) + sums


def sides(program: Program, term: Dot, extents: Sequence[int]) -> tuple[int, int, int, int]:
    """A contraction as ``batch`` products of m x k by k x n matrices: ``(m, n, k, batch)``, rows being those of the result."""
    left, right = program.free[term.lhs], program.free[term.rhs]
    rows, columns = (left, right) if _first(left & ~right) < _first(right & ~left) else (right, left)
    m, n = (extent_of(extents, side & ~other & ~term.over) for side, other in ((rows, columns), (columns, rows)))
    k = extent_of(extents, (rows | columns) & term.over)
    return m, n, k, extent_of(extents, rows & columns & ~term.over)


def _first(mask: int) -> float:
    """The first index of a set: it stands first in arrays."""
    return (mask & -mask).bit_length() or math.inf


def term_seconds(program: Program, t: int, unrolled: bool = False, *, backend: Backend) -> float:
    """Seconds of one term at full extents as if its tiles stayed in cache: the cost that extraction minimises.

    Leaves and renames cost nothing: they are reads.
    """
    term = program.terms[t]
    if isinstance(term, (Input, Const, Iota, Literal, Rename)):
        return 0.0
    seconds = arithmetic_s(program, t, [i.extent for i in program.indices], backend, backend.crowded_weight if unrolled else None)
    touched = program.nbytes(t) + sum(program.nbytes(c) for c in children(term)) if isinstance(term, (Dot, DotPlus, Block, Take)) else 0
    return seconds + touched / backend.device.levels[backend.device.tile_level][1]


def _shape(extents: Sequence[int], axes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(math.prod(extents[i] for i in axis) for axis in axes)
