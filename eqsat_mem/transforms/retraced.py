"""Programs that are traced anew: a pass evaluates the terms of a program in another way, and what comes of it is loaded again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax

from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.preferences import LOADED
from eqsat_mem.frontend.roll import traced
from eqsat_mem.ir import Program
from eqsat_mem.passes import Pass

Array = Any


def retraced(program: Program, run: Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]], passes: Collection[Pass]) -> Program:
    """The program of ``run``, which returns the outputs of another for its arguments and constants; what passes changed that is kept."""
    avals = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in program.inputs]
    new = load(traced(run, avals, program.consts), [b.name for b in program.inputs], LOADED, passes)
    new.passes |= program.passes
    new.outputs = [replace(o, weak_type=w.weak_type) for o, w in zip(new.outputs, program.outputs, strict=True)]
    return new
