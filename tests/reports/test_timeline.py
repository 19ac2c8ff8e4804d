"""Memory over the points of a program: the largest is the predicted peak; and the picture of it."""

from __future__ import annotations

import io
import sys

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.reports.parts import by_role, parts_of
from eqsat_mem.reports.plan_text import headline
from eqsat_mem.reports.scale import label_rows, loop_spans, scale_of
from eqsat_mem.reports.timeline import Point, timeline
from eqsat_mem.reports.words import axis_names, loop_name
from eqsat_mem.schedule.search import schedule, straight
from eqsat_mem.units import format_bytes
from tests.oracles.targets import CPU
from tests.reports.test_explain import planned
from tests.schedule import test_search as test_schedule

LIMITS = (10**9, 30_000, 1)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", test_schedule.PROGRAMS)
def test_the_largest_point_is_the_peak(name, limit):
    s = schedule(test_schedule.program(name), limit, CPU)
    points = timeline(s)
    assert max(point.nbytes for point in points) == s.peak_bytes
    assert points[0].nbytes <= s.peak_bytes


@pytest.mark.parametrize("name", test_schedule.PROGRAMS)
def test_what_is_held_is_at_most_what_is_counted(name):
    ex = test_schedule.program(name)
    for s in (straight(ex, CPU), schedule(ex, 1, CPU)):
        points = timeline(s)
        for point in points[1:]:
            assert 0 < max(live.nbytes for live in point.held) <= point.nbytes
            assert set(point.terms) <= {live.term for live in point.held}


def test_every_loop_is_on_the_line():
    s = schedule(test_schedule.program("kernel gradient"), 1, CPU)
    inside = {point.loops for point in timeline(s)}
    names = [loop_name(s.ex.program, axis_names(s.ex.program), s.seq, loop) for loop in loops(s.seq)]
    assert {name for path in inside for name in path} == set(names)
    assert timeline(s)[0].loops == ()


def test_points_have_the_users_lines():
    plan = planned("bound")
    before, after = plan.record.timelines(plan)
    for points, nbytes in ((before, plan.original_peak_bytes), (after, plan.peak_bytes)):
        largest = max(points, key=lambda point: point.nbytes)
        assert largest.nbytes == nbytes
        assert largest.place.startswith("test_explain.py:")
        assert points[0].what == "arguments"


def test_a_planned_body_counts_as_written_before():
    plan = planned("scan")
    before, after = plan.record.timelines(plan)
    assert max(point.nbytes for point in before) == plan.original_peak_bytes > max(point.nbytes for point in after) == plan.peak_bytes


def test_spans_of_loops():
    points = [Point("", "", 0, loops=loops) for loops in ((), ("i",), ("i", "k"), ("i", "k"), ("j",), ())]
    assert list(loop_spans(points)) == [(0, 1, 4, "i"), (0, 4, 5, "j"), (1, 2, 4, "k")]


@pytest.mark.parametrize("name", ["bound", "scan"])
def test_the_picture_is_written(name, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.svg"
    figure = planned(name).show(path)
    text = path.read_text()
    assert text.startswith("<?xml")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["as written", "as planned"]
    written, after = figure.axes
    assert written.get_ylim() == after.get_ylim()
    plan = planned(name)
    for axes, nbytes in ((written, plan.original_peak_bytes), (after, plan.peak_bytes)):
        assert format_bytes(nbytes) in [label.get_text() for label in axes.texts]
    assert f"limit {format_bytes(plan.limit_bytes)}" in {text.get_text().split(",")[0] for text in figure.legends[0].get_texts()}
    assert figure.get_suptitle() == f"{plan.name} {headline(plan)}"


def test_the_picture_is_shown_where_there_is_a_window(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown = []
    monkeypatch.setattr(pyplot, "get_backend", lambda: "TkAgg")
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(True))
    assert planned("chain").show() is None  # a notebook would draw a figure that is returned once more
    assert shown == [True]
    pyplot.close("all")


def test_labels_of_loops_do_not_meet():
    paths = [(), ("rows of x",), ("rows of x", "columns of y"), ("columns of y",), ("a rather long axis of z",), ()]
    points = [Point("", "", 0, loops=loops) for loops in paths]
    rows = list(label_rows(points, 30))
    assert [text for *_, text in rows] == ["over rows of x", "over columns of y", "over a rather long axis of z", "over columns of y"]
    for row, start, end, left, text in rows:
        assert 0 <= left <= 1
        others = [other for other in rows if other[0] == row and other[1:] != (start, end, left, text)]
        for _, begins, _, at, words in others:
            assert left + len(text) / 30 <= at or at + len(words) / 30 <= left
            assert end <= begins or begins < start


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", test_schedule.PROGRAMS)
def test_parts_of_points_add_up(name, limit):
    s = schedule(test_schedule.program(name), limit, CPU)
    points = timeline(s)
    for point, parts in zip(points, parts_of(s, points), strict=True):
        assert sum(part.nbytes for part in parts) == sum(by_role(parts).values()) == point.nbytes
        assert all(part.nbytes >= 0 for part in parts)


def test_roles_are_those_of_arguments_outputs_loops_and_names():
    def loss(w, x):
        return jnp.sum(jax.nn.gelu(jnp.tanh(x @ w)) @ w)

    def step(w, grads, x):
        return w - 0.1 * grads, jax.grad(loss)(w, x)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((300, 300), (300, 300), (4000, 300))]
    plan = eqsat_mem.optimize(step, memory_limit="1GiB", verify=False).plan(*args)
    before, _ = plan.record.timelines(plan)
    every = [part for parts in parts_of(plan.record.before, before, as_written=True) for part in parts]
    roles = {part.what.rpartition(" ")[2]: part.role for part in every if " argument " in part.what}
    assert roles == {"w": "arguments", "grads": "gradients", "x": "arguments"}
    values = {part.term: part.role for part in every if part.term is not None}
    order = [values[point.terms[0]] for point in before[1:] if values.get(point.terms[0]) in ("temporaries", "gradients")]
    assert set(order) == {"temporaries", "gradients"}
    assert order[0] == "temporaries"  # forward comes before backward
    assert "outputs" in values.values()
    bound = planned("bound")
    _, after = bound.record.timelines(bound)
    found = {part.role for parts in parts_of(bound.schedule, after) for part in parts}
    assert {"arguments", "loop state", "outputs", "temporaries"} <= found


def test_what_a_step_of_a_loop_holds_is_no_scratch():
    def rounds(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(jnp.sort(x @ x, 0)) @ x, x)

    plan = eqsat_mem.optimize(rounds, memory_limit="1GiB", verify=False).plan(jax.ShapeDtypeStruct((800, 800), jnp.float32))
    assert plan.unchanged
    before, _ = plan.record.timelines(plan)
    every = {part.what: part for parts in parts_of(plan.record.before, before, as_written=True) for part in parts}
    inside = next(part for what, part in every.items() if what.startswith("in "))
    assert inside.role == "temporaries"
    assert inside.nbytes >= 800 * 800 * 4
    assert "scratch of operations" not in every


def test_ticks_are_round_and_few():
    for peak, limit in ((855_638_016, 96 * 2**20), (100, 10**12), (3 * 2**30, 2**31), (1, 1), (0, 0)):
        scale = scale_of([peak], limit)
        step = scale.ticks[1]
        assert step & (step - 1) == 0
        assert 2 <= len(scale.ticks) <= 7
        assert max(scale.ticks) <= scale.top
        assert scale.limit_is_near == (limit <= 3 * max(peak, 1))


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"^plan\.show\(\) draws with matplotlib: pip install 'eqsat-mem\[plots\]'\.$"):
        planned("chain").show(io.BytesIO())


def test_a_program_of_nothing_but_arguments():
    plan = eqsat_mem.optimize(lambda x: x, memory_limit="1MiB", verify=False).plan(jax.ShapeDtypeStruct((8,), jnp.float32))
    before, after = plan.record.timelines(plan)
    assert [point.what for point in after] == [point.what for point in before] == ["arguments"]
