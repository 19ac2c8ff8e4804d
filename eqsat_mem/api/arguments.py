"""The arguments and results of a traced function: their names, those that it closes over, and those that have no values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.dtypes import float0
from jax.extend.core import ClosedJaxpr

SMALL_CONSTANT_BYTES = 4096
"""A closed-over array up to this size is a constant of the program, whose value rules may use; a larger one is an argument."""


def hoist_constants(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[Any]]:
    """Make leading arguments of closed-over tracers and large arrays: the former are not constant, the latter are held memory."""
    hoisted = [isinstance(const, Tracer) or getattr(const, "nbytes", 0) > SMALL_CONSTANT_BYTES for const in closed.consts]
    if not any(hoisted):
        return closed, []
    pairs = list(zip(closed.jaxpr.constvars, closed.consts, hoisted, strict=True))
    moved = [var for var, _, is_hoisted in pairs if is_hoisted]
    debug = closed.jaxpr.debug_info
    jaxpr = closed.jaxpr.replace(
        constvars=[var for var, _, is_hoisted in pairs if not is_hoisted],
        invars=[*moved, *closed.jaxpr.invars],
        debug_info=debug._replace(arg_names=None),
    )
    kept = [const for _, const, is_hoisted in pairs if not is_hoisted]
    return ClosedJaxpr(jaxpr, kept), [const for _, const, is_hoisted in pairs if is_hoisted]


def is_valueless(result: Any) -> bool:
    """Whether a result, or what describes it, is a derivative by integers, whose dtype has no values."""
    return bool(getattr(result, "dtype", None) == float0)


def without_valueless(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same without results that have no values."""
    kept = [v for v in closed.jaxpr.outvars if not is_valueless(v.aval)]
    if len(kept) == len(closed.jaxpr.outvars):
        return closed
    debug = closed.jaxpr.debug_info._replace(result_paths=None)
    return ClosedJaxpr(closed.jaxpr.replace(outvars=kept, debug_info=debug), closed.consts)


def with_valueless(results: Iterable[Any], described: Sequence[Any]) -> list[Any]:
    """All results, given those that have values and something for each that says which have none."""
    rest = iter(results)
    return [np.zeros(d.shape, float0) if is_valueless(d) else next(rest) for d in described]


def argument_names(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], inputs: Sequence[Any]) -> list[str]:
    """A name for each leaf of the arguments that is one of ``inputs``, from the parameter and the path to it: ``x``, ``params['w'][0]``."""
    leaves, tree = jax.tree.flatten((tuple(args), kwargs))
    places = [object() for _ in leaves]  # one array may stand in several places
    placed_args, placed_kwargs = jax.tree.unflatten(tree, places)
    try:
        arguments = dict(inspect.signature(fun).bind(*placed_args, **placed_kwargs).arguments)
    except (TypeError, ValueError):  # built-in functions have no signature
        arguments = {"args": placed_args, **placed_kwargs}
    named = {}
    for parameter, value in arguments.items():
        for path, place in jax.tree_util.tree_flatten_with_path(value)[0]:
            named[id(place)] = f"{parameter}{jax.tree_util.keystr(path)}"
    wanted = {id(leaf) for leaf in inputs}
    given = [place for place, leaf in zip(places, leaves, strict=True) if id(leaf) in wanted]
    return [named.get(id(place), f"arg_{k}") for k, place in enumerate(given)]
