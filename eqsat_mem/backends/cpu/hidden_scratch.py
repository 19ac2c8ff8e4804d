"""An estimate, from the compiled program, of the memory that XLA:CPU's kernel libraries and LAPACK allocate and XLA does not report."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

import jax
import jax.numpy as jnp
from jax import jit as real_jit
from jaxlib import version

from eqsat_mem.backends import hlo
from eqsat_mem.backends.cpu import lapack
from eqsat_mem.backends.cpu.fusion import LONG
from eqsat_mem.backends.hlo import Instruction, Module

# XLA:CPU passes contractions, with the elementwise operations and reductions around them, to a kernel library as fusions of
# the kind below. The library allocates memory for contractions whose result is used inside the fusion; XLA does not count it.
# Measured as growth of resident memory on 2 cores, jax 0.10, f32, against the bytes of the contraction's result:
#
#   sum_k exp(q k), batched                 128 of 128 MiB      a batched contraction is always materialised whole
#   softmax(q k) v, batched or not          133 of 128, 68 of 64    so is one that is read twice, or by another contraction
#   sum_k exp(q k), 4096 x 4096             17 of 64            otherwise a block of rows at a time
#   sum_k exp(q k), 8192 x 8192             34 of 256
#   sum_k exp(q k), 65536 x 1024            1 of 256
#   two such attentions                     135 of 2 * 128      fusions run one at a time
#   the second attention fused to the first 267 of 2 * 128
#   exp(x) @ v, sum_d (x - y)^2, softmax(x) 0                   elementwise intermediates take no memory
#   sum |x|, also with its axis kept; -sum x    0
#   -sum |x|, log sum exp(x), var(x)        171, 179, 179 of 179    except where operations of the sum's own size follow a sum
#   -sum |x - y|, d = 784; d = 300          194 of 179, 134 of 69
#   -sum |x|, 4096, 32,767 rows; v + sum |x|    0 of 128        unless they are 2^15 at most, or an array is added to the sum
#   sum_i x_ijk, sum_i |x_ijk|, 64 x 64 x 8192  130, 121 of 128     a sum of leading axes holds rows of partial sums
#   sum_i x_ik, 4096 x 8192; 16,384 x 2048  32; 8 of 128
#   sum_k f(x_i, y_k) v_k                   4 of 38 and of 381, 40 of 191      a weighted sum is a contraction: about 200 rows at a time,
#   sum_i f(x_i, y_k) w_i                   38 of 38, 381 of 381, 171 of 95    whole where rows are summed,
#   sum_k f(x_i, y_j, z_k) v_k              38 of 38, 381 of 381, 148 of 71    or where rows are those of several axes,
#   sum_i f(x_i, y_j, z_k) w_i              303 of 71, 74 of 71                up to four times
#   sum_k x_ik v_k, sum_i x_ik w_i          0 of 128            but nothing where a matrix is weighted that is in memory;
#   sum_i x_ijk w_ik; sum_i x_ijk w_i       130; 128 of 128     of more axes, all or less
#   sum_k x_ijk w_jk; w_ik, sum_j x_ijk w_ij    36 of 128; 30 of 256
#   max_k f(x_i, y_j, z_k) v_k              2 of 71
#   sum_k x_ik y_ik, shape (1, i, k)        43 of 9, 84 of 17, 64 of 13     five times where an axis that is not summed has extent one
#   sum_ak x_aik y_aik, sum_k x_ik y_ik     0 of 9
#
# Contractions whose left operand does not end in the contracted axis are passed to another library. The contractions of a batch run
# concurrently, and each packs its operands: more of them with more threads. Figures in MiB without the result, of the sizes of both
# operands, in the first run of a process; the others are of 2 threads:
#
#   bki,bkj->bij, f32 8 x 1024 x 1024       12 to 15 of 32 + 2, 14 to 16 of 32 + 32; 8 threads: 15 to 18, 32 to 36
#   f32 16, 4 x 1024 x 1024                 19 to 21 of 64 + 64, 22 to 24 of 16 + 16; 8 threads: 38 to 40, 24 to 25
#   f32 64 x 512 x 512                      48 to 53 of 64 + 8, 64 to 66 of 64 + 64; 8 threads: 40 to 55, 67 to 84
#   f64, f32 8 x 512 x 512                  17 of 16 + 2, 15 to 20 of 8 + 8; 8 threads: 20 to 24 of 8 + 8
#   f32 256 x 128 x 128; one of 1024 x 1024     0 of 16 + 8; 3 of 4 + 4
#   bkj,bki->bji, f32 8 x 1024 x 1024       17 of 2 + 32        whichever operand is larger
#   bik,bkj->bij, bik,bjk->bij              0, in f32 and f64
#
# An identity that the library does not support (reduce_precision to the dtype's own precision) keeps the contraction out of the
# fusion, and XLA then reports its result; optimization_barrier does not, because XLA:CPU removes it before it fuses.
LIBRARY_FUSION = '"kind":"__ynn_fusion"'
BATCH = "lhs_batch_dims"

STREAMED_ROWS = 1088
"""The most rows of a contraction's result that the library was observed to hold when it works in blocks of rows:
benchmarks/calibration/hidden_scratch.py."""
WEIGHTED_ROWS = 256
"""The most rows of values that it was observed to hold in a weighted sum of them: benchmarks/calibration/hidden_scratch.py."""
FOLDED_AT_ONCE = 32_768
"""Elements of an operand that the kernel library folds to one partial result: benchmarks/calibration/partial_folds.py."""
LONE_AXIS = 5
"""The bytes that it was observed to hold for a sum of products along some axes while another axis has extent one, as a multiple of
the bytes of the products: benchmarks/calibration/hidden_scratch.py."""
PACKED = 0.75
"""The fraction of the operands of a batched contraction that the other library was observed to hold packed at one time, where they are
so large that what it holds anyway, some MiB, does not show: benchmarks/calibration/hidden_scratch.py."""
PACKED_ELEMENTS = 2**16
"""The elements of both operands of one contraction of a batch up to which no packed copies were observed:
benchmarks/calibration/hidden_scratch.py."""


def hidden_scratch_bytes(module: Module) -> int:
    """Estimate the bytes that XLA:CPU's kernel libraries allocate and ``memory_analysis()`` does not report.

    The estimate is that of the largest kernel, because kernels run one at a time. For a contraction that is reduced immediately, it is
    an upper bound, up to four times the measured bytes; for batched contractions chained inside one fusion, it may be up to half too
    small.
    """
    fusions = [i for i in module.instructions if i.op == "fusion"]
    fused = {name for fusion in fusions for name in fusion.called}
    called = library_computations(module)
    sums = _sums(module)
    bodies = {name: {i.name: i for i in body.values() if i.type != "tuple"} for name, body in module.computations.items()}
    packed = (nbytes for name, body in bodies.items() if name not in fused for nbytes in _packed(body))
    return max((*(sum(_scratch(bodies[name], sums)) for name in called if name in bodies), *packed), default=0)


def library_computations(module: Module) -> list[str]:
    """The names of the computations that XLA:CPU passes to its kernel library as fusions."""
    return [name for i in module.instructions if i.op == "fusion" and not is_compiled(i) for name in i.called]


def is_compiled(instruction: Instruction) -> bool:
    """Whether an instruction is a fusion that XLA compiles itself: it holds nothing that XLA does not report."""
    return instruction.op == "fusion" and LIBRARY_FUSION not in instruction.text("backend_config")


SEEN_IN = frozenset({"0.10.0", "0.10.1", "0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1"})
"""The versions of jaxlib whose compiled programs are known to be read correctly."""


def is_seen() -> bool:
    """Whether hidden scratch is recognised in programs compiled by the installed jaxlib; an unknown version is tested once."""
    return version.__version__ in SEEN_IN or canary()


@cache
def canary() -> bool:
    """Whether the scratch of a program known to allocate some is recognised, or reported by XLA itself.

    A batched contraction whose exponentials are summed immediately is materialised whole in the kernel library (see the table above).
    If XLA renamed the library's fusions, the estimate would be 0 although XLA reports less than the contraction.
    """
    batch, rows, depth = 2, 256, 8
    shape = jax.ShapeDtypeStruct((batch, rows, depth), jnp.float32)

    def summed(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k)).sum(-1)

    compiled = real_jit(summed).lower(shape, shape).compile()
    whole = 4 * batch * rows * rows
    memory = compiled.memory_analysis()
    return (memory is not None and memory.temp_size_in_bytes >= whole) or hidden_scratch_bytes(hlo.read(compiled)) >= whole


# --- LAPACK -------------------------------------------------------------------------------------------

_ROUTINE = re.compile(r"lapack_[sdcz](\w+)_ffi")
_VECTORS = re.compile(r"\b(?:mode|compute_left|compute_right) = (\d+)")
_NO_VECTORS = str(ord("N"))


def workspace_bytes(module: Module) -> int:
    """Return the bytes that LAPACK allocates and ``memory_analysis()`` does not report.

    They are those of the largest call, because calls run one at a time.
    """
    return max((_workspace(i, body) for body in module.computations.values() for i in body.values()), default=0)


def _workspace(call: Instruction, body: Mapping[str, Instruction]) -> int:
    """Return the bytes of workspace of the LAPACK routine that an instruction calls; zero if it calls none."""
    routine = _ROUTINE.fullmatch(call.text("custom_call_target"))
    if routine is None:
        return 0
    matrix = body[call.operands[0]]
    vectors = sum(flag != _NO_VECTORS for flag in _VECTORS.findall(call.text("backend_config")))
    return int(lapack.workspace(routine[1], min(matrix.shape[-2:], default=0), vectors)) * hlo.itemsize(matrix.type)


# --- kernel libraries: instructions of one computation by name, without tuples ---------------------------


def _packed(body: Mapping[str, Instruction]) -> Iterator[int]:
    """Yield the bytes packed for each batched contraction that XLA passes to the other library (see the table above)."""
    for dot in body.values():
        if dot.op != "dot" or not dot.axes(BATCH):
            continue
        operands = [body[name] for name in dot.operands]
        shape = operands[0].shape
        batch = math.prod(shape[axis] for axis in dot.axes(BATCH))
        elements = sum(math.prod(operand.shape) for operand in operands)
        if batch > 1 and elements > batch * PACKED_ELEMENTS and len(shape) - 1 not in dot.axes("lhs_contracting_dims"):
            yield int(PACKED * sum(operand.nbytes for operand in operands))


def _scratch(body: Mapping[str, Instruction], sums: set[str]) -> Iterator[int]:
    """Yield the bytes held for folds and for each contraction inside a fusion whose result is not the fusion's (see the table above).

    Args:
        body: the instructions of the fusion.
        sums: the names of the computations that add.
    """
    for dot in body.values():
        if dot.op != "dot" or dot.is_root:
            continue
        rows = dot.shape[0] if dot.shape else 1
        if _is_streamed(dot, body):
            rows = min(rows, STREAMED_ROWS)
        yield rows * math.prod(dot.shape[1:]) * hlo.itemsize(dot.type)
    yield _held_for_folds(body)
    yield from _held_for_weights(body, sums)


def _reductions(body: Mapping[str, Instruction]) -> Iterator[Instruction]:
    return (i for i in body.values() if i.op == "reduce")


def _held_for_folds(body: Mapping[str, Instruction]) -> int:
    """Return the bytes of the largest argument of a fusion that folds a computed value and ends in a value no larger than the fold.

    Other fusions hold no bytes for folds.
    """
    root = next((i for i in body.values() if i.is_root), None)
    while root is not None and root.op == "bitcast":  # the same elements: a sum whose axis is kept with extent one
        root = body.get(root.operands[0])
    if root is None:
        return 0
    arguments = {i.name: i.nbytes for i in body.values() if i.op == "parameter"}
    for fold in _reductions(body):
        read = body[fold.operands[0]]
        begins_with_array = root.op == "add" and fold.name in root.operands and not arguments.keys().isdisjoint(root.operands)
        if begins_with_array or math.prod(fold.shape) <= LONG:
            continue
        is_square = len(read.operands) == 2 and len({*read.operands}) == 1 and read.operands[0] in arguments
        if fold is not root and root.nbytes <= fold.nbytes and not is_square and read.name not in arguments:
            return max(arguments.values(), default=0)
    return 0


def partial_bytes(module: Module) -> int:
    """Return the bytes of the partial results that the kernel library leaves in folds of leading axes, and XLA does not report.

    They are those of the largest fold, because folds run one at a time. A sum with weights is a contraction, and leaves none.
    """
    sums, computations = _sums(module), module.computations
    bodies = (computations[name] for name in library_computations(module) if name in computations)
    return max((_held_for_parts(fold, body, sums) for body in bodies for fold in _reductions(body)), default=0)


def _held_for_parts(fold: Instruction, body: Mapping[str, Instruction], sums: set[str]) -> int:
    operand = body[fold.operands[0]]
    is_contracted = _weighted(fold, body, sums) is not None
    return 0 if is_contracted else held_for_parts(operand.shape, {*fold.axes("dimensions")}) * hlo.itemsize(operand.type)


def held_for_parts(shape: Sequence[int], folded: Collection[int]) -> int:
    """The elements of partial results held for a fold of an array of this shape along the axes ``folded``.

    Where an axis that stays comes before them, its rows are distributed: each is folded at once.
    """
    axes = [a for a, extent in enumerate(shape) if extent > 1]
    if not axes or axes[0] not in folded:
        return 0
    length = math.prod(shape[a] for a in axes if a not in folded)
    parts = math.ceil(math.prod(shape[a] for a in axes if a in folded) / max(1, FOLDED_AT_ONCE // length))
    return parts * length if parts > 1 else 0


def _held_for_weights(body: Mapping[str, Instruction], sums: set[str]) -> Iterator[int]:
    """Yield the bytes held for each sum of products where an axis of extent one is not summed, or a factor, the weight, is broadcast."""
    for fold in _reductions(body):
        product, folded = _product(fold, body, sums), {*fold.axes("dimensions")}
        if product is None:
            continue
        shape = product.shape
        if len({*product.operands}) > 1 and any(shape[a] == 1 for a in range(len(shape)) if a not in folded):
            yield LONE_AXIS * product.nbytes
        elif (value := _weighted(fold, body, sums)) is not None:
            yield held_for_weights(shape, folded, value.op != "parameter") * hlo.itemsize(product.type)


def _sums(module: Module) -> set[str]:
    """The names of the computations that add."""
    return {i.computation for i in module.instructions if i.op == "add"}


def _product(fold: Instruction, body: Mapping[str, Instruction], sums: set[str]) -> Instruction | None:
    """The product that a fold sums, negated or not; None if it folds another value."""
    product = body[fold.operands[0]]
    while product.op == "negate":
        product = body[product.operands[0]]
    return None if product.op != "multiply" or sums.isdisjoint(fold.called) else product


def _weighted(fold: Instruction, body: Mapping[str, Instruction], sums: set[str]) -> Instruction | None:
    """The factor that a fold sums with weights, which are broadcast along an axis that stays; None if it is no such sum."""
    product = _product(fold, body, sums)
    if product is None:
        return None
    folded = {*fold.axes("dimensions")}
    stays = {a for a, extent in enumerate(product.shape) if extent > 1} - folded
    for value, weight in itertools.permutations(body[name] for name in product.operands):
        along = {*weight.axes("dimensions")} if weight.op == "broadcast" else set()
        if along & folded and stays - along:
            return value
    return None


def held_for_weights(shape: Sequence[int], folded: Collection[int], computed: bool) -> int:
    """The elements held for a sum of products of this shape along the axes ``folded`` where one factor, the weight, is broadcast.

    The other is ``computed`` by the library, or an array: a matrix is contracted where it lies.
    """
    axes = [a for a, extent in enumerate(shape) if extent > 1]
    if not axes or (len(axes) == 2 and not computed):
        return 0
    sums_rows = axes[-1] not in folded
    rows = min(shape[axes[0]], WEIGHTED_ROWS) if len(axes) == 2 and not sums_rows else shape[axes[0]]
    twice = 2 if len(axes) > 2 and sums_rows and len(set(axes).intersection(folded)) == 1 else 1
    return rows * math.prod(shape[a] for a in axes[1:]) * twice


def _is_streamed(dot: Instruction, body: Mapping[str, Instruction]) -> bool:
    """Whether a contraction without batch dimensions is followed by a chain of single readers that are not contractions."""
    if dot.axes(BATCH):
        return False
    value = dot
    while users := [i for i in body.values() if value.name in i.operands]:
        if len(users) > 1 or users[0].op == "dot":
            return False
        value = users[0]
    return True
