"""Programs written anew."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Input, Literal, Map, check, children
from eqsat_mem.ir.interpreter import evaluate

X, Y = (np.random.RandomState(0).standard_normal((3, 4)).astype(np.float32) for _ in range(2))


def loaded(fun, *args):
    return load(jax.make_jaxpr(fun)(*args), [f"x{k}" for k in range(len(args))])


@pytest.fixture
def program():
    return loaded(lambda x, y: (jnp.exp(x + y) @ y.T, jnp.exp(x + y).sum()), X, Y)


def test_a_program_that_nothing_rewrites_is_copied(program):
    copy, ids = program.rewritten(lambda new, t, ids: None)
    check(copy)
    assert str(copy) == str(program)
    assert copy.source == {ids[t]: source for t, source in program.source.items() if t in ids}
    assert sorted(ids) == program.reachable()


def test_a_term_or_the_number_of_one_stands_for_a_term_wherever_it_is_used(program):
    def doubled(new, t, ids):
        term = program.on(t, ids)
        if isinstance(term, Map) and term.op == "exp":
            return Map(term.dtype, "sin", term.args)
        if isinstance(term, Map) and term.op == "add":
            return new.add(Map(term.dtype, "mul", (new.add(term), new.add(Literal.of(2.0, term.dtype)))))
        return None

    new, _ = program.rewritten(doubled)
    check(new)
    value = np.sin(2 * (X + Y))
    for mine, theirs in zip(evaluate(new, [X, Y]), (value @ Y.T, value.sum()), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_what_becomes_equal_is_one_term():
    program = loaded(lambda x, y: jnp.exp(x) * jnp.exp(y), X, Y)

    def same(new, t, ids):
        term = program.terms[t]
        return Input(term.dtype, 0, term.axes) if isinstance(term, Input) else None

    new, ids = program.rewritten(same)
    assert len(ids) == 5
    assert len(set(ids.values())) == len(new.terms) == 3
    np.testing.assert_allclose(evaluate(new, [X, Y])[0], np.exp(2 * X), rtol=1e-5)


def test_terms_may_be_left_out_and_go_into_a_given_program():
    program = loaded(lambda x, y: jnp.exp(x + y).sum(), X, Y)
    into = program.empty_like()
    extra = into.new_index("extra", 7)
    (total,) = program.roots()
    (exp,) = children(program.terms[total])

    def mean(new, t, ids):
        return Literal.of(2.5, program.terms[t].dtype) if t == total else None

    new, ids = program.rewritten(mean, [t for t in program.reachable() if t != exp], into)
    assert new is into
    assert exp not in ids
    assert new.indices[extra].extent == 7
    assert evaluate(new, [X, Y]) == [2.5]
