"""What XLA:CPU's kernel libraries and LAPACK allocate besides what XLA reports: an estimate from the text of the compiled program."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache

import jax
import jax.numpy as jnp
from jaxlib import version

from eqsat_mem.backends.cpu import lapack

# XLA:CPU hands contractions, with the elementwise operations and reductions around them, to a kernel library as fusions of
# the kind below. The library allocates room for contractions whose result is used inside the fusion; XLA does not count it.
# Measured as growth of resident memory on 2 cores, jax 0.10, f32, against the bytes of the contraction's result:
#
#   sum_k exp(q k), batched                 128 of 128 MiB      a batched contraction is always whole
#   softmax(q k) v, batched or not          133 of 128, 68 of 64    so is one that is used twice, or by another contraction
#   sum_k exp(q k), 4096 x 4096             17 of 64            otherwise a block of rows at a time
#   sum_k exp(q k), 8192 x 8192             34 of 256
#   sum_k exp(q k), 65536 x 1024            1 of 256
#   two such attentions                     135 of 2 * 128      fusions run one at a time
#   the second attention fused to the first 267 of 2 * 128
#   exp(x) @ v, sum_d (x - y)^2, softmax(x) 0                   elementwise intermediates take no room of their own
#   sum |x|, also with its axis kept; -sum x    0
#   -sum |x|, log sum exp(x), var(x)        171, 179, 179 of 179    but for a sum that goes on to operations as small as itself
#   -sum |x - y|, d = 784; d = 300          194 of 179, 134 of 69
#   sum_k f(x_i, y_k) v_k                   4 of 38 and of 381, 40 of 191      a weighted sum is a contraction: about 200 rows at a time,
#   sum_i f(x_i, y_k) w_i                   38 of 38, 381 of 381, 171 of 95    whole where rows are summed,
#   sum_k f(x_i, y_j, z_k) v_k              38 of 38, 381 of 381, 148 of 71    or where rows are those of several axes,
#   sum_i f(x_i, y_j, z_k) w_i              303 of 71, 74 of 71                up to four times
#   max_k f(x_i, y_j, z_k) v_k              2 of 71
#   sum_k x_ik y_ik, shape (1, i, k)        43 of 9, 84 of 17, 64 of 13     five times where an axis that stays has extent one
#   sum_ak x_aik y_aik, sum_k x_ik y_ik     0 of 9
#
# Contractions whose left operand does not end in the contracted axis are left to another library. Batched ones are all under way at once,
# and each has packed its operands. In MiB, the operands in brackets:
#
#   bki,bkj->bij, f32 8 x 1024 x 1024       14 to 17 of 32 + 2, 66 to 76 of 32 + 32
#   f32 64 x 512 x 512                      30 to 55 of 64 + 8
#   f64 8 x 512 x 512, f32 8 x 512 x 512    17 of 16 + 2, 14 of 8 + 8
#   f32 256 x 128 x 128; one of 1024 x 1024     0 of 16 + 8; 3 of 4 + 4
#   bkj,bki->bji, f32 8 x 1024 x 1024       17 of 2 + 32        whichever is the larger
#   bik,bkj->bij, bik,bjk->bij              0, in f32 and f64
#
# An identity that the library does not know (reduce_precision to the dtype's own precision) keeps the contraction out of the
# fusion, and XLA then reports its result; optimization_barrier does not, because XLA:CPU drops it before it fuses.
LIBRARY_FUSION = '"kind":"__ynn_fusion"'

STREAMED_ROWS = 1088
"""Most rows of a contraction's result that the library was seen to hold where it works in blocks of rows."""
WEIGHTED_ROWS = 256
"""Most rows of values that it was seen to hold while it sums them with weights."""
LONE_AXIS = 5
"""How many times it was seen to hold products that it sums along some of their axes, where one of the others has extent one."""
PACKED = 0.5
"""The share of the operands of a batched contraction that the other library was seen to pack at once, of those that count twice."""
PACKED_ELEMENTS = 2**16
"""Elements of both operands of one contraction of a batch up to which nothing was seen to be held."""


def hidden_scratch_bytes(compiled_text: str) -> int:
    """Bytes that XLA:CPU's kernel libraries allocate beyond what ``memory_analysis()`` reports: an estimate.

    ``compiled_text`` is the compiled program's HLO. The largest kernel counts, as one runs at a time. The estimate is an upper bound,
    up to four times what was measured, for a contraction that is reduced at once; and up to half of it too small for batched contractions
    chained inside one fusion.
    """
    if LIBRARY_FUSION not in compiled_text and _BATCHED not in compiled_text:
        return 0
    bodies = dict(_computations(compiled_text))
    called = re.findall(rf"calls=%?([\w.\-]+).*{re.escape(LIBRARY_FUSION)}", compiled_text)
    sums = {name for name, body in bodies.items() if any(" add(" in line for line in body)}
    fused = {*re.findall(r"calls=%?([\w.\-]+)", compiled_text)}
    packed = (nbytes for name, body in bodies.items() if name not in fused for nbytes in _packed(body))
    return max((*(sum(_scratch(bodies[name], sums)) for name in called), *packed), default=0)


SEEN_IN = frozenset({"0.10.0", "0.10.1", "0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0"})
"""Versions of jaxlib whose compiled text is known to be read."""


def is_seen() -> bool:
    """Whether scratch is recognised in what the installed jaxlib compiles: asked once, of versions that are not known."""
    return version.__version__ in SEEN_IN or canary()


@cache
def canary() -> bool:
    """Whether the scratch of a program that is known to take some is recognised, or reported by XLA itself.

    A batched contraction whose exponentials are summed at once is whole in the kernel library (see the table above). If XLA renames the
    library's fusions, the estimate is 0 although XLA reports less than the contraction.
    """
    batch, rows, depth = 2, 256, 8
    shape = jax.ShapeDtypeStruct((batch, rows, depth), jnp.float32)

    def summed(q: jax.Array, k: jax.Array) -> jax.Array:
        return jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k)).sum(-1)

    compiled = jax.jit(summed).lower(shape, shape).compile()
    whole = 4 * batch * rows * rows
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return (memory is not None and memory.temp_size_in_bytes >= whole) or (text is not None and hidden_scratch_bytes(text) >= whole)


def workspace_bytes(compiled_text: str) -> int:
    """Bytes that LAPACK allocates, which ``memory_analysis()`` does not report either: of the largest call, as one runs at a time."""
    return max(map(_workspace, _LAPACK.finditer(compiled_text)), default=0)


_LAPACK = re.compile(
    r'custom_call_target="lapack_[sdcz](?P<routine>\w+)_ffi", '
    r"operand_layout_constraints=\{(?P<type>\w+)\[(?P<shape>[\d,]*)\](?P<rest>.*)"
)
_NO_VECTORS = str(ord("N"))


def _workspace(call: re.Match[str]) -> int:
    """Bytes that a routine allocates for itself."""
    wanted = re.findall(r"\b(?:mode|compute_left|compute_right) = (\d+)", call["rest"])
    vectors = sum(flag != _NO_VECTORS for flag in wanted)
    return int(lapack.workspace(call["routine"], min(_shape(call)[-2:]), vectors)) * _itemsize(call["type"])


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """The computations of HLO text: names, and lines of instructions."""
    for match in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2].splitlines()


_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\w+)\[(?P<shape>[\d,]*)\]\S* (?P<op>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)"
)


_BATCHED = "lhs_batch_dims={"


def _packed(body: list[str]) -> Iterator[int]:
    """Bytes packed for each batched contraction that XLA leaves to the other library: see the table above."""
    if not any(_BATCHED in line for line in body):
        return
    made_by = {match["name"]: match for line in body if (match := _INSTRUCTION.match(line))}
    for dot in made_by.values():
        if dot["op"] != "dot" or _BATCHED not in dot["rest"]:
            continue
        operands = [made_by[name] for name in re.findall(r"%([\w.\-]+)", dot["operands"])]
        shape = _shape(operands[0])
        batch = math.prod(shape[axis] for axis in _axes(dot, "lhs_batch_dims"))
        elements = sum(math.prod(_shape(operand)) for operand in operands)
        if batch > 1 and elements > batch * PACKED_ELEMENTS and len(shape) - 1 not in _axes(dot, "lhs_contracting_dims"):
            yield int(PACKED * sum(map(_nbytes, operands)))


def _scratch(body: list[str], sums: set[str]) -> Iterator[int]:
    """Bytes held for each contraction inside a fusion whose result is not the fusion's own, and for folds: see the table above.

    ``sums`` are the computations that add.
    """
    instructions = [match for line in body if (match := _INSTRUCTION.match(line))]
    reads = {match["name"]: re.findall(r"%([\w.\-]+)", match["operands"]) for match in instructions}
    contractions = {match["name"] for match in instructions if match["op"] == "dot"}
    for dot in instructions:
        if dot["op"] != "dot" or dot["root"]:
            continue
        shape = _shape(dot)
        rows = shape[0] if shape else 1
        if _is_streamed(dot, reads, contractions):
            rows = min(rows, STREAMED_ROWS)
        yield rows * math.prod(shape[1:]) * _itemsize(dot["type"])
    yield _held_for_folds(instructions, reads)
    yield from _held_for_weights(instructions, reads, sums)


def _held_for_folds(instructions: list[re.Match[str]], reads: dict[str, list[str]]) -> int:
    """Bytes of the largest argument of a fusion that folds what it has computed, and computes on with something no larger."""
    made_by = {i["name"]: i for i in instructions}
    root = next((i for i in instructions if i["root"]), None)
    while root is not None and root["op"] == "bitcast":  # the same numbers: of sums whose axis is kept, with extent one
        root = made_by.get(reads[root["name"]][0])
    arguments = {i["name"]: _nbytes(i) for i in instructions if i["op"] == "parameter"}
    for fold in instructions:
        read = reads[fold["name"]][:1]
        squares = [
            operands for name in read if len(operands := reads[name]) == 2 and operands[0] == operands[1] and operands[0] in arguments
        ]
        goes_on = root is not None and fold["op"] == "reduce" and fold is not root and _nbytes(root) <= _nbytes(fold)
        if goes_on and not squares and not arguments.keys() & set(read):
            return max(arguments.values())
    return 0


def _held_for_weights(instructions: list[re.Match[str]], reads: dict[str, list[str]], sums: set[str]) -> Iterator[int]:
    """Bytes held for each sum of products: if an axis that stays has extent one, or if a factor, the weight, is the same along one."""
    made_by = {i["name"]: i for i in instructions}
    for fold in instructions:
        product = made_by.get(next(iter(reads[fold["name"]]), ""))
        while product is not None and product["op"] == "negate":
            product = made_by.get(reads[product["name"]][0])
        adds = fold["op"] == "reduce" and (match := re.search(r"to_apply=%?([\w.\-]+)", fold["rest"])) and match[1] in sums
        if product is None or product["op"] != "multiply" or not adds:
            continue
        shape, folded, factors = _shape(product), _dimensions(fold), reads[product["name"]]
        axes = [a for a, extent in enumerate(shape) if extent > 1]
        if len(set(factors)) > 1 and any(shape[a] == 1 for a in range(len(shape)) if a not in folded):
            yield LONE_AXIS * _nbytes(product)
            continue
        folded, stays = folded & set(axes), set(axes) - folded
        broadcasts = [_dimensions(factor) for name in factors if (factor := made_by[name])["op"] == "broadcast"]
        if any(along & folded and stays - along for along in broadcasts):
            sums_rows = axes[-1] not in folded
            rows = min(shape[axes[0]], WEIGHTED_ROWS) if len(axes) == 2 and not sums_rows else shape[axes[0]]
            twice = 2 if len(axes) > 2 and sums_rows and len(folded) == 1 else 1
            yield rows * math.prod(shape[a] for a in axes[1:]) * _itemsize(product["type"]) * twice


def _is_streamed(dot: re.Match[str], reads: dict[str, list[str]], contractions: set[str]) -> bool:
    """Whether a contraction without batch dimensions goes straight through a chain of operations that are not contractions."""
    if _BATCHED in dot["rest"]:
        return False
    value = dot["name"]
    while users := [name for name, operands in reads.items() if value in operands]:
        if len(users) > 1 or users[0] in contractions:
            return False
        value = users[0]
    return True


def _nbytes(instruction: re.Match[str]) -> int:
    """Bytes of the result of an instruction."""
    return math.prod(_shape(instruction)) * _itemsize(instruction["type"])


def _shape(instruction: re.Match[str]) -> list[int]:
    return [int(extent) for extent in instruction["shape"].split(",") if extent]


def _dimensions(instruction: re.Match[str]) -> set[int]:
    """The axes that a reduction folds, or those of a broadcast's result that its operand has."""
    return _axes(instruction, "dimensions")


def _axes(instruction: re.Match[str], attribute: str) -> set[int]:
    found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", instruction["rest"])
    return {int(axis) for axis in found[1].split(",") if axis} if found else set()


def _itemsize(hlo_type: str) -> int:
    """Bytes of an element of an HLO type: f32, bf16, s8, pred, c64, f8e4m3fn ..."""
    width = re.match(r"[a-z]+(\d+)", hlo_type)
    return max(int(width[1]) // 8, 1) if width else 1
