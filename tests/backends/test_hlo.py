"""Compiled programs are read the same from XLA's message and from its text, and what is not read is told."""

from __future__ import annotations

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from eqsat_mem.backends import hlo
from eqsat_mem.backends.hlo import UNREAD, from_message, from_text, message_of, read

WNC = ("WNC", "WIO", "WNC")


def everything(x):
    """Calls, loops, branches, tuples, constants, custom calls, and operations with axes."""
    looped = lax.fori_loop(0, 3, lambda t, c: jnp.tanh(c @ x) + t, x)
    chosen = lax.cond(x[0, 0] > 0, jnp.sin, lambda x: jnp.sort(x, 0), x)
    grouped = x.reshape(3, 3, 4)
    table = jnp.asarray([[1.0, 2.0], [3.0, -jnp.inf]]) * x[:2, :2]
    return (
        looped,
        chosen,
        table,
        jnp.linalg.eigh(x),
        jnp.argmax(x, 1),
        lax.top_k(x, 3),
        jnp.fft.fft(x),
        x.at[3].set(1.0),
        jnp.einsum("bij,bkj->bik", x.reshape(3, 2, 6), x.reshape(3, 2, 6)),
        x.astype(jnp.bfloat16) * jax.random.normal(jax.random.key(0), (6,), jnp.bfloat16),
        lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
        lax.conv_general_dilated(grouped, x[:2, :4].reshape(2, 2, 2), (1,), [(-1, 2)], feature_group_count=2, dimension_numbers=WNC),
    )


@pytest.fixture(scope="module")
def compiled():
    return jax.jit(everything).lower(jax.ShapeDtypeStruct((6, 6), jnp.float32)).compile()


def by_name(module):
    """The instructions; configurations that are JSON are compared as such."""

    def comparable(name, value):
        if name == "backend_config" and value.startswith('{"'):
            return json.loads(value)
        return value

    return {
        (i.computation, i.name): (
            *(i.op, i.type, i.shape, i.operands, sorted(i.called), i.is_root),
            {name: comparable(name, value) for name, value in i.attributes.items()},
        )
        for i in module.instructions
    }


def test_both_sources_tell_the_same(compiled):
    structured, printed = from_message(message_of(compiled)), from_text(compiled.as_text())
    assert structured.unread == printed.unread == ()
    assert by_name(structured) == by_name(printed)
    assert {"dot", "reduce", "while", "fusion", "custom-call"} <= {i.op for i in structured.instructions}
    assert {"f32", "bf16", "s32", "pred", "c64", "tuple"} <= {i.type for i in structured.instructions}
    attributes = {name for i in structured.instructions for name in i.attributes}
    if jax.default_backend() == "cpu":
        assert attributes == hlo.ATTRIBUTES


def test_operands_and_computations_can_be_followed(compiled):
    module = read(compiled)
    for body in module.computations.values():
        assert sum(i.is_root for i in body.values()) == 1
        assert all(name in body for i in body.values() for name in i.operands)
        assert all(name in module.computations for i in body.values() for name in i.called)


def test_what_only_closed_instructions_call_is_left_out(compiled):
    whole, asked = read(compiled), []

    def is_closed(instruction):
        asked.append(instruction.name)
        return instruction.op == "fusion"

    module = read(compiled, is_closed)
    called = {name: {i.op for i in whole.instructions if name in i.called} for name in whole.computations}
    inside = {name for name, ops in called.items() if ops == {"fusion"}}
    assert inside
    while further := {name for name in whole.computations if _is_called_within(whole, name, inside)} - inside:
        inside |= further
    assert set(module.computations) == set(whole.computations) - inside
    assert module.instructions == tuple(i for i in whole.instructions if i.computation not in inside)
    assert module.unread == ()
    assert set(asked) == {i.name for i in module.instructions}


def _is_called_within(module, name, computations):
    callers = {i.computation for i in module.instructions if name in i.called}
    return bool(callers) and callers <= computations


def test_a_square_of_a_matrix():
    compiled = jax.jit(lambda x: lax.dot(x, x)).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32)).compile()
    (dot,) = (i for i in read(compiled).instructions if i.op == "dot")
    assert (dot.shape, dot.axes("lhs_contracting_dims"), dot.axes("rhs_contracting_dims")) == ((4, 4), (1,), (0,))
    assert dot.nbytes == 16 * hlo.itemsize(dot.type)
    assert dot.operands[0] == dot.operands[1]
    assert dot.axes("lhs_batch_dims") == ()
    assert dot.text("custom_call_target") == ""


# --- what is not there, or not read ----------------------------------------------------------------------


class Printed:
    """A program of which nothing but the text is to be had."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


def test_without_a_message_the_text_is_read(compiled):
    module = read(Printed(compiled.as_text()))
    assert module == from_text(compiled.as_text())
    assert by_name(module) == by_name(read(compiled))


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff", b"\x1a\xff\x01no such length", b"\x1a\x02\x12\x00", b"no message at all"])
def test_a_damaged_message_is_unread_and_the_text_counts(compiled, data, monkeypatch):
    assert from_message(data).instructions == ()
    assert from_message(data).unread
    monkeypatch.setattr(hlo, "message_of", lambda compiled: data)
    assert read(compiled) == from_text(compiled.as_text())


def test_a_message_that_is_cut_off_is_not_half_a_program(compiled):
    whole = message_of(compiled)
    assert from_message(whole[: len(whole) // 2]).instructions == ()


def test_a_program_without_any_source_is_unread():
    assert read(SimpleNamespace()).unread == ("the program as a whole",)
    assert read(Printed(None)).unread == ("the program as a whole",)
    assert read(Printed("nothing that is HLO")).unread


def test_a_type_of_the_future_is_unread(compiled, monkeypatch):
    known = from_message(message_of(compiled))
    monkeypatch.setattr(hlo, "TYPES", {number: name for number, name in hlo.TYPES.items() if name != "bf16"})
    module = from_message(message_of(compiled))
    lost = {i.name for i in known.instructions if i.type == "bf16"}
    assert set(module.unread) == lost == {i.name for i in module.instructions if i.op == UNREAD}
    assert read(compiled).unread == (), "the text tells"


TEXT = """HloModule m

%body (p: f32[3]) -> f32[3] {
  %p = f32[3]{0} parameter(0)
  this line is no instruction
  %strange = f32[3]{0} without brackets
  ROOT %sum = f32[3]{0} add(%p, %gone)
}
"""


def test_lines_that_are_no_instructions_are_unread():
    module = from_text(TEXT)
    assert module.unread == ("this line is no instruction", "%strange = f32[3]{0} without brackets", "gone")
    body = module.computations["body"]
    assert [body[name].op for name in ("p", "sum", "gone", "strange")] == ["parameter", "add", UNREAD, UNREAD]
