"""Operations that a plan cannot repeat or reorder: side effects, references, collectives."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from eqsat_mem.ir.jaxprs import inner_jaxprs


def without_resultless_effects(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return the function without equations that only have an effect (``jax.debug.print``, callbacks without results).

    A derivative recomputes its function, whose effects have already happened when the function itself ran.

    Raises:
        NotImplementedError: if a callback with results remains, which recomputation would call again.
    """
    if not closed.effects:
        return closed
    jaxpr = _without(closed.jaxpr)
    repeated = [effect for effect in jaxpr.effects if not is_axis_name(effect)]
    if repeated:
        raise NotImplementedError(
            f"an optimised function with the effect {type(repeated[0]).__name__} cannot be differentiated: its derivative recomputes it, "
            "and would call the callback again. Use optimize(jax.grad(fun)) instead of jax.grad(optimize(fun))."
        )
    return ClosedJaxpr(jaxpr, closed.consts)


def refuse_references(closed: ClosedJaxpr) -> None:
    """Refuse a function that creates, reads or writes references to arrays.

    Raises:
        NotImplementedError: if it does.
    """
    if uses_references(closed):
        raise NotImplementedError(REFERENCES)


def uses_references(closed: ClosedJaxpr) -> bool:
    """Whether a function creates, reads or writes references to arrays, its own, arguments or closed over."""
    return any(type(effect).__name__ in _OF_REFERENCES for effect in closed.effects)


REFERENCES = (
    "an optimised function cannot use references to arrays (jax.new_ref): its plan computes values in another order, and more than once. "
    "Pass arrays and return them."
)
_OF_REFERENCES = ("InternalMutableArrayEffect", "ReadEffect", "WriteEffect", "AccumEffect")


def refuse_collectives(closed: ClosedJaxpr, mesh: Collection[str] | None = None) -> None:
    """Refuse a function that communicates over a named axis that it does not bind itself.

    Args:
        closed: the function.
        mesh: the axes over which ``shard_map`` maps at this place; None refuses every axis bound outside of the function.

    Raises:
        NotImplementedError: if it communicates over such an axis.
    """
    axes = {str(effect.name) for effect in closed.effects if is_axis_name(effect)}
    if mesh is not None:
        axes = (axes | set(_named_axes(closed.jaxpr))) & set(mesh)
    if axes:
        raise NotImplementedError(
            f"an optimised function cannot contain collectives over the axis {min(axes)!r} of a mesh: it is planned for one device. "
            "Optimise the parts between the collectives."
        )


def _named_axes(jaxpr: Jaxpr) -> Iterator[str]:
    """Yield the axes named by equations, some of which declare no effect, such as ``ppermute``."""
    for eqn in jaxpr.eqns:
        named = eqn.params.get("axis_name", ())
        yield from (name for name in (named if isinstance(named, tuple) else (named,)) if isinstance(name, str))
        for inner in inner_jaxprs(eqn.params):
            yield from _named_axes(inner)


def is_axis_name(effect: Any) -> bool:
    """Whether an effect only declares the use of a named axis."""
    return type(effect).__name__ == "NamedAxisEffect"


def _without(jaxpr: Jaxpr) -> Jaxpr:
    if not jaxpr.effects:
        return jaxpr
    eqns = [_inside(eqn) for eqn in jaxpr.eqns if eqn.outvars or not eqn.effects]
    effects = set().union(*(eqn.effects for eqn in eqns))
    return jaxpr.replace(eqns=eqns, effects=effects)


def _inside(eqn: JaxprEqn) -> JaxprEqn:
    """Return the equation after removing such effects from the functions among its parameters."""
    if not eqn.effects:
        return eqn
    effects: set[Any] = set()
    found = False

    def clean(value: Any) -> Any:
        nonlocal found
        if isinstance(value, tuple | list):
            return type(value)(map(clean, value))
        if isinstance(value, ClosedJaxpr) and value.jaxpr is not value:  # since JAX 0.11 a closed jaxpr is its own jaxpr
            return ClosedJaxpr(clean(value.jaxpr), value.consts)
        if isinstance(value, Jaxpr):
            found = True
            new = _without(value)
            effects.update(new.effects)
            return new
        return value

    params = {name: clean(value) for name, value in eqn.params.items()}
    return eqn.replace(params=params, effects=effects) if found else eqn
