"""Primitives of other packages as the JAX functions that define them: behind those of libraries for solvers are plain operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from eqsat_mem.ir import ops
from eqsat_mem.ir.jaxprs import CALLED, IMPURE

OURS = frozenset({"jax", "jaxlib", "eqsat_mem"})
"""Packages whose primitives are known here, or are called as they are."""


def definition(prim: Any, params: Mapping[str, Any], types: Sequence[Any]) -> ClosedJaxpr | None:
    """The function of another package's primitive for operands of these types: what its author gave to ``def_impl``.

    JAX runs it outside of ``jax.jit``. None if the primitive is JAX's, or a row of the table of operations; if its function
    cannot be traced, since it reads numbers of arrays; and if it does nothing but bind the primitive.
    """
    function = getattr(prim, "impl", None)
    if prim.name in IMPURE or ops.has_row(prim, params) or function is None or _package(function) in OURS:
        return None
    try:
        traced = jax.make_jaxpr(partial(function, **params))(*types)
    except Exception:  # it is meant for arrays, and may raise whatever its operations do
        return None
    return None if _binds(traced.jaxpr, prim) else traced


def _package(function: Callable[..., Any]) -> str:
    """The name of the package that holds a function."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", None) or "").partition(".")[0]


def _binds(jaxpr: Any, prim: Any) -> bool:
    """Whether a jaxpr is one equation of a primitive, through any number of calls."""
    while len(jaxpr.eqns) == 1:
        (eqn,) = jaxpr.eqns
        if eqn.primitive is prim:
            return True
        if eqn.primitive.name not in CALLED:
            return False
        body = eqn.params[CALLED[eqn.primitive.name]]
        jaxpr = getattr(body, "jaxpr", body)
    return False
