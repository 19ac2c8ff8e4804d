"""Memory over the points of a program: the largest is the predicted peak; and the picture of it."""

from __future__ import annotations

import io
import sys

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.reports.scale import loop_spans
from eqsat_mem.reports.timeline import Point, timeline
from eqsat_mem.reports.words import loop_name
from eqsat_mem.schedule.search import schedule, straight
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
    names = [loop_name(s.ex.program, loop.index) for loop in loops(s.seq)]
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
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.split(": ")[0].rsplit(" ", 2)[-1] for title in titles] == ["written", "planned"]
    assert any("limit" in label.get_text() for axes in figure.axes for label in axes.texts)


def test_the_picture_is_shown_where_there_is_a_window(monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown = []
    monkeypatch.setattr(pyplot, "get_backend", lambda: "TkAgg")
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(True))
    figure = planned("chain").show()
    assert shown == [True]
    pyplot.close(figure)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"^plan\.show\(\) draws with matplotlib: pip install 'eqsat-mem\[plots\]'\.$"):
        planned("chain").show(io.BytesIO())


def test_a_program_of_nothing_but_arguments():
    plan = eqsat_mem.optimize(lambda x: x, memory_limit="1MiB", verify=False).plan(jax.ShapeDtypeStruct((8,), jnp.float32))
    before, after = plan.record.timelines(plan)
    assert [point.what for point in after] == [point.what for point in before] == ["arguments"]
