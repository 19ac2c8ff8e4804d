"""Values computed again at a late use: less held once compiled, since nothing merges the two computations, and the same results."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from benchmarks.planning import training_step
from eqsat_mem import pipeline
from eqsat_mem.backends.xla import compiled_peak
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import original
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Map
from eqsat_mem.ir.loop_tree import loops, walk_regions
from eqsat_mem.options import Options
from eqsat_mem.schedule import remat
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import schedule, straight
from eqsat_mem.schedule.split import region, split
from eqsat_mem.schedule.ties import BitTie
from eqsat_mem.schedule.timing import Timing
from tests.oracles import stepwise
from tests.oracles.execution import execute
from tests.oracles.peak import brute_force_peak
from tests.oracles.targets import CPU
from tests.tiers import tiered

ROWS, WIDTH, LAYERS = 500, 32, 10


def numbers(*shape, seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


def normalised(weights, x):
    """Batch normalisation: no layer can do with a part of the batch."""
    for w in weights:
        z = x @ w
        x = jnp.tanh((z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-3))
    return jnp.sum(x**2)


def spectral(weights, x):
    """Transforms along both axes bind both."""
    for w in weights:
        x = jnp.tanh(jnp.fft.irfft2(jnp.fft.rfft2(x) * w[0, 0], x.shape))
    return jnp.sum(x**2)


def shortened(weights, x):
    """The gradients of slices are padded arrays, whose first elements every compiler knows."""
    for w in jax.lax.stop_gradient(weights):
        x = jnp.tanh(x[:-1] + jnp.cumsum(x, 1)[1:] * w[0, 0])
    return jnp.sum(x**2)


def case(function):
    weights = [numbers(WIDTH, WIDTH, seed=k) * np.float32(0.3) for k in range(LAYERS)]
    args = [*weights, numbers(ROWS, WIDTH, seed=99)]

    def flat(*values):
        return jax.tree.leaves(jax.value_and_grad(lambda *v: function(v[:-1], v[-1]), tuple(range(len(values))))(*values))

    jaxpr = jax.make_jaxpr(flat)(*args)
    return flat, args, straight(original(load(jaxpr, [f"x{k}" for k in range(len(args))])), CPU)


def held(function, args):
    return compiled_peak(function, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args], optimise=False)[0]


def same(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(np.max(np.abs(b))))


@pytest.mark.parametrize("function", tiered([normalised, spectral], [spectral]))
def test_compiled_programs_hold_less(function):
    flat, args, written = case(function)
    made = remat.Moved(written).fitting(int(0.6 * written.peak_bytes))
    assert made.fits(int(0.6 * written.peak_bytes))
    assert list(loops(made.seq)) == []
    assert made.seconds < 1.6 * written.seconds
    code = emit(made)
    assert held(code.function, args) < 0.75 * held(flat, args)
    same(jax.jit(code.function)(*args), jax.jit(flat)(*args))


def test_compiled_programs_wait_for_values_that_are_padded():
    flat, args, written = case(shortened)
    made = remat.Moved(written).fitting(int(0.75 * written.peak_bytes))
    assert made.fits(int(0.75 * written.peak_bytes))
    code = emit(made)
    assert held(code.function, args) < 1.05 * made.peak_bytes
    same(jax.jit(code.function)(*args), jax.jit(flat)(*args))


@pytest.mark.slow
def test_a_barrier_would_not_be_enough(monkeypatch):
    """The number that XLA:CPU does not know keeps it from merging: without it, the program holds as much as the one as written."""
    flat, args, written = case(normalised)
    monkeypatch.setattr(BitTie, "tied", lambda self, program, value, token, add: value)
    made = remat.Moved(written).fitting(int(0.6 * written.peak_bytes))
    assert held(emit(made).function, args) > 0.95 * held(flat, args)
    barred = jax.grad(jax.checkpoint(lambda *v: normalised(v[:-1], v[-1])))
    assert held(barred, args) > 0.95 * held(jax.grad(lambda *v: normalised(v[:-1], v[-1])), args)


def test_peaks_are_those_of_the_live_set_and_values_those_of_the_program():
    flat, args, written = case(normalised)
    made = remat.Moved(written).fitting(int(0.5 * written.peak_bytes))
    memory = Memory(made.ex, CPU.inside())
    assert memory.peak(made.seq, memory.full_extents(), made.chunks).nbytes == brute_force_peak(made)
    same(execute(made, args), flat(*args))


@pytest.mark.slow
def test_tighter_limits_take_more_moves_and_more_time():
    _, _, written = case(normalised)
    made = [remat.Moved(written).fitting(int(share * written.peak_bytes)) for share in (1.0, 0.8, 0.6, 0.45)]
    assert made[0] is written
    peaks, seconds, terms = ([f(s) for s in made] for f in (lambda s: s.peak_bytes, lambda s: s.seconds, lambda s: len(s.ex.program.terms)))
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)
    assert terms == sorted(terms)


def test_a_limit_that_cannot_be_met_ends_with_the_smallest_peak_found():
    _, _, written = case(normalised)
    made = remat.Moved(written).fitting(1)
    assert 1 < made.peak_bytes < 0.5 * written.peak_bytes


@pytest.mark.parametrize("function", [normalised, spectral])
def test_no_moves_get_below_what_one_kernel_holds(function):
    _, args, written = case(function)
    least, smallest = remat.least_bytes(written), remat.Moved(written).fitting(0).peak_bytes
    assert sum(a.nbytes for a in args) + args[-1].nbytes < least <= smallest < written.peak_bytes


@pytest.mark.slow
def test_moves_that_cannot_help_are_not_tried(monkeypatch):
    """Layers are computed in chunks of rows; outside of loops, each has its rows and its results at once."""
    function, args = training_step(4)
    jaxpr = jax.make_jaxpr(function)(*args)
    tried = []
    moved = remat.Moved
    monkeypatch.setattr(remat, "Moved", lambda s: tried.append(s) or moved(s))
    with pytest.raises(eqsat_mem.MemoryLimitError) as error:
        pipeline.plan(jaxpr, Options(memory_limit=1000, verify=False), [f"x{k}" for k in range(len(jaxpr.in_avals))])
    assert all(list(loops(s.seq)) for s in tried)
    assert error.value.smallest_bytes == min(s.peak_bytes for s in tried)


@pytest.mark.parametrize(
    ("held", "fits", "most"),
    [
        (lambda moves: 1000 - 2 * moves, True, 401),
        (lambda moves: 500 + 500 * 0.7**moves, False, remat.ENOUGH + 1),
        (lambda moves: 1000 / (1 + moves) ** 0.5, True, 401),
    ],
    ids=["each saves as much", "each saves less and less", "each saves a share"],
)
def test_moves_end_where_those_that_are_left_are_not_expected_to_do(held, fits, most):
    def after(moves):
        peak = int(held(moves))
        return SimpleNamespace(peak_bytes=peak, seconds=1.0, fits=lambda limit: peak <= limit, ex=of_few_terms)

    of_few_terms = SimpleNamespace(program=SimpleNamespace(terms=[None] * 100))
    moved = remat.Moved(after(0))
    moved.further = (remat.AfterMoves(after(n), frozenset(), int(held(n)), n) for n in range(401))
    limit = int(held(200)) if fits else 300
    assert moved.fitting(limit, slowest=2.0).fits(limit) == fits
    assert len(moved.made) <= most


def test_effects_happen_once():
    calls = []

    def noisy(x):
        y = jax.pure_callback(lambda v: np.sin(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        jax.debug.callback(lambda: calls.append(1))
        z = jnp.fft.irfft(jnp.fft.rfft(y))
        for _ in range(3):
            z = jnp.fft.irfft(jnp.fft.rfft(jnp.tanh(z)))
        return jnp.sum(z) + y

    x = numbers(1000)
    written = straight(original(load(jax.make_jaxpr(noisy)(x), ["x"])), CPU)
    made = remat.Moved(written).fitting(int(0.6 * written.peak_bytes))
    jax.block_until_ready(jax.jit(emit(made).function)(x))
    jax.effects_barrier()
    assert calls == [1]


def test_inside_a_loop():
    """Values that wait in the body of a loop over the batch are computed again there."""

    def one(w, x):
        for _ in range(8):
            x = jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(x) * w))
        return jnp.sum(x**2)

    def batch(w, xs):
        return jnp.sum(jax.vmap(jax.grad(one), (None, 0))(w, xs))

    args = [np.float32(0.9), numbers(64, 2000)]
    ex = original(load(jax.make_jaxpr(batch)(*args), ["w", "xs"]))
    looped = schedule(ex, 2**20, CPU)
    assert list(loops(looped.seq))
    fixed = sum(a.nbytes for a in args)
    made = remat.Moved(looped).fitting(fixed + int(0.7 * (looped.peak_bytes - fixed)))
    assert made.peak_bytes - fixed < 0.75 * (looped.peak_bytes - fixed)
    assert any(isinstance(term, Map) and term.op == "population_count" for term in made.ex.program.terms)
    same(jax.jit(emit(made).function)(*args), [batch(*args)])


def test_in_a_loop_views_of_all_rows_are_not_tied():
    """The rows of a chunk can be tied; all rows, which a contraction reads through a view, come from outside of the loop."""

    def pairs(x, w, u):
        v = jnp.tanh(x @ w)
        e = jnp.exp(-0.1 * (v @ v.T))  # of the rows of a chunk with all rows
        y = e @ v  # with all rows alone
        r = jnp.sum(lax.cumsum(y @ u, axis=1), 1)
        return jnp.sum(y * r[:, None], 1) + jnp.sum(e * r[:, None], 1)

    args = [numbers(128, 8), numbers(8, 16, seed=1), numbers(16, 256, seed=2)]
    jaxpr = jax.make_jaxpr(pairs)(*args)
    ex = original(load(jaxpr, ["x", "w", "u"]))
    ((rows,),) = ex.program.outputs[0].axes
    seq = split(ex, region(ex), rows)
    memory, chunks = Memory(ex, CPU), dict.fromkeys(loops(seq), 16)
    looped = Schedule(ex, CPU, seq, chunks, memory.total(seq, chunks), Timing(memory).total(seq, chunks))
    written = remat.written(looped)
    moves = remat._moves(looped, frozenset(), written)
    assert len({move.chain for move in moves}) == 2
    for move in moves:
        made = remat.apply(looped, written, [move], frozenset()).schedule
        same(stepwise.run(jax.make_jaxpr(emit(made).function)(*args), args), stepwise.run(jaxpr, args))


@pytest.mark.slow
def test_moves_are_made_once_whatever_limits_are_asked_for(monkeypatch):
    _, _, written = case(normalised)
    applied = []
    apply = remat.apply
    monkeypatch.setattr(remat, "apply", lambda *args: applied.append(args) or apply(*args))
    moved = remat.Moved(written)
    smallest = moved.fitting(1)
    needed = len(applied)
    made = {share: moved.fitting(int(share * written.peak_bytes)) for share in (1.0, 0.8, 0.6)}
    assert moved.fitting(1) is smallest
    assert made[1.0] is written
    assert len(applied) == needed > 0
    assert [s.peak_bytes for s in made.values()] == sorted((s.peak_bytes for s in made.values()), reverse=True)


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_of_moves_that_are_made_together_no_more_than_needed_are_kept(monkeypatch, share):
    flat, args, written = case(normalised)
    monkeypatch.setattr(remat, "ALONE", 0)
    monkeypatch.setattr(remat, "TOGETHER", 1.0)
    moved, limit = remat.Moved(written), int(share * written.peak_bytes)
    made = moved.fitting(limit)
    assert made.fits(limit)
    last, k = moved.made[-1], len(moved.made) - 1
    assert last.moves > k > 1, "several at a time"
    fitting = {n: s is not None and s.fits(limit) for (step, n), s in moved.fewer.items() if step == k} | {0: False, len(last.group): True}
    fewest = min(n for n, fits in fitting.items() if fits)
    assert fitting[fewest - 1] is False
    assert made is (last.schedule if fewest == len(last.group) else moved.fewer[k, fewest])
    for step in moved.made[1:]:
        chains = [q for move in step.group for q in move.chain]
        assert len(set(chains)) == len(chains)
        assert len({move.path for move in step.group}) == 1
    code = emit(made)
    assert held(code.function, args) < 1.1 * limit
    same(jax.jit(code.function)(*args), jax.jit(flat)(*args))


def test_no_move_is_made_once_the_schedule_is_slower_than_another_that_fits(monkeypatch):
    _, _, written = case(normalised)
    applied = []
    apply = remat.apply
    monkeypatch.setattr(remat, "apply", lambda *args: applied.append(args) or apply(*args))
    assert remat.Moved(written).fitting(1, slowest=written.seconds / 2) is written
    assert not applied
    moved = remat.Moved(written)
    some = moved.fitting(1, slowest=1.01 * written.seconds)
    assert len(moved.made) < len(list(moved._each())), "all moves take longer than that"
    assert some.peak_bytes < written.peak_bytes


def test_moves_of_large_programs_write_so_many_terms_and_no_more(monkeypatch):
    _, _, written = case(normalised)
    applied = []
    apply = remat.apply
    monkeypatch.setattr(remat, "apply", lambda *args: applied.append(args) or apply(*args))
    monkeypatch.setattr(remat, "MOST_REBUILT", 3 * len(written.ex.program.terms))
    remat.Moved(written).fitting(1)
    assert 0 < len(applied) <= 3 * remat.TRIED


@pytest.mark.slow
def test_optimize_computes_again_where_loops_take_longer():
    flat, args, _ = case(spectral)
    limit = int(0.7 * held(flat, args))
    plan = eqsat_mem.optimize(flat, memory_limit=limit, max_seconds=60.0).plan(*args)
    assert plan.compiled_peak_bytes <= limit
    assert plan.loops == []
    same(jax.jit(plan.function)(*args), flat(*args))


def test_values_that_are_compared_with_what_was_selected_from_them_are_left_alone():
    def selected(x):
        y = jnp.fft.irfft(jnp.fft.rfft(x))
        first = y == jnp.max(y)
        z = lax.fori_loop(0, 3, lambda i, z: jnp.fft.irfft(jnp.fft.rfft(z)), x)
        return jnp.sum(z) + jnp.where(first, y, 0.0)

    x = numbers(4000)
    written = straight(original(load(jax.make_jaxpr(selected)(x), ["x"])), CPU)
    made = remat.Moved(written).fitting(1)
    assert len(made.ex.exact) == len(written.ex.exact)


def test_no_move_ties_what_a_rescaled_sum_exponentiates():
    """A second computation reads its operands through conversions of bits, in which the sum's way to its level is lost."""

    def attention(x, y):
        score = x @ y.T
        weight = jnp.exp(score - score.max(1, keepdims=True))
        return weight.sum(1), weight @ y

    x, y = numbers(64, 8), numbers(2048, 8, seed=1)
    s = eqsat_mem.optimize(attention, memory_limit=200_000).plan(x, y).schedule
    memory = Memory(s.ex, CPU, as_run=False)
    path, body = next((path, seq) for path, seq in walk_regions(s.seq) if path and any(t in s.ex.rescales for t in seq.outs))
    kept = memory.fused(body).kept
    moves = [remat.Move(path, (q,), use, kept[0], 1, 1.0) for use in range(1, len(kept)) for q in range(use)]
    results = [remat.apply(s, memory, [move], frozenset()) for move in moves]
    assert None in results
    made = [new.schedule for new in filter(None, results)]
    assert all(set(loop.rescaled) <= new.ex.rescales.keys() for new in made for loop in loops(new.seq))


def stacked(count, last=False):
    """Results of one scan, which wait while something larger is computed, beside small values that wait, too; or its last carry does."""

    def waiting(x, y, small):
        end, kept = lax.scan(lambda c, row: (c + row, tuple(jnp.sin(c * (k + 1.0)) for k in range(count))), x[0], x)
        tiny = end * 2.0 if last else small * 2.0
        large = jnp.fft.irfft2(jnp.fft.rfft2(y), y.shape)
        return sum(jnp.sum(jnp.fft.irfft2(jnp.fft.rfft2(part) * jnp.sum(large[0]), part.shape)) for part in kept) + jnp.sum(jnp.sort(tiny))

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((200, 300), (400, 400), (16,))]
    return straight(original(load(jax.make_jaxpr(waiting)(*args), ["x", "y", "small"])), CPU)


@pytest.mark.parametrize(("count", "is_run_again"), [(1, True), (2, False)])
def test_a_scan_is_not_run_again_for_one_of_several_large_results(count, is_run_again):
    """It would make all of them. What saves next to nothing of the peak, such as 16 numbers, is no move either."""
    s = stacked(count)
    memory = remat.written(s)
    kept = memory.fused(s.seq).kept
    moves = remat._moves(s, frozenset(), memory)
    assert any(is_scan(s.ex.program.terms[kept[q]]) for move in moves for q in move.chain) == is_run_again
    assert all(move.saved > remat.LEAST * s.peak_bytes > 16 * 4 for move in moves)


def test_a_scan_is_not_run_again_for_one_result_while_another_stays():
    """Where roundings grow from step to step, those of two runs do not go together."""
    s = stacked(1, last=True)
    memory = remat.written(s)
    kept = memory.fused(s.seq).kept
    assert sum(is_scan(s.ex.program.terms[step]) for step in kept) == 2
    assert not any(is_scan(s.ex.program.terms[kept[q]]) for move in remat._moves(s, frozenset(), memory) for q in move.chain)


def is_scan(term):
    return isinstance(term, Block) and term.call.prim.name == "scan"
