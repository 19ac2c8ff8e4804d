"""Splitting: phases, what is stacked, folded, recomputed and kept, and effects that stay in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, as_written, original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Program, bits
from eqsat_mem.ir.loop_tree import Loop, Seq, Trees, at, enclosing, loops, made, walk_regions, with_region
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.split import Choices, Kind, Phases, kind_of, region, shared_slices, split
from tests.oracles.execution import execute
from tests.oracles.targets import CPU


def traced(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> Extraction:
    """The program of a function of float32 arrays, with no rule but those for splitting."""
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    return original(load(jax.make_jaxpr(fun)(*args), "abcdefgh"[: len(args)]))


def index_of(program: Program, extent: int) -> int:
    """The first index of an extent."""
    return next(i for i, index in enumerate(program.indices) if index.extent == extent)


def nested(ex: Extraction, outer: int, inner: int) -> Seq:
    """A whole program in one loop along the index of an extent, with one along another inside of it."""
    tree = split(ex, region(ex), index_of(ex.program, outer))
    assert tree is not None
    (around,) = loops(tree)
    inside = split(ex, around.body, index_of(ex.program, inner))
    assert inside is not None
    return with_region(tree, (tree.steps.index(around),), inside)


def along(fun: Callable[..., Any], extent: int, *shapes: tuple[int, ...]) -> tuple[Extraction, list[Loop]]:
    """The loops that splitting a whole program along the index of an extent gives."""
    ex = traced(fun, *shapes)
    tree = split(ex, region(ex), index_of(ex.program, extent))
    return ex, [] if tree is None else list(loops(tree))


def softmax(q, k, v):
    return jax.nn.softmax(q @ k.T, -1) @ v


def test_a_region_of_whole_terms_is_not_split():
    ex = traced(lambda a: jnp.sort(a, 0), (7,))
    assert all(split(ex, region(ex), i) is None for i in range(len(ex.program.indices)))


def test_a_map_is_stacked_and_a_fold_is_accumulated():
    ex, (loop,) = along(lambda a: (jnp.sin(a), jnp.sum(a, 0)), 7, (7, 3))
    assert [ex.program.terms[t].op for t in loop.stacks] == ["sin"]
    assert [ex.program.terms[t].monoid for t in loop.folds] == ["add"]


def test_attention_over_queries_is_one_phase_also_for_its_gradient():
    shapes = [(11, 3), (7, 3), (7, 2)]
    assert len(along(softmax, 11, *shapes)[1]) == 1
    assert len(along(jax.grad(lambda *a: jnp.sum(softmax(*a) ** 2), (0, 1, 2)), 11, *shapes)[1]) == 1


def test_attention_over_keys_waits_for_the_maximum_and_for_the_sum():
    assert len(along(softmax, 7, (11, 3), (7, 3), (7, 2))[1]) == 3


def bound(x, y, z):
    """A variational bound: folds over data meet in a Cholesky factor."""
    kuf = jnp.exp(-0.5 * jnp.sum((z[:, None] - x[None]) ** 2, -1))
    low = jnp.linalg.cholesky(kuf @ kuf.T + jnp.eye(len(z)))
    c = jax.scipy.linalg.solve_triangular(low, kuf @ y, lower=True)
    return jnp.sum(jnp.log(jnp.diag(low))) - jnp.sum(c**2)


def test_a_variational_bound_is_one_loop_over_data_and_its_gradient_two():
    shapes = [(31, 2), (31, 1), (5, 2)]
    assert len(along(bound, 31, *shapes)[1]) == 1
    assert len(along(jax.grad(bound, (0, 2)), 31, *shapes)[1]) == 2


def test_slices_of_an_earlier_phase_are_recomputed_unless_they_are_kept():
    def normalised(a):
        e = jnp.exp(a)
        return e / jnp.sum(e)

    ex = traced(normalised, (7,))
    seq = region(ex)
    (exp,) = shared_slices(ex, seq, 0)
    again, kept = (list(loops(split(ex, seq, 0, keep))) for keep in (Choices(), Choices(keep=frozenset([exp]))))
    assert [exp in loop.body.steps for loop in again] == [True, True]
    assert [exp in loop.body.steps for loop in kept] == [True, False]
    assert exp in kept[0].stacks


def test_other_slices_are_kept_by_a_split_as_if_it_had_been_made_so():
    ex = traced(softmax, (6, 4), (10, 4), (10, 3))
    seq, i = region(ex), index_of(ex.program, 10)
    phases = Phases(ex, seq, i)
    every = phases.shared_slices()
    assert every
    for keep in (frozenset(every), frozenset(every[:1]), frozenset[int]()):
        kept, alone = phases.keeping(frozenset(every)).keeping(keep), Phases(ex, seq, i, Choices(keep=keep))
        assert (kept.stacked, kept.roots, kept.loops_of) == (alone.stacked, alone.roots, alone.loops_of)


def test_kept_slices_that_no_later_loop_reads_are_not_stacked():
    def f(a):
        s = jnp.sin(a)
        e = jnp.exp(s)
        return e / jnp.sum(e)

    ex = traced(f, (7,))
    seq = region(ex)
    first, _ = loops(split(ex, seq, 0, Choices(keep=frozenset(shared_slices(ex, seq, 0)))))
    assert [ex.program.terms[t].op for t in first.stacks] == ["exp"]


def test_a_value_that_is_compared_with_its_own_maximum_is_not_rounded_twice():
    """A loop over the searched axis may not compute products again: no chunk need find its maximum in them."""
    ex, found = along(lambda a, b: jnp.argmax(a @ b.T, 1), 29, (5, 12), (29, 12))
    (product,) = [t for t in ex.program.reachable() if type(ex.program.terms[t]).__name__ == "Dot"]
    assert sum(product in loop.body.steps for loop in found) == 1


def test_a_value_and_its_maximum_are_computed_together_where_they_are_compared():
    """Though the maximum is there from the loop before: that loop may have rounded the product in another way."""

    def fun(a, b):
        s = a @ b.T
        top = jnp.max(s, 1)
        return top, (s == top[:, None]).astype(np.float32) @ b * jnp.sum(top)

    ex, (first, last) = along(fun, 7, (7, 3), (29, 3))
    product, top, *_ = (t for t in ex.program.reachable() if type(ex.program.terms[t]).__name__ in ("Dot", "Fold"))
    assert top in first.stacks
    assert {product, top} <= set(last.body.steps)


def test_only_comparisons_with_what_was_selected_from_a_value_need_its_bits():
    def needs(fun: Callable[..., Any]) -> int:
        return len(traced(fun, (7, 5)).exact)

    assert needs(lambda a: jnp.sin(a) == jnp.max(jnp.sin(a), 0)) == 1
    assert needs(lambda a: jnp.sin(a) >= jnp.sort(jnp.sin(a), 0)[3]) == 1
    assert needs(lambda a: a == jnp.max(a, 0)) == 0  # an argument is read, not computed
    assert needs(lambda a: jnp.sin(a) > jnp.mean(jnp.sin(a), 0)) == 0
    assert needs(lambda a: (jnp.sin(a) != 0) & jnp.isnan(jnp.cos(a))) == 0


def scores(x, y, w, u):
    """All products of what two networks make of their examples, and a fold of them whose gradient goes back into both."""
    return jnp.sum(jnp.tanh((jnp.tanh(x @ w) @ w.T) @ (jnp.tanh(y @ u) @ u.T).T))


def test_what_lies_between_two_networks_is_whole_between_the_loops_of_one():
    ex = traced(jax.grad(scores, (2, 3)), (40, 3), (50, 3), (3, 60), (3, 70))
    program, whole = ex.program, region(ex)
    small = frozenset(t for t in range(len(program.terms)) if program.nbytes(t) <= 4 * 40 * 50)
    pairs = {t for t in program.reachable() if program.extent(program.free[t]) == 40 * 50}
    apart, through = (split(ex, whole, index_of(program, 40), Choices(small=small, waists=waists)) for waists in (True, False))
    assert pairs <= {t for step in apart.steps if isinstance(step, Seq) for t in step.steps}
    assert pairs <= {t for loop in loops(through) for t in loop.body.steps}
    assert len(list(loops(apart))) == 2


def test_a_network_is_computed_after_a_loop_that_does_not_need_it():
    """Its hidden layer, which its gradient reads, would wait for the end of that loop."""
    ex = traced(jax.grad(scores, (2, 3)), (40, 3), (50, 3), (3, 60), (3, 70))
    program = ex.program
    small = frozenset(t for t in range(len(program.terms)) if program.nbytes(t) <= 4 * 40 * 50)
    tree = split(ex, region(ex), index_of(program, 40), Choices(small=small, waists=True))
    first = next(k for k, step in enumerate(tree.steps) if isinstance(step, Loop))
    hidden = {t for t in program.reachable() if program.extent(program.free[t]) == 50 * 70}
    assert hidden
    assert not hidden & {t for step in tree.steps[:first] if isinstance(step, Seq) for t in step.steps}


def test_loops_compute_all_that_they_read_of_a_scan_in_one_run_of_it():
    """Small results too: those of another run may be far off where roundings grow from step to step."""

    def loss(h, x):
        def step(h, x):
            h = jnp.sin(h * x[:, None])
            return h, (jnp.sum(h, 1), jnp.tanh(h))

        sums, large = jax.lax.scan(step, h, x)[1]
        return jnp.sum(jnp.exp(large - sums[:, :, None]), (0, 2)), jnp.sum(sums)

    ex = traced(loss, (400, 70), (5, 400))
    program = ex.program
    results = [t for t in program.reachable() if isinstance(program.terms[t], Block) and program.terms[t].call.prim.name == "scan"]
    small = frozenset(t for t in range(len(program.terms)) if program.nbytes(t) <= 4 * 5 * 400)
    assert len(small.intersection(results)) == 1 < len(results)
    found = list(loops(split(ex, region(ex), index_of(program, 400), Choices(small=small))))
    assert any(set(results) <= set(loop.body.steps) for loop in found)
    for loop in found:
        assert not (loop.body.reads & set(results) and set(results) & set(loop.body.steps))


def test_a_transposed_read_needs_the_other_order_whole():
    ex = traced(lambda a: jnp.exp(a @ a.T) + jnp.exp(a @ a.T).T, (7, 3))
    args = [np.random.default_rng(0).standard_normal((7, 3)).astype(np.float32)]
    want = np.exp(args[0] @ args[0].T)
    tree = split(ex, region(ex), 0) or region(ex)
    made_by = Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), 3), 0, 0.0)
    for got in (execute(made_by, args)[0], jax.jit(emit(made_by).function)(*args)[0]):
        np.testing.assert_allclose(got, want + want.T, rtol=1e-5)


def test_effects_keep_their_order_and_happen_once():
    seen: list[float] = []

    def note(value):
        seen.append(float(value))

    def f(a):
        s = jnp.sum(jnp.sin(a), 0)
        io_callback(note, None, s[0], ordered=False)
        t = jnp.sum(jnp.cos(a) * s, 0)
        io_callback(note, None, t[0], ordered=False)
        return t

    a = np.ones((7, 3), np.float32)
    ex = traced(f, (7, 3))
    tree = split(ex, region(ex), index_of(ex.program, 7))
    emit(Schedule(ex, CPU, tree, dict.fromkeys(loops(tree), 2), 0, 0.0)).function(a)
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [7 * np.sin(1), 7 * np.cos(1) * 7 * np.sin(1)], rtol=1e-5)


def test_regions_are_found_and_replaced_by_their_paths():
    ex = traced(lambda a: jnp.tanh(jnp.sin(a) / jnp.sum(a)), (7, 5))
    tree = split(ex, region(ex), index_of(ex.program, 7))
    for path, seq in walk_regions(tree):
        assert at(tree, path) is seq
        assert with_region(tree, path, seq).outs == tree.outs
        assert len(enclosing(tree, path)) <= 1
    straight = [path for path, seq in walk_regions(tree) if all(isinstance(s, int) for s in seq.steps)]
    marker = replace(at(tree, straight[0]), steps=())
    assert at(with_region(tree, straight[0], marker), straight[0]) is marker


def test_a_tree_made_again_is_the_first_one_part_by_part():
    ex, trees = traced(jax.grad(lambda *a: jnp.sum(softmax(*a) ** 2), (0, 1, 2)), (11, 3), (7, 3), (7, 2)), Trees()
    i, j = (index_of(ex.program, extent) for extent in (11, 7))
    first, again = (trees.first(split(ex, region(ex), i)) for _ in range(2))
    assert again is first
    other = trees.first(split(ex, region(ex), j))
    assert not {id(loop.body) for loop in loops(other)} & {id(loop.body) for loop in loops(first)}


def test_parts_that_are_alike_stay_apart_within_a_tree_and_in_other_loops():
    trees = Trees()

    def body():
        return Seq((1, 2), frozenset({2}), frozenset({0}))

    twice = trees.first(Seq((Loop(0, body(), (), (2,)), Loop(0, body(), (), (2,))), frozenset(), frozenset()))
    one, two = twice.steps
    assert one is not two
    assert one.body is not two.body
    assert trees.first(Seq((one, two), frozenset(), frozenset())) is twice
    for loop in (Loop(1, body(), (), (2,)), Loop(0, body(), (2,), ())):
        (found,) = trees.first(Seq((loop,), frozenset(), frozenset())).steps
        assert found.body not in (one.body, two.body)


def test_every_term_is_made_before_it_is_read():
    ex = traced(jax.grad(lambda *a: jnp.sum(softmax(*a) ** 2), (0, 1, 2)), (11, 3), (7, 3), (7, 2))
    for i in range(len(ex.program.indices)):
        tree = split(ex, region(ex), i)
        if tree is not None:
            assert region(ex).outs <= made(tree)


def test_rules_say_what_is_a_slice_a_fold_or_whole():
    program = load(jax.make_jaxpr(lambda a: jnp.sum(jnp.sort(a, 0), 1))(jax.ShapeDtypeStruct((13, 5), np.float32)), ["a"])
    ex = as_written(saturate(program, load_rules(), Limits()))
    by_op = {type(program.terms[t]).__name__: t for t in program.reachable()}
    columns = index_of(program, 5)
    (rows,) = bits(program.free[by_op["Block"]] & ~(1 << columns))
    assert kind_of(ex, by_op["Block"], rows) is Kind.WHOLE
    assert kind_of(ex, by_op["Block"], columns) is Kind.SLICE
    assert kind_of(ex, by_op["Fold"], columns) is Kind.FOLD
