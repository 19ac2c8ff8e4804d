"""The arguments of a traced function: their names, and those that it closes over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
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
