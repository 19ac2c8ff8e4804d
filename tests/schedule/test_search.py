"""The search for a loop tree: the same every time, smaller for tighter limits, and what the paper's two knobs do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem import optimize
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir.loop_tree import Loop, Seq, dissolved, enclosing, loops, made, walk_regions
from eqsat_mem.schedule.chunk_sizes import first_chunk, ladder
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.search import BEHIND, FOLLOWING, Search, fastest, schedule, straight
from eqsat_mem.schedule.sizes import extents_inside
from eqsat_mem.schedule.timing import Known
from tests.oracles.execution import execute
from tests.oracles.targets import CPU, TINY
from tests.schedule.test_split import bound, softmax, traced
from tests.tiers import tiered


def kernel_vector(x, y, v):
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


PROGRAMS = {
    "kernel times vector": (kernel_vector, [(61, 3), (53, 3), (53, 2)]),
    "kernel gradient": (jax.grad(lambda *a: jnp.sum(kernel_vector(*a) ** 2), (0, 1, 2)), [(61, 3), (53, 3), (53, 2)]),
    "attention gradient": (jax.grad(lambda *a: jnp.sum(softmax(*a) ** 2), (0, 1, 2)), [(47, 3), (41, 3), (41, 2)]),
    "bound gradient": (jax.grad(bound, (0, 2)), [(97, 2), (97, 1), (5, 2)]),
    "layer": (lambda x, w, u: jnp.tanh(x @ w) @ u, [(64, 8), (8, 67), (67, 4)]),
}
QUICK = [name for name in PROGRAMS if name != "attention gradient"]


def program(name: str) -> Extraction:
    fun, shapes = PROGRAMS[name]
    return traced(fun, *shapes)


@pytest.mark.parametrize("name", tiered(PROGRAMS, QUICK))
def test_schedules_are_the_same_every_time(name):
    ex = program(name)
    middle = (schedule(ex, 1, TINY).peak_bytes + straight(ex, TINY).peak_bytes) // 2
    assert emit(schedule(program(name), middle, TINY)).source == emit(schedule(program(name), middle, TINY)).source


@pytest.mark.parametrize("device", [TINY, CPU], ids=["tiny", "cpu"])
@pytest.mark.parametrize("name", tiered(PROGRAMS, QUICK))
def test_looser_limits_are_kept_where_tighter_ones_are_and_never_slow_a_plan_down(name, device):
    ex = program(name)
    smallest, largest = schedule(ex, 1, device).peak_bytes, straight(ex, device).peak_bytes
    limits = [smallest + (largest - smallest) * k // 8 for k in range(9)]
    made = [schedule(ex, limit, device) for limit in limits]
    assert [s.fits(limit) for s, limit in zip(made, limits)] == [True] * 9
    if device is not TINY:  # where everything is worth splitting, which splits come first decides
        assert all(loose.seconds <= 1.1 * tight.seconds for tight, loose in itertools.pairwise(made))


@pytest.mark.parametrize("name", PROGRAMS)
def test_some_schedule_is_much_smaller_than_the_program(name):
    assert schedule(program(name), 1, TINY).peak_bytes < 0.7 * straight(program(name), TINY).peak_bytes


def test_a_program_whose_values_stay_in_cache_is_not_split():
    assert not list(loops(schedule(program("kernel times vector"), 2**40, CPU).seq))


class Watched(Search):
    """A search that notes which trees it splits further."""

    def __post_init__(self):
        super().__post_init__()
        self.expanded = []

    def expand(self, s, only=None):
        self.expanded.append(s)
        return super().expand(s, only)


def test_trees_far_behind_the_best_of_any_program_are_split_no_further():
    ex = program("bound gradient")
    alone = Watched(ex, 2**40, TINY)
    best = fastest(alone)
    assert len(alone.expanded) > 1
    rival = replace(best, seconds=best.seconds / (2 * BEHIND))  # of a program that is far faster
    beaten = Watched(ex, 2**40, TINY)
    fastest(beaten, rival)
    assert [s.splits for s in beaten.expanded] == [()]


def test_a_program_of_many_terms_is_split_as_the_best_that_computes_the_same():
    ex = program("bound gradient")
    alone = Watched(ex, 2**14, TINY)
    best = fastest(alone)
    assert len(alone.straight.seq.steps) > FOLLOWING
    assert best.splits
    following = Watched(ex, 2**14, TINY)
    assert fastest(following, best).splits == best.splits
    assert len(following.expanded) < len(alone.expanded)


def test_a_program_that_cannot_be_split_as_the_best_is_searched_as_if_alone():
    ex = program("bound gradient")
    best = fastest(Search(ex, 2**14, TINY))
    no_index = len(ex.program.indices)
    lost = fastest(Search(ex, 2**14, TINY), replace(best, splits=((no_index, 0),)))
    assert lost.splits[:1] == fastest(Search(ex, 2**14, TINY)).splits[:1]


def test_trees_that_splits_in_several_orders_lead_to_get_chunk_sizes_once():
    search, started, tiled = Search(program("attention gradient"), 2**14, TINY), [], []

    def figures(s):
        return s.peak_bytes, s.seconds, tuple((loop.index, len(loop.folds), len(loop.stacks)) for loop in s.chunks)

    start, tile = search.start, search.tile
    search.start = lambda *args: started.append(start(*args)) or started[-1]
    search.tile = lambda s, parent: tiled.append((parent.splits, figures(s))) or tile(s, parent)
    fastest(search)
    assert len(set(tiled)) == len(tiled) < len(started) - 1


def test_a_search_for_another_limit_knows_what_the_first_has_found_out():
    search = Search(program("attention gradient"), 2**40, TINY)
    fastest(search)
    again, alone = fastest(search.with_limit(1)), fastest(Search(search.ex, 1, TINY))
    assert (again.peak_bytes, again.seconds, again.splits) == (alone.peak_bytes, alone.seconds, alone.splits)


@pytest.mark.parametrize("name", tiered(["attention gradient", "kernel times vector"], ["kernel times vector"]))
def test_searches_that_share_what_they_know_find_what_each_would_alone(name):
    ex, shared = program(name), Known.nothing(program(name), TINY)

    def found(limit, others):
        s = fastest(Search(shared.timing.memory.ex if others else ex, limit, TINY, others=others))
        return s.peak_bytes, s.seconds, s.splits, [(loop.index, chunk) for loop, chunk in s.chunks.items()]

    for limit in (2**40, 2**15, 2**14, 2**13, 2**12, 1):
        assert found(limit, shared) == found(limit, None)


def test_only_regions_with_a_value_above_the_threshold_are_split():
    ex = program("kernel times vector")
    largest = 61 * 53 * 3 * 4
    assert list(loops(schedule(ex, 1, TINY, tensor_size_threshold=largest - 1).seq))
    assert not list(loops(schedule(ex, 1, TINY, tensor_size_threshold=largest).seq))


def test_slices_that_are_held_are_no_larger_than_the_split_size():
    ex = program("kernel times vector")
    made, memory = schedule(ex, 2**40, TINY, tensor_split_size=2048), Memory(ex, TINY)
    assert list(loops(made.seq))
    for path, seq in walk_regions(made.seq):
        extents = memory.full_extents()
        for loop in enclosing(made.seq, path):
            extents = extents_inside(extents, loop, made.chunks)
        if path and enclosing(made.seq, path):
            assert all(memory.size(t, extents) <= 2048 for t in memory.fused(seq).kept if isinstance(t, int))


def test_of_large_programs_a_tree_gets_chunk_sizes_that_fits_with_the_smallest_ones():
    """A deep network and its gradient: with the first chunks a loop over columns is smaller, but what it needs whole is too large."""

    def loss(x, *layers):
        for k, w in enumerate(layers):
            x = x + jnp.tanh((jnp.cumsum(x, 1) if k == 3 else x) @ w)
        return jnp.sum(x**2)

    ex = traced(jax.grad(loss, tuple(range(1, 7))), (256, 1024, 2), *[(2, 2)] * 6)
    search = Search(ex, straight(ex, CPU).peak_bytes // 10, CPU)
    found = [s for s in search.expand(search.straight) if not s.fits(search.limit)]
    rows = next(i for i, index in enumerate(ex.program.indices) if index.extent == 256)
    along = [s for s in found if {loop.index for loop in s.chunks} == {rows}]
    assert along
    assert min(found, key=search.rank) not in along
    best = min(found, key=lambda s: search.promise(s, search.straight))
    assert best in along
    assert search.tile(best, search.straight).fits(search.limit)


@pytest.mark.parametrize("extent", [1, 2, 3, 7, 16, 97, 1000, 1009])
def test_chunk_ladders_ascend_from_one_and_prefer_divisors(extent):
    steps = ladder(extent)
    assert steps == sorted(set(steps))
    assert steps[0] == 1
    assert all(1 <= c <= extent for c in steps)
    assert first_chunk(steps) in steps
    if extent == 1000:
        assert 125 in steps


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_body_of_any_loop_may_run_once_for_all_of_its_index(name):
    ex, args = program(name), [jax.random.normal(jax.random.key(k), shape) for k, shape in enumerate(PROGRAMS[name][1])]
    search = Search(ex, 1, TINY)
    best = fastest(search)
    wanted = execute(search.straight, args)
    for k, loop in enumerate(found := list(loops(best.seq))):
        seq = dissolved(best.seq, loop)
        if seq is None:  # what it computes again is there outside of it
            continue
        once = search.start(seq, best)
        assert len(list(loops(once.seq))) == len(found) - 1, k
        for got in (execute(once, args), emit(once).function(*args)):
            for one, want in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one, want, rtol=2e-4, atol=2e-4)


def test_what_a_loop_leaves_is_ordered_together_with_what_is_around_it():
    """As one sequence, of which later steps read what they did: a compiler knows no more of the loop."""
    first, last = Seq((0, 1), frozenset({0, 1}), frozenset({9})), Seq((5,), frozenset({5}), frozenset({1, 4}))
    gone, kept = (Loop(k, Seq((t,), frozenset({t}), frozenset({0})), (), (t,)) for k, t in enumerate((2, 4)))
    tree = Seq((first, gone, Seq((3,), frozenset({3}), frozenset({2})), kept, last), frozenset({3, 5}), frozenset({9}))
    once = dissolved(tree, gone)
    assert [type(step) for step in once.steps] == [Seq, Loop, Seq]
    joined = once.steps[0]
    assert (joined.steps, joined.outs, joined.reads) == ((0, 1, 2, 3), {0, 1, 3}, {9})


def test_a_loop_that_computes_again_what_is_there_beside_it_stays():
    inner = Loop(0, Seq((1, 2), frozenset({2}), frozenset()), (2,), ())
    beside = Seq((Seq((1,), frozenset({1}), frozenset()), inner), frozenset({1, 2}), frozenset())
    assert dissolved(beside, inner) is None
    outer = Loop(1, beside, (1, 2), ())
    assert dissolved(Seq((3, outer), frozenset({1, 2, 3}), frozenset()), inner) is None
    assert made(dissolved(Seq((3, outer), frozenset({1, 2, 3}), frozenset()), outer)) == {1, 2, 3}


def test_loops_that_later_ones_made_superfluous_are_left_out():
    search = Search(program("bound gradient"), 2**14, TINY)
    best = fastest(search)
    simple = search.simplified(best)
    assert len(simple.chunks) < len(best.chunks)
    assert simple.seconds < best.seconds
    assert simple.peak_bytes <= 2**14
    assert search.simplified(simple) is simple


@pytest.mark.parametrize("several", [2, 3, 7])
def test_of_several_peaks_of_one_height_all_are_split(several):
    """A tree without one of them holds as much as before: the search goes on, though nothing is better."""

    def sums(*points):
        return sum(jnp.sort(jnp.cos(x[:, None] - x), 1)[:, 3].sum() for x in points)

    ex = traced(sums, *[(512,)] * several)
    limit = int(1.5 * 512 * 512 * 4)  # less than one matrix and its rows in order
    found = schedule(ex, limit, CPU)
    assert found.fits(limit)
    assert len(found.chunks) == several


@pytest.mark.parametrize(("dimensions", "limit"), [(3, 100_000_000), (3, 30_000_000), (100, 1_000_000_000)])
def test_of_nested_loops_no_chunk_sizes_are_much_faster(dimensions, limit):
    """Selections from some lengths take the same whatever that length is: a plateau between two good sizes."""
    avals = [jax.ShapeDtypeStruct((n, dimensions), jnp.float32) for n in (10_000, 10**6)]

    def nearest(q, p):
        return jax.lax.top_k(-jnp.sum((q[:, None] - p) ** 2, -1), 10)

    s = optimize(nearest, memory_limit=limit, device="h200", verify=False).plan(*avals).schedule
    search = Search(s.ex, limit, s.backend)
    outer, inner = s.chunks
    every = (search.rechunked(s, {outer: a, inner: b}) for a in search.steps([outer]) for b in search.steps([inner]))
    assert s.seconds < 1.1 * min(other.seconds for other in every if other.fits(limit))
