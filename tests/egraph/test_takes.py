"""Rows looked up in computed values: the same rows, computed from rows of what the values are made of."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.egraph.extract import as_written, extract
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.egraph.take_lowering import as_block
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.takes import with_takes
from eqsat_mem.ir import Buffer, Const, Dot, Fold, Index, Input, Iota, Literal, Map, Output, Program, Take, bits, check
from eqsat_mem.schedule.cost_model import term_seconds
from tests.oracles.evaluation import values
from tests.oracles.extraction import chaos
from tests.oracles.targets import CPU
from tests.tiers import tiered

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


def of_blocks(x, y, i):
    return pairs(x, y)[jnp.ix_(i % N, i % M)] + jnp.tanh(x @ y.T)[i[:, None], jnp.arange(len(i)) % M]


def filled_blocks(x, y, i):
    return pairs(x, y).at[jnp.ix_(i, jnp.array([1, M + 2, -1, 0]))].get(mode="fill", fill_value=-2.0)


LOOKUPS = [
    filled_blocks,
    rows,
    columns,
    of_batches,
    clipped,
    filled,
    unknown,
    sliced,
    of_products,
    of_positions,
    of_the_same,
    of_sums,
    of_lookups,
    of_blocks,
]


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


def corners(x, y, i):
    k = pairs(x, y)
    return k[:2, 1:].mean() + k[2:, :1].mean() - k[1::2, 1::2].mean(0)


@pytest.mark.parametrize("fun", [first, but_the_first, every_other, of_columns, corners])
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


@pytest.mark.parametrize("seed", tiered(range(12), range(1)))
def test_blocks_of_one_kernel_fit_where_the_kernel_does_not(seed):
    rng = np.random.RandomState(seed)
    n, m = 601, rng.randint(100, 500)
    kernel = [
        lambda z: jnp.exp(-jnp.sum((z[:, None] - z[None]) ** 2, -1)),
        lambda z: jnp.tanh(z @ z.T),
        lambda z: 1 / (1 + jnp.sum(jnp.abs(z[:, None] - z[None]), -1)),
    ][rng.randint(3)]
    block = [
        lambda k, i: k[:m, m:],
        lambda k, i: k[m:, :m] + k[:m, m:].T,
        lambda k, i: k[1:m:2, m:],
        lambda k, i: k[jnp.ix_(i, i)],
        lambda k, i: k[jnp.ix_(i, (i * 7 + 3) % n)],
        lambda k, i: k[i][:, i],
    ]
    ends = [lambda b: b.sum(), lambda b: b.max(0), lambda b: (b**2).mean(1), lambda b: jnp.log(b.sum(0) + 300.0)]
    chosen = [(block[rng.randint(6)], ends[rng.randint(4)]) for _ in range(rng.randint(1, 4))]

    def fun(x, y, i):
        k = kernel(jnp.concatenate([x, y]))
        return [end(of(k, i)) for of, end in chosen]

    args = made(m, 3), made(n - m, 3), rng.randint(0, n, 450).astype(np.int32)
    plan = eqsat_mem.optimize(fun, memory_limit="360 KiB").plan(*args)
    assert plan.compiled_peak_bytes <= 360 * 2**10 < 4 * n * n
    for mine, theirs in zip(jax.jit(plan.function)(*args), jax.jit(fun)(*args), strict=True):
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


def take_of(positions):
    """A take of an argument over i at positions that are made in an empty program, and what it is written as."""
    program = Program([Index("i", 300), Index("j", 5), Index("k", 3)])
    program.inputs.append(Buffer("x", (300, 3), np.dtype("float32")))
    x = program.add(Input(np.dtype("float32"), 0, ((0,), (2,))))
    return program, Take(np.dtype("float32"), 0, positions(program), x)


def counted(dtype, start, stride, op="add"):
    """``start + stride * j`` in a dtype."""
    kind = np.dtype(dtype)

    def positions(program):
        first, step = (program.add(Literal.of(n, kind)) for n in (start, stride))
        return program.add(Map(kind, op, (program.add(Map(kind, "mul", (step, program.add(Iota(kind, 1))))), first)))

    return positions


def converted(dtype, t):
    return Map(dtype, "convert_element_type", (t,), (("new_dtype", dtype), ("weak_type", False), ("sharding", None)))


def wrapped(program):
    """Positions that would count, had they not wrapped around before they were converted."""
    kind = np.dtype("int32")
    narrow = counted("int8", 100, 40)(program)
    return program.add(converted(kind, narrow))


@pytest.mark.parametrize(
    ("positions", "written"),
    [
        (counted("int32", 3, 2), "slice"),
        (counted("int64", -1, 1, "sub"), "slice"),
        (counted("int32", 291, 2), "slice"),
        (counted("int32", 292, 2), "gather"),  # the last position is outside
        (counted("int32", 4, -1), "gather"),
        (wrapped, "gather"),
        (lambda program: program.add(Literal.of(7, np.dtype("int32"))), "slice"),
    ],
)
def test_positions_that_count_are_a_slice(positions, written):
    program, take = take_of(positions)
    block = as_block(program, take)
    assert block.call.prim.name == written
    t, s = program.add(take), program.add(block)
    axes = tuple((i,) for i in bits(program.free[t]))
    program.outputs = [Output(t, axes), Output(s, axes)]
    check(program)
    with jax.enable_x64(True):
        one, other = values([made(300, 3)], program)[0]
    np.testing.assert_array_equal(one, other)


def test_positions_of_a_folded_index_stay_outside_the_fold():
    """The positions depend on the index j that is folded below: taken inside, they would be folded with it."""
    program, take = take_of(lambda program: program.add(Iota(np.dtype("int32"), 1)))
    xy = program.add(Map(take.dtype, "mul", (take.arg, program.add(converted(take.dtype, take.positions)))))
    folded = program.add(Fold(take.dtype, "max", 1 << 1, xy))
    t = program.add(Take(take.dtype, 0, take.positions, folded))
    program.outputs = [Output(t, ((1,), (2,)))]
    view = saturate(program, RULES, Limits(large_elements=0))
    assert "take-fold" not in view.matches
    want, *drawn = values([made(300, 3)], program, *(chaos(view, seed).program for seed in range(3)))
    for (got,) in drawn:
        np.testing.assert_array_equal(got, want[0])


def test_rows_are_read_where_that_is_cheaper():
    """At no price of memory, rows of a value that is needed whole are read; at a high one they are computed alone."""

    def fun(x, y, i):
        k = jnp.exp(x @ y.T)
        return k.sum(0), k[i]

    program = taken(fun, made(400, 64), made(300, 64), np.arange(0, 400, 2))
    view = saturate(program, RULES)
    seconds = partial(term_seconds, backend=CPU)
    exps = [
        sum(isinstance(term, Map) and term.op == "exp" for term in extract(view, seconds, price).program.terms) for price in (0.0, 1e-6)
    ]
    assert exps == [1, 2]
