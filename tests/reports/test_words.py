"""Names of axes and values in the terms of a JAX user, and lists that add up."""

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem import optimize
from eqsat_mem.events import Clock
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Input, Map, Program
from eqsat_mem.ir.loop_tree import Loop, Seq
from eqsat_mem.ir.program import Buffer, Output
from eqsat_mem.ir.source import Source
from eqsat_mem.reports.words import axis_names, describe, pieces, spans


def program(*inputs):
    """A program of arguments ``(name, axes)`` over indices of extents 2, 3, 4, ..., whose result has the axes of all."""
    p = Program()
    count = 1 + max((i for _, axes in inputs for axis in axes for i in axis), default=0)
    for k in range(count):
        p.new_index("ijklmn"[k], k + 2)
    for slot, (name, axes) in enumerate(inputs):
        p.inputs.append(Buffer(name, p.shape(axes), jnp.float32))
        p.add(Input(jnp.dtype("float32"), slot, axes))
    return p


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (((0,),), "elements of x"),
        (((0,), (1,)), "rows of x"),
        (((1,), (0,)), "columns of x"),
        (((1,), (2,), (0,)), "axis 2 of x"),
        (((1,), (0, 2)), "part of columns of x"),
    ],
)
def test_an_index_is_named_after_the_axis_of_an_argument(axes, words):
    assert axis_names(program(("x", axes)))[0] == words


def test_an_axis_of_its_own_comes_before_a_part():
    assert axis_names(program(("x", ((0, 1),)), ("y", ((1,), (0,)))))[0] == "columns of y"


def test_an_index_of_results_only_and_one_of_neither():
    p = program(("x", ((0,),)))
    p.new_index("j", 7)
    p.new_index("k", 8)
    t = p.add(Map(jnp.dtype("float32"), "exp", (0,)))
    p.outputs.append(Output(t, ((1,), (0,))))
    assert axis_names(p) == {0: "elements of x", 1: "rows of the result"}
    assert describe(p, t) == "f32[2] exp"
    assert describe(p, 0, [1, 7, 8]) == "f32[1] argument x"


def test_what_is_cut_from_an_axis_and_laid_out_anew_has_its_name():
    def windows(x, y):
        scores = x[:, :-1].T @ y
        return jnp.sum(jax.nn.softmax(scores, -1) @ jax.nn.softmax(scores, -1).T)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 1025), (6, 9))]
    loaded = load(jax.make_jaxpr(windows)(*shapes), ["x", "y"])
    names = axis_names(loaded)
    found = {names.get(i) for i, index in enumerate(loaded.indices) if index.extent == 1024}
    assert found == {"columns of x"}


def attended(x, w):
    weights = jax.nn.softmax((x @ w) @ x.T, axis=-1)
    return x + weights @ x


def layers(x, ws):
    return jax.lax.scan(lambda h, w: (attended(h, w), None), x, ws)[0]


def test_what_a_body_holds_and_loops_over_is_told():
    shapes = jax.ShapeDtypeStruct((512, 16), jnp.float32), jax.ShapeDtypeStruct((3, 16, 16), jnp.float32)
    plan = optimize(layers, memory_limit="400KiB", verify=False).plan(*shapes)
    inside = [loop for loop in plan.loops if loop.inside]
    assert inside
    assert all(loop.inside.startswith("scan at test_words.py:") for loop in inside)
    assert {loop.axis for loop in inside} <= {"rows of x", "axis 1 of ws", "axis 2 of ws", "columns of x"}
    assert any(kept.startswith("1 MiB f32[512,512] ") for loop in inside for kept in loop.never_whole)
    assert plan.peak_tensors[0][0].startswith("in scan: f32[")
    assert sum(nbytes for _, nbytes, _ in plan.peak_tensors) <= plan.peak_bytes
    assert sum(nbytes for _, nbytes, _ in plan.peak_tensors) > 0.8 * plan.peak_bytes


def test_an_index_of_no_argument_is_named_after_the_largest_value_cut():
    def f(x):
        points = jnp.sin(jnp.arange(2_000.0) * x[0])
        return jnp.sum(jnp.exp(points[:, None] * points[None]) @ points)

    plan = optimize(f, memory_limit="100KiB", verify=False).plan(jax.ShapeDtypeStruct((2_001,), jnp.float32))
    assert {loop.axis for loop in plan.loops} <= {"rows of f32[2000,2000]", "columns of f32[2000,2000]"}
    outer = plan.loops[0].never_whole
    assert outer[0].startswith("15.26 MiB f32[2000,2000] ")
    assert plan.loops[0].lines.startswith("test_words.py:")
    assert plan.loops[0].lines.endswith(" (f)")
    assert " at test_words.py:" in outer[0]
    assert not [value for loop in plan.loops if loop.depth for value in loop.never_whole if value in outer]


def test_lines_are_told_by_functions_and_passes():
    p = program(("x", ((0,), (1,))), ("y", ((1,),)))
    forward, backward = (Source("/a/model.py", line, "loss", backward=line == 9) for line in (7, 9))
    terms = [p.add(Map(jnp.dtype("float32"), op, (arg,))) for op, arg in (("exp", 0), ("sin", 0), ("cos", 1), ("tanh", 1), ("log", 1))]
    for t, source in zip(terms, (forward, backward, Source("/a/layers.py", 3, "norm"), Source("/b/more.py", 1, "g"))):
        p.source[t] = source
    assert spans(p, terms[:1]) == "model.py:7 (loss)"
    assert spans(p, terms[1:2]) == "model.py:9 (loss), backward"
    assert spans(p, terms[:3]) == "model.py:7-9 (loss) and layers.py:3 (norm), forward and backward"
    assert spans(p, terms).startswith("model.py:7-9 (loss) and ")
    assert spans(p, terms).endswith(" and 1 more, forward and backward")
    assert spans(p, terms[4:]) == ""


def test_blocks_that_became_a_loop_are_told_with_their_line():
    source = Source("/a/model.py", 7, "block", blocks=4)
    assert (str(source), source.to(9)) == ("model.py:7 (block, 4 equal blocks)", "model.py:7-9 (block, 4 equal blocks)")


def test_what_is_whole_elsewhere_is_no_piece():
    p = program(("x", ((0,), (1,))))
    exp, sin = (p.add(Map(jnp.dtype("float32"), op, (a,))) for op, a in (("exp", 0), ("sin", 1)))
    cut = Loop(0, Seq((exp, sin), frozenset({sin}), frozenset()), (), (sin,))
    assert pieces(p, Seq((cut,), frozenset({sin}), frozenset()), cut) == [exp]
    assert pieces(p, Seq((exp, cut), frozenset({sin}), frozenset()), cut) == []


def test_a_line_in_a_package_is_told_beside_the_users():
    def user(x):
        return jax.scipy.special.logsumexp(jax.tree.map(jnp.exp, [x])[0])

    plan = optimize(user, memory_limit="1GiB", verify=False).plan(jax.ShapeDtypeStruct((64,), jnp.float32))
    places = {str(source) for source in plan.program.source.values()}
    assert places
    assert all(place.startswith("test_words.py:") and "(test_a_line" not in place for place in places)


def test_stages_add_up():
    times = iter([0.0, 1.0, 4.0, 10.0])
    clock = Clock(now=lambda: next(times))
    with clock("outer"), clock("inner"):
        pass
    assert clock.seconds == {"inner": 3.0, "outer": 7.0}


def test_what_a_scan_keeps_has_the_operation_and_line_of_its_body():
    def step(carry, x):
        squashed = jax.jit(jnp.tanh)(x @ carry)
        return carry + 1, (squashed, jnp.exp(x))

    def f(carry, xs):
        return jax.lax.scan(step, carry, xs)

    p = load(jax.make_jaxpr(f)(jnp.ones((3, 3)), jnp.ones((5, 4, 3))), ["carry", "xs"])
    told = [(describe(p, o.term), p.source[o.term].line - f.__code__.co_firstlineno) for o in p.outputs]
    assert told == [
        ("f32[3,3] scan", 1),
        ("f32[5,4,3] tanh, kept by scan", -3),
        ("f32[5,4,3] exp, kept by scan", -2),
    ]


def test_what_several_loops_compute_is_told():
    def softmax(q, k, v):
        return jax.nn.softmax(q @ k.T, -1) @ v

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in [(500, 8), (4000, 8), (4000, 8)]]
    plan = optimize(jax.grad(lambda *a: jnp.sum(softmax(*a) ** 2), (0, 1, 2)), memory_limit="1.5MiB").plan(*args)
    assert plan.computed_again[0].startswith("7.63 MiB f32[500,4000] ")
    assert f"      computed again rather than kept: {plan.computed_again[0]}" in str(plan)
    assert optimize(softmax, memory_limit="8GiB").plan(*args).computed_again == []


@pytest.mark.parametrize(("given", "words"), [(True, "copies of arguments, side by side"), (False, "concatenate")])
def test_arguments_that_are_copied_to_lie_side_by_side_are_told_so(given, words):
    def stacked(*ws):
        return jnp.concatenate([w[None] if given else jnp.sin(w)[None] for w in ws])

    jaxpr = jax.make_jaxpr(stacked)(*[jax.ShapeDtypeStruct((3, 4), jnp.float32)] * 5)
    program = load(jaxpr, "abcde")
    assert describe(program, program.source_of(program.outputs[0].term)) == f"f32[5,3,4] {words}"
