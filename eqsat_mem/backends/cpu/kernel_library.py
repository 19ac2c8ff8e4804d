"""The kernel library of XLA:CPU (YNNPACK): what it computes inside a fold, and what it is slow at.

It folds and contracts float32 and float64, with the elementwise operations around a fold that it supports. The facts come from optimised
HLO and from measured resident memory, with jaxlib 0.10 on x86.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from typing import Any
from weakref import WeakKeyDictionary

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Dot, Fold, Literal, Map, Program, Term
from eqsat_mem.ir.jaxprs import inner_jaxprs
from eqsat_mem.ir.loop_tree import Loop, Seq
from eqsat_mem.ir.ops import MAPS, Operation, operation_of
from eqsat_mem.ir.ops.custom.operation import traced
from eqsat_mem.schedule.backend import Backend

ADDITIONS = frozenset({"neg", "abs", "square", "floor", "ceil", "round", "integer_pow", "add", "sub", "mul", "max", "min"})
"""The operations that take no longer than an addition."""
WIDE = ("float32", "float64")
"""The dtypes in which the kernel library folds and computes."""
NARROW = ("bfloat16", "float16")
"""Floating-point dtypes that are widened for contractions."""
FOLDED = frozenset({"add", "max", "min"})
"""The monoids by which the kernel library folds."""
KNOWN = frozenset({"neg", "abs", "sign", "square", "floor", "ceil", "round", "sqrt", "rsqrt", "exp", "exp2", "expm1", "log", "log1p",
                   "logistic", "tanh", "erf", "integer_pow", "add", "sub", "mul", "div", "max", "min", "pow"})  # fmt: skip
"""The elementwise operations that the kernel library computes inside a fold."""
HEAVY = 6
"""Operations for each element of a fold's operand from which on XLA:CPU's own code, which writes the operand to memory, is faster than
the kernel library, which runs them one after the other on small blocks. Sweep: benchmarks/calibration/fused_operands.py."""
GAINED = {"sign": 15, "erf": 8, "logistic": 4, "log": -5, "log1p": -13, "expm1": -12}
"""What such code gains by an operation, in the gains by an addition, where it is not one; the library's logarithms are the faster ones.
Sweep: benchmarks/calibration/fused_operands.py."""
SLOWER, SLOWEST = 3.0, {"sign": 50.0}
"""The factor by which the library takes longer for an addition, and for some operations. Sweep:
benchmarks/calibration/fused_operands.py."""


def knows(term: Map) -> bool:
    """Whether the kernel library supports an elementwise operation in its dtype."""
    return is_wide(term.dtype) and _is_known(term)


def takes(program: Program, t: int) -> bool:
    """Whether the kernel library computes a value that is fused with a fold: an elementwise operation that it knows, and no clamp."""
    term = program.terms[t]
    return isinstance(term, Map) and knows(term) and not _is_clamp(program, term)


def _is_clamp(program: Program, term: Map) -> bool:
    """Whether XLA makes an operation and its operand one: a minimum, by a number, of a maximum with a number, or the reverse.

    The library does not know the result, ``clamp(low, x, high)``. Of bfloat16 there is none: XLA computes each in float32.
    """
    if term.op not in _REVERSE:
        return False
    inner = [program.terms[c] for c in _beside_numbers(program, term)]
    return any(isinstance(c, Map) and c.op == _REVERSE[term.op] and bool(_beside_numbers(program, c)) for c in inner)


def _beside_numbers(program: Program, term: Map) -> list[int]:
    """The operands of an operation whose other operand is a number."""
    numbers = [isinstance(program.terms[c], Literal) for c in term.args]
    return [c for c, other in zip(term.args, reversed(numbers), strict=True) if other]


_REVERSE = {"min": "max", "max": "min"}


def _is_known(term: Map) -> bool:
    own = operation_of(dict(term.params)) if term.params else None
    return term.op in KNOWN if own is None else _knows_function(own)


@cache
def _knows_function(operation: Operation) -> bool:
    """Whether the kernel library supports all operations of which a user's elementwise operation consists."""
    return _knows_jaxpr(traced(operation, ((),) * len(operation.operands)))


def _knows_jaxpr(jaxpr: Any) -> bool:
    for eqn in jaxpr.eqns:
        inside = list(inner_jaxprs(eqn.params))
        if not (all(map(_knows_jaxpr, inside)) if inside else eqn.primitive.name in MAPS and eqn.primitive.name in KNOWN):
            return False
    return True


def computes_inside(program: Program, t: int, fold: Fold) -> bool:
    """Whether the kernel library computes an elementwise operation inside a fold."""
    term = program.terms[t]
    assert isinstance(term, Map)
    if fold.monoid not in FOLDED or widens(fold):
        return False
    if term.op == "convert_element_type":
        wider, narrow = term, program.terms[term.args[0]]
        computed_wide = isinstance(narrow, Map) and not _is_known(narrow)
        return str(wider.dtype) == "float32" and str(narrow.dtype) == "bfloat16" and not computed_wide
    return takes(program, t) or (str(term.dtype) == "bfloat16" and _is_known(term))


_HEAVY_FOLDS: WeakKeyDictionary[Extraction, dict[Backend, frozenset[Fold]]] = WeakKeyDictionary()
"""Those of programs that are in use: a program holds the arrays that its function closes over."""


def heavy_folds(ex: Extraction, backend: Backend) -> frozenset[Fold]:
    """The folds of a program whose operands are better written to memory: they take many operations, or are summed with weights.

    See :func:`_is_heavy`.
    """
    known = _HEAVY_FOLDS.setdefault(ex, {})
    if backend not in known:
        folds = {term for t in ex.program.reachable() if isinstance(term := ex.program.terms[t], Fold)}
        known[backend] = frozenset(fold for fold in folds if _is_heavy(ex, fold, backend.is_cheap))
    return known[backend]


def _is_heavy(ex: Extraction, fold: Fold, is_cheap: Callable[[Program, int], bool]) -> bool:
    """Whether the operand of a fold by the kernel library takes many operations, and is larger than everything that they read.

    Emitted source keeps such an operand, all pairwise distances say, out of the library's fusion: see :data:`HEAVY`. It reads little, so
    that chunks of it stay in the caches. An operand as large as what it reads would only be read and written once more. What others read,
    and is not cheap, is in memory. Sums with weights are heavy, too: the library holds their operands, and takes longer.
    """
    program, count = ex.program, 0.0 if weighted(ex.program, fold) is None else HEAVY
    if fold.monoid not in FOLDED or not is_wide(fold.dtype):
        return False
    seen, heap = {fold.arg}, [(-fold.arg, program.free[fold.arg], 1)]
    while heap:
        number, joint, times = heappop(heap)  # users first
        t = -number
        term = program.terms[t]
        over = ex.unrolls.get(t, 0)
        if isinstance(term, Fold) and over:
            times *= program.extent(over)
            joint |= over
        elif not isinstance(term, Map) or (t != fold.arg and not seen.issuperset(program.readers(t)) and not is_cheap(program, t)):
            return False
        count += times * GAINED.get(term.op, 1) if isinstance(term, Map) else times
        inner = [c for c in program.operands(t) if c not in seen and not joint & ~program.free[c]]
        seen.update(inner)
        for c in inner:
            heappush(heap, (-c, joint, times))
    return count >= HEAVY


def weighted(program: Program, fold: Fold) -> int | None:
    """The value of which a fold is the sum with weights, which are the same along an axis that stays; None if it is no such sum.

    The library contracts both, and holds what it contracts, unreported. A quotient counts as a product: XLA multiplies by reciprocals of
    a smaller array.
    """
    if fold.monoid != "add" or not is_wide(fold.dtype):
        return None
    term = program.terms[fold.arg]
    while isinstance(term, Map) and term.op == "neg":
        term = program.terms[term.args[0]]
    if not isinstance(term, Map) or term.op not in ("mul", "div"):
        return None
    stays = program.free[fold.arg] & ~fold.over
    pairs = itertools.permutations(term.args) if term.op == "mul" else [term.args]
    return next((c for c, weight in pairs if program.free[weight] & fold.over and stays & ~program.free[weight]), None)


def slowness(term: Term) -> float:
    """The factor by which the kernel library takes longer for an operation inside a fold; 1 where its function is as fast as XLA's."""
    return SLOWEST.get(term.op, SLOWER if term.op in ADDITIONS else 1.0) if isinstance(term, Map) else 1.0


def is_narrow(program: Program, t: int) -> bool:
    """Whether the elements of a value are floating-point numbers that XLA:CPU widens to float32 for contractions."""
    return _is_narrow(program.terms[t].dtype)


def widens(term: Term) -> bool:
    """Whether an operation reads operands of a narrow floating-point dtype from a copy in float32."""
    return isinstance(term, Dot) or (isinstance(term, Fold) and term.monoid == "add" and str(term.dtype) == "bfloat16")


def folds_in_library(ex: Extraction, step: int | Loop | Seq) -> bool:
    """Whether a step is a fold that XLA:CPU passes to its kernel library."""
    if not isinstance(step, int) or ex.unrolls.get(step):
        return False
    term = ex.program.terms[step]
    return isinstance(term, Fold) and term.monoid in FOLDED and is_wide(term.dtype)


@cache
def is_wide(dtype: Any) -> bool:
    """Whether the kernel library computes with a dtype."""
    return str(dtype) in WIDE


@cache
def _is_narrow(dtype: Any) -> bool:
    return str(dtype) in NARROW
