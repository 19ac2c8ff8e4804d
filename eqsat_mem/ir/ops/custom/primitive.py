"""The primitive of all user-defined operations: a function of some axes, vectorised over the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

if TYPE_CHECKING:
    from eqsat_mem.ir.ops.custom.operation import Operation

Mapped = tuple[tuple[bool, ...], ...]
"""For each batch axis of the result, outermost first: which operands have it. The leading axes of operands are batch axes in this order."""

operation_p = Primitive("operation")


def bind(operation: Operation, arrays: Sequence[Any], mapped: Mapped) -> Any:
    """Bind the primitive to operands whose leading axes are the batch axes according to ``mapped``, followed by the named axes."""
    return operation_p.bind(*arrays, operation=operation, mapped=mapped)


def least(arrays: Sequence[Any], ranks: Sequence[int]) -> tuple[list[Any], Mapped]:
    """Drop leading axes along which an operand is only broadcast.

    Args:
        arrays: the operands, with leading axes that broadcast against each other.
        ranks: the number of named axes of each operand.

    Returns:
        The operands, and the batch axes that each of them has.
    """
    batch = [x.shape[: x.ndim - rank] for x, rank in zip(arrays, ranks)]
    whole = np.broadcast_shapes(*batch)
    mapped = []
    for axis, n in enumerate(whole):
        places = [axis - len(whole) + len(own) for own in batch]
        mapped.append(tuple(place >= 0 and own[place] == n for place, own in zip(places, batch)))
    kept = []
    for x, own in zip(arrays, batch):
        repeated = [place for place, n in enumerate(own) if n != whole[place - len(own)]]
        kept.append(lax.squeeze(x, repeated) if repeated else x)
    return kept, tuple(mapped)


def _whole(evaluate: Callable[..., Any], mapped: Mapped) -> Callable[..., Any]:
    """Vectorise a function of the named axes over the batch axes."""
    for has in reversed(mapped):
        evaluate = jax.vmap(evaluate, in_axes=tuple(0 if one else None for one in has))
    return evaluate


def _run(*args: Any, operation: Operation, mapped: Mapped) -> Any:
    return _whole(operation.evaluate, mapped)(*args)


def _abstract(*avals: Any, operation: Operation, mapped: Mapped) -> Any:
    key = mapped, *((a.shape, a.dtype) for a in avals)
    if key not in operation._known:
        out = jax.eval_shape(partial(_run, operation=operation, mapped=mapped), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        operation._known[key] = jax.core.ShapedArray(out.shape, out.dtype)
    return operation._known[key]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, operation: Operation, mapped: Mapped) -> tuple[Any, Any]:
    """Differentiate: the value remains the operation, for which there may be rules; the tangent is that of its function."""
    out = bind(operation, primals, mapped)
    active = [not isinstance(t, ad.Zero) and t.dtype != jax.dtypes.float0 for t in tangents]
    if not any(active) or not jnp.issubdtype(out.dtype, np.inexact):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())

    def of_active(*values: Any) -> Any:
        given = iter(values)
        return _whole(operation.derivable, mapped)(*(next(given) if is_active else x for x, is_active in zip(primals, active)))

    at, along = (tuple(v for v, is_active in zip(values, active) if is_active) for values in (primals, tangents))
    return out, jax.jvp(of_active, at, along)[1]


def _batch(args: Sequence[Any], dims: Sequence[int | None], *, operation: Operation, mapped: Mapped) -> tuple[Any, int]:
    """Add a batch axis, which becomes the first."""
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims)]
    return bind(operation, moved, (tuple(dim is not None for dim in dims), *mapped)), 0


operation_p.def_impl(jax.jit(_run, static_argnames=("operation", "mapped")))
operation_p.def_abstract_eval(_abstract)
mlir.register_lowering(operation_p, mlir.lower_fun(_run, multiple_results=False))
ad.primitive_jvps[operation_p] = _jvp
batching.primitive_batchers[operation_p] = _batch
