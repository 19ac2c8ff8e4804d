"""Rows looked up in computed values: the same rows, computed from rows of what the values are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.egraph.extract import as_written, extract
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.takes import with_takes
from eqsat_mem.ir import Const, Dot, Input, Program, Take
from tests.oracles.evaluation import values

pytestmark = pytest.mark.usefixtures("quick_compilation")

RULES = load_rules()
N, M, D = 7, 5, 3
INSIDE = np.array([0, 6, 2, 2], np.int32)
OUTSIDE = np.array([3, -1, 7, 40, -8, -30], np.int32)


def made(*shape):
    return np.random.RandomState(0).standard_normal(shape).astype(np.float32)


def pairs(x, y):
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1))


def rows(x, y, i):
    return pairs(x, y)[i]


def columns(x, y, i):
    return pairs(y, x)[:, i]


def of_batches(x, y, i):
    return pairs(x, y)[i.reshape(2, -1)]


def clipped(x, y, i):
    return jnp.take(pairs(x, y), i, axis=0, mode="clip")


def filled(x, y, i):
    return pairs(x, y).at[i].get(mode="fill", fill_value=7.0)


def unknown(x, y, i):
    return jnp.take(pairs(x, y), i, axis=0)


def sliced(x, y, i):
    k = pairs(x, y)
    return jax.vmap(lambda j: jax.lax.dynamic_slice_in_dim(k, j, 1))(i)


def of_products(x, y, i):
    return jnp.tanh(x @ y.T)[i]


def of_positions(x, y, i):
    return jnp.where(jnp.arange(N)[:, None] > jnp.arange(M), pairs(x, y), 0)[i]


def of_the_same(x, y, i):
    k = pairs(x, x)
    return k[i] @ k[:, i]


def of_sums(x, y, i):
    return pairs(x, y).sum(1)[i]


def of_lookups(x, y, i):
    return (pairs(x, y)[i] * 2)[:, jnp.array([1, 0])]


LOOKUPS = [rows, columns, of_batches, clipped, filled, unknown, sliced, of_products, of_positions, of_the_same, of_sums, of_lookups]


def taken(fun, *args) -> Program | None:
    return with_takes(load(jax.make_jaxpr(fun)(*args), ["x", "y", "i"]))


def extracted(program, rules=RULES):
    """The view of a program with takes, and the program that reads the fewest computed values."""

    def seconds(p, t, _):
        term = p.terms[t]
        return 1.0 if isinstance(term, Take) and not isinstance(p.terms[term.arg], Input | Const) else 1e-6

    view = saturate(program, rules, Limits(large_elements=0))
    return view, extract(view, seconds, 0.0).program


def apart(fun, *args):
    """The program with its lookups taken apart, once it and what it comes from have been found to compute the same."""
    program = taken(fun, *args)
    assert program is not None
    view, changed = extracted(program)
    for version in (program, as_written(view).program, changed):
        for mine, theirs in zip(values(args, version)[0], jax.tree.leaves(jax.jit(fun)(*args)), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        assert not any(isinstance(term, Take) for term in version.terms) or version is program
    return changed


def looks_up_arguments_only(program):
    inputs = {f"%{t}" for t, term in enumerate(program.terms) if type(term).__name__ in ("Input", "Const")}
    gathers = [line.split("gather.0(")[1].split(",")[0] for line in str(program).splitlines() if "gather.0(" in line]
    return set(gathers) <= inputs


@pytest.mark.parametrize(
    "positions", [INSIDE, OUTSIDE, INSIDE.astype(np.int8), OUTSIDE.astype(np.uint32)], ids=lambda p: f"{p.dtype}{len(p)}"
)
@pytest.mark.parametrize("lookup", LOOKUPS, ids=lambda f: f.__name__)
def test_rows_of_computed_values_are_computed_from_rows(lookup, positions):
    assert looks_up_arguments_only(apart(lookup, made(N, D), made(M, D), positions))


def test_positions_narrower_than_the_index():
    def fun(x, y, i):
        values = jnp.where(jnp.arange(300) > 5, x, 0)
        return jax.vmap(lambda k: jax.lax.dynamic_index_in_dim(values, k, keepdims=False))(i)

    apart(fun, made(300), made(1), np.array([-1, 127, 4], np.int8))


def first(x, y, i):
    return pairs(x, y)[0]


def but_the_first(x, y, i):
    return pairs(x, y)[1:] - pairs(x, y)[:-1]


def every_other(x, y, i):
    return jnp.where(jnp.arange(N)[:, None] > jnp.arange(M), pairs(x, y), 0)[1::2]


def of_columns(x, y, i):
    return jnp.tanh(x @ y.T)[:, 1:4] + pairs(x, y)[:, 4:5]


@pytest.mark.parametrize("fun", [first, but_the_first, every_other, of_columns])
def test_slices_of_computed_values_are_computed_from_slices(fun):
    program = apart(fun, made(N, D), made(M, D), INSIDE)
    inputs = {f"%{t}" for t, term in enumerate(program.terms) if type(term).__name__ == "Input"}
    assert {line.split("slice.0(")[1].split(")")[0] for line in str(program).splitlines() if "slice.0(" in line} <= inputs


@pytest.mark.parametrize("fun", [lambda x, y, i: x[i], lambda x, y, i: jnp.sort(x @ y.T, 0)[i], lambda x, y, i: (2 * x)[i, i % D]])
def test_what_is_in_memory_is_looked_up_there(fun):
    assert taken(fun, made(N, D), made(M, D), INSIDE) is None


def test_positions_along_another_axis_of_the_same_value_stay():
    def fun(x, y, i):
        k = pairs(x, y)
        return k[jnp.argmax(k, 0)]  # the positions of each column

    args = [made(N, D), made(M, D), INSIDE]
    program = taken(fun, *args)
    for p in [] if program is None else [program, extracted(program)[1]]:
        np.testing.assert_allclose(values(args, p)[0][0], jax.jit(fun)(*args), rtol=1e-5)


def test_rows_and_columns_of_one_kernel_fit_where_the_kernel_does_not():
    def fun(x, v, i):
        k = pairs(x, x)
        return k[i] @ v, k[:, i].T @ v

    x, v, i = made(2003, 3), made(2003, 2), np.arange(0, 2003, 9)
    plan = eqsat_mem.optimize(fun, memory_limit="1 MiB").plan(x, v, i)
    assert plan.compiled_peak_bytes <= 1 << 20 < 4 * 2003 * 2003
    for mine, theirs in zip(jax.jit(plan.function)(x, v, i), jax.jit(fun)(x, v, i), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_contractions_are_left_whole_where_no_rule_slices_them():
    program = taken(of_products, made(N, D), made(M, D), INSIDE)

    def rows_of_contraction(rules):
        _, apart = extracted(program, rules)
        (dot,) = (t for t in apart.reachable() if isinstance(apart.terms[t], Dot))
        return apart.extent(apart.free[dot]) // M

    assert rows_of_contraction(RULES) == len(INSIDE)
    assert rows_of_contraction(load_rules(accuracy="bitwise")) == N
    assert rows_of_contraction(load_rules(without=("take",))) == N


def test_rows_of_a_scan_after_the_first_are_computed_in_the_scan():
    def fun(x, y):
        cost = jnp.abs(x[:, :, None] - y[:, None])
        last, _ = jax.lax.scan(lambda c, row: (jnp.minimum(c, jnp.roll(c, 1, -1)) + row, None), cost[0], cost[1:])
        return last.min(-1)

    x, y = made(301, 40), made(301, 50)
    plan = eqsat_mem.optimize(fun, memory_limit="512 KiB").plan(x, y)
    assert plan.compiled_peak_bytes <= 1 << 19 < 301 * 40 * 50 * 4
    np.testing.assert_allclose(jax.jit(plan.function)(x, y)[0], jax.jit(fun)(x, y), rtol=1e-5)
