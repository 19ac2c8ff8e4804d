"""Figure 3 and table 2 of the paper: sparse Gaussian process regression, error against the number of inducing points under one limit.

    python -m paper_repro.sgpr                                  sizes for a 2-core machine
    python -m paper_repro.sgpr --scale paper                    the paper's sizes
    python -m paper_repro.sgpr --data 3droad=3droad.mat         a UCI data set (CSV or MAT, the target last)

The bound is GPflow's, in plain JAX (``gp.py``); both columns run the same function objects. Inducing points are chosen greedily, L-BFGS
fits the parameters; in later phases points are chosen anew with the parameters found. Plain JAX is run where its compiled program holds no
more than the limit. A data set whose file is not given is replaced by a synthetic one of the same shape. Points are kept and each iteration
of L-BFGS is saved; a re-run continues.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring import RESULTS, Prepared, device_name, measure, no_plan, prepare, warm_up
from benchmarks.plots import legend_below
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.options import parse_bytes
from eqsat_mem.units import format_bytes
from paper_repro import gp
from paper_repro.datasets import load_regression, standardised, synthetic_regression
from paper_repro.experiment import Experiment, Point, Row, main
from paper_repro.showing import device_line, grid_table, lines

DATA = {"3droad": (434_874, 3), "houseelectric": (2_049_280, 11)}
"""Points and dimensions of the paper's data sets."""


@dataclass(frozen=True)
class Scale:
    """The scale of a run: data sets (name, points, dimensions), numbers of inducing points, the limit, and its duration."""

    data: tuple[tuple[str, int, int], ...]
    inducing: tuple[int, ...]
    limit: str
    iterations: int
    phases: int
    seeds: tuple[int, ...]
    candidates: int
    """Training points among which inducing points are chosen."""


SCALES = {
    "tiny": Scale((("3droad", 600, 3),), (5, 20), "300kB", 4, 2, (111,), 200),
    "small": Scale((("3droad", 20_000, 3),), (25, 50, 100, 200, 400), "100MB", 20, 2, (111,), 5_000),
    "paper": Scale(
        tuple((name, *shape) for name, shape in DATA.items()),
        (200, 500, 800, 1_000, 2_000, 3_000, 4_000, 5_000, 8_000, 10_000),
        "1GB",
        1_000,
        2,
        (111, 222, 333),
        100_000,
    ),
}


def grid(options: argparse.Namespace) -> Iterator[Point]:
    """Every data set, number of inducing points and seed, as written and planned."""
    scale, files = SCALES[options.scale], dict(options.data or ())
    for data, n, d in scale.data:
        for m in scale.inducing:
            for seed in scale.seeds:
                for limit in options.limit or [scale.limit]:
                    for column in ("plain", "planned"):
                        at = {"data": data, "n": n, "d": d, "file": files.get(data, ""), "inducing": m, "seed": seed, "limit": limit}
                        yield at | {"column": column, "scale": options.scale}


def data_options(parser: argparse.ArgumentParser) -> None:
    """Files of data sets."""
    parser.add_argument("--data", action="append", type=_named_file, metavar="NAME=FILE", help=f"the file of {' or '.join(DATA)}")


def _named_file(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in DATA or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE with a NAME among {', '.join(DATA)}.")
    return name, path


# --- one point ----------------------------------------------------------------------------------------


def measure_point(point: Point, folder: Path) -> dict[str, Any]:
    """Memory and seconds of an evaluation of the loss and its gradient, and what the model that is trained with it predicts."""
    with jax.enable_x64(True):
        data = load(point)
        try:
            return _train(point, data, folder)
        except MemoryLimitError as error:
            return {"device_name": device_name(), "status": no_plan(error)}
        except _OverLimit as error:
            return {"device_name": device_name(), "status": str(error), "held_bytes": error.held_bytes}


def load(point: Point) -> dict[str, np.ndarray]:
    """``x``, ``y``, ``x_test``, ``y_test``: from the file, or synthetic."""
    if point["file"]:
        x, y = load_regression(point["file"])
    else:
        x, y = synthetic_regression(point["n"], point["d"], seed=0)
    return standardised(x, y, point["seed"])


class _OverLimit(Exception):
    def __init__(self, held: int) -> None:
        super().__init__(f"over the limit: holds {format_bytes(held)}")
        self.held_bytes = held


def _train(point: Point, data: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    scale = SCALES[point["scale"]]
    parameters = gp.start(data["x"].shape[1])
    z = gp.greedy_points(parameters, data["x"][: scale.candidates], point["inducing"])
    x, y = jnp.asarray(data["x"]), jnp.asarray(data["y"])
    start = jax.block_until_ready(jax.tree.map(jnp.asarray, (parameters, x, y, z)))
    made = _prepared(gp.loss_and_gradient, start, point)
    evaluate = made.compiled
    warm_up(x.dtype)
    _, results = measure(lambda: evaluate(*start), sum(leaf.nbytes for leaf in jax.tree.leaves(start)))
    trained, value, files = 0.0, np.nan, []
    for phase in range(scale.phases):
        if phase:
            z = gp.greedy_points(parameters, data["x"][: scale.candidates], point["inducing"])
        at = folder / f"{'-'.join(str(value).replace('/', '_') for value in point.values())}-{phase}.npz"
        fit = minimise(partial(_at, evaluate, x, y, jnp.asarray(z)), parameters, scale.iterations, at)
        files.append(at)
        parameters, value, trained = fit.parameters, fit.value, trained + fit.seconds
    shown = {"held_bytes": made.held_bytes, "plan_seconds": made.plan_seconds, "train_seconds": trained, "bound": -value * len(y)}
    quality = _quality(point, data, parameters, z)
    for path in files:
        path.unlink(missing_ok=True)
    return results | shown | quality


def _at(evaluate: Any, x: Any, y: Any, z: Any, parameters: Any) -> Any:
    return evaluate(parameters, x, y, z)


def _prepared(function: Callable[..., Any], args: Sequence[Any], point: Point) -> Prepared:
    """The compiled function; raises where no plan fits, or the program as written holds more than the limit."""
    made = prepare(function, args, None if point["column"] == "plain" else point["limit"])
    if made.held_bytes > parse_bytes(point["limit"], "--limit"):
        raise _OverLimit(made.held_bytes)
    return made


@dataclass(frozen=True)
class Fit:
    """Parameters, the loss there, and the seconds that it took to find them."""

    parameters: Any
    value: float
    seconds: float


def minimise(evaluate: Callable[[Any], Any], parameters: Any, iterations: int, path: Path) -> Fit:
    """So many iterations of L-BFGS on a function that returns a loss and its gradient.

    Each iteration is saved to ``path``, from which an interrupted run goes on, though with no memory of the curvature.
    """
    from scipy.optimize import minimize

    flat, unflatten = jax.flatten_util.ravel_pytree(parameters)
    done, before, began = 0, 0.0, time.perf_counter()
    if path.exists():
        saved = np.load(path)
        flat, done, before = saved["parameters"], int(saved["iterations"]), float(saved["seconds"])

    def objective(values: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = evaluate(unflatten(jnp.asarray(values)))
        return float(value), np.asarray(jax.flatten_util.ravel_pytree(gradient)[0], np.float64)

    def keep(values: np.ndarray) -> None:
        nonlocal done
        done += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part.npz")
        np.savez(partial, parameters=values, iterations=done, seconds=before + time.perf_counter() - began)
        partial.replace(path)

    if done < iterations:
        options = {"maxiter": iterations - done}
        flat = minimize(objective, np.asarray(flat), jac=True, method="L-BFGS-B", callback=keep, options=options).x
    return Fit(unflatten(jnp.asarray(flat)), objective(flat)[0], before + time.perf_counter() - began)


def _quality(point: Point, data: dict[str, np.ndarray], parameters: Any, z: np.ndarray) -> dict[str, float]:
    """RMSE and mean negative log density of the held-out targets, which have unit variance."""
    new, want = data["x_test"], data["y_test"]
    args = jax.tree.map(jnp.asarray, (parameters, data["x"], data["y"], z, new))
    mean, variance = (np.asarray(value) for value in _prepared(gp.predict, args, point).compiled(*args))
    log_density = -0.5 * (np.log(2 * np.pi * variance) + (want - mean) ** 2 / variance)
    return {"rmse": float(np.sqrt(np.mean((want - mean) ** 2))), "nlpd": float(-np.mean(log_density))}


# --- what is shown ------------------------------------------------------------------------------------


def tables(rows: Sequence[Row]) -> str:
    """Errors, memory and time for each number of inducing points."""
    rows = [row | {"data": row["data"] if row["file"] else f"synthetic, as {row['data']}"} for row in rows]
    heads = {"data": "data", "n": "n", "inducing": "inducing points", "seed": "seed", "limit": "limit"}

    def quality(row: Row) -> str:
        return f"{float(row['rmse']):.4f}, {float(row['nlpd']):.4f}" if row["rmse"] else row["status"]

    def cost(row: Row) -> str:
        if not row["rmse"]:
            return row["status"]
        held, resident = (f"{float(row[key]) / 1e6:,.1f}" for key in ("held_bytes", "resident_bytes"))
        return f"{float(row['seconds']):.3g} s, {held} MB ({resident}), trained in {float(row['train_seconds']):.0f} s"

    shown = {
        "RMSE and NLPD of standardised test targets:": quality,
        "The loss with its gradient: seconds, MB held by the compiled program (MB resident); seconds of training:": cost,
    }
    parts = [f"{title}\n\n{grid_table(rows, heads, 'column', cell, _label)}" for title, cell in shown.items()]
    return "\n\n".join([*parts, device_line(rows)])


def _label(column: str) -> str:
    return {"plain": "plain JAX", "planned": "under the limit"}[column]


def draw(rows: Sequence[Row], figure: Any) -> None:
    """RMSE, NLPD and memory against the number of inducing points."""
    shown = [("rmse", "RMSE", 1.0), ("nlpd", "NLPD", 1.0), ("resident_bytes", "MB resident", 1e-6)]
    for axes, (field, label, scale) in zip(figure.subplots(1, 3), shown, strict=True):
        lines(rows, axes, "inducing", field, label, scale, x_label="inducing points", name=_line)
    legend_below(figure)


def _line(row: Row) -> str:
    """The name of a line in the picture."""
    return f"{row['data']}: {'plain JAX' if row['column'] == 'plain' else 'eqsat_mem, limit ' + row['limit']}"


EXPERIMENT = Experiment(
    module="paper_repro.sgpr",
    about=__doc__,
    keys=("data", "n", "d", "file", "inducing", "seed", "limit", "column", "scale"),
    results=(*RESULTS, "train_seconds", "bound", "rmse", "nlpd"),
    grid=grid,
    measure=measure_point,
    tables=tables,
    draw={"sgpr": draw},
    options=data_options,
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
