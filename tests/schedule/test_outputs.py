"""Outputs have their memory from the beginning: what lies in it until they are written, against XLA and against all assignments."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from eqsat_mem.backends.xla import compiled_peak
from eqsat_mem.codegen.emit import emit
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.packing import Placed, bytes_of, bytes_within, free_outputs
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import straight
from eqsat_mem.schedule.split import region, split
from tests.oracles.targets import CPU
from tests.schedule.test_memory import traced


@pytest.mark.parametrize("seed", range(40))
def test_as_much_as_can_lies_in_outputs(seed):
    """Against the best assignment of values to outputs of all."""
    rng = random.Random(seed)
    room, values = ([rng.choice((1, 2, 3, 5, 8)) for _ in range(rng.randrange(6))] for _ in range(2))
    gains = np.array([[value if value <= size else 0 for size in room] for value in values]).reshape(len(values), len(room))
    assert bytes_within(Counter(room), Counter(values)) == gains[linear_sum_assignment(gains, maximize=True)].sum()


@pytest.mark.parametrize("seed", range(40))
def test_outputs_are_free_until_a_value_lies_in_them_or_they_are_written(seed):
    rng, moments = random.Random(seed), 8
    begins = [rng.randrange(moments) for _ in range(12)]
    values = [Placed(rng.choice((1, 2, 3, 5)), begin, rng.choice((math.inf, rng.randrange(begin, moments)))) for begin in begins]
    scratch = [Placed(rng.choice((0, 4)), k, k) for k in range(moments)]
    for moment, free in enumerate(free_outputs(values, scratch, moments)):
        room = Counter(v.nbytes for v in values if v.last == math.inf and v.first > moment)
        there = Counter(v.nbytes for v in (*values, *scratch) if v.last < math.inf and v.first <= moment <= v.last and v.nbytes)
        assert bytes_of(free) == bytes_of(room) - sum(room_of(room, there))
        assert not free - room


def room_of(room: Counter[int], there: Counter[int]) -> list[int]:
    """The outputs in which values lie, where each takes the smallest that it finds, the largest value first."""
    rooms, taken = sorted(room.elements()), []
    for value in sorted(there.elements(), reverse=True):
        if (size := next((size for size in rooms if size >= value), None)) is not None:
            rooms.remove(size)
            taken.append(size)
    return taken


# --- against XLA --------------------------------------------------------------------------------------


def held(made: Schedule) -> int:
    """What XLA reserves for the source of a schedule."""
    avals = [jax.ShapeDtypeStruct(b.shape, b.dtype) for b in made.ex.program.inputs]
    return compiled_peak(emit(made).function, avals)[0]


def many_results(x, *ws):
    """A value that is larger than any result, then results that are written one after the other."""
    total = jnp.sum(jnp.sin(jnp.cumsum(x @ x.T, 0)))
    return tuple(jnp.cumsum(w * total, 0) for w in ws)


def one_result(x, w):
    """A value that lies in the result until that is written."""
    total = jnp.sum(jnp.sin(jnp.cumsum(x @ x.T, 0)))
    return jnp.cumsum(w * total, 0)


@pytest.mark.parametrize(("fun", "shapes"), [(many_results, [(512, 8)] + [(128, 512)] * 4), (one_result, [(512, 8), (1024, 1024)])])
def test_values_lie_in_results_that_are_no_smaller(fun, shapes):
    made = straight(traced(fun, *shapes), CPU)
    assert held(made) == pytest.approx(made.peak_bytes, rel=0.03)


def test_what_a_loop_holds_lies_in_no_smaller_result():
    """A loop's values are larger than each of the results that are written after it. Its copy of a slice might be many small values."""
    ex = traced(lambda x, y, *ws: many_results(jnp.exp(x @ y) @ y.T, *ws), (256, 256), (256, 4096), *[(512, 256)] * 4)
    column = next(k for k, index in enumerate(ex.program.indices) if index.extent == 4096)
    tree = split(ex, region(ex), column)
    chunks = dict.fromkeys(loops(tree), 1024)
    made = Schedule(ex, CPU, tree, chunks, Memory(ex, CPU).total(tree, chunks), 0.0)
    copied = 4 * 256 * 1024
    assert held(made) - 1.3 * copied <= made.peak_bytes <= 1.01 * held(made)


def matrices(x, w):
    return x @ w.T


def rows_of_groups(x, w):
    return jnp.einsum("abk,nk->abn", x, w)


def batches(x, w):
    return jnp.einsum("aik,ajk->aij", x, w)


def back(product, y, w):
    """The contraction that reads what a product has made, over the product's columns."""
    if product is batches:
        return jnp.einsum("aij,ajk->aik", y, w)
    return y @ w


N, GROUPS, K = 1024, 4, 32
PRODUCTS: dict[Callable[..., Any], tuple[list[tuple[int, ...]], tuple[int, ...]]] = {
    matrices: ([(N, K), (N, K)], (N, N)),
    rows_of_groups: ([(GROUPS, N // GROUPS, K), (N, K)], (GROUPS, N // GROUPS, N)),
    batches: ([(GROUPS, N, K), (GROUPS, N, K)], (GROUPS, N, N)),
}


def layer(product, x, w, z):
    return back(product, jnp.tanh(product(x, w)), w)


def layer_with_bias(product, x, w, z):
    return back(product, jnp.tanh(product(x, w) + z[..., :1, :]), w)


def gated(product, x, w, z):
    return back(product, jnp.tanh(product(x, w)) * product(x + 1.0, w), w)


def returned(product, x, w, z):
    y = jnp.tanh(product(x, w) + z[..., :1, :])
    return back(product, y, w), y


def softmax_and_more(product, x, w, z):
    d = product(x, w)
    e = jnp.exp(d - jnp.max(d, -1, keepdims=True))
    return back(product, z + e / jnp.sum(e, -1, keepdims=True), w)


@pytest.mark.parametrize("fun", [layer, layer_with_bias, gated, returned, softmax_and_more])
@pytest.mark.parametrize("product", PRODUCTS)
def test_results_are_written_over_operands_of_their_own_shape(product, fun):
    shapes, other = PRODUCTS[product]
    made = straight(traced(lambda x, w, z: fun(product, x, w, z), *shapes, other), CPU)
    value = 4 * math.prod(other)
    assert abs(held(made) - made.peak_bytes) < value / 4
