"""Values that are compared with what is selected from them: which of them a kernel may compute for itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Fold, Map
from eqsat_mem.ir.bitwise import compared, selected_by_element

X = jax.ShapeDtypeStruct((7, 5), jnp.float32)
Y = jax.ShapeDtypeStruct((5,), jnp.float32)


def found(function):
    """The compared values of a program that are selected from by element, as (operation, operations on the way)."""
    program = load(jax.make_jaxpr(function)(X, Y), ["x", "y"], passes=())
    every = compared(program)
    by_element = selected_by_element(program, every)
    names = {t: program.terms[t].op if isinstance(program.terms[t], Map) else "fold" for t in program.reachable()}
    assert all(isinstance(program.terms[t], Map | Fold) for exact in every.values() for t in exact)
    return sorted((names[x], tuple(sorted(names[t] for t in way))) for x, way in by_element.items()), len(set().union(*every.values()))


def hinge(x, y):
    a = x * y + 1.0
    return a == jnp.maximum(a, y)


def chain(x, y):
    a = x * y + 1.0
    return a == jnp.tanh(jnp.maximum(a, y) * 2.0)


def elsewhere(x, y):
    """A value at other positions than what is selected from it."""
    a = x[:, 0] * 2.0 + 1.0
    return a[:, None] == jnp.maximum(a, y[0])[None, :]


def both(x, y):
    """One value is selected from by element, and across elements, too."""
    a = x * y + 1.0
    return (a == jnp.maximum(a, y)) & (a == jnp.max(a, 1, keepdims=True))


def extreme(x, y):
    a = x * y
    return a == jnp.max(a, 1, keepdims=True)


@pytest.mark.parametrize(
    ("function", "expected", "exact"),
    [
        (hinge, [("add", ("max",))], 1),
        (chain, [("add", ("max", "mul", "tanh"))], 1),
        (both, [], 1),
        (extreme, [], 1),
        (elsewhere, [], 1),
        (lambda x, y: x == jnp.maximum(x, y), [], 0),
    ],
)
def test_values_are_told_apart_by_how_is_selected_from_them(function, expected, exact):
    assert found(function) == (expected, exact)
