"""Equal blocks are found and become loops, and the loops compute what the blocks did, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.candidates import Forms
from eqsat_mem.frontend.equal_blocks import EqualBlocks
from eqsat_mem.frontend.inline import flatten
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.preferences import PLAIN
from eqsat_mem.frontend.repeats import _runs, with_chains
from eqsat_mem.frontend.roll import rolled
from eqsat_mem.passes import ROLLS
from tests.oracles import stepwise
from tests.tiers import tiered

DEPTH, WIDTH, ROWS = 7, 6, 5


def f32(*shape, seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32) * np.float32(0.5)


def dense(w, b, x):
    h = jnp.tanh(x @ w + b)
    mean = jnp.mean(h, -1, keepdims=True)
    return x + (h - mean) * jax.lax.rsqrt(jnp.mean((h - mean) ** 2, -1, keepdims=True) + 1e-5)


def layers(seed=1, depth=DEPTH):
    return [(f32(WIDTH, WIDTH, seed=seed + k), f32(WIDTH, seed=seed - k - 1 + 2 * depth)) for k in range(depth)]


def network(ws, x):
    for w, b in ws:
        x = dense(w, b, x)
    return jnp.mean(x**2)


def with_mask(ws, x):
    """What all layers share is computed in the first."""
    for w, b in ws:
        x = jnp.where(jnp.tril(jnp.ones((ROWS, WIDTH), bool)), dense(w, b, x), x)
    return jnp.sum(x**2)


def stacked(ws, x):
    """Layers are slices of one array, and their numbers take part."""
    for k in range(DEPTH):
        x = dense(ws[0][k], ws[1][k], x) * (1.0 + 0.1 * k)
    return jnp.sum(x**2)


def with_dropout(ws, x):
    key = jax.random.key(3)
    for k, (w, b) in enumerate(ws):
        x = jnp.where(jax.random.bernoulli(jax.random.fold_in(key, k), 0.5, x.shape), dense(w, b, x), x)
    return jnp.sum(x**2)


def power(a, x):
    for _ in range(9):
        x = jnp.tanh(a @ x) + 0.5 * x
        x = x / jnp.sqrt(jnp.sum(x * x) + 1.0) * jnp.cos(jnp.max(x))
    return x


def two_before(a, x):
    """A recurrence of two terms: blocks read values of two blocks before."""
    before, now = x, a @ x
    for _ in range(9):
        before, now = now, jnp.sin(2.0 * (a @ now) - before) * jnp.cos(now) / (1.0 + now * now) + 0.5 * jnp.exp(-now)
    return before, now


def every_layer(ws, x):
    """Results of all layers are results of the program, one after the other."""
    out = []
    for w, b in ws:
        x = dense(w, b, x)
        out.append(x)
    return out, jnp.sum(x)


def long_skips(ws, x):
    """The last layers read what the first ones made, in reverse."""
    kept = []
    for w, b in ws:
        x = dense(w, b, x)
        kept.append(x)
    for w, b in ws:
        x = dense(w, b, x) + kept.pop()
    return x


def odd_ends(ws, x):
    """The first and the last layer are something else."""
    x = jnp.sin(dense(*ws[0], x))
    for w, b in ws[1:-1]:
        x = dense(w, b, x)
    return jnp.tanh(x @ ws[-1][0])


PROGRAMS = {
    "network": (network, (layers(), f32(ROWS, WIDTH))),
    "gradient": (jax.grad(network), (layers(), f32(ROWS, WIDTH))),
    "gradient of checkpoints": (
        jax.value_and_grad(lambda ws, x: jnp.sum(_checkpointed(ws, x) ** 2)),
        (layers(), f32(ROWS, WIDTH)),
    ),
    "mask": (jax.value_and_grad(with_mask), (layers(), f32(ROWS, WIDTH))),
    "slices": (jax.value_and_grad(stacked), ((f32(DEPTH, WIDTH, WIDTH), f32(DEPTH, WIDTH)), f32(ROWS, WIDTH))),
    "dropout": (jax.value_and_grad(with_dropout), (layers(), f32(ROWS, WIDTH))),
    "power": (power, (f32(WIDTH, WIDTH), f32(WIDTH))),
    "gradient of power": (jax.grad(lambda a, x: jnp.sum(power(a, x))), (f32(WIDTH, WIDTH), f32(WIDTH))),
    "two before": (two_before, (f32(WIDTH, WIDTH), f32(WIDTH))),
    "gradient of two before": (jax.grad(lambda a, x: jnp.sum(two_before(a, x)[1])), (f32(WIDTH, WIDTH), f32(WIDTH))),
    "every layer": (every_layer, (layers(), f32(ROWS, WIDTH))),
    "long skips": (long_skips, (layers(), f32(ROWS, WIDTH))),
    "gradient of long skips": (jax.grad(lambda ws, x: jnp.sum(long_skips(ws, x) ** 2)), (layers(), f32(ROWS, WIDTH))),
    "odd ends": (jax.grad(lambda ws, x: jnp.sum(odd_ends(ws, x) ** 2)), (layers(), f32(ROWS, WIDTH))),
    "batch": (jax.vmap(network, (None, 0)), (layers(), f32(3, ROWS, WIDTH))),
}


def _checkpointed(ws, x):
    for w, b in ws:
        x = jax.checkpoint(dense)(w, b, x)
    return x


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("name", tiered(list(PROGRAMS), quick=set(PROGRAMS) - {"dropout", "slices"}))
def test_loops_compute_what_blocks_did(name, pieces):
    f, args = PROGRAMS[name]
    closed = jax.make_jaxpr(f)(*args)
    loops = rolled(closed, pieces=pieces)
    assert loops is not None
    lengths = [eqn.params["length"] for eqn in loops.eqns if eqn.primitive.name == "scan"]
    assert lengths
    assert min(lengths) >= 2
    assert pieces == 1 or max(lengths) < DEPTH - 2
    assert len(loops.eqns) < len(flatten(closed).equations)
    flat = jax.tree.leaves(args)
    for got, want in zip(stepwise.run(loops, flat), stepwise.run(closed, flat), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def chains_of(f, *args):
    return with_chains(flatten(jax.make_jaxpr(f)(*args)))[1]


@pytest.mark.parametrize(("f", "count"), [(network, DEPTH), (with_mask, DEPTH), (odd_ends, DEPTH - 2)])
def test_all_equal_layers_are_in_one_chain_that_carries_one_value(f, count):
    (chain,) = chains_of(f, layers(), f32(ROWS, WIDTH))
    assert chain.count == count
    assert len(chain.carried()) == 1


def test_a_gradient_has_a_chain_each_way():
    loops = rolled(jax.make_jaxpr(jax.grad(network))(layers(), f32(ROWS, WIDTH)))
    scans = [eqn for eqn in loops.eqns if eqn.primitive.name == "scan"]
    assert [eqn.params["reverse"] for eqn in scans] == [False, True]
    assert {eqn.params["length"] for eqn in scans} == {DEPTH - 1}, "the first layer has no gradient for its input, and stands outside"
    together = [eqn for eqn in loops.eqns if eqn.primitive.name == "concatenate"]
    assert len(together) == 2, "weights and biases are put together once, for both"


@pytest.mark.parametrize(("depth", "pieces", "lengths"), [(13, 4, [3, 3, 3, 3]), (14, 3, [4, 4, 5]), (20, 4, [4, 5, 5, 5])])
def test_a_gradient_in_several_loops_each_way_is_cut_where_the_network_is(depth, pieces, lengths):
    loops = rolled(jax.make_jaxpr(jax.grad(network))(layers(depth=depth), f32(ROWS, WIDTH)), pieces=pieces)
    scans = [(eqn.params["length"], eqn.params["reverse"]) for eqn in loops.eqns if eqn.primitive.name == "scan"]
    assert scans == [*((n, False) for n in lengths), *((n, True) for n in reversed(lengths))]
    together = [eqn for eqn in loops.eqns if eqn.primitive.name == "concatenate"]
    assert len(together) == 2 * len(lengths), "weights and biases of each piece are put together once, for both ways"
    assert not [eqn for eqn in loops.eqns if eqn.primitive.name == "rev"]


def test_slices_of_one_array_are_not_copied():
    loops = rolled(jax.make_jaxpr(stacked)((f32(DEPTH, WIDTH, WIDTH), f32(DEPTH, WIDTH)), f32(ROWS, WIDTH)))
    assert not [eqn for eqn in loops.eqns if eqn.primitive.name == "concatenate"]


def test_gradients_of_slices_are_added_after_the_blocks():
    loops = rolled(jax.make_jaxpr(jax.grad(stacked))((f32(DEPTH, WIDTH, WIDTH), f32(DEPTH, WIDTH)), f32(ROWS, WIDTH)))
    assert [eqn.params["reverse"] for eqn in loops.eqns if eqn.primitive.name == "scan"] == [False, True]


def test_programs_without_equal_blocks_have_no_chains():
    assert rolled(jax.make_jaxpr(lambda x: jnp.sum(jnp.exp(x) @ x))(f32(WIDTH, WIDTH))) is None

    def growing(x):
        for k in range(2, 9):
            x = jnp.concatenate([x, jnp.tanh(x[: k // 2]) + 1.0])
        return x

    assert rolled(jax.make_jaxpr(growing)(f32(4))) is None


def test_effects_are_not_repeated():
    def talking(ws, x):
        for w, b in ws:
            x = dense(w, b, x)
            jax.debug.print("{}", x[0, 0])
        return x

    assert rolled(jax.make_jaxpr(talking)(layers(), f32(ROWS, WIDTH))) is None


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_those_found_by_looking_everywhere(seed):
    rng = np.random.RandomState(seed)
    block = rng.randint(0, 3, rng.randint(1, 7))
    text = np.concatenate([rng.randint(0, 3, 5), np.tile(block, rng.randint(3, 6)), rng.randint(0, 3, 4)]).astype(np.int64)
    found = set(_runs(text))
    for period in range(1, len(text) // 3 + 1):
        equal = np.concatenate([[False], text[period:] == text[:-period], [False]])
        edges = np.flatnonzero(np.diff(equal.astype(int)))
        for first, last in zip(edges[::2], edges[1::2]):
            has_less = any(s <= first and e >= last + period and p < period for s, e, p in found)
            if last - first >= 2 * period and not has_less:
                assert (first, last + period, period) in found


def test_a_long_program_is_planned_as_loops_that_say_how_many_blocks_they_have(monkeypatch):
    before = {}
    search = Forms.fastest

    def searched(forms, *args, **kwargs):
        found = search(forms, *args, **kwargs)
        before[len(forms.loaded.terms)] = found.before.seconds
        return found

    monkeypatch.setattr(Forms, "fastest", searched)
    ws = [(jax.ShapeDtypeStruct((16, 16), np.float32), jax.ShapeDtypeStruct((16,), np.float32))] * 24
    limit = 300 * 2**10
    plan = eqsat_mem.optimize(jax.grad(network), memory_limit=limit, verify=False).plan(ws, jax.ShapeDtypeStruct((200, 16), np.float32))
    assert "equal-blocks-as-loops" in plan.rules_fired
    assert plan.peak_bytes <= limit < plan.original_peak_bytes
    assert "23 equal blocks" in plan.source
    rolled, written = sorted(before)[-2:]
    assert plan.original_predicted_s == before[rolled] == before[written]  # what is said to be faster or slower is priced alike


@pytest.mark.parametrize(("times", "forms"), [(4, 1), (2, 2)])
def test_of_loops_far_from_fitting_no_further_forms_are_searched_where_something_fits(times, forms, monkeypatch):
    def loss(ws, x):
        for w, b in ws:
            x = jnp.tanh(x @ w + b)
        return jnp.mean(x**2)

    searched = []
    search = Forms._fastest

    def large(self, form, backend, limit, *rest):
        found = search(self, form, backend, limit, *rest)
        if "equal-blocks-as-loops" not in form.passes:
            return found
        searched.append(form.passes)
        return replace(found, best=replace(found.best, peak_bytes=times * limit if len(searched) == 1 else limit))

    monkeypatch.setattr(Forms, "_fastest", large)
    monkeypatch.setattr("eqsat_mem.candidates.GAIN", 2.0)  # whatever fits is slow
    ws = [(jax.ShapeDtypeStruct((8, 8), np.float32), jax.ShapeDtypeStruct((8,), np.float32))] * 12
    x = jax.ShapeDtypeStruct((8192, 8), np.float32)
    limit = 9 * 8192 * 8
    plan = eqsat_mem.optimize(jax.grad(loss), memory_limit=limit, verify=False).plan(ws, x)
    assert plan.peak_bytes <= limit < plan.original_peak_bytes
    assert min(len(searched), 2) == forms
    assert times == 2 or "equal-blocks-as-loops" not in plan.rules_fired


@pytest.mark.parametrize(("others", "in_loops"), [(0, True), (600, False)])
def test_loops_are_searched_first_where_they_make_a_long_program_much_shorter(others, in_loops, monkeypatch):
    searched = []
    search = Forms._fastest_form
    monkeypatch.setattr(Forms, "_fastest_form", lambda forms, *args: searched.append(forms.loaded.passes) or search(forms, *args))
    monkeypatch.setattr("eqsat_mem.candidates.LONG", 50)
    steps = np.random.default_rng(0).choice([jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.arctan], others)

    def function(ws, x):
        for step in steps:  # none of which is in a block
            x = step(x)
        return network(ws, x)

    ws = [(jax.ShapeDtypeStruct((16, 16), np.float32), jax.ShapeDtypeStruct((16,), np.float32))] * 12
    eqsat_mem.optimize(function, memory_limit="1MiB", verify=False).plan(ws, jax.ShapeDtypeStruct((200, 16), np.float32))
    assert (ROLLS.name in searched[0]) is in_loops


def test_blocks_whose_parameters_do_not_fit_twice_are_several_loops_one_after_the_other():
    wide = 128
    ws = [(jax.ShapeDtypeStruct((wide, wide), np.float32), jax.ShapeDtypeStruct((wide,), np.float32))] * 80
    x = jax.ShapeDtypeStruct((1024, wide), np.float32)
    fixed = 4 * (80 * wide * (wide + 1) + 1024 * wide + 1)
    limit = fixed + 3 * 2**20
    plan = eqsat_mem.optimize(network, memory_limit=limit).plan(ws, x)
    assert plan.compiled_peak_bytes <= limit < fixed + 4 * 80 * wide * wide, "no room for all weights side by side"
    assert plan.source.count("lax.scan(") > 1
    assert "20 equal blocks" in plan.source
    flat = [f32(wide, wide, seed=k) / 16 if k % 2 == 0 else f32(wide, seed=k) for k in range(160)]
    values = list(zip(flat[::2], flat[1::2])), f32(1024, wide, seed=999)
    np.testing.assert_allclose(jax.jit(plan.function)(*jax.tree.leaves(values))[0], network(*values), rtol=1e-5)


def test_blocks_that_are_too_few_for_more_loops_are_tried_once():
    closed = jax.make_jaxpr(jax.grad(network))(layers(depth=5), f32(ROWS, WIDTH))
    equal = EqualBlocks(closed, load(closed, [f"x{k}" for k in range(len(closed.in_avals))]), PLAIN, (ROLLS,))
    one, several = equal.programs()
    assert len(one.terms) < len(several.terms)
    assert list(equal.programs()) == [one, several]
    assert not list(equal.by(equal.loaded, ()).programs())
