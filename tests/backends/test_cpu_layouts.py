"""Contractions of arguments whose axes do not merge into those of matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.backends.cpu.layouts import is_turned
from eqsat_mem.egraph.soundness.sample_programs import program_of
from eqsat_mem.ir import Dot

EXTENTS = {"a": 40, "b": 36, "c": 32, "d": 28}

cpu_only = pytest.mark.skipif(jax.default_backend() != "cpu", reason="about XLA:CPU")


def drawn(seed):
    """A contraction of an array of four axes with a small one, perhaps for each element of an axis of both: its text and arrays."""
    rng = np.random.default_rng(seed)
    left, right = "abcd", "".join(sorted(rng.choice([*"abcd"], rng.integers(1, 4), replace=False)))
    batch = right[: rng.integers(0, 2)] if len(right) > 1 else ""
    out = "".join(sorted({*left} - {*right} | {*batch}))
    arrays = [rng.standard_normal([EXTENTS[i] for i in names], np.float32) for names in (left, right)]
    return f"{left},{right}->{out}", arrays


def dots(program):
    return [term for t in program.reachable() if isinstance(term := program.terms[t], Dot)]


@cpu_only
@pytest.mark.parametrize("seed", range(12))
def test_an_argument_whose_axes_do_not_merge_is_copied_a_chunk_at_a_time(seed):
    spec, arrays = drawn(seed)

    def contract(a, b):
        return jnp.einsum(spec, a, b)

    program = program_of(contract, *arrays)
    plain = jax.jit(contract).lower(*arrays).compile()
    memory = plain.memory_analysis()
    if any(is_turned(program, d, d.lhs) or is_turned(program, d, d.rhs) for d in dots(program)):
        assert memory.temp_size_in_bytes >= arrays[0].nbytes
        limit = sum(a.nbytes for a in arrays) + memory.output_size_in_bytes + arrays[0].nbytes // 3
        fast = eqsat_mem.optimize(contract, memory_limit=limit)
        np.testing.assert_allclose(fast(*arrays), plain(*arrays), rtol=2e-4, atol=2e-3)
    elif spec[:4].endswith(spec[5:].partition("->")[0]):  # rows first, as XLA reads a left operand
        assert memory.temp_size_in_bytes < arrays[0].nbytes


def test_both_kinds_are_drawn():
    programs = [program_of(lambda a, b, spec=spec: jnp.einsum(spec, a, b), *arrays) for spec, arrays in map(drawn, range(12))]
    assert {is_turned(program, d, d.lhs) or is_turned(program, d, d.rhs) for program in programs for d in dots(program)} == {True, False}


@cpu_only
@pytest.mark.parametrize("at_once", [1, 4])
def test_an_argument_into_which_rows_are_written_is_copied_a_chunk_at_a_time(at_once):
    """A step of a decoder: keys and values of a new token are written between the others, and read by all heads."""

    def decode(keys, values, query, new, position):
        keys, values = (jax.lax.dynamic_update_slice(a, new, (0, position, 0, 0)) for a in (keys, values))
        weights = jax.nn.softmax(jnp.einsum("bhd,bthd->bht", query, keys))
        return keys, values, jnp.einsum("bht,bthd->bhd", weights, values)

    rng = np.random.default_rng(0)
    shapes = (2, 2048, 4, 32), (2, 2048, 4, 32), (2, 4, 32), (2, at_once, 4, 32)
    arrays = *(rng.standard_normal(shape).astype(np.float32) for shape in shapes), np.int32(77)
    program = program_of(decode, *arrays)
    assert all(is_turned(program, d, d.lhs) or is_turned(program, d, d.rhs) for d in dots(program))
    plain = jax.jit(decode).lower(*arrays).compile()
    memory = plain.memory_analysis()
    assert memory.temp_size_in_bytes >= arrays[0].nbytes
    limit = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes // 4
    fast = eqsat_mem.optimize(decode, memory_limit=limit)
    assert fast.plan(*arrays).compiled_peak_bytes <= limit
    for got, want in zip(fast(*arrays), plain(*arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)
