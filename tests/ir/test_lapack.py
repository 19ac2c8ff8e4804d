"""The memory that LAPACK holds besides, against the growth of a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.measuring import grown, warm_up
from eqsat_mem.backends import hlo
from eqsat_mem.backends.cpu.hidden_scratch import workspace_bytes
from eqsat_mem.backends.xla import held_bytes
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block
from eqsat_mem.schedule.memory import block_scratch
from tests.oracles.targets import CPU

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu" or not hasattr(os, "sched_setaffinity"), reason="other devices and systems have other libraries"
)

N, LONG = 512, 3072
SLACK = 2**20
"""Bytes of pages that come and go otherwise: a quarter of the smallest workspace."""
RUNS = 4
"""Of the growths, the largest tells of a first run, which fills buffers that stay; what one freed may go back only after the next began."""

CODE = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # before OpenBLAS starts its threads
from tests.ir.test_lapack import measured
print(measured())
"""

SQUARE, TALL = (N, N), (LONG, N)
CALLS = {
    "cholesky": (lambda a: lax.linalg.cholesky(a + 2 * N * jnp.eye(N), symmetrize_input=False), SQUARE),
    "solve": (lambda a: lax.linalg.triangular_solve(a[:N] + 2 * N * jnp.eye(N), a, lower=True), TALL),
    "lu": (lambda a: lax.linalg.lu(a)[0], SQUARE),
    "qr": (lambda a: lax.linalg.qr(a, full_matrices=False), TALL),
    "eigh": (lambda a: lax.linalg.eigh(a, symmetrize_input=False)[1], SQUARE),
    "svd": (lambda a: lax.linalg.svd(a, full_matrices=False)[1], SQUARE),
    "svd of many rows": (lambda a: lax.linalg.svd(a, full_matrices=False)[1], TALL),
    "eig": (lambda a: lax.linalg.eig(a)[0], SQUARE),
    "right eigenvectors": (lambda a: lax.linalg.eig(a, compute_left_eigenvectors=False)[0], SQUARE),
}
"""Functions of one matrix, with its shape."""


def measured():
    """As JSON: the bytes that calls hold as counted, LAPACK's part of them, and the growth of this process."""
    jax.config.update("jax_enable_x64", True)
    warm_up(jnp.float64)
    return json.dumps({name: of_call(*call) for name, call in CALLS.items()})


def of_call(function, shape):
    matrix = jax.random.normal(jax.random.key(0), shape, jnp.float64)
    compiled = jax.jit(function).lower(matrix).compile()
    growths = [grown(lambda: compiled(matrix))[1] for _ in range(RUNS)]
    return {
        "held": held_bytes(compiled),
        "workspace": workspace_bytes(hlo.read(compiled)),
        "later": None if None in growths else sorted(growths)[-2] + matrix.nbytes,
        "first": None if None in growths else max(growths) + matrix.nbytes,
    }


@pytest.fixture(scope="module")
def calls():
    root = Path(__file__).resolve().parent.parent.parent
    mapped = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system
    path = str(root)
    command = [sys.executable, "-c", CODE]
    out = subprocess.run(command, env={**os.environ, **mapped, "PYTHONPATH": path}, capture_output=True, text=True, check=True).stdout
    found = json.loads(out.splitlines()[-1])
    if found["eigh"]["first"] is None:
        pytest.skip("this system does not tell how much a process grows")
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("name", CALLS)
def test_a_process_grows_by_what_is_counted(calls, name):
    of = calls[name]
    assert of["later"] <= of["held"] + SLACK
    assert of["first"] >= of["held"] - 0.4 * of["workspace"] - SLACK


def test_what_the_planner_predicts_of_a_call_is_what_is_counted():
    def eigenvectors(a):
        return lax.linalg.eigh(a, symmetrize_input=False)

    matrix = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = load(jax.make_jaxpr(eigenvectors)(matrix), ["a"])
    call = next(term.call for term in program.terms if isinstance(term, Block))
    module = hlo.read(jax.jit(eigenvectors).lower(matrix).compile())
    predicted = block_scratch(program, CPU, call, (0,), [index.extent for index in program.indices])
    assert predicted == workspace_bytes(module) == 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    ("vectors", "squares"), [({}, 3), ({"compute_left_eigenvectors": False}, 2), ({"compute_right_eigenvectors": False}, 2)]
)
def test_eigenvectors_that_are_not_wanted_take_no_room(vectors, squares):
    compiled = jax.jit(lambda a: lax.linalg.eig(a, **vectors)).lower(jnp.ones((40, 40))).compile()
    assert workspace_bytes(hlo.read(compiled)) == squares * 40 * 40 * 4
