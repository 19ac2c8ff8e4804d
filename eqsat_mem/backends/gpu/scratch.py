"""Memory that kernels of XLA:GPU hold besides operands and results: partial results, copies of operands, and workspaces of libraries.

docs/xla-gpu.md has the programs in which each was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from eqsat_mem.backends.gpu import habits
from eqsat_mem.backends.gpu.convolutions import CONVOLUTION, convolution_bytes
from eqsat_mem.backends.gpu.operations import GpuWeights, weights_of
from eqsat_mem.backends.gpu.targets import Target
from eqsat_mem.ir import Block, Const, Dot, Fold, Input, Literal, Map, Program, Rename, bits, is_leaf, itemsize
from eqsat_mem.ir.ops import Shapes, picks
from eqsat_mem.schedule.cost_model import sides
from eqsat_mem.schedule.sizes import extent_of
from eqsat_mem.schedule.tiles import is_alike
from eqsat_mem.schedule.weights import Weights

COLUMNS_AT_ONCE = 64
"""Columns that one block of a fold of columns computes, of an odd number half as many: read from compiled programs."""
LONG_ROW = 2**12
"""The length of rows from which on XLA computes the operand of a fold inside it only if that has results enough:
read from compiled programs."""
ALL_BLOCKS, TRAFFIC, KERNEL = 1056, 41.0, 33e6
"""Blocks with which an H100 is busy, as XLA estimates it; and the operations that take as long as writing and reading an element, and as
beginning a kernel: fitted to the columns from which on programs of 1 to 24 operations compute them inside, read from compiled programs."""
INNER_COLUMNS = 12_587
"""Columns below which a fold of columns has what it folds written out where that is a short fold itself, a distance: of four to eight
dimensions over 2,500 and 4,096 rows; 7,382 of two dimensions: read from compiled programs."""
FACTORISATIONS = frozenset({"cholesky", "lu"})
"""Operations that libraries do in place, or on a copy of an operand not made for them: read from compiled programs."""
OVERWRITING = frozenset({"eigh", "qr", "svd"})
"""Operations that copy an operand that is not computed for them: read from compiled programs."""
SIMPLE, FUNCTION = 2.0, 16.0
"""Weights up to which an operand counts as simple, or as one function, in that question: guessed, between what was compiled."""


def fold_bytes(
    program: Program, t: int, members: Sequence[int], extents: Sequence[int], weights: Weights, size: Callable[[int], int]
) -> int:
    """Bytes that the kernel of a fold takes besides operands and result: partial results, and operands that are written out or turned."""
    term = program.terms[t]
    assert isinstance(term, Fold)
    extent, last = folded(program, t, extents)
    partial = _partial_bytes(extent, last, size(t))
    results = extent_of(extents, program.free[t])
    operand = 0
    if term.arg in members:
        computed = [weights.of_map(m) for c in members if isinstance(m := program.terms[c], Map) and program.free[c] & term.over]
        if not last and (side := extent_of(extents, columns(program, term))) < results:  # each of the others has blocks of its own
            results = results // side * (-(-side // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE)
        is_written = _is_written_out(extent, last, results, computed)
        in_columns = not last and habits.fold_parts(extent, last) == 1 and 1 < results < INNER_COLUMNS
        folds = any(isinstance(program.terms[c], Fold) and program.free[c] & term.over for c in members if c != t)
        operand = size(term.arg) if is_written or (in_columns and folds) else 0
    return partial + operand + _turned_bytes(program, members, size)


def folds_an_array(program: Program, t: int) -> bool:
    """Whether one of the arrays that a fold reads has all the elements that it folds: rows of a matrix, say, not distances of points."""
    term = program.terms[t]
    assert isinstance(term, Fold)
    elements, pending = program.free[t] | term.over, {term.arg}
    while pending:
        c = pending.pop()
        if elements & ~program.free[c]:
            continue
        if not isinstance(program.terms[c], Map | Fold):
            return True
        pending.update(program.operands(c))
    return False


def padding(program: Program, term: Dot, extents: Sequence[int], target: Target) -> float:
    """The factor by which padding lengthens the operands that are copied for a product."""
    m, n, k, batch = sides(program, term, extents)
    width = itemsize(term.dtype)
    if min(m, n) == 1 and habits.vector_is_fold(m * n * k, k, width):
        return 1.0
    return habits.padded_contraction(k, habits.product_parts(batch, m, n, k, width, target), width) / k


def copied_operand_bytes(program: Program, t: int, weights: Weights, size: Callable[[int], int]) -> int:
    """Bytes of operands that an operation overwrites or wants in another layout, unless they are made for that; less than none where the
    result lies in the operand's place."""
    term = program.terms[t]
    assert isinstance(term, Block)
    name = term.call.prim.name
    if name == CONVOLUTION:
        return convolution_bytes(program, t, size)
    if name in FACTORISATIONS:
        return -size(term.args[0]) if _is_made_for(program, term.args[0]) else 0
    if name == "triangular_solve":
        matrix, right = term.args
        return (0 if _is_made_in_columns(program, matrix) else size(matrix)) + (0 if _is_made_for(program, right) else size(right))
    if name == "sort":
        return _sorted_along(program, term, size)
    if name in OVERWRITING:
        return -size(term.args[0]) if _is_made_for_call(program, term.args[0], term) else 0
    if name == "top_k" and weights.workspace(term.call, *_whole_shapes(program, term)):
        return 0 if _is_made_for_call(program, term.args[0], term) else size(term.args[0])
    return 0


def _sorted_along(program: Program, term: Block, size: Callable[[int], int]) -> int:
    """Bytes of sorted operands that nothing reads; less than none for operands that are computed to become results."""
    used = _results(program, term)
    apart = sum(size(a) for k, a in enumerate(term.args) if k not in used and not _is_made_for_call(program, a, term))
    return apart - sum(size(term.args[k]) for k in used if _is_made_for_call(program, term.args[k], term))


def _results(program: Program, term: Block) -> set[int]:
    """The results of a call that are used."""
    returned = {o.term for o in program.outputs}
    used = [r for r in program.readers(term.args[0]) if r in returned or program.readers(r)]
    return {r.out for t in used if isinstance(r := program.terms[t], Block) and r.call is term.call}


def _is_made_for_call(program: Program, t: int, reader: Block) -> bool:
    """Whether a value is computed element by element for a call alone, whose results count as one reader."""
    others = [r for r in program.readers(t) if getattr(program.terms[r], "call", None) is not reader.call]
    return isinstance(program.terms[t], Map) and not others and all(o.term != t for o in program.outputs)


def _is_made_for(program: Program, t: int) -> bool:
    """Whether a value is computed in the layout that its only reader wants."""
    return isinstance(program.terms[t], Map | Dot) and _dies_with(program, t)


def _is_made_in_columns(program: Program, t: int) -> bool:
    """Whether solvers read a value as it is computed: all else that reads it computes it again."""
    readers = [program.terms[r] for r in program.readers(t)]
    others = [r for r in readers if not (isinstance(r, Block) and r.call.prim.name == "triangular_solve")]
    is_computed = isinstance(program.terms[t], Map) and all(o.term != t for o in program.outputs)
    return is_computed and all(isinstance(r, Map | Fold) for r in others)


def product_bytes(
    program: Program, term: Dot, extents: Sequence[int], target: Target, size: Callable[[int], int], library: int | None
) -> int:
    """Bytes that a product takes besides operands and result, by Triton or by a library with so much scratch, if it may be: whichever is
    more."""
    m, n, k, batch = sides(program, term, extents)
    width = itemsize(term.dtype)
    if min(m, n) == 1 and habits.vector_is_fold(m * n * k, k, width):
        return _vector_bytes(program, term, extents)
    made = _made_whole(program, term, extents)
    parts = habits.product_parts(batch, m, n, k, width, target)
    growth = padding(program, term, extents, target)
    partial = batch * parts * m * n * max(width, 4) if parts > 1 else 0
    by_triton = _padding_bytes(program, term, size, growth, partial, weights_of(target)) if growth > 1 else partial
    return made + max(by_triton, library or 0)


def _vector_bytes(program: Program, term: Dot, extents: Sequence[int]) -> int:
    """Bytes that a product with a vector holds as a fold of products."""
    matrix = max((term.lhs, term.rhs), key=lambda c: program.free[c].bit_count())
    axes = order(program, matrix)
    last = axes is not None and bool(term.over >> axes[-1] & 1)
    extent = extent_of(extents, program.free[matrix] & term.over)
    results = extent_of(extents, program.free[matrix] & ~term.over)
    partial = _partial_bytes(extent, last, results * itemsize(term.dtype))
    is_written = _is_written_out(extent, last, results, [1.0])
    return partial + (extent * results * itemsize(term.dtype) if is_written else 0)


# --- shapes ---------------------------------------------------------------------------------------------


def folded(program: Program, t: int, extents: Sequence[int]) -> tuple[int, bool]:
    """The number of elements that a fold combines to one, and whether they lie side by side: its indices are the last of its operand."""
    term = program.terms[t]
    assert isinstance(term, Fold)
    return extent_of(extents, program.free[term.arg] & term.over), not is_by_columns(program, term)


def is_by_columns(program: Program, fold: Fold) -> bool:
    """Whether a fold combines elements that do not lie side by side."""
    free = program.free[fold.arg]
    return free & fold.over <= free & ~fold.over


def columns(program: Program, fold: Fold) -> int:
    """The indices of a fold's results that lie side by side: those behind what it folds."""
    first = fold.over & -fold.over
    return program.free[fold.arg] & ~fold.over & ~(first - 1)


def _partial_bytes(extent: int, last: bool, result: int) -> int:
    """Bytes of the partial results of a fold of two passes."""
    parts = habits.fold_parts(extent, last)
    return parts * result if parts > 1 else 0


def _is_written_out(extent: int, last: bool, results: int, computed: Sequence[float]) -> bool:
    """Whether a fold has too few results for XLA to compute its operand inside; ``computed`` are the weights of the operations that make
    the operand, none where none does."""
    if not computed:
        return False
    heaviest = max(computed)
    if habits.fold_parts(extent, last) > 1:
        least = 0.0 if last else COLUMNS_AT_ONCE + 1
    elif last:
        least = 0.0 if heaviest <= SIMPLE or extent < LONG_ROW else 41 if heaviest <= FUNCTION else 128
    else:
        least = _least_columns(extent, results, 1.0 + len(computed) if heaviest <= SIMPLE else 3.2 if heaviest <= FUNCTION else 5.0)
    return 1 < results < least


def _least_columns(extent: int, columns: int, work: float) -> float:
    """The columns from which on XLA computes inside a fold of so many rows in one pass what takes so much work: with fewer blocks that
    takes longer than to compute it everywhere, to write it and to read it, and to begin two kernels.

    >>> [round(_least_columns(n, 64, 2.0)) for n in (400, 600, 1000, 2000, 4096)]
    [1225, 1864, 2376, 2760, 2956]
    """
    width = COLUMNS_AT_ONCE // (1 + columns % 2)
    return width * (ALL_BLOCKS * work - KERNEL / (width * extent)) / (TRAFFIC + work)


def work(program: Program, t: int, weights: GpuWeights) -> float:
    """The cost, as XLA estimates it, of all operations that elementwise kernels and folds compute for one element of a value."""
    total, seen, waiting = 0.0, {t}, [(t, 1.0)]
    while waiting:
        u, times = waiting.pop()
        term = program.terms[u]
        if isinstance(term, Fold):
            extent = program.extent(program.free[term.arg] & term.over)
            if extent >= habits.INNER_FOLD:
                continue
            times *= extent
            total += times
        elif isinstance(term, Map) and not program.free[t] & ~program.free[u]:
            total += times * weights.estimated(term)
        for c in elementwise_operands(program, u):
            if c not in seen:
                seen.add(c)
                waiting.append((c, times))
    return total


def is_computed_where_spread(program: Program, t: int) -> bool:
    """Whether elementwise kernels compute a value for each element that they make of one of it, rather than read it."""
    into = (program.free[u] & ~program.free[t] for u in program.readers(t) if isinstance(program.terms[u], Map))
    if (spread := max(map(program.extent, into), default=1)) == 1:
        return True
    seen, waiting = {t}, [t]
    while waiting:
        new = {c for c in elementwise_operands(program, waiting.pop()) if not program.free[t] & ~program.free[c]} - seen
        waiting.extend(c for c in new if isinstance(program.terms[c], Map))
        seen |= new
    costs = (habits.SPREAD_COST.get(term.op, 1) for c in seen if isinstance(term := program.terms[c], Map))
    return habits.is_computed_where_spread(program.extent(program.free[t]), spread, sum(costs))


def transformed(program: Program, t: int) -> int:
    """The value of which a term is elementwise functions, with numbers in the source as their only other operands: it may be itself."""
    while isinstance(term := program.terms[t], Map):
        read = {a for a in term.args if not isinstance(program.terms[a], Literal)}
        if len(read) != 1:
            break
        t = read.pop()
    return t


def step_of_kernel(program: Program, t: int, members: Collection[int]) -> int:
    """The term after which a kernel that ends in ``t`` is launched: the fold, where it makes something of a fold alone that is no loop in
    an elementwise kernel."""
    fold = program.terms[first := transformed(program, t)]
    if not isinstance(program.terms[t], Map) or not isinstance(fold, Fold) or first not in members:
        return t
    return t if habits.is_looped(program.extent(fold.over)) else first


def _sources(program: Program, term: Dot) -> set[int]:
    """The arrays that a product reads: one, where it multiplies a matrix by itself."""
    return {program.source_of(c) for c in (term.lhs, term.rhs)}


def _whole_shapes(program: Program, term: Block) -> tuple[Shapes, Shapes]:
    """The shapes of operands and results of an operation that is not in a loop."""
    ins, outs = ([program.shape(axes) for axes in side] for side in (term.call.in_axes, term.call.out_axes))
    return ins, outs


def _dies_with(program: Program, t: int) -> bool:
    """Whether a value is computed, and read by one term only."""
    return len(program.readers(t)) == 1 and not is_leaf(program.terms[t]) and all(o.term != t for o in program.outputs)


def _is_made_longer(program: Program, t: int) -> bool:
    """Whether a value is elementwise, and made by no kernel of a fold."""
    first = program.terms[transformed(program, t)]
    return isinstance(program.terms[t], Map) and not (isinstance(first, Fold) and not habits.is_looped(program.extent(first.over)))


def _is_made_twice(program: Program, t: int, product: Dot, weights: GpuWeights) -> bool:
    """Whether what else reads a value computes it for itself, so that it is made for a product alone."""
    others = [reader for r in program.readers(t) if (reader := program.terms[r]) != product]
    if not _is_made_longer(program, t) or any(o.term == t for o in program.outputs):
        return False
    again = habits.is_computed_again(1 + len(others), 1, work(program, t, weights), itemsize(program.terms[t].dtype))
    return again and all(isinstance(reader, Map | Fold) for reader in others)


def _padding_bytes(program: Program, term: Dot, size: Callable[[int], int], growth: float, partial: int, weights: GpuWeights) -> int:
    """Bytes that a product takes whose operands are written out once more, longer, one after the other, and that leaves partial results.

    What was made for the product is free once its copy is there; what is elementwise is made longer at once.
    """
    operands = sorted(_sources(program, term))
    dying = [c for c in operands if _dies_with(program, c) or _is_made_twice(program, c, term, weights)]
    made_longer = [c for c in dying if _is_made_longer(program, c)]
    counted = sum(map(size, dying))
    held, most = counted - sum(map(size, made_longer)), 0
    for c in [*(c for c in dying if c not in made_longer), *(c for c in operands if c not in dying), *made_longer]:
        held += int(size(c) * growth)
        most = max(most, held)
        held -= size(c) if c in dying and c not in made_longer else 0
    return max(most, held + partial) - counted


def _made_whole(program: Program, term: Dot, extents: Sequence[int]) -> int:
    """Bytes of operands that do not depend on all contracted indices, and are written out along them."""
    missing = [c for c in (term.lhs, term.rhs) if term.over & ~program.free[c] and program.free[c]]
    return sum(extent_of(extents, program.free[c] | term.over) * itemsize(term.dtype) for c in missing)


def _turned_bytes(program: Program, members: Sequence[int], size: Callable[[int], int]) -> int:
    """Bytes of the smallest array that a fold reads in another order of axes than the others, of which XLA makes a copy."""
    read = {c for t in members for c in elementwise_operands(program, t) if c not in members and program.free[c].bit_count() > 1}
    orders = {c: axes for c in read if (axes := order(program, c)) is not None}
    turned = [c for c, axes in orders.items() if axes != tuple(sorted(axes))]
    straight = [c for c in orders if c not in turned]
    return min(map(size, (*turned, *straight))) if turned and straight else 0


def elementwise_operands(program: Program, t: int) -> Sequence[int]:
    """The operands of a map or a fold; nothing for other terms."""
    term = program.terms[t]
    return term.args if isinstance(term, Map) else (term.arg,) if isinstance(term, Fold) else ()


def order(program: Program, t: int) -> tuple[int, ...] | None:
    """The indices of an array in the order of its axes; None for what is no array."""
    term = program.terms[t]
    if isinstance(term, Rename):
        names = dict(term.pairs)
        own = order(program, term.arg)
        return None if own is None else tuple(names.get(i, i) for i in own)
    if isinstance(term, Input | Const):
        return tuple(i for axis in term.axes for i in axis)
    return None if is_leaf(term) else tuple(bits(program.free[t]))


def left_to_tiles(program: Program, step: int, members: Sequence[int]) -> list[int]:
    """The values that only tile kernels compute inside the fold ``step``, and XLA writes out."""
    fold = program.terms[step]
    if not isinstance(fold, Fold | Block):
        return []
    if isinstance(fold, Block) and picks(fold.call):
        return [t for t in members if isinstance(program.terms[t], Dot) or t in fold.args]
    longest = habits.INNER_FOLD // 2 if isinstance(fold, Fold) else habits.SEARCHED_FOLD

    def is_held(t: int) -> bool:
        term = program.terms[t]
        return isinstance(term, Dot) or (isinstance(term, Fold) and program.extent(term.over) >= longest)

    return [t for t in members if t != step and not is_alike(program, step, t) and is_held(t)]


def size(program: Program, t: int, extents: Sequence[int]) -> int:
    """The bytes of a value at the given extents of its indices."""
    return extent_of(extents, program.free[t]) * itemsize(program.terms[t].dtype)
