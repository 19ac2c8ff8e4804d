"""Maps over devices that stay as they are, so that the program around them does too where several devices run it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from eqsat_mem.frontend.inline import source_of
from eqsat_mem.frontend.shard_maps import of_all_shares
from eqsat_mem.ir.jaxprs import inner_jaxprs


def whole_map(closed: ClosedJaxpr) -> str:
    """A sentence about the first ``shard_map`` of a function that cannot be planned with what is around it; empty if there is none."""
    for eqn in _maps(closed.jaxpr):
        types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        try:
            of_all_shares(eqn.params, types)
        except NotImplementedError as reason:
            source = source_of(eqn)
            line = "" if source is None else f" at {source.file}:{source.line}"
            return (
                f"The shard_map{line} runs as written, and all that is around it: its body has what cannot be planned, {reason}. "
                "Do without that there, or plan the parts before and after the shard_map, or its body, each by itself."
            )
    return ""


def _maps(jaxpr: Any) -> Iterator[Any]:
    """The equations of the outermost maps over devices."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            yield eqn
        else:
            for inner in inner_jaxprs(eqn.params):
                yield from _maps(inner)
