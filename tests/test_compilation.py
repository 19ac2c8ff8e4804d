"""Programs of tests are compiled quickly, and compute what those of users compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

A, B, C = np.random.default_rng(0).standard_normal((3, 40, 50)).astype(np.float32)
PROGRAMS = {
    "sum of a product": lambda a, b, c: a * b + c,
    "product read twice": lambda a, b, c: (a * b, a * b + c, a * b - c),
    "polynomial": lambda a, b, c: ((a * b + c) * b + a) * b - c,
    "sums of products": lambda a, b, c: jnp.sum((a - c) * b, 0),
    "branches": lambda a, b, c: jnp.where(a > 0, a * b + c, a * c - b),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_sums_of_products_are_contracted_as_in_programs_of_users(name, request):
    """LLVM's quick selection of instructions (FastISel) contracts some of these and not others."""
    quick = jax.jit(lambda *args: PROGRAMS[name](*args))(A, B, C)
    request.getfixturevalue("compiled_as_everybodys")
    full = jax.jit(lambda *args: PROGRAMS[name](*args))(A, B, C)
    for mine, theirs in zip(jax.tree.leaves(quick), jax.tree.leaves(full), strict=True):
        np.testing.assert_array_equal(mine, theirs)
