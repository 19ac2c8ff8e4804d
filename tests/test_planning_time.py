"""Planning grows in proportion to programs: work is counted, never timed."""

import gc
import itertools
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from benchmarks.planning import elementwise, kernels, training_step, transformer
from eqsat_mem.candidates import Forms
from eqsat_mem.codegen.source import identifier
from eqsat_mem.egraph.extract import as_written, extract, original, run_as_is
from eqsat_mem.egraph.node_costs import node_costs, priced
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.equal_programs import Candidates
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.events import Clock, Saturated, listening
from eqsat_mem.frontend import repeats
from eqsat_mem.frontend.equal_blocks import EqualBlocks
from eqsat_mem.frontend.inline import flatten
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.repeats import with_chains
from eqsat_mem.ir.loop_tree import walk_regions
from eqsat_mem.options import Options
from eqsat_mem.passes import PARTS, ROLLS, SCANS
from eqsat_mem.pipeline import BodyPlans, plan
from eqsat_mem.schedule.chunk_sizes import FEW_LOOPS, tied
from eqsat_mem.schedule.cost_model import term_seconds
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.search import LARGE_PROGRAM, MOST_STEPS, Search, fastest, straight
from eqsat_mem.schedule.split import MOST_AGAIN, Phases, region, split
from eqsat_mem.testing import same_values
from eqsat_mem.transforms.further import Further
from tests.oracles.targets import CPU

SECONDS = partial(term_seconds, backend=CPU)


def loaded(made):
    function, args = made
    jaxpr = jax.make_jaxpr(function)(*args)
    return load(jaxpr, [f"x{k}" for k in range(len(jaxpr.in_avals))])


def recurrence(w, x):
    """A loss of a scan with products in its steps, and its gradient: most of its forms take longer than it does as written."""
    last, stacked = lax.scan(lambda c, z: (jnp.tanh(c @ w + z), jnp.exp(-((c[:, None] - z[None]) ** 2).sum(-1))), x[0], x)
    return jnp.mean(last**2) + jnp.mean(stacked)


def forms_of(function, *shapes):
    program = loaded((function, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]))
    return Forms(program, load_rules(), Options(memory_limit=1), CPU, BodyPlans(), Clock())


@pytest.mark.parametrize("limit", [350_000, 700_000])
def test_what_is_slower_than_is_useful_is_not_searched_to_the_end(limit, monkeypatch):
    shapes, bounds = [(16, 16), (30, 80, 16)], []
    made = Candidates.rematerialised
    monkeypatch.setattr(Candidates, "rematerialised", lambda *args: bounds.append(args[3]) or made(*args))
    gradient = jax.value_and_grad(recurrence)
    best = forms_of(gradient, *shapes).fastest(CPU, limit).best
    assert best.fits(limit)
    bounds.clear()
    useful = 1.001 * best.seconds
    same = forms_of(gradient, *shapes).fastest(CPU, limit, slowest=useful).best
    assert (same.seconds, same.peak_bytes) == (best.seconds, best.peak_bytes)
    assert all(bound <= useful for bound in bounds)
    bounds.clear()
    forms = forms_of(gradient, *shapes)
    none = forms.fastest(CPU, limit, slowest=0.3 * best.seconds).best
    assert not bounds or max(bounds) <= 0.3 * best.seconds
    assert not none.fits(limit) or none.seconds > 0.3 * best.seconds
    found = forms.fastest(CPU, limit).best  # what did not fit in time is searched again where there is more
    assert found.fits(limit)
    assert found.seconds <= 1.001 * best.seconds


def test_a_form_is_saturated_once_whatever_its_bodies_take():
    forms, saturated = forms_of(jax.value_and_grad(recurrence), (16, 16), (30, 80, 16)), []
    with listening(lambda event: saturated.append(event.view.program) if isinstance(event, Saturated) else None):
        for limit in (700_000, 350_000):
            assert forms.fastest(CPU, limit).best.fits(limit)
    assert set(Counter(map(str, saturated)).values()) == {1}


def test_forms_are_not_searched_again_without_parts_where_they_fit_with_them():
    program = loaded((recurrence, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (30, 80, 16))]))
    further, scans, parts = Further(program, load_rules(), False), frozenset({SCANS.name}), frozenset({PARTS.name})
    stacked_less = replace(program, passes=scans)
    assert further.is_needless(program, [frozenset()])
    assert further.is_needless(stacked_less, [frozenset(), scans | parts])
    assert not further.is_needless(stacked_less, [frozenset(), parts, scans])
    assert not further.is_needless(replace(program, passes=scans | parts), [frozenset(), scans, scans | parts])


def joined(w, x, p):
    """A recurrence over rows that are put together, whose loss is of what it makes of either part."""
    rows = jnp.concatenate([jnp.tanh(x @ w), jnp.exp(-jnp.abs(x)) @ w], 1)
    last, made = lax.scan(lambda c, z: (jnp.tanh(c + z @ p), jnp.exp(-c) * (z @ p)), rows[0, :, :4] @ p[:4], rows)
    return jnp.sum(last) + jnp.sum(jnp.concatenate([made, jnp.cos(made)], 1) ** 2)


def test_a_program_with_parts_and_scans_computes_the_same():
    shapes = (8, 8), (60, 100, 8), (8, 8)
    args = [jnp.asarray(np.random.default_rng(k).standard_normal(shape) / 4, jnp.float32) for k, shape in enumerate(shapes)]
    optimised = eqsat_mem.optimize(jax.grad(joined, (0, 2)), memory_limit=2_000_000, verify=False)
    assert optimised.plan(*args).peak_bytes <= 2_000_000
    comparison = same_values(jax.grad(joined, (0, 2)), optimised, args)
    assert comparison.same, comparison


def test_the_e_graph_of_a_deep_network_grows_with_its_depth():
    rows = {depth: saturate(loaded(training_step(depth)), load_rules()).rows for depth in (6, 12)}
    assert rows[12] < 2.2 * rows[6]


def test_a_search_looks_at_so_many_steps_and_no_more():
    ex = as_written(saturate(loaded(transformer(20)), load_rules()))
    search = Search(ex, 20 * 2**20, CPU)
    fastest(search)
    largest = len(region(ex).steps) * 40  # a tree with its loops' bodies: what the last evaluation may look at
    assert search.timing.walked < MOST_STEPS + largest


def test_large_programs_get_the_splits_of_those_that_compute_the_same():
    view = saturate(loaded(training_step(8)), load_rules())
    one, other = as_written(view), extract(view, SECONDS, 0.0)
    assert str(one.program) != str(other.program)
    searches = [Search(ex, 20 * 2**20, CPU) for ex in (one, other, other)]
    assert len(searches[1].straight.seq.steps) > LARGE_PROGRAM
    rival = fastest(searches[0])
    guided, alone = fastest(searches[1], rival), fastest(searches[2])
    assert guided.splits == rival.splits
    assert guided.seconds <= 1.01 * alone.seconds
    assert searches[1].timing.walked < searches[2].timing.walked / 2


def test_alike_loops_get_their_chunks_together():
    ex = as_written(saturate(loaded(training_step(20)), load_rules()))
    search = Search(ex, 60 * 2**20, CPU)
    tree = max(search.expand(search.start(region(ex))), key=lambda s: len(s.chunks))
    assert len(tree.chunks) > FEW_LOOPS
    groups = tied(list(tree.chunks), tree.chunks)
    assert len(groups) < len(tree.chunks) / 2
    assert sum(map(len, groups)) == len(tree.chunks)
    assert all(len({(loop.index, tree.chunks[loop]) for loop in group}) == 1 for group in groups)


def test_no_garbage_is_looked_for_while_planning(monkeypatch):
    jaxpr = jax.make_jaxpr(lambda x: jnp.sum(x * x))(jnp.zeros(9))
    meanwhile = []
    monkeypatch.setattr("eqsat_mem.pipeline.load", lambda *args: meanwhile.append(gc.isenabled()) or load(*args))
    with pytest.raises(MemoryLimitError):
        plan(jaxpr, Options(memory_limit=1), ["x"])
    assert gc.isenabled()
    gc.disable()
    try:
        plan(jaxpr, Options(memory_limit="1MiB"), ["x"])
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()
    assert meanwhile == [False, False]


@pytest.mark.slow
def test_the_least_memory_is_looked_for_in_one_program_only():
    limits = []

    def scheduler(search, rival=None):
        limits.append(search.limit)
        return fastest(search, rival)

    forms = Forms(loaded(training_step(2)), load_rules(), Options(memory_limit=1), CPU, BodyPlans(), Clock())
    smallest = forms.fastest(CPU, 1, scheduler).best
    assert smallest.peak_bytes > 1
    assert limits.count(1) > 1
    assert limits.count(0) == 1


@pytest.mark.parametrize(("unrolled_s", "searches"), [(1.0, 1), (3.0, 2)], ids=["slower", "faster"])
def test_loops_that_were_no_faster_with_more_room_are_not_searched_again(unrolled_s, searches):
    function, args = training_step(6)
    jaxpr = jax.make_jaxpr(function)(*args)
    program, rules = loaded((function, args)), load_rules()
    equal = EqualBlocks(jaxpr, program, CPU.preferences, rules.passes)
    forms = Forms(program, rules, Options(memory_limit=1), CPU, BodyPlans(), Clock(), equal=equal)
    sought = []

    def scheduler(search, rival=None):
        rolls = ROLLS.name in search.ex.program.passes
        sought.append((search.limit, rolls))
        return replace(search.straight, peak_bytes=1, seconds=2.0 if rolls else unrolled_s)

    limits = 2**30, 2**29
    for limit in limits:
        forms.fastest(CPU, limit, scheduler)
    assert all((limit, False) in sought for limit in limits)
    assert sum((limit, True) in sought for limit in limits) == searches


def test_long_kernels_are_written_whatever_their_length():
    function, args = elementwise(700)
    jaxpr = jax.make_jaxpr(function)(*args)
    made = plan(jaxpr, Options(memory_limit="1MiB", verify=False, without_rules="equal-blocks-as-loops"), ["x", "y"])
    x, y = jnp.linspace(0, 1, args[0].shape[0]), jnp.linspace(1, 0, args[0].shape[0])
    assert jax.eval_shape(made.function, x, y)[0].shape == ()
    assert made.source.count("jnp.sin") + made.source.count("lax.sin") >= 700


def test_importing_the_package_loads_nothing_that_it_does_not_need():
    code = "import sys, eqsat_mem, eqsat_mem.api.optimize, eqsat_mem.pipeline; print(*sys.modules)"
    loaded_modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "egglog" not in loaded_modules  # whose package takes several times as long as its bindings
    for name in ("matplotlib", "rich", "scipy", "pandas", "IPython", "eqsat_mem.backends.calibrate"):
        assert name not in loaded_modules, name


def test_a_plan_for_one_cpu_loads_nothing_of_other_devices_and_of_reports():
    code = """
import sys, jax, jax.numpy as jnp, eqsat_mem
x = jax.ShapeDtypeStruct((3000, 3), jnp.float32)
product = lambda x, y: jnp.exp(-jnp.sum((x[:, None] - y) ** 2, -1)) @ y
plan = eqsat_mem.optimize(product, memory_limit="1MiB", verify=False).plan(x, x)
assert plan.loops
print(*sys.modules)
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "EQSAT_MEM_PROFILES": "none"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    ours = {name.removeprefix("eqsat_mem.") for name in ran.stdout.split() if name.startswith("eqsat_mem.")}
    for room in ("backends.gpu", "mesh", "egraph.soundness", "reports.explain", "reports.timeline", "transforms.scan_rewrite"):
        assert not {name for name in ours if name == room or name.startswith(f"{room}.")}, room


class Counting(Memory):
    """Counts how often it goes through the kernels of regions."""

    walks = 0

    def _walk(self, seq, extents):
        self.walks += 1
        return super()._walk(seq, extents)


def test_what_is_held_around_loops_is_worked_out_once_for_all_their_chunks():
    ex = as_written(saturate(loaded(transformer(2)), load_rules()))
    search = Search(ex, 20 * 2**20, CPU)
    tree = max(search.expand(search.start(region(ex))), key=lambda s: len(s.chunks))
    memory, walks = Counting(ex, CPU), []
    for chunk in (64, 32, 16):
        memory.total(tree.seq, {**tree.chunks, next(iter(tree.chunks)): chunk})
        walks.append(memory.walks)
    assert len(tree.chunks) > 1
    assert walks[1] - walks[0] == walks[2] - walks[1] < walks[0] / 2


class Asking(Search):
    """Counts how often other chunks are asked for, and how often time and memory have both to be known for the answer, which it checks."""

    def __post_init__(self):
        super().__post_init__()
        self.asked = self.known_whole = 0

    def improved(self, s, chunks):
        before, self.asked = self.known_whole, self.asked + 1
        new = super().improved(s, chunks)
        after, whole = self.known_whole, self.rechunked(s, chunks)
        self.known_whole = after
        assert (new is not None) == (self.rank(whole) < self.rank(s))
        assert new is None or (after == before + 1 and self.rank(new) == self.rank(whole))
        return new

    def rechunked(self, s, chunks):
        self.known_whole += 1
        return super().rechunked(s, chunks)


@pytest.mark.parametrize("limit", [2**40, 1])
def test_of_time_and_memory_what_decides_on_chunks_is_asked_first(limit):
    search = Asking(as_written(saturate(loaded(kernels(1)), load_rules())), limit, CPU)
    fastest(search)
    assert 0 < search.known_whole < 0.7 * search.asked


def test_extents_are_the_same_object_wherever_the_same_chunks_are_around():
    full = Memory(as_written(saturate(loaded(transformer(1)), load_rules())), CPU).full_extents()
    other = full.with_extent(0, 3).with_extent(1, 2)
    assert other is full.with_extent(1, 2).with_extent(0, 3)
    assert tuple(other) == (3, 2, *full[2:])
    assert other != full
    assert other.with_extent(0, full[0]).with_extent(1, full[1]) is full


def test_a_program_that_is_only_run_as_written_needs_no_e_graph_but_of_what_is_written_out(monkeypatch):
    rules = load_rules()
    programs = [loaded(training_step(1)), loaded(kernels(4))]
    expected = [straight(original(program, rules), CPU, emitted=False) for program in programs]
    made = []
    monkeypatch.setattr("eqsat_mem.egraph.extract.saturate", lambda *args: made.append(args) or saturate(*args))
    found = [straight(run_as_is(program, partial(original, rules=rules)), CPU, emitted=False) for program in programs]
    assert [(s.peak_bytes, s.seconds) for s in found] == [(s.peak_bytes, s.seconds) for s in expected]
    assert [len(program.terms) for program, *_ in made] == [2]  # a sum over three elements, and the squares that it reads


def test_rules_that_make_a_long_program_shorter_are_not_blamed_for_its_length():
    """That a ruleset is stopped before it rests is nobody's fault where only rules that come with the package have run."""

    def chain(x):
        for _ in range(30):
            x = (jnp.sin(x) + 0.0) * 1.0 + jnp.cos(x) * 0.0
        return x

    program = loaded((chain, (jax.ShapeDtypeStruct((8,), jnp.float32),)))
    view = saturate(program, load_rules(accuracy="any"), Limits(max_rows=len(program.terms)))
    assert " rows, " in view.stopped


def test_equations_are_compared_once_however_often_chains_are_looked_for(monkeypatch):
    labelled, searched = [], []
    monkeypatch.setattr(repeats, "_labels", lambda flat, made=repeats._labels: labelled.append(flat) or made(flat))
    monkeypatch.setattr(repeats, "_Search", lambda *args, made=repeats._Search: searched.append(args) or made(*args))
    function, args = training_step(8)
    assert with_chains(flatten(jax.make_jaxpr(function)(*args)))[1]
    assert len(searched) > 1
    assert len(labelled) == 1


def test_regions_that_pass_nothing_on_are_gone_through_once_whether_or_not_streamed_values_count():
    walks = {}
    for name, made in {"streams": transformer(2), "does not": elementwise(20)}.items():
        ex = as_written(saturate(loaded(made), load_rules()))
        memory, seq = Counting(ex, CPU), region(ex)
        streaming = memory.streaming()
        memory.total(seq, {})
        streaming.total(seq, {})
        walks[name] = memory.walks, streaming.walks
    assert walks == {"streams": (1, 1), "does not": (1, 0)}


def test_nodes_are_timed_once_for_all_prices_of_memory():
    view, timed = saturate(loaded(transformer(2)), load_rules()), []

    def seconds(program, t, unrolled):
        timed.append(t)
        return SECONDS(program, t, unrolled)

    every = priced(view, seconds, (0.0, 1e-9))
    assert 0 < len(timed) <= sum(map(len, view.nodes))
    assert [costs.of for costs in every] == [node_costs(view, SECONDS, price).of for price in (0.0, 1e-9)]
    assert every[0].of != every[1].of


def test_names_are_fresh_however_many_there_are():
    taken = {"v_3": 1}
    assert [identifier("v", taken) for _ in range(4)] == ["v", "v_2", "v_4", "v_5"]
    assert identifier("v_2", taken) == "v_2_2"
    assert identifier("while", taken) == "_while"
    assert taken["v"] == 5  # where the next search begins


def test_loops_that_would_all_start_from_the_arguments_keep_what_several_of_them_need():
    ex = as_written(saturate(loaded(transformer(16)), load_rules()))
    seq, search = region(ex), Search(ex, 20 * 2**20, CPU)
    along = next(i for i in search.candidates(seq, search.full) if Phases(ex, seq, i).computed() > MOST_AGAIN * len(seq.steps))
    assert split(ex, seq, along) is None
    cuts = search.ways(seq, search.full, along, frozenset())
    assert cuts
    assert all(sum(len(inner.steps) for _, inner in walk_regions(tree)) < (MOST_AGAIN + 1) * len(seq.steps) for tree in cuts)


def test_saturation_stops_for_the_same_reason_on_a_busy_machine(monkeypatch):
    program, rules = loaded(training_step(12)), load_rules()
    calm = saturate(program, rules)
    clock = itertools.count(0.0, 0.2)
    monkeypatch.setattr("eqsat_mem.egraph.saturate.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    busy = saturate(program, rules)
    assert next(clock) > 5.0
    assert (busy.stopped, busy.rows, busy.iterations) == (calm.stopped, calm.rows, calm.iterations)
