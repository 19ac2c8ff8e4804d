"""``jax.shard_map`` inside a function as operations on the shares of all devices: a device is a position along axes of a batch.

A map over devices means what ``vmap`` with a name for each mesh axis does: arguments come as the shares along the axes in their specs,
and collectives over an axis fold, gather or permute an axis of the batch, by the rules that JAX has for them. The types that say along
which axes of a mesh a value varies mean nothing there, and neither do the operations that change them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.interpreters import batching
from jax.sharding import NamedSharding, PartitionSpec

from eqsat_mem.frontend.effects import is_axis_name
from eqsat_mem.ir.jaxprs import CALLED, IMPURE, inner_jaxprs, nested_jaxprs

Names = tuple[str, ...]


def of_all_shares(params: Mapping[str, Any], operands: Sequence[Any]) -> ClosedJaxpr:
    """A map over devices as a function of whole arrays of these types.

    Raises:
        NotImplementedError: if it does something that has no meaning for all shares at once.
    """
    unknown = next(filter(None, map(_unknown, _maps(params))), "")
    if unknown:
        raise NotImplementedError(unknown)
    return jax.make_jaxpr(partial(_mapped, params))(*operands)


def _maps(params: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parameters of a map over devices, and of those inside of it."""
    yield params
    for inner in nested_jaxprs(params["jaxpr"]):
        yield from (eqn.params for eqn in inner.eqns if eqn.primitive.name == "shard_map")


def _mapped(params: Mapping[str, Any], *arrays: Any) -> list[Any]:
    """The results of a map over devices: its body on a batch along each mesh axis, of arguments in shares along the axes in their specs."""
    mapped = params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]  # the latter in JAX 0.10.0
    sizes = {name: int(n) for name, n in params["mesh"].shape.items() if name in mapped}
    operands = [_in_shares(x, spec, sizes) for x, spec in zip(arrays, params["in_specs"], strict=True)]
    lying = [_named(spec) for spec in params["out_specs"]]

    def body(shares: Sequence[Any]) -> list[Any]:
        results = _evaluated(params["jaxpr"], (), *shares)
        return [_of_first(x, [name for name in sizes if name not in names]) for x, names in zip(results, lying, strict=True)]

    for name, size in reversed(sizes.items()):
        ins, outs = [0 if name in batched else None for _, batched in operands], [0 if name in names else None for names in lying]
        body = jax.vmap(body, (ins,), outs, axis_name=name, axis_size=size)
    return [_put_together(x, spec, sizes) for x, spec in zip(body([share for share, _ in operands]), params["out_specs"], strict=True)]


def _in_shares(x: Any, spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[Any, Names]:
    """An array with an axis for each mesh axis in its spec, in the order of the mesh, before those of a share; and these mesh axes."""
    shape: list[int] = []
    place: dict[str, int] = {}
    for names, extent in zip(_entries(spec, x.ndim), x.shape, strict=True):
        place.update((name, len(shape) + k) for k, name in enumerate(names))
        shape += [*(sizes[name] for name in names), extent // math.prod(sizes[name] for name in names)]
    batched = tuple(name for name in sizes if name in place)
    return jax.numpy.moveaxis(x.reshape(shape), [place[name] for name in batched], range(len(batched))), batched


def _put_together(x: Any, spec: PartitionSpec, sizes: Mapping[str, int]) -> Any:
    """A whole array of shares, with an axis for each mesh axis in its spec, in the order of the mesh, before those of a share."""
    batched = [name for name in sizes if name in _named(spec)]
    order: list[int] = []
    shape: list[int] = []
    for k, names in enumerate(_entries(spec, x.ndim - len(batched)), len(batched)):
        order += [*(batched.index(name) for name in names), k]
        shape.append(x.shape[k] * math.prod(sizes[name] for name in names))
    return x.transpose(order).reshape(shape)


def _entries(spec: PartitionSpec, rank: int) -> list[Names]:
    """The mesh axes along which each axis of an array lies."""
    given = [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return given + [()] * (rank - len(given))


def _named(spec: PartitionSpec) -> set[str]:
    """The mesh axes along which an array lies."""
    return {name for names in _entries(spec, 0) for name in names}


# --- the body of a map, one equation after the other ---------------------------------------------------


def _evaluated(jaxpr: Jaxpr, consts: Sequence[Any], *arrays: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arrays], strict=True))

    def read(atom: Any) -> Any:
        return _number(atom) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, _results(eqn, [read(atom) for atom in eqn.invars])))
    return [jax.numpy.asarray(read(atom)) for atom in jaxpr.outvars]


def _number(literal: Any) -> Any:
    """The value of a literal, without a type that names a mesh."""
    value = np.asarray(literal.val, literal.aval.dtype)
    return value.item() if literal.aval.weak_type else value


def _results(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    """The results of an equation on a share, with collectives over one axis of a mesh at a time and without types of such axes."""
    name, params = eqn.primitive.name, eqn.params
    if name in CALLED:
        body = params[CALLED[name]]
        return _evaluated(getattr(body, "jaxpr", body), getattr(body, "consts", ()), *operands)
    if name == "shard_map":
        return _mapped(params, *operands)
    if name in _CASTS:
        return operands
    if name in _COLLECTIVES:
        return [_COLLECTIVES[name](params, *operands)]
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params({key: _untyped(value) for key, value in params.items()}))
    return results if eqn.primitive.multiple_results else [results]


def _untyped(value: Any) -> Any:
    """A parameter without types of mesh axes: a function traced again, no sharding."""
    if isinstance(value, ClosedJaxpr):
        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in value.in_avals]
        return jax.make_jaxpr(partial(_evaluated, value.jaxpr, value.consts))(*avals)
    if isinstance(value, tuple):
        parts = map(_untyped, value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return None if isinstance(value, NamedSharding) else value


# --- collectives over several axes, by those over one --------------------------------------------------


def _folded(over_devices: Callable[..., Any], own: Callable[..., Any], params: Mapping[str, Any], x: Any) -> Any:
    """A fold over mesh axes, and over axes of the share where the collective is that of a batch."""
    axes = [axis for axis in params["axes"] if isinstance(axis, int)]
    named = [name for name in params["axes"] if not isinstance(name, int)]
    return reduce(over_devices, named, own(x, axes) if axes else x)


def _gathered(x: Any, names: Names, axis: int) -> Any:
    """The shares of all devices along a new axis, by the position of a device along all the mesh axes."""
    many = reduce(lambda x, name: lax.all_gather(x, name, axis=axis), reversed(names), x)
    return many.reshape(*x.shape[:axis], -1, *x.shape[axis:])


def _all_gather(params: Mapping[str, Any], x: Any) -> Any:
    axis = params["all_gather_dimension"]
    many = _gathered(x, _names(params), axis)
    return many.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :]) if params["tiled"] else many


def _exchanged(x: Any, names: Names, axis: int) -> Any:
    """A share with one of its axes dealt out: along an axis for each name what the devices there have for this one, then the rest."""
    x = x.reshape(*x.shape[:axis], *map(lax.axis_size, names), -1, *x.shape[axis + 1 :])
    for k, name in enumerate(names, axis):
        x = jax.numpy.moveaxis(_own_p.bind(lax.all_gather(x, name), axis=k + 1, axis_name=name), 0, k)
    return x


def _all_to_all(params: Mapping[str, Any], x: Any) -> Any:
    axis, to, count = params["split_axis"], params["concat_axis"], len(_names(params))
    x = _exchanged(x, _names(params), axis)
    x = jax.numpy.moveaxis(x, range(axis, axis + count), range(to, to + count))
    return x.reshape(*x.shape[:to], -1, *x.shape[to + count + 1 :])


def _reduce_scatter(params: Mapping[str, Any], x: Any) -> Any:
    axis = params["scatter_dimension"]
    x = _exchanged(x, _names(params), axis)
    total = x.sum(range(axis, axis + len(_names(params))), dtype=x.dtype)
    return total if params["tiled"] else lax.squeeze(total, [axis])


def _ppermute(params: Mapping[str, Any], x: Any) -> Any:
    """The value of the device before this one; zeros where there is none. Devices in a row that send to devices in a row are one slice."""
    names = _names(params)
    before = {int(to): int(of) for of, to in params["perm"]}
    many = _gathered(x, names, 0)
    runs: list[list[int | None]] = []
    for of in (before.get(k) for k in range(len(many))):
        follows = bool(runs) and of == (None if runs[-1][-1] is None else runs[-1][-1] + 1)
        runs[-1 if follows else len(runs) :] = [[*(runs[-1] if follows else ()), of]]
    parts = (jax.numpy.zeros_like(many[: len(run)]) if run[0] is None else many[run[0] : run[0] + len(run)] for run in runs)
    moved = jax.numpy.concatenate([*parts])
    moved = moved.reshape(*map(lax.axis_size, names), *many.shape[1:])
    return reduce(lambda x, name: _own_p.bind(x, axis=0, axis_name=name), names, moved)


def _pbroadcast(params: Mapping[str, Any], x: Any) -> Any:
    return _gathered(x, _names(params), 0)[params["source"]]


def _axis_index(params: Mapping[str, Any]) -> Any:
    return lax.axis_index(_names(params))


def _names(params: Mapping[str, Any]) -> Names:
    named = params["axis_name"]
    return tuple(named) if isinstance(named, tuple | list) else (named,)


_CASTS = frozenset({"pvary", "sharding_constraint", "mesh_cast"})
"""Operations that only change what is known of where values lie."""
_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "psum": partial(_folded, lax.psum, lambda x, axes: x.sum(axes, dtype=x.dtype)),
    "psum_invariant": partial(_folded, lax.psum, lambda x, axes: x.sum(axes, dtype=x.dtype)),
    "pmax": partial(_folded, lax.pmax, lambda x, axes: x.max(axes)),
    "pmin": partial(_folded, lax.pmin, lambda x, axes: x.min(axes)),
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
    "axis_index": _axis_index,
}


def _of_first(x: Any, names: Sequence[str]) -> Any:
    """The value of the first device along mesh axes."""
    return reduce(lambda x, name: _first_p.bind(x, axis_name=name), names, x)


def _own(axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, axis: int, axis_name: str) -> tuple[Any, int | None]:
    """A batch of values for all devices along an axis, of which each device takes its own: this axis is then that of the batch."""
    (x,), (dim,) = values, dims
    place = axis if dim is None else axis + (dim <= axis)
    if axis_data.name != axis_name:
        return _own_p.bind(x, axis=place, axis_name=axis_name), None if dim is None else dim - (place < dim)
    return (x, place) if dim is None else (jax.numpy.diagonal(x, 0, dim, place), x.ndim - 2)


def _first(axis_data: Any, values: Sequence[Any], dims: Sequence[int | None], *, axis_name: str) -> tuple[Any, int | None]:
    """A batch of values that all devices along an axis of the mesh have, or what the first of them has."""
    (x,), (dim,) = values, dims
    if axis_data.name != axis_name:
        return _first_p.bind(x, axis_name=axis_name), dim
    return (x if dim is None else lax.index_in_dim(x, 0, dim, keepdims=False)), None


_own_p, _first_p = Primitive("own_of_all"), Primitive("first_of_all")
_own_p.def_abstract_eval(lambda x, axis, axis_name: jax.core.ShapedArray((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype))
_first_p.def_abstract_eval(lambda x, axis_name: x)
batching.fancy_primitive_batchers[_own_p] = _own
batching.fancy_primitive_batchers[_first_p] = _first


# --- what has no meaning for all shares at once --------------------------------------------------------


def _unknown(params: Mapping[str, Any]) -> str:
    """The name of what a map over devices does besides computing, or of a collective that is not known; empty if there is neither."""
    if any(getattr(spec, kind, ()) for spec in (*params["in_specs"], *params["out_specs"]) for kind in ("unreduced", "reduced")):
        return "specs with unreduced axes"
    eqn = next((eqn for inner in nested_jaxprs(params["jaxpr"]) for eqn in inner.eqns if not _is_known(eqn)), None)
    if eqn is None:
        return ""
    return f"{eqn.primitive.name}{' with axis_index_groups' if eqn.params.get('axis_index_groups') is not None else ''}"


def _is_known(eqn: Any) -> bool:
    """Whether an equation only computes, and the same for a batch as for each of its elements."""
    name, params = eqn.primitive.name, eqn.params
    if name in IMPURE or name == "rng_bit_generator" or not all(map(is_axis_name, eqn.effects)):
        return False
    if name.startswith("random_") and not all(map(_is_threefry, (*eqn.invars, *eqn.outvars))):
        return False
    if name in _COLLECTIVES:
        return params.get("axis_index_groups") is None
    return name in _CASTS or any(True for _ in inner_jaxprs(params)) or not (eqn.effects or any(map(params.__contains__, _NAMING)))


def _is_threefry(variable: Any) -> bool:
    """Whether a value is no key, or one of the generator that draws for a batch what it draws for each element."""
    dtype = variable.aval.dtype
    return not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) or str(dtype) == "key<fry>"


_NAMING = ("axis_name", "axis_names")
"""Parameters in which a collective says over which mesh axes it is one."""
