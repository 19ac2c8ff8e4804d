"""Equations as other operations, which rules and loops can take apart: by JAX's own definitions, and by passes that make folds of them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from operator import itemgetter
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun, primitives

from eqsat_mem.frontend import counted_positions, diagonal_gathers, row_gathers, shard_maps
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat, Plain
from eqsat_mem.frontend.preferences import Preferences
from eqsat_mem.ir.ops import BatchGroups
from eqsat_mem.passes import DIAGONALS, DRAWS, ROWS, SEARCHES, Pass


def plain_form(
    flat: Flat,
    producer: Mapping[int, Equation],
    name: str,
    params: dict[str, Any],
    ins: Sequence[int],
    preferences: Preferences,
    passes: Collection[Pass],
) -> Plain | None:
    """An equation in terms of other operations, by its definition or by one of ``passes``; ``None`` if it stays as it is."""
    by_definition = _definition(flat, name, params, ins)
    if by_definition is not None:
        return Plain(by_definition, ins)
    if (counting := counted_positions.plain_form(flat, producer, name, params, ins)) is not None:
        return counting
    if name in _SEARCHES and SEARCHES in passes:
        search = (_search_pairs if preferences.pairs else _search)(flat, name, params, ins[0], preferences.short_search)
        return Plain(search, ins, SEARCHES) if search is not None else None
    if name == "random_bits" and DRAWS in passes and _counts_elements(flat, params, ins):
        return Plain(_traced(flat, partial(_bits, params["shape"], params["bit_width"]), ins), ins, DRAWS)
    if DIAGONALS in passes and (diagonal := diagonal_gathers.plain_form(flat, producer, name, params, ins)) is not None:
        return diagonal
    if ROWS in passes and (rows := row_gathers.plain_form(flat, producer, name, params, ins)) is not None:
        return rows
    return row_gathers.batched_form(flat, producer, name, params, ins)


def _definition(flat: Flat, name: str, params: dict[str, Any], ins: Sequence[int]) -> Any:
    """A primitive as the others that JAX lowers it to; ``None`` if it lowers it to none."""
    if name == "convert_element_type" and _drops_imaginary_part(flat.dtypes[ins[0]], params["new_dtype"]):
        return _traced(flat, lambda x: lax.real(x).astype(params["new_dtype"]), ins)
    if name == "reshape" and params["dimensions"] is not None:
        return _traced(flat, lambda x: lax.reshape(lax.transpose(x, params["dimensions"]), params["new_sizes"]), ins)
    if name in ("dynamic_slice", "pad", "slice") and (cut := _cut(flat, name, params, ins)) is not None:
        return _traced(flat, cut, ins)
    if name == "select_n" and len(ins) != 3:
        return _traced(flat, _chosen, ins)
    if name == "shard_map":
        with suppress(NotImplementedError):
            return shard_maps.of_all_shares(params, _types(flat, ins))
    if name.startswith(_SPARSE) and (function := _of_sparse_arrays(name)) is not None:
        return _traced(flat, partial(function, **params), ins)
    if name in _OVER_DEVICES and all(isinstance(axis, int) for axis in params["axes"]):
        return _traced(flat, partial(_OVER_DEVICES[name], axes=params["axes"]), ins)
    if name in _COMPOUND and _COMPOUND[name][0](params):
        return _traced(flat, partial(_COMPOUND[name][1], params), ins)
    return None


_SPARSE = ("bcoo_", "bcsr_")
"""How names of operations on JAX's sparse arrays begin."""


def _of_sparse_arrays(name: str) -> Callable[..., Any] | None:
    """The gathers, products and scatters that JAX lowers an operation on sparse arrays to; None where it is not known."""
    return getattr(sys.modules.get(f"jax.experimental.sparse.{name[:4]}"), f"_{name}_impl", None)


def _traced(flat: Flat, function: Callable[..., Any], ins: Sequence[int]) -> Any:
    return jax.make_jaxpr(function)(*_types(flat, ins))


def _types(flat: Flat, ins: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(flat.shapes[v], flat.dtypes[v]) for v in ins]


def _drops_imaginary_part(before: Any, after: Any) -> bool:
    """A conversion that JAX's own derivatives make and that its public functions warn of."""
    complex_before, complex_after = (jax.numpy.issubdtype(dtype, np.complexfloating) for dtype in (before, after))
    return complex_before and not complex_after and not jax.numpy.issubdtype(after, np.bool_)


def _while_any(params: dict[str, Any], *args: Any) -> Any:
    """A loop of a batch, which ``vmap`` makes: it runs while any element does, and changes those that run."""
    condition, body = jaxpr_as_fun(params["cond_jaxpr"]), jaxpr_as_fun(params["body_jaxpr"])
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def runs(carry: Sequence[Any]) -> Any:
        return condition(*args[:first], *carry)[0]

    def step(carry: Sequence[Any]) -> list[Any]:
        running, new = runs(carry), body(*args[first:second], *carry)
        return [lax.select(lax.broadcast_in_dim(running, n.shape, range(running.ndim)), n, c) for n, c in zip(new, carry)]

    return lax.while_loop(lambda carry: jax.numpy.any(runs(carry)), step, list(args[second:]))


def _chosen(which: Any, first: Any, *others: Any) -> Any:
    """One of any number of cases, by its number, as choices between two."""
    return reduce(lambda chosen, case: lax.select(lax.lt(which, np.int32(case[0])), chosen, case[1]), enumerate(others, 1), first)


def _cut(flat: Flat, name: str, params: dict[str, Any], ins: Sequence[int]) -> Callable[..., Any] | None:
    """A slice at numbers that are known, a padding that only takes away, and a slice that is all of its operand, as slices or nothing."""
    shape = flat.shapes[ins[0]]
    if name == "dynamic_slice" and len(ins) == 1 + len(shape) and all(v in flat.literals for v in ins[1:]):
        return partial(_slice_at, params["slice_sizes"], [int(flat.literals[v]) for v in ins[1:]])
    if name == "pad" and all(low <= 0 and high <= 0 and between == 0 for low, high, between in params["padding_config"]):
        return partial(_cropped, params["padding_config"])
    if name == "slice" and tuple(params["limit_indices"]) == shape and not any(params["start_indices"]):
        return _same if all(step == 1 for step in params["strides"] or ()) else None
    return None


def _same(x: Any) -> Any:
    return x


def _slice_at(sizes: Sequence[int], starts: Sequence[int], x: Any, *given: Any) -> Any:
    """A slice from known places, as near to these as it lies inside."""
    inside = [min(max(start, 0), extent - size) for start, size, extent in zip(starts, sizes, x.shape, strict=True)]
    return lax.slice(x, inside, [start + size for start, size in zip(inside, sizes, strict=True)])


def _cropped(config: Sequence[tuple[int, int, int]], x: Any, filling: Any) -> Any:
    """A padding that takes away and adds nothing."""
    return lax.slice(x, [-low for low, _, _ in config], [extent + high for (_, high, _), extent in zip(config, x.shape, strict=True)])


def _convolution_in_groups(params: dict[str, Any], x: Any, kernel: Any) -> Any:
    """A convolution with groups of its batch as one with groups of its features, which are those of the batch then."""
    batch, features = params["dimension_numbers"].lhs_spec[:2]
    count, sizes = params["batch_group_count"], list(x.shape)
    sizes[batch] //= count
    moved = jax.numpy.moveaxis(lax.reshape(x, (*x.shape[:batch], count, *sizes[batch:])), batch, features)
    sizes[features] *= count
    by_features = {**params, "batch_group_count": 1, "feature_group_count": BatchGroups(count)}
    return primitives.conv_general_dilated_p.bind(lax.reshape(moved, sizes), kernel, **by_features)


def _solve(params: dict[str, Any], *args: Any) -> Any:
    """A linear solver is the function it solves with; the others serve derivatives, which have been taken."""
    lengths = list(params["const_lengths"])
    place = params["const_lengths"]._fields.index("solve")
    start = sum(lengths[:place])
    return jaxpr_as_fun(params["jaxprs"].solve)(*args[start : start + lengths[place]], *args[sum(lengths) :])


def _selected(params: dict[str, Any], x: Any) -> Any:
    """A search that may be approximate, which compilers for other devices than TPUs do by sorting everything: the largest, or smallest."""
    found, places = lax.top_k(x if params["is_max_k"] else -x, params["k"], axis=params["reduction_dimension"])
    return found if params["is_max_k"] else -found, places


def _one_minus_square(params: dict[str, Any], x: Any) -> Any:
    return (1 + x) * (1 - x)


def _log2(params: dict[str, Any], x: Any) -> Any:
    natural, scale = lax.log(x), 1 / math.log(2)
    if jax.numpy.issubdtype(x.dtype, np.complexfloating):
        return lax.complex(lax.real(natural) * scale, lax.imag(natural) * scale)
    return natural * scale


def _polynomial(params: dict[str, Any], x: Any, *coefficients: Any) -> Any:
    """Horner's rule from the highest power, in a loop where there are many."""
    highest, *others = reversed(coefficients)
    if len(coefficients) <= (params.get("unroll") or 8):
        return reduce(lambda total, c: total * x + c, others, highest)
    shape = jax.numpy.broadcast_shapes(x.shape, *(c.shape for c in coefficients))
    stack = jax.numpy.stack(jax.numpy.broadcast_arrays(highest, *others))
    return lax.scan(lambda total, c: (total * x + c, None), jax.numpy.zeros(shape, x.dtype), stack)[0]


def _is_as_accurate_as_any(params: Mapping[str, Any]) -> bool:
    return params.get("accuracy") is None


_COMPOUND: dict[str, tuple[Callable[[Mapping[str, Any]], Any], Callable[..., Any]]] = {
    "while": (lambda params: params["cond_jaxpr"].out_avals[0].shape, _while_any),
    "conv_general_dilated": (lambda params: params["batch_group_count"] > 1, _convolution_in_groups),
    "custom_linear_solve": (lambda params: True, _solve),
    "approx_top_k": (itemgetter("aggregate_to_topk"), _selected),
    "one_minus_square": (_is_as_accurate_as_any, _one_minus_square),
    "log2": (_is_as_accurate_as_any, _log2),
    "polynomial": (_is_as_accurate_as_any, _polynomial),
}
"""Primitives as several others, with the parameters for which they are. JAX traces the last three since 0.11 or 0.12, the others before."""

_OVER_DEVICES: dict[str, Callable[..., Any]] = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
"""Folds over devices, which are over axes of an array where ``vmap`` gave the devices' axis its name."""

LARGE_DRAW = 1 << 14
"""Random numbers of at least so many elements are those of their positions; smaller ones are drawn whole."""


def _counts_elements(flat: Flat, params: dict[str, Any], ins: Sequence[int]) -> bool:
    """Whether each element of a draw depends on the one key and on its position only."""
    dtype, count = flat.dtypes[ins[0]], math.prod(params["shape"])
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or str(dtype) != "key<fry>" or flat.shapes[ins[0]]:
        return False
    by_position: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return by_position and params["bit_width"] < 64 and LARGE_DRAW <= count < 2**32


def _bits(shape: tuple[int, ...], bit_width: int, key: Any) -> Any:
    """Threefry's hash of the key and of each element's position in row-major order."""
    first, second = jax.random.key_data(key)
    place = jax.numpy.zeros(shape, np.uint32)
    for axis in range(len(shape)):
        place += lax.broadcasted_iota(np.uint32, shape, axis) * np.uint32(math.prod(shape[axis + 1 :]))
    high, low = primitives.threefry2x32_p.bind(first, second, jax.numpy.zeros(shape, np.uint32), place)
    return lax.convert_element_type(high ^ low, f"uint{bit_width}")


def _search_pairs(flat: Flat, name: str, params: dict[str, Any], operand: int, short: int) -> Any:
    """``argmin x`` as a fold of pairs, which JAX itself lowers it to: of equal values the first place, and what is not a number leads."""
    shape, dtype = flat.shapes[operand], flat.dtypes[operand]
    ordered = not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) and jax.numpy.issubdtype(dtype, np.number)
    if not ordered or jax.numpy.issubdtype(dtype, np.complexfloating) or len(params["axes"]) != 1 or shape[params["axes"][0]] <= short:
        return None
    (axis,) = params["axes"]
    leads = lax.lt if name == "argmin" else lax.gt
    floating = jax.numpy.issubdtype(dtype, np.floating)
    worst = np.inf if floating else np.iinfo(dtype).max
    if name == "argmax":
        worst = -np.inf if floating else np.iinfo(dtype).min

    def combine(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        (x, i), (y, j) = one, other
        picks = leads(x, y) | lax.ne(x, x)
        first = picks | (lax.eq(x, y) & lax.lt(i, j))
        return lax.select(picks, x, y), lax.select(first, i, j)

    def first(x: Any) -> Any:
        places = lax.broadcasted_iota(params["index_dtype"], shape, axis)
        start = np.asarray(worst, dtype), np.asarray(0, params["index_dtype"])
        return lax.reduce((x, places), start, combine, (axis,))[1]

    return jax.make_jaxpr(first)(jax.ShapeDtypeStruct(shape, dtype))


LARGEST = 1 << 24
"""The positions that float32 holds exactly."""
_SEARCHES: dict[str, Callable[..., Any]] = {"argmin": lax.reduce_min, "argmax": lax.reduce_max}


def _search(flat: Flat, name: str, params: dict[str, Any], operand: int, short: int) -> Any:
    """``argmin x`` is the first position where ``x`` is not a number or, if there is none, is its own minimum.

    Positions of what is not a number count from the end, below zero: a compiler's minimum may pass over what is not a number.
    """
    shape, dtype = flat.shapes[operand], flat.dtypes[operand]
    kind = np.dtype(dtype).kind if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else ""
    ordered = kind != "" and (kind in "iu" or jax.numpy.issubdtype(dtype, np.floating))
    if not ordered or len(params["axes"]) != 1 or not short < shape[params["axes"][0]] < 2**31:
        return None
    (axis,) = params["axes"]
    counts = np.float32 if shape[axis] <= LARGEST else np.int32  # exact; folds of floating-point numbers are faster

    def first(x: Any) -> Any:
        extreme = lax.expand_dims(_SEARCHES[name](x, (axis,)), (axis,))
        extreme = lax.broadcast_in_dim(extreme, shape, range(len(shape)))
        places = lax.broadcasted_iota(counts, shape, axis)
        found = lax.select(lax.eq(x, extreme), places, lax.full_like(places, shape[axis]))
        if kind not in "iu":
            found = lax.select(lax.ne(x, x), places - shape[axis], found)
        place = lax.reduce_min(found, (axis,))
        return jax.numpy.where(place < 0, place + shape[axis], place).astype(params["index_dtype"])

    return jax.make_jaxpr(first)(jax.ShapeDtypeStruct(shape, dtype))
