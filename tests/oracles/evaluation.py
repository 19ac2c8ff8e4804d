"""The meaning of programs, compiled: equation by equation it would take a compilation for each operation and shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from eqsat_mem.ir import Program
from eqsat_mem.ir.interpreter import evaluate


def values(args: Sequence[Any], *programs: Program) -> list[list[Any]]:
    """The outputs of each program for the same arguments, by the reference interpreter."""
    return jax.jit(lambda *a: [evaluate(program, a) for program in programs])(*args)
