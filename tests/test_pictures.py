"""The pictures of results: ticks and legends do not meet, and our lines are told from others."""

import csv
import doctest
import itertools
import json
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

from benchmarks import plots, training_step
from paper_repro import kernel_mvm, matmul_chains, sgpr, transformer

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = (kernel_mvm, matmul_chains, sgpr, transformer)
EXPERIMENTS = {name: (draw, f"{name}.csv") for script in SCRIPTS for name, draw in script.EXPERIMENT.draw.items()}
QUESTIONS = {"curves": plots._curves, "planning": plots._planning, "ranks": plots._ranks}


def published(name):
    """A picture of the repository, drawn anew from its kept results."""
    if name in EXPERIMENTS:
        draw, file = EXPERIMENTS[name]
        figure = pyplot.figure(figsize=(10, 4), layout="constrained")
        with (ROOT / "paper_repro" / "results" / file).open(encoding="utf-8") as rows:
            draw(list(csv.DictReader(rows)), figure)
        return figure
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    QUESTIONS[name](rows, Path("/dev/null"))
    return pyplot.gcf()


def boxes(figure, artists):
    renderer = figure.canvas.get_renderer()
    return [artist.get_window_extent(renderer) for artist in artists if artist.get_visible() and getattr(artist, "get_text", lambda: "x")()]


@pytest.fixture(autouse=True)
def without_windows():
    matplotlib.use("Agg")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPERIMENTS, *QUESTIONS])
def test_ticks_and_legends_do_not_meet(name, monkeypatch):
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, path, **options: None)
    figure = published(name)
    figure.canvas.draw()
    for axes in figure.axes:
        assert axes.get_legend() is None, "a legend over the data"
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        for axis in (axes.xaxis, axes.yaxis):
            labels = [tick.label1 for tick in axis.get_major_ticks()]
            turned = labels and labels[0].get_rotation()
            if not turned:
                assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes(figure, labels), 2)), f"{name}: ticks collide"
            assert len(labels) >= 2
    (legend,) = figure.legends
    (below,) = boxes(figure, [legend])
    assert not any(below.overlaps(box) for box in boxes(figure, figure.axes))
    pyplot.close("all")


def test_our_lines_are_marked():
    ours, written, other = (plots.style(label, 1) for label in ("eqsat_mem, limit 1MB", "plain JAX", "KeOps"))
    assert ours["linewidth"] > max(written["linewidth"], other["linewidth"])
    assert len({ours["color"], written["color"], other["color"]}) == 3


@pytest.mark.parametrize("module", [plots, training_step], ids=lambda module: module.__name__)
def test_examples_of_docstrings_run(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(("low", "high"), [(1e-9, 1e9), (0.011, 0.013), (3, 4_000), (1, 10), (1.31, 1.34)])
def test_ticks_of_an_axis_are_few_round_and_inside(low, high):
    ticks = plots.log_ticks(low, high)
    assert 1 <= len(ticks) <= plots.MOST_TICKS
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(ticks)
