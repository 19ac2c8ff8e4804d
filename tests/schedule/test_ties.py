"""Ties: compilers know no token before the value that it waits for is there."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Output
from eqsat_mem.schedule.schedules import unscheduled
from eqsat_mem.schedule.ties import BitTie
from tests.oracles.targets import CPU

X = jax.ShapeDtypeStruct((4, 6), jnp.float32)
LATE = {
    "padded": lambda x: jnp.pad(jnp.sin(x), ((2, 0), (1, 0))),
    "a part": lambda x: jnp.pad(jnp.sin(x), ((2, 0), (1, 0)))[1:],
    "reversed": lambda x: lax.rev(jnp.pad(jnp.sin(x), ((0, 2), (0, 1))), (0, 1)),
    "computed": lambda x: jnp.sin(x),
    "scaled": lambda x: jnp.pad(jnp.sin(x), ((2, 0), (1, 0))) * x[0, 0],
}
NEVER = {
    "an argument": lambda x: x,
    "a padded argument": lambda x: jnp.pad(x, 1),
    "joined": lambda x: jnp.concatenate([x, jnp.sin(x)]),
    "padded where joined": lambda x: jnp.pad(jnp.concatenate([x, jnp.sin(x)]), 1),
    "updated": lambda x: lax.dynamic_update_slice(jnp.zeros((9, 9)), jnp.sin(x), (2, 2)),
    "scattered": lambda x: jnp.zeros((9, 9)).at[jnp.array([3, 4])].add(jnp.sin(x[0, 0])),
    "complex": lambda x: x * 1j,
    "numbers of four bits": lambda x: jnp.sin(x).astype(jnp.int4),
}


def last_of(function):
    program = load(jax.make_jaxpr(function)(X), ["x"])
    return program, program.outputs[0].term


def waits(program, token):
    """Whether the compiled token is computed from the argument."""
    program.outputs = [Output(token, ())]
    function = emit(unscheduled(Extraction(program), CPU)).function
    text = jax.jit(function).lower(X).compile().as_text()
    return "popcnt" in text


@pytest.mark.parametrize("name", LATE)
def test_tokens_wait(name):
    program, late = last_of(LATE[name])
    assert BitTie().can_wait_for(program, late)
    assert waits(program, BitTie().token(program, late, program.add))


@pytest.mark.parametrize("name", NEVER)
def test_nothing_waits_for_what_compilers_may_know_before_it_is_there(name):
    assert not BitTie().can_wait_for(*last_of(NEVER[name]))


def test_a_compiler_knows_the_first_element_of_a_padded_array(monkeypatch):
    """Why tokens are not of the padded array itself."""
    monkeypatch.setattr("eqsat_mem.schedule.ties.computed", lambda program, t: t)
    program, late = last_of(LATE["padded"])
    assert not waits(program, BitTie().token(program, late, program.add))
