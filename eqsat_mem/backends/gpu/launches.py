"""Launches of kernels by XLA:GPU: how many a step takes, and how much of the card they keep busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Literal

from eqsat_mem.backends.gpu import habits, scratch
from eqsat_mem.backends.gpu.operations import LAUNCHES
from eqsat_mem.backends.gpu.targets import Target
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Block, Dot, Fold, itemsize
from eqsat_mem.ir.jaxprs import inner_jaxprs
from eqsat_mem.ir.ops import REDUCTIONS
from eqsat_mem.schedule.cost_model import sides
from eqsat_mem.schedule.kernel import Kernel
from eqsat_mem.schedule.sizes import extent_of
from eqsat_mem.schedule.tiles import Tile
from eqsat_mem.schedule.weights import BLOCKS, free, moved, trips

BLOCKS_PER_CORE = 8
"""Thread blocks for each multiprocessor that a kernel needs to run at its full rate: guessed."""
THREADS = 512
"""Elements of an elementwise kernel that one block computes: blocks of launches in benchmarks/gpu_model.py."""


def busy(ex: Extraction, t: int, extents: Sequence[int], target: Target) -> float:
    """The share of the full rate that the kernel of an elementwise value or a fold has blocks for."""
    return min(1.0, _blocks(ex, t, extents) / (BLOCKS_PER_CORE * target.multiprocessors))


def _blocks(ex: Extraction, t: int, extents: Sequence[int]) -> float:
    """Thread blocks of an elementwise kernel or a fold."""
    program, term = ex.program, ex.program.terms[t]
    results = extent_of(extents, program.free[t])
    if not isinstance(term, Fold) or ex.unrolls.get(t):
        return max(results / THREADS, 1.0)
    extent, last = scratch.folded(program, t, extents)
    side_by_side = 1 if last else extent_of(extents, scratch.columns(program, term))
    return results / min(side_by_side, scratch.COLUMNS_AT_ONCE) * habits.fold_parts(extent, last)


def count(kernel: Kernel, tile: Tile | None, target: Target) -> int:
    """The launches of a kernel of the model, which may be a tile kernel."""
    program, term = kernel.ex.program, kernel.term
    if not kernel.members:  # another kernel computes it
        return 0
    if isinstance(term, Dot):
        m, n, k, batch = sides(program, term, kernel.extents)
        return 1 if habits.product_parts(batch, m, n, k, itemsize(term.dtype), target) == 1 else 2
    if tile is not None:
        return 1 + sum(read.copied for read in tile.pairs.reads)
    step = scratch.step_of_kernel(program, kernel.step, kernel.members)
    if isinstance(program.terms[step], Fold) and not kernel.ex.unrolls.get(step):
        return 1 if habits.fold_parts(*scratch.folded(program, step, kernel.extents)) == 1 else 2
    if not isinstance(term, Block):
        return 1
    is_unknown = not any(term.call.bodies_s) and term.call.inside is None  # else its steps are timed with what they launch
    if term.call.prim.name in ("scan", "while") and is_unknown:
        return trips(term.call) * (1 + sum(map(_launched, inner_jaxprs(term.call.params))))
    return LAUNCHES.get(term.call.prim.name, 1)


def _launched(jaxpr: Any) -> int:
    """The launches of a run of a jaxpr that is not planned: those of each operation, and one for all that is elementwise, or moves
    elements, between the same operations."""
    count, behind, maps = 0, dict[Any, int](), set[int]()
    for eqn in jaxpr.eqns:
        name, inside = eqn.primitive.name, [*inner_jaxprs(eqn.params)]
        depth = max((behind.get(v, 0) for v in eqn.invars if not isinstance(v, Literal)), default=0)
        if name in REDUCTIONS or name == "dot_general" or BLOCKS.get(name, free) not in (free, moved):
            count, depth = count + LAUNCHES.get(name, 1), depth + 1
        elif inside:
            count, depth = count + eqn.params.get("length", 1) * sum(map(_launched, inside)), depth + 1
        else:
            maps.add(depth)
        behind |= dict.fromkeys(eqn.outvars, depth)
    return count + len(maps)
