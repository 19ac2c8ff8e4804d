"""The programs that show what XLA:GPU does."""

from __future__ import annotations

import re

import jax
import pytest

from benchmarks.calibration.constants import PACKAGE, in_code
from benchmarks.gpu_model import PROGRAMS, THRESHOLDS, Threshold, bisected, stacked, told
from eqsat_mem.backends.gpu import deviceless, measured, weights
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.backends.gpu.thunks import Launch

SOURCES = re.compile(
    r"benchmarks[/.][\w/.]+|data sheet|[Gg]uessed|documentation|Programming Guide|read from compiled\s+programs|jax-cuda13-plugin"
)
"""How docstrings say where a figure is from: a script, a page of the maker's, programs that were compiled, or nowhere."""
CONSTANTS = list(in_code(sorted((PACKAGE / "backends" / "gpu").glob("*.py"))))


def test_every_figure_of_a_gpu_says_where_it_is_from():
    said = {constant.path: constant.said for constant in CONSTANTS if constant.name.isupper()}
    assert len(said) > 40
    said["backends.gpu.weights.COUNTS"] = weights.__doc__  # the module is about this table
    about = measured.__doc__  # and this one about its figures
    said = {path: about if path.startswith("backends.gpu.measured.") else text for path, text in said.items()}
    assert [path for path, text in said.items() if not SOURCES.search(text)] == []


def test_thresholds_and_constants_name_one_another():
    swept = {constant.path.removeprefix("backends.gpu.") for constant in CONSTANTS if "--thresholds" in constant.said}
    assert swept == {path for threshold in THRESHOLDS for path in threshold.measures}


@pytest.mark.parametrize("heading", PROGRAMS)
def test_programs_are_programs(heading):
    with jax.enable_x64(True):
        for name, (function, avals) in PROGRAMS[heading].items():
            assert jax.tree.leaves(jax.eval_shape(function, *avals)), name


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=lambda threshold: threshold.name)
def test_thresholds_are_between_programs(threshold):
    with jax.enable_x64(True):
        for size in (threshold.low, threshold.high):
            function, avals = threshold.make(size)
            assert jax.tree.leaves(jax.eval_shape(function, *avals))


def test_a_loop_over_rows_computes_all_of_them():
    x = jax.numpy.arange(12.0).reshape(6, 2)
    assert (stacked(lambda rows, y: rows * y, 2)(x, 3.0) == 3 * x).all()


def test_bisection_finds_the_first_size_that_differs(monkeypatch):
    sizes = []

    def compile_for(function, avals, target, **options):
        sizes.append(avals[0])
        return deviceless.Checked(target, (avals[0],))

    monkeypatch.setattr(deviceless, "compile_for", compile_for)
    made = Threshold("", (), 3, 1000, lambda size: (None, [size]), see=lambda size: size >= 77)
    assert bisected(made, named("h100")) == 77
    assert len(sizes) < 15
    assert bisected(Threshold("", (), 3, 70, made.make, see=made.see), named("h100")) is None


def test_launches_are_told_in_short():
    launches = (
        Launch("kernel", "loop_fusion_1", 8, 128, 0, 16, 1),
        Launch("Copy", "copy.1", 0, 0, 0, None, 1),
        Launch("Fft", "fft", 0, 0, 0, 1, 0),
    )
    assert told(launches) == "16 x loop_1 8, ? x Copy, Fft"
    assert told(launches, most=1) == "16 x loop_1 8, ... 3 in all"
