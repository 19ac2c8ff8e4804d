"""Passes have cards as rules have: options name them, accuracy leaves them out, and plans tell which of them changed a program."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.__main__ import main
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.rule_files import SOUNDNESS, load_rules
from eqsat_mem.errors import RuleError
from eqsat_mem.frontend.load import load
from eqsat_mem.passes import EVERY, FILE
from eqsat_mem.schedule.schedules import unscheduled
from tests.oracles.targets import CPU
from tests.tiers import tiered

PACKAGE = Path(eqsat_mem.__file__).parent
KIB = 2**10


def f32(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def nearest(x, y):
    return jnp.argmin(jnp.sum((x[:, None] - y[None]) ** 2, -1), -1)


def dropped(key):
    return jnp.sum(jax.random.uniform(key, (300, 400)) > 0.5)


def trace(x):
    return jnp.sum(jnp.diagonal(jnp.exp(x @ x.T)))


def labels(x, w, i):
    logits = x @ w.T
    return jnp.sum(jax.nn.logsumexp(logits, -1) - logits[jnp.arange(len(x)), i])


def chain(x, *factors):
    for factor in factors:
        x = x @ factor
    return x


def steps(x, v):
    """Rows that are normalised together, so that they are not computed in chunks."""
    rows = jnp.exp(x[:, :, None] * x[:, None])
    return lax.scan(lambda c, row: (jax.nn.softmax(c + jnp.tanh(row @ v)), None), jnp.zeros(300), rows)[0]


def descent(w, x):
    """A step of many updates, each of a dozen operations."""
    ws = list(w)

    def loss(ws):
        return sum(jnp.mean(jnp.sin(x[:, :, None] * w[:, None]) ** 2) for w in ws)

    update = lambda w, g: w - 0.1 * jnp.tanh(g) / (jnp.sqrt(g**2 + 1e-3) + jnp.abs(g)) - 0.01 * jnp.sign(w) * jnp.log1p(jnp.abs(w))  # noqa: E731
    return jax.tree.map(update, ws, jax.grad(loss)(ws))


def deep(ws, x):
    def loss(ws):
        h = x
        for w in ws:
            a = jnp.tanh((h - jnp.mean(h)) / jnp.std(h) @ w)
            h = h + a / (1.0 + jnp.abs(a)) * jnp.cos(a)
        return jnp.mean(h**2)

    return jax.value_and_grad(loss)(ws)


def tangents(x, w, v):
    """A tangent kernel: the rows of a Jacobian are gradients with respect to both layers, side by side."""
    h = jnp.tanh(x @ w)
    rows = jnp.concatenate([(x[:, :, None] * ((1 - h**2) * v)[:, None]).reshape(x.shape[0], -1), h], 1)
    return rows @ rows.T


def power(x, v):
    def loss(x):
        k = jnp.exp(-jnp.sum((x[:, None] - x) ** 2, -1))
        step = lambda v, _: (jnp.tanh(k @ v), None)  # noqa: E731
        return jnp.mean(lax.scan(step, v, None, length=4)[0] ** 2)

    return jax.value_and_grad(loss)(x)


def middle(x):
    return jnp.median(jnp.sum((x[:, None] - x[None]) ** 2, -1))


def variation(x):
    return jnp.mean(jnp.sqrt((x[1:, 1:] - x[:-1, 1:]) ** 2 + (x[1:, 1:] - x[1:, :-1]) ** 2 + 1e-6))


def counts(documents, words, table):
    return jnp.log1p(jnp.zeros((300, 400)).at[documents, words].add(1.0)) @ table


def overlaps(boxes):
    sides = jnp.minimum(boxes[:, None, 2:], boxes[None, :, 2:]) - jnp.maximum(boxes[:, None, :2], boxes[None, :, :2])
    areas, both = jnp.prod(boxes[:, 2:] - boxes[:, :2], 1), sides[..., 0] * sides[..., 1]
    return lax.top_k(both / (areas[:, None] + areas - both), 3)[0]


def swirling(x, q):
    def energy(x):
        d = x[:, None] - x
        return q @ (jnp.exp(-(d[..., 0] ** 2)) * jnp.cos(d[..., 1]) @ q)

    return jax.grad(energy)(x)


def one_by_one(queries, keys, rows):
    return lax.map(lambda query: jax.nn.softmax(keys @ query) @ rows, queries)


def linear_attention(queries, keys, rows):
    return jnp.einsum("td,tde->te", queries, jnp.cumsum(keys[:, :, None] * rows[:, None], 0))


def filtered(image, first, second):
    same = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    return same(jnp.tanh(same(image[None, :, :, None], first)), second)[0, :, :, 0]


PROGRAMS = {
    "search-by-folds": (nearest, [f32(900, 8), f32(800, 8)], 120 * KIB),
    "draws-by-position": (dropped, [jax.random.key(0)], 100 * KIB),
    "diagonal-by-mask": (trace, [f32(700, 8)], 400 * KIB),
    "rows-by-mask": (labels, [f32(600, 4), f32(500, 4), np.arange(600, dtype=np.int32) % 500], 400 * KIB),
    "equal-updates": (descent, [f32(8, 150, 20), f32(150, 20)], 300 * KIB),
    "elements-apart": (overlaps, [f32(500, 4)], 100 * KIB),
    "components-apart": (swirling, [f32(500, 2), f32(500)], 200 * KIB),
    "equal-blocks-as-loops": (deep, [f32(14, 32, 32), f32(500, 32)], 3 * 2**20),
    "sums-of-parts": (tangents, [f32(100, 30), f32(30, 40), f32(40)], 300 * KIB),
    "overlapping-tiles": (filtered, [f32(400, 100), f32(3, 3, 1, 8), f32(3, 3, 8, 1)], 900 * KIB),
    "shifts-by-position": (variation, [f32(400, 300)], 700 * KIB),
    "scatters-by-position": (counts, [np.arange(900, dtype=np.int32) * k % n for k, n in ((7, 300), (11, 400))] + [f32(400, 3)], 200 * KIB),
    "ranks-by-counting": (middle, [f32(300, 3)], 150 * KIB),
    "order-of-products": (chain, [f32(2, 300), *[f32(300, 301)[:, :300] for _ in range(11)], f32(300, 1)], 2**30),
    "prefix-sums-by-blocks": (linear_attention, [f32(600, 24), f32(600, 24), f32(600, 16)], 600 * KIB),
    "steps-at-once": (one_by_one, [f32(600, 24), f32(500, 24), f32(500, 16)], 600 * KIB),
    "slices-in-scans": (steps, [f32(400, 300), f32(300)], 4 * 2**20),
    "sums-of-steps": (power, [f32(500, 3), f32(500)], 500 * KIB),
}


def planned(name, **options):
    fun, args, limit = PROGRAMS[name]
    return eqsat_mem.optimize(fun, memory_limit=limit, verify=False, **options).plan(*args)


def test_every_pass_has_a_program():
    assert [known.name for known in EVERY] == list(PROGRAMS)


@pytest.mark.parametrize("known", EVERY, ids=lambda known: known.name)
def test_a_card_is_whole(known):
    assert known.sound in SOUNDNESS["all"]
    assert (PACKAGE / known.place).is_file()
    assert all((known.equation, known.why, known.memory))


@pytest.mark.parametrize(
    "name", tiered(PROGRAMS, [name for name in PROGRAMS if name not in ("equal-blocks-as-loops", "ranks-by-counting", "sums-of-steps")])
)
def test_a_pass_is_named_where_it_changed_the_program_and_left_out_by_its_name(name):
    fun, args, _ = PROGRAMS[name]
    plan = planned(name)
    assert name in plan.rules_fired
    want = fun(*args)
    for mine, theirs in zip(plan.function(*args), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=1e-3 * float(jnp.max(jnp.abs(theirs))))
    try:
        without = planned(name, without_rules=name)
    except eqsat_mem.MemoryLimitError:
        return
    assert name not in without.rules_fired
    assert without.source != plan.source
    for mine, theirs in zip(without.function(*args), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=1e-3 * float(jnp.max(jnp.abs(theirs))))


def names(**options):
    return {known.name for known in load_rules(**options).passes}


def test_options_name_passes_as_they_name_rules():
    every = {known.name for known in EVERY}
    assert names() == every
    assert names(without=(FILE,)) == set()
    assert names(only=(FILE,)) == every
    assert load_rules(only=(FILE,)).rules == ()
    assert names(only=("splitting", "order-of-products")) == {"order-of-products"}
    assert names(without=("order-of-products",)) == every - {"order-of-products"}
    with pytest.raises(RuleError, match="similar ones are 'order-of-products'"):
        load_rules(without=("order-of-product",))


def test_accuracy_leaves_out_passes_that_promise_less():
    for accuracy, allowed in SOUNDNESS.items():
        assert names(accuracy=accuracy) == {known.name for known in EVERY if known.sound in allowed}
    assert names(only=("order-of-products",), accuracy="bitwise") == {"order-of-products"}


def test_the_name_of_a_pass_is_taken(tmp_path):
    path = tmp_path / "mine.egg"
    path.write_text(';; a\n;; sound: real -- why\n;; memory: none\n(rewrite (Neg (Neg a)) a :ruleset simplify :name "order-of-products")')
    with pytest.raises(RuleError, match="another rule is named 'order-of-products'"):
        load_rules([path])


def test_rules_of_other_names_switch_no_pass():
    plan = planned("order-of-products", without_rules=("reassociate",))
    assert "order-of-products" in plan.rules_fired


@pytest.mark.slow
def test_an_explanation_names_the_passes_that_a_plan_needs():
    why = planned("search-by-folds").explain()
    (needed,) = (n for n in why.rules if n.rule.name == "search-by-folds")
    assert not needed.without.reached
    assert needed.matches > 0
    assert "search-by-folds [bitwise]: argmin_k a" in str(why)


def test_the_page_of_rules_lists_every_pass():
    text = (PACKAGE.parent / "rules" / "README.md").read_text().partition("## What is not a rule")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert [(row[0].strip("| `"), row[1]) for row in rows] == [(known.name, known.sound) for known in EVERY]


def test_bodies_without_a_plan_are_emitted_as_they_were_written():
    """Options may not allow passes, and nothing tells the emitter which they allow."""

    def function(x):
        return lax.fori_loop(0, 3, lambda _, total: total + jnp.take(x, jnp.argmin(x * total)), 0.0)

    x = f32(1000)
    written = emit(unscheduled(Extraction(load(jax.make_jaxpr(function)(x), ["x"])), CPU))
    assert "argmin" in written.source
    np.testing.assert_allclose(written.function(x)[0], function(x), rtol=1e-6)


def test_passes_are_listed_with_the_rules(capsys):
    assert main(["rules", "--only", FILE]) == 0
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [[c.name, c.sound, "pass"] for c in EVERY]
