"""Scans are pointwise in the axes that their bodies act on row by row, and sum over those that they sum over: then loops split them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.egraph.extract import as_written
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend import loop_roles
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Literal, Take, bits
from eqsat_mem.ir.axis_roles import Role, result_roles
from eqsat_mem.ir.interpreter import evaluate_term, to_axes
from eqsat_mem.ir.ops import bind_call
from eqsat_mem.schedule.loop_bodies import in_chunks
from eqsat_mem.testing import same_values
from tests.oracles.evaluation import values as evaluated
from tests.tiers import tiered

ROWS, STEPS, WIDTH = 4, 5, 3


def values(*shapes, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal(shape)).astype(np.float32) for shape in shapes]


def program_of(function, args):
    leaves, tree = jax.tree.flatten(tuple(args))
    traced = jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*jax.tree.unflatten(tree, a))))(*leaves)
    return load(traced, [f"x{k}" for k in range(len(leaves))])


def scans(program):
    found = {}
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Block) and term.call.prim.name == "scan":
            found.setdefault(term.call, {})[term.out] = t
    return found


@pytest.fixture
def small_too(monkeypatch):
    """Scans are looked into however small they are."""
    monkeypatch.setattr(loop_roles, "SMALL_BYTES", 0)


# --- roles against what the scan does -----------------------------------------------------------------


def test_what_is_taken_of_some_rows_is_neither_theirs_nor_the_same_for_all():
    program = program_of(lambda x: 2 * x, values((ROWS, WIDTH)))
    (whole,) = program.outputs
    place = program.add(Literal.of(3, np.dtype(np.int32)))
    taken = program.add(Take(np.dtype(np.float32), whole.axes[0][0], place, whole.term))
    program.outputs = [replace(whole, term=taken, axes=whole.axes[1:])]
    assert result_roles(program, whole.axes[0][0], [Role.ROWS]) == [Role.OTHER]


class Drawn:
    """A scan over random operations: some keep rows apart, some mix them, some sum over them."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.length = int(self.rng.integers(1, STEPS))
        self.mixes = self.rng.random() < 0.3
        self.seeds = [int(n) for n in self.rng.integers(0, 2**31, int(self.rng.integers(1, 5)))]
        self.reverse = bool(self.rng.random() < 0.4)

    def args(self):
        return values((ROWS, WIDTH), (WIDTH, WIDTH), (self.length, ROWS, WIDTH), (WIDTH,), seed=self.length, scale=0.5)

    def __call__(self, h, w, xs, b):
        def step(carry, x):
            h, total, count = carry
            y = x
            for seed in self.seeds:
                h, y = self.changed(np.random.default_rng(seed), h, y, w, b, total, count)
            return (h, total + h.T @ y, count + 1), (y, jnp.sum(h, 0) * b, count * b)

        zeros = jnp.zeros((WIDTH, WIDTH))
        (h, total, _), (ys, sums, _) = lax.scan(step, (h, zeros, 0), xs, reverse=self.reverse)
        return h, total, ys, sums

    def changed(self, rng, h, y, w, b, total, count):
        apart = [
            lambda: (jnp.tanh(h @ w + y), y),
            lambda: (h, jnp.sin(y) * b + h),
            lambda: (h - h.mean(1, keepdims=True), y),
            lambda: (h, jax.nn.softmax(y, -1)),
            lambda: (jnp.sort(h, 1), y[:, ::-1]),
            lambda: (h.at[:, 1].add(y[:, 0]), y),
            lambda: (jnp.where(count > 1, h, 2 * h), y),
            lambda: (h, lax.scan(lambda c, x: (c + x * h[:, 0], c), h[:, 1], y.T)[1].T),
            lambda: (h.reshape(-1).reshape(h.shape), jnp.concatenate([y[:, 1:], h[:, :1]], 1)),
            lambda: (jnp.einsum("bi,bj,ij->bj", h, y, w), y),
            lambda: (h, lax.cumsum(y, 1)),
        ]
        mixing = [
            lambda: (h - h.mean(0), y),
            lambda: (h[::-1], y),
            lambda: (h @ h.T @ y, y),
            lambda: (h, y + jnp.arange(ROWS, dtype=y.dtype)[:, None]),
            lambda: (h + total[0], y),
            lambda: (jnp.roll(h, 1, 0), y),
            lambda: (h, lax.cumsum(y, 0)),
        ]
        ways = [*apart, *mixing] if self.mixes else apart
        return ways[rng.integers(len(ways))]()


@pytest.mark.parametrize("seed", tiered(range(60), range(3), range(3, 24)))
def test_roles_are_what_a_scan_does_to_each_row(seed, small_too):
    drawn = Drawn(seed)
    args = drawn.args()
    program = program_of(drawn, args)
    ((call, results),) = scans(program).items()
    batch = list(bits(call.pointwise))
    operands = operands_of(program, call, results, args)
    before = [np.asarray(x) for x in bind_call(call, operands)]
    for i in batch:
        extent = program.indices[i].extent
        parts = [sliced(call, operands, i, rows) for rows in (slice(0, 1), slice(1, extent))]
        made = [bind_call(call, part) for part in parts]  # the same scan, of chunks of two sizes
        for out, axes in enumerate(call.out_axes):
            if out not in results:
                continue
            whole = (
                np.concatenate([np.asarray(m[out]) for m in made], axes.index((i,)))
                if (i,) in axes
                else sum(np.asarray(m[out]) for m in made)
            )
            assert np.allclose(whole, before[out], rtol=2e-4, atol=2e-4 * max(1, np.abs(before[out]).max())), (out, axes)
    if not drawn.mixes:
        assert batch, "no row is mixed with another"


def operands_of(program, call, results, args):
    """What a scan of a program is given."""
    made, kept = {}, {}
    for t in range(min(results.values())):
        made[t] = evaluate_term(program, t, args, made, kept)
    term = program.terms[min(results.values())]
    return [to_axes(program, made[a], program.free[a], axes) for a, axes in zip(term.args, call.in_axes)]


def sliced(call, operands, i, rows):
    return [x[tuple(rows if axis == (i,) else slice(None) for axis in axes)] for x, axes in zip(operands, call.in_axes)]


def roles_of(function, *args):
    """The indices along which the last scan of a function is pointwise, and those that it sums over, as extents."""
    program = program_of(function, args)
    call = list(scans(program))[-1]
    return tuple({program.indices[i].extent for i in bits(mask)} for mask in (call.pointwise, call.folds))


READS_ROWS = {
    "positions of both axes, made outside": lambda rows, p, x: x[rows, p],
    "columns made inside": lambda rows, p, x: x[rows, (p + x.astype(p.dtype)[:, :2]) % WIDTH],
    "rows of columns": lambda rows, p, x: x.T[p, rows],
    "written": lambda rows, p, x: x.at[rows, p].add(1.0)[:, :2],
}


def are_read_in_rows(program):
    """Whether all scans read the rows of matrices that they are given step by step in rows of what they carry."""
    given = [(call, axes) for call in scans(program) for axes in call.in_axes if program.shape(axes)[:2] == (STEPS, 7)]
    return all(axes[1][0] in bits(call.pointwise) for call, axes in given)


@pytest.mark.parametrize("name", READS_ROWS)
def test_rows_whose_positions_are_counted_before_a_scan_are_a_batch(name, small_too):
    def loss(h, xs, p):
        rows = jnp.arange(7)[:, None]
        return jnp.sum(lax.scan(lambda h, x: (h * 0.9 + READS_ROWS[name](rows, p, x), None), h, xs)[0] ** 2)

    args = [*values((7, 2), (STEPS, 7, WIDTH)), integers(WIDTH, 7, 2)]
    for function in (loss, jax.grad(loss, (0, 1))):
        program = program_of(function, args)
        assert are_read_in_rows(program) or (function is not loss and "inside" in name)
        for mine, theirs in zip(evaluated(args, program)[0], jax.tree.leaves(jax.jit(function)(*args)), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_positions_that_do_not_count_stay_outside(small_too):
    def loss(h, xs, p):
        rows = jnp.arange(7)[::-1][:, None]
        return jnp.sum(lax.scan(lambda h, x: (h * 0.9 + x[rows, p], None), h, xs)[0] ** 2)

    assert not are_read_in_rows(program_of(loss, [*values((7, 2), (STEPS, 7, WIDTH)), integers(WIDTH, 7, 2)]))


def test_keys_that_a_scan_reads_are_no_positions():
    def drawn(xs, key):
        return lax.scan(lambda h, x: (h + x * jax.random.uniform(key, x.shape), None), xs[0], xs)[0]

    key = jax.random.key(0)
    assert len(scans(program_of(drawn, [*values((STEPS, WIDTH)), key]))) == 1


def test_a_gradient_sums_over_the_batch_and_keeps_its_rows(small_too):
    def loss(w, h, xs):
        return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), h, xs)[1] ** 2)

    args = values((WIDTH, WIDTH), (7, WIDTH), (STEPS, 7, WIDTH))
    assert roles_of(loss, *args) == ({7}, set())
    for gradient in (jax.grad(loss), jax.grad(loss, (0, 1))):
        pointwise, summed = roles_of(gradient, *args)
        assert 7 in pointwise
        assert summed == {7}


def test_a_sum_that_begins_with_a_number_is_none_of_chunks(small_too):
    def total(start, xs):
        return lax.scan(lambda c, x: (c + jnp.sum(x), None), start, xs)[0]

    (xs,) = values((STEPS, 7))
    assert roles_of(lambda xs: total(0.0, xs), xs) == ({7}, {7})
    assert roles_of(lambda xs: total(1.0, xs), xs) == (set(), set())
    assert roles_of(total, np.float32(0), xs) == (set(), set())


def test_what_no_row_changes_is_the_same_in_every_chunk(small_too):
    (xs,) = values((STEPS, 7))
    counted = lax.scan, lambda c, x: ((c[0] * 2, c[1] + c[0] * x), None)
    assert roles_of(lambda xs: counted[0](counted[1], (jnp.float32(1), jnp.zeros(7)), xs)[0][1], xs) == ({7}, set())
    assert roles_of(lambda xs: counted[0](counted[1], (jnp.float32(1), jnp.zeros(7)), xs)[0], xs) == (set(), set())


def test_an_axis_that_is_one_around_a_scan_is_one_inside(small_too):
    def apart(a, b):
        return lax.scan(lambda c, _: ((jnp.sin(c[0]), jnp.cos(c[1])), None), (a * b, a + b), None, length=3)[0]

    program = program_of(apart, values((7,), (7,)))
    ((call, _),) = scans(program).items()
    assert call.pointwise.bit_count() == 1
    assert call.in_axes == (((0,),), ((0,),))


def test_bitwise_accuracy_splits_scans_without_contractions_only(small_too):
    rules = load_rules(accuracy="bitwise")
    args = values((7, WIDTH), (WIDTH, WIDTH), (STEPS, 7, WIDTH))
    for step, splits in ((lambda h, w, x: jnp.sin(h) + x, True), (lambda h, w, x: jnp.sin(h @ w) + x, False)):
        program = program_of(lambda h, w, xs, step=step: lax.scan(lambda h, x: (step(h, w, x), None), h, xs)[0], args)
        (call,) = scans(program)
        assert call.pointwise
        ex = as_written(saturate(program, rules, Limits()))
        found = [t for t in ex.program.reachable() if isinstance(ex.program.terms[t], Block)]
        assert bool(ex.splits.get(found[0], 0) & call.pointwise) is splits


# --- plans --------------------------------------------------------------------------------------------


def held(function, args):
    """Bytes of arguments and results, and of temporaries, that XLA holds for a function."""
    memory = jax.jit(function, keep_unused=True).lower(*args).compile().memory_analysis()
    fixed = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return fixed, memory.temp_size_in_bytes


LEAST = 2**16
"""Bytes that plans have for temporaries where the original has less."""


def squeezed(function, args, share, tolerance=1e-4):
    """The plan of a function under a share of the temporaries that XLA holds for it, having run it."""
    fixed, temporaries = held(function, args)
    limit = fixed + max(int(share * temporaries), LEAST)
    planned = eqsat_mem.optimize(function, memory_limit=limit)
    plan = planned.plan(*args)
    assert plan.compiled_peak_bytes <= limit
    comparison = same_values(jax.jit(function), planned, args, tolerance=tolerance)
    assert comparison.same, comparison
    return plan


def rnn(w, xs):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h

    return jnp.mean(lax.scan(step, jnp.zeros(xs.shape[1:]), xs)[1] ** 2)


def wave(c, sources, records):
    """The misfit of seismic shots, each a wave on the velocities ``c``."""

    def shot(source, record):
        def step(u, k):
            now, before = u
            laplacian = sum(jnp.roll(now, s, a) for s in (1, -1) for a in (0, 1)) - 4 * now
            after = 2 * now - before + 0.1 * c**2 * laplacian
            after = after.at[2, source].add(jnp.exp(-(((k - 5.0) / 2) ** 2)))
            return (after, now), after[3]

        still = jnp.zeros_like(c)
        return jnp.sum((lax.scan(step, (still, still), jnp.arange(record.shape[0], dtype=c.dtype))[1] - record) ** 2)

    return jnp.sum(jax.vmap(shot)(sources, records))


def labels_of_frames(w, frames, labels):
    """Connectionist temporal classification: the likelihood of the labels, whichever frames they stand in."""

    def one(x, own):
        scores = jax.nn.log_softmax(x @ w)
        stands = jnp.zeros(2 * own.size + 1, jnp.int32).at[1::2].set(own)
        emitted = scores[:, stands]
        never = jnp.full(stands.shape, -1e9).at[0].set(emitted[0, 0]).at[1].set(emitted[0, 1])

        def step(alpha, e):
            moved = jnp.concatenate([jnp.full(1, -1e9), alpha[:-1]])
            return jnp.logaddexp(alpha, moved) + e, None

        last = lax.scan(step, never, emitted[1:])[0]
        return -jnp.logaddexp(last[-1], last[-2])

    return jnp.mean(jax.vmap(one)(frames, labels))


def labels_of_rows(frames, labels):
    """The same with a batch that is counted: each step reads the scores of each row's labels at their positions."""
    scores, rows = jax.nn.log_softmax(frames, -1), jnp.arange(labels.shape[0])[:, None]
    stands = jnp.zeros((labels.shape[0], 2 * labels.shape[1] + 1), jnp.int32).at[:, 1::2].set(labels)
    never = jnp.full(stands.shape, -1e9).at[:, 0].set(scores[0, :, 0]).at[:, 1].set(scores[0][rows[:, 0], stands[:, 1]])

    def step(alpha, e):
        moved = jnp.concatenate([jnp.full_like(alpha[:, :1], -1e9), alpha[:, :-1]], 1)
        return jnp.logaddexp(alpha, moved) + e[rows, stands], None

    last = lax.scan(step, never, scores[1:])[0]
    return -jnp.mean(jnp.logaddexp(last[:, -1], last[:, -2]))


def soft_dtw(w, x, y):
    def one(a, b):
        cost = jnp.sum(((a @ w)[:, None] - b[None]) ** 2, -1)

        def row(above, costs):
            def cell(left, at):
                up, corner, c = at
                new = c - jax.nn.logsumexp(-jnp.stack([left, up, corner]))
                return new, new

            new = lax.scan(cell, jnp.float32(1e6), (above[1:], above[:-1], costs))[1]
            return jnp.concatenate([jnp.full(1, 1e6), new]), None

        return lax.scan(row, jnp.full(b.shape[0] + 1, 1e6).at[0].set(0.0), cost)[0][-1]

    return jnp.mean(jax.vmap(one)(x, y))


def forward(transitions, emissions):
    """Hidden Markov models: the likelihood of sequences."""

    def step(a, e):
        return jax.nn.logsumexp(a[:, :, None] + transitions, axis=1) + e, None

    return jnp.mean(jax.nn.logsumexp(lax.scan(step, emissions[0], emissions[1:])[0], -1))


def flow(a, b, x):
    """The end of a differential equation, solved by the method of Runge and Kutta from many points."""

    def field(x):
        return jnp.tanh(x @ a) @ b

    def step(x, _):
        k = field(x)
        k2 = field(x + 0.05 * k)
        k3 = field(x + 0.05 * k2)
        return x + 0.1 / 6 * (k + 2 * k2 + 2 * k3 + field(x + 0.1 * k3)), None

    return jnp.mean(lax.scan(step, x, None, length=20)[0] ** 2)


def kalman(transition, noise, series):
    def one(ys):
        def step(state, y):
            m, p = state
            m, p = transition @ m, transition @ p @ transition.T + jnp.diag(noise * (1 + y[:4] ** 2))
            gain = p[:, 0] / (p[0, 0] + 0.1)
            error = y[0] - m[0]
            return (m + gain * error, p - jnp.outer(gain, p[0])), error**2 / (p[0, 0] + 0.1) + jnp.log(p[0, 0] + 0.1)

        return jnp.sum(lax.scan(step, (jnp.zeros(4), jnp.eye(4)), ys)[1])

    return jnp.mean(jax.vmap(one)(series))


def integers(high, *shape):
    return np.random.default_rng(1).integers(1, high, shape).astype(np.int32)


FAMILIES = {
    "rnn": (rnn, lambda: values((32, 32), (24, 256, 32), scale=0.2)),
    "wave": (wave, lambda: [1 + values((40, 40), scale=0.05)[0], integers(40, 16), *values((16, 30, 40), scale=0.1)]),
    "ctc": (labels_of_frames, lambda: [*values((16, 40), (64, 30, 16), scale=0.3), integers(40, 64, 8)]),
    "ctc, rows counted": (labels_of_rows, lambda: [*values((30, 64, 100), scale=0.3), integers(100, 64, 8)]),
    "soft-dtw": (soft_dtw, lambda: values((4, 4), (64, 40, 4), (64, 40, 4), scale=0.5)),
    "hmm": (forward, lambda: values((16, 16), (20, 256, 16), scale=0.5)),
    "ode": (flow, lambda: values((8, 16), (16, 8), (2048, 8), scale=0.4)),
    "kalman": (kalman, lambda: [np.eye(4, dtype=np.float32) * 0.9, np.full(4, 0.1, np.float32), *values((512, 20, 4))]),
}


@pytest.mark.parametrize("name", tiered(FAMILIES, [], ["rnn", "ctc, rows counted", "soft-dtw", "hmm"]))
def test_gradients_of_batched_scans_fit_in_chunks_of_the_batch(name):
    function, args = FAMILIES[name]
    plan = squeezed(jax.value_and_grad(function), args(), 1 / 8)
    assert not plan.unchanged


def test_a_batch_of_recurrences_runs_in_chunks():
    plan = squeezed(jax.grad(rnn), values((32, 32), (24, 512, 32), scale=0.2), 1 / 8)
    assert in_chunks(plan.schedule.ex.program, plan.schedule.seq)


@pytest.mark.parametrize("seed", tiered(range(24), [], range(10)))
def test_random_scans_of_batches_and_their_gradients_fit(seed):
    rng = np.random.default_rng(seed)
    function = Batched(seed)
    args = values((8, 8), (16, 8 * int(rng.integers(20, 120)) + int(rng.integers(0, 3)), 8), seed=seed, scale=0.3)
    squeezed(jax.grad(function, int(rng.integers(2))) if rng.random() < 0.7 else function, args, 1 / 3, tolerance=1e-3)


class Batched:
    """The mean over a batch of a function of what a scan makes of each row."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.step, self.end = (int(n) for n in rng.integers(0, 4, 2))
        self.is_vmapped, self.reverse = bool(rng.random() < 0.5), bool(rng.random() < 0.3)

    def __call__(self, w, xs):
        def rows(xs):
            h, ys = lax.scan(lambda h, x: self.stepped(h, x, w), jnp.zeros(xs.shape[1:]), xs, reverse=self.reverse)
            ends = [lambda: (h**2).sum(-1), lambda: (ys * xs).sum((0, -1)), lambda: jnp.sin(ys).mean((0, -1)), lambda: ys.max(0).sum(-1)]
            return ends[self.end]()

        return jnp.mean(jax.vmap(rows, 1)(xs) if self.is_vmapped else rows(xs))

    def stepped(self, h, x, w):
        ways = [
            lambda: jnp.tanh(h @ w + x),
            lambda: 0.9 * h + jnp.sin(x) * jax.nn.sigmoid(h @ w),
            lambda: h / (1 + jnp.abs(h)) + x @ w,
            lambda: jnp.logaddexp(h, x) - jnp.log(2.0),
        ]
        new = ways[self.step]()
        return new, jnp.cos(new) * x


def test_a_place_that_is_a_sum_of_the_numbers_it_points_at_is_no_sum():
    """Places have the dtype of the values here, and JAX does not wrap unsigned ones: parts of a place point elsewhere."""

    def histogram(x, w):
        def step(carry, _):
            rows = jnp.cos(carry[0] @ w)
            count = (rows[:, 0] > 0.99).astype(jnp.uint32).sum()
            return (rows, lax.dynamic_update_slice(carry[1], count[None], (count,))), None

        return lax.scan(step, (jnp.exp(x), jnp.zeros(2048, jnp.uint32)), None, length=4)[0][1]

    program = program_of(histogram, values((1003, 32), (32, 32)))
    assert scans(program)
    assert not any(call.folds for call in scans(program))


def test_a_sum_over_an_axis_has_it_under_no_other_name(small_too):
    """What a body sums over an axis and broadcasts along another of the same extent: around the scan, both are added to one value."""

    def program(x, ys):
        def step(total, y):
            return total + y * x, jnp.broadcast_to(jnp.sum(y * x), WIDTH)

        total, sums = lax.scan(step, jnp.zeros((WIDTH, WIDTH)), ys)
        return sums[:, :WIDTH] * 2 + total

    loaded = program_of(program, values((WIDTH, WIDTH), (WIDTH, WIDTH, WIDTH)))
    ((call, _),) = scans(loaded).items()
    total, sums = call.out_axes
    assert call.folds >> total[1][0] & 1
    assert not {i for axis in sums for i in axis} & {i for axis in total for i in axis}


def distances(x):
    return jnp.sqrt(jnp.sum((x[:, None] - x[None]) ** 2, -1))


EDGES = np.linspace(0, 4, 23, dtype=np.float32)
SEARCHES = {
    "histogram": lambda x: jnp.histogram(distances(x), bins=22, range=(0.0, 4.0))[0],
    "weighted histogram": lambda x: jnp.histogram(distances(x), bins=EDGES, weights=jnp.cos(distances(x)))[0],
    "digitize": lambda x: jnp.digitize(distances(x), EDGES).sum(1),
    "searchsorted from the right": lambda x: jnp.searchsorted(EDGES, distances(x), side="right").max(0),
    "interp": lambda x: jnp.interp(distances(x), EDGES, np.sin(EDGES)).sum(0),
    "gradient of interp": jax.grad(lambda x: jnp.interp(distances(x + 1e-3), EDGES, np.sin(EDGES)).sum()),
}


@pytest.mark.parametrize("name", tiered(SEARCHES, [], ["histogram", "interp"]))
def test_computed_values_are_searched_for_in_chunks(name):
    plan = squeezed(SEARCHES[name], values((500, 3)), 1 / 6, tolerance=1e-4)
    assert not plan.unchanged
