"""Check a program against XLA (what the compiled program holds) and against the original (its values)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import jit

# --- memory ------------------------------------------------------------------------------------------


UNOPTIMISED: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": "1",
}
"""Options of a compilation that is only asked what it holds: XLA:CPU assigns buffers before it generates machine code, for which it then
takes the shortest way. Without its fusion emitters a scatter becomes a loop, whose counters are some hundred bytes."""


def compiled_peak(function: Callable[..., Any], avals: Sequence[Any], donate: Sequence[int] = (), optimise: bool = True) -> tuple[int, Any]:
    """Bytes that a function of flat arguments holds at its peak when XLA has compiled it, and the compiled program.

    Arguments (used or not), outputs and temporaries, less what outputs share with donated arguments, plus the scratch that
    XLA does not report (:func:`hidden_scratch_bytes`). ``avals`` have ``shape`` and ``dtype``. Runs nothing. Where the
    program is not going to be run, ``optimise=False`` has XLA:CPU generate slower machine code, which holds the same (some hundred bytes
    more for a scatter), in a quarter of the time.

    Raises:
        NotImplementedError: if the backend does not analyse memory.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
    lowered = jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*shapes)
    compiled = lowered.compile() if optimise or jax.default_backend() != "cpu" else _unoptimised(lowered)
    return held_bytes(compiled), compiled


def _unoptimised(lowered: Any) -> Any:
    try:
        return lowered.compile(UNOPTIMISED)
    except jax.errors.JaxRuntimeError:  # a jaxlib of other options
        return lowered.compile()


def held_bytes(compiled: Any) -> int:
    """What a compiled program holds at its peak, in bytes."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise NotImplementedError("this backend does not tell what a compiled program holds: pass verify=False to plan without it.")
    reported = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return int(reported + DOUBT * hidden_scratch_bytes(compiled.as_text()))


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
#   sum |x|, -sum x                         0
#   -sum |x|, log sum exp(x), var(x)        171, 179, 179 of 179    but for a sum that goes on to operations as small as itself
#   -sum |x - y|, d = 784; d = 300          194 of 179, 134 of 69
#   sum_k f(x_i, y_k) v_k                   4 of 38 and of 381, 40 of 191      a weighted sum is a contraction: about 200 rows at a time,
#   sum_i f(x_i, y_k) w_i                   38 of 38, 381 of 381, 171 of 95    whole where rows are summed,
#   sum_k f(x_i, y_j, z_k) v_k              38 of 38, 381 of 381, 148 of 71    or where rows are those of several axes,
#   sum_i f(x_i, y_j, z_k) w_i              303 of 71, 74 of 71                up to four times
#   max_k f(x_i, y_j, z_k) v_k              2 of 71
#
# An identity that the library does not know (reduce_precision to the dtype's own precision) keeps the contraction out of the
# fusion, and XLA then reports its result; optimization_barrier does not, because XLA:CPU drops it before it fuses.
LIBRARY_FUSION = '"kind":"__ynn_fusion"'

DOUBT = 2
"""How often estimated scratch counts towards what a program holds: chains of contractions were seen to take twice the estimate."""
STREAMED_ROWS = 1088
"""Most rows of a contraction's result that the library was seen to hold where it works in blocks of rows."""
WEIGHTED_ROWS = 256
"""Most rows of values that it was seen to hold while it sums them with weights."""


def hidden_scratch_bytes(compiled_text: str) -> int:
    """Bytes that XLA:CPU's fusions into its kernel library allocate beyond what ``memory_analysis()`` reports: an estimate.

    ``compiled_text`` is the compiled program's HLO. The largest fusion counts, as one runs at a time. The estimate is an upper bound,
    up to four times what was measured, for a contraction that is reduced at once; and up to half of it too small for batched contractions
    chained inside one fusion.
    """
    if LIBRARY_FUSION not in compiled_text:
        return 0
    bodies = dict(_computations(compiled_text))
    called = re.findall(rf"calls=%?([\w.\-]+).*{re.escape(LIBRARY_FUSION)}", compiled_text)
    sums = {name for name, body in bodies.items() if any(" add(" in line for line in body)}
    return max((sum(_scratch(bodies[name], sums)) for name in called), default=0)


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """The computations of HLO text: names, and lines of instructions."""
    for match in re.finditer(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2].splitlines()


_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<type>\w+)\[(?P<shape>[\d,]*)\]\S* (?P<op>[\w\-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)"
)


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
    root = next((i for i in instructions if i["root"]), None)
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
    """Bytes of the products of each sum in which one factor, the weight, is the same along an axis that stays."""
    made_by = {i["name"]: i for i in instructions}
    for fold in instructions:
        product = made_by.get(next(iter(reads[fold["name"]]), ""))
        adds = fold["op"] == "reduce" and (match := re.search(r"to_apply=%?([\w.\-]+)", fold["rest"])) and match[1] in sums
        if product is None or product["op"] != "multiply" or not adds:
            continue
        shape, folded = _shape(product), _dimensions(fold)
        stays = set(range(len(shape))) - folded
        broadcasts = [_dimensions(factor) for name in reads[product["name"]] if (factor := made_by[name])["op"] == "broadcast"]
        if any(along & folded and stays - along for along in broadcasts):
            sums_rows = len(shape) - 1 not in folded
            rows = min(shape[0], WEIGHTED_ROWS) if len(shape) == 2 and not sums_rows else shape[0]
            yield rows * math.prod(shape[1:]) * _itemsize(product["type"]) * (2 if len(shape) > 2 and sums_rows and len(folded) == 1 else 1)


def _is_streamed(dot: re.Match[str], reads: dict[str, list[str]], contractions: set[str]) -> bool:
    """Whether a contraction without batch dimensions goes straight through a chain of operations that are not contractions."""
    if "lhs_batch_dims={" in dot["rest"]:
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
    found = re.search(r"dimensions=\{([\d,]*)\}", instruction["rest"])
    return {int(axis) for axis in found[1].split(",") if axis} if found else set()


def _itemsize(hlo_type: str) -> int:
    """Bytes of an element of an HLO type: f32, bf16, s8, pred, c64, f8e4m3fn ..."""
    width = re.match(r"[a-z]+(\d+)", hlo_type)
    return max(int(width[1]) // 8, 1) if width else 1


# --- values ------------------------------------------------------------------------------------------

LARGEST_TOLERANCE = 0.1
WRONG_INTEGERS = 1e-3
"""Share of integers that may differ: the rank of nearly equal values turns on rounding."""


@dataclass(frozen=True)
class Comparison:
    """The worst difference between the results of two functions.

    Attributes:
        error: largest absolute difference within one result, over the largest absolute value in it; 1 where integers, shapes, dtypes
            or the places of infinities and NaNs differ.
        tolerance: the bound for ``error``.
        where: the result with that difference, as a path.
        why: what differs, in words.
    """

    error: float
    tolerance: float
    where: str
    why: str

    @property
    def same(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        verdict = "agrees" if self.same else "DIFFERS"
        return f"{verdict}: {self.why} at {self.where}: error {self.error:.2g}, tolerance {self.tolerance:.2g}"


def same_values(
    fun: Callable[..., Any],
    other: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    tolerance: float | None = None,
) -> Comparison:
    """Run both functions and compare all results; give the worst.

    ``tolerance`` bounds the relative error of each result (see :class:`Comparison`); by default 1000 roundings in its dtype.

    Raises:
        ValueError: if the results are not the same pytree.

    >>> same_values(np.sin, lambda x: np.sin(x) + 1e-3, [np.arange(3.0)]).same
    False
    """
    expected, actual = fun(*args, **(kwargs or {})), other(*args, **(kwargs or {}))
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    tree: Any = jax.tree.structure(expected)
    other_tree: Any = jax.tree.structure(actual)
    if not tree == other_tree:  # a PyTreeDef declares only ==
        raise ValueError(f"the functions return different pytrees: {tree} and {other_tree}.")
    found = [
        _compare(_plain(x), _plain(y), f"result{jax.tree_util.keystr(path)}", tolerance)
        for (path, x), y in zip(paths, jax.tree.leaves(actual), strict=True)
    ]
    return max(found, key=lambda c: c.error / c.tolerance, default=Comparison(0.0, 1.0, "result", "nothing is returned"))


def _plain(value: Any) -> np.ndarray[Any, Any]:
    dtype = getattr(value, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def _compare(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any], where: str, tolerance: float | None) -> Comparison:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        types = f"{expected.dtype}{list(expected.shape)} and {actual.dtype}{list(actual.shape)}"
        return Comparison(1.0, LARGEST_TOLERANCE, where, f"{types} are not one type")
    if not jax.numpy.issubdtype(expected.dtype, np.inexact):
        wrong = float(np.mean(expected != actual)) if expected.size else 0.0
        return Comparison(0.0 if wrong <= WRONG_INTEGERS else 1.0, LARGEST_TOLERANCE, where, f"{wrong:.2%} of integers differ")
    bound = min(1000 * float(jax.numpy.finfo(expected.dtype).eps), LARGEST_TOLERANCE) if tolerance is None else tolerance
    wide = np.complex128 if np.issubdtype(expected.dtype, np.complexfloating) else np.float64
    expected, actual = expected.astype(wide), actual.astype(wide)
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True) or not np.all(np.isfinite(actual[finite])):
        return Comparison(1.0, bound, where, "infinities and NaNs stand elsewhere")
    scale = float(np.max(np.abs(expected[finite]), initial=0.0))
    worst = float(np.max(np.abs(expected[finite] - actual[finite]), initial=0.0))
    return Comparison(worst / scale if scale else worst, bound, where, f"largest difference {worst:.2g} where values reach {scale:.2g}")
