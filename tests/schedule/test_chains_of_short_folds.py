"""Chains of contractions over few elements, each written out inside the next while all are few terms: gates of quantum circuits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.backends.xla import compiled_peak
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, as_written
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.load import load
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.search import straight
from eqsat_mem.schedule.split import region
from tests.oracles.targets import CPU, GPU
from tests.tiers import tiered

RULES = load_rules()
THEN: dict[str, Callable[[Any, int], Any]] = {
    "nothing": lambda s, axis: s,
    "sine": lambda s, axis: jnp.sin(s),
    "flip": jnp.flip,
    "both": lambda s, axis: s + jnp.flip(s, axis),
}
"""What follows a contraction of an axis."""


def contracted(s: Any, gate: Any, axis: int) -> Any:
    return jnp.moveaxis(jnp.einsum("ab,b...->a...", gate, jnp.moveaxis(s, axis, 0)), 0, axis)


def summed(s: Any, gate: Any, axis: int) -> Any:
    """The contraction as a sum of products, which is what rules make of it."""
    return jnp.sum(jnp.expand_dims(gate, (*range(axis), *range(axis + 2, s.ndim + 1))) * jnp.expand_dims(s, axis), axis + 1)


def circuit(axes: Sequence[int], then: Sequence[str], shape: tuple[int, ...], apply: Callable[..., Any] = contracted) -> Callable[..., Any]:
    """Gates on axes of a state, one after the other, and what follows them."""

    def run(s: Any, *gates: Any) -> Any:
        s = s.reshape(shape)
        for axis, gate, name in zip(axes, gates, then, strict=True):
            s = THEN[name](apply(s, gate, axis), axis)
        return jnp.sum(s**2 * jnp.arange(s.size).reshape(s.shape))

    return run


def on_different_axes(gates: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Gates of two rows on as many axes of a state of 2^15 numbers."""
    f32 = jnp.dtype(jnp.float32)
    fun = circuit(range(gates), ["nothing"] * gates, (2,) * gates + (2 ** (15 - gates),), summed)
    return fun, [jax.ShapeDtypeStruct((2**15,), f32), *[jax.ShapeDtypeStruct((2, 2), f32)] * gates]


def written_out(gates: int, backend: Any = CPU) -> Extraction:
    """The program of gates on different axes, all of whose sums may be written out."""
    fun, avals = on_different_axes(gates)
    program = load(jax.make_jaxpr(fun)(*avals), ["state", *(f"gate{k}" for k in range(gates))])
    return as_written(saturate(program, RULES, Limits(max_iterations=0, unrolled_elements=backend.unrolled_elements)))


@pytest.mark.parametrize("backend", [CPU, GPU], ids=["cpu", "gpu"])
def test_lines_of_source_grow_with_the_number_of_sums(backend):
    few, more, many = (emit(straight(written_out(gates, backend), backend)).source.count("\n") for gates in (5, 9, 13))
    assert many - more < 1.3 * (more - few)


def test_kernels_write_out_no_more_terms_than_a_fold_may_have():
    ex = written_out(12)
    assert sum(bool(over) for over in ex.unrolls.values()) == 12
    kernels = Memory(ex, CPU).fused(region(ex))
    for members in kernels.members:
        over = 0
        for t in members:
            over |= ex.unrolls.get(t, 0)
        assert ex.program.extent(over) <= CPU.unrolled_elements
    assert len([t for t in kernels.kept if ex.unrolls.get(t)]) == 2  # of four sums each, of which the last is in the kernel that reads it


@pytest.mark.usefixtures("compiled_as_everybodys")
@pytest.mark.parametrize("gates", [4, 5, 8])
def test_a_kernel_that_sums_elements_of_an_array_is_not_written_over_it(gates):
    made = straight(written_out(gates), CPU)
    held, _ = compiled_peak(emit(made).function, on_different_axes(gates)[1])
    assert held <= 1.03 * made.peak_bytes


@pytest.mark.parametrize("seed", tiered(range(12), quick=(4, 6), slow=(0, 1, 2, 3, 5, 7)))
def test_random_chains_are_what_jax_computes(seed):
    draw, rng = random.Random(seed), np.random.default_rng(seed)
    shape = (*(draw.choice((2, 2, 3, 4)) for _ in range(6)), draw.choice((33, 64)))
    axes = [draw.randrange(6) for _ in range(draw.randint(3, 10))]
    fun = circuit(axes, [draw.choice([*THEN]) for _ in axes], shape)
    args = [rng.standard_normal(n).astype(np.float32) for n in (np.prod(shape), *((shape[a], shape[a]) for a in axes))]
    analysis = jax.jit(fun).lower(*args).compile().memory_analysis()
    limit = analysis.argument_size_in_bytes + analysis.output_size_in_bytes + 0.7 * analysis.temp_size_in_bytes
    planned = eqsat_mem.optimize(fun, memory_limit=int(limit))
    np.testing.assert_allclose(planned(*args), jax.jit(fun)(*args), rtol=1e-4)
    assert len(planned.plan(*args).source) < 5_000 * (len(axes) + 2)
