"""Each shipped rule file earns its place: a program that is worse off without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem.egraph.extract import extract
from eqsat_mem.egraph.rule_files import default_files, load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.egraph.soundness.sample_programs import program_of
from eqsat_mem.ir.loop_tree import loops
from eqsat_mem.schedule.cost_model import term_seconds
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import schedule
from tests.oracles.targets import CPU

FILES = [path.stem for path in default_files()]


def planned(fun: Callable[..., Any], shapes: list[tuple[int, ...]], limit: int, without: str = "") -> Schedule:
    """The best schedule with all rule files but one."""
    rules = load_rules(only=[name for name in FILES if name != without])
    args = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    view = saturate(program_of(fun, *args), rules, Limits(max_seconds=60.0))
    candidates = [extract(view, partial(term_seconds, backend=CPU), price) for price in (0.0, 1e-10, 1e-8)]
    return min(
        (schedule(ex, limit, CPU) for ex in candidates), key=lambda s: (not s.fits(limit), s.seconds if s.fits(limit) else s.peak_bytes)
    )


def distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def norms(x):
    return jnp.sum(x * x, -1)


def symmetrised(k):
    return (k + k.T) / 2


def rows_of_kernel(x, v):
    k = jnp.exp(-distances(x, x))
    return k[PLACES] @ v, k[:, PLACES] @ v[PLACES]


N = 1500
SPEED = 2**40
PLACES = np.arange(0, N, 7)
GAINS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int]] = {  # by file: a program and a limit
    "associativity": (lambda a, b, v: (a @ b) @ v, [(N, N), (N, N), (N, 1)], SPEED),
    "augmented": (lambda x, y: jnp.exp(x @ y.T - 0.5 * norms(x)[:, None] - 0.5 * norms(y)), [(N, 9), (N, 9)], SPEED),
    "centre": (lambda x, y: jnp.exp(-distances(x, y)), [(N, 64), (N, 64)], SPEED),
    "diagonal": (lambda x, v: (jnp.exp(-distances(x, x)) + 0.1 * jnp.eye(N)) @ v, [(N, 3), (N, 2)], SPEED),
    "distance": (lambda x, y: jnp.exp(-distances(x, y)), [(N, 64), (N, 64)], SPEED),
    "scaling": (lambda x, y, v: jnp.exp(-0.5 * distances(x, y)) @ v, [(N, 64), (N, 64), (N, 2)], SPEED),
    "simplify": (lambda x, y: jnp.exp(-(jnp.linalg.norm(x[:, None] - y[None], axis=-1) ** 2)), [(N, 64), (N, 64)], SPEED),
    "symmetry": (lambda x, v: symmetrised(jnp.exp(-distances(x, x))) @ v, [(N, 3), (N, 2)], SPEED),
    "streaming": (lambda x, w: jax.nn.logsumexp(x @ w.T, axis=1), [(500, 256), (40 * N, 256)], 70 * 2**20),
    "take": (rows_of_kernel, [(N, 3), (N, 2)], 2**20),
    "splitting": (lambda x, y, v: jnp.exp(-distances(x, y)) @ v, [(N, 3), (N, 3), (N, 2)], 2**20),
}


def test_every_shipped_file_has_a_program_that_needs_it():
    assert set(GAINS) == set(FILES)


@pytest.mark.parametrize("name", GAINS)
def test_a_program_is_slower_or_does_not_fit_without_a_file(name):
    fun, shapes, limit = GAINS[name]
    best, worse = planned(fun, shapes, limit), planned(fun, shapes, limit, without=name)
    assert best.fits(limit)
    assert not worse.fits(limit) or worse.seconds > 1.02 * best.seconds


def test_without_splitting_there_are_no_loops():
    fun, shapes, limit = GAINS["splitting"]
    assert not list(loops(planned(fun, shapes, limit, without="splitting").seq))
