"""What functions and programs mean: what is traced is run equation by equation, and nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eqsat_mem.ir import Program
from eqsat_mem.ir.interpreter import evaluate
from tests.oracles import stepwise


def results(function: Callable[..., Any], *args: Any) -> list[Any]:
    """The leaves of what a function returns."""
    return [*map(jnp.asarray, stepwise.run(jax.make_jaxpr(function)(*args), jax.tree.leaves(args)))]


def values(args: Sequence[Any], *programs: Program) -> list[list[Any]]:
    """The outputs of each program for the same arguments, by the reference interpreter."""
    return [results(lambda *a, program=program: evaluate(program, a), *args) for program in programs]
