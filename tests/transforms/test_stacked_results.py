"""What is computed from stacked results of a scan step by step is computed by the scan, and stacked in their place where it is smaller."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.egraph.extract import original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.testing import same_values
from eqsat_mem.transforms.control_flow import repeats
from eqsat_mem.transforms.scan_analysis import Stage, Stages
from eqsat_mem.transforms.scan_rewrite import forms
from tests.tiers import tiered

RULES = load_rules()
STEPS, ROWS, COLUMNS = 7, 6, 5


def values(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def program_of(function, args):
    return load(jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*args), [f"x{k}" for k in range(len(args))])


def stacked_bytes(program):
    """Bytes of all that scans of a program stack."""
    return sum(program.nbytes(t) for scan in repeats(program) if scan.call.prim.name == "scan" for _, t in scan.stacked())


def rotated(h, x, w):
    return 0.9 * h + 0.1 * jnp.sin(w * h + x)


# --- programs drawn at random -------------------------------------------------------------------------


class Drawn:
    """A scan, or a map, and functions of what it stacks that leave a few numbers of each step."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reverse, self.is_map, self.summed = self.rng.random(3) < (0.3, 0.3, 0.25)
        self.chain = [int(n) for n in self.rng.integers(0, 2**31, self.rng.integers(0, 5))]
        self.end = int(self.rng.integers(0, 2**31))

    def __call__(self, h, w, xs):
        def step(h, x):
            new = rotated(h, x, w)
            return new, (jnp.cos(new), new * x)

        if self.is_map:
            stacks = lax.map(lambda x: step(h, x)[1], xs)
        else:
            stacks = lax.scan(step, h, xs, reverse=bool(self.reverse))[1]
        y = stacks[0]
        for seed in self.chain:
            y = self.changed(np.random.default_rng(seed), y, stacks[1], w, xs)
        y = self.ended(np.random.default_rng(self.end), y)
        return jax.tree.map(lambda a: a.sum(0), y) if self.summed else y

    def changed(self, rng, y, other, w, xs):
        along = (slice(None),) + (None,) * (y.ndim - 1)
        whole = y.ndim == 3
        ways = [
            lambda: jnp.exp(-(y**2)),
            lambda: jnp.sqrt(jnp.abs(y) + 1),
            lambda: y * xs[along],
            lambda: y + jnp.arange(STEPS, dtype=y.dtype)[along],
            lambda: y * w[rng.integers(ROWS), rng.integers(COLUMNS)],
            lambda: jnp.swapaxes(y, -1, -2) if whole else y - 1,
            lambda: y + other if y.shape == other.shape else y.astype(jnp.bfloat16).astype(y.dtype),
            lambda: jnp.einsum("tab,cd->tabcd"[: 7 if whole else 3], y, w) if y.ndim == 9 else y * 2,
            lambda: jnp.einsum("tab,ab->ta", y, w) if y.shape[1:] == w.shape else y / 3,
            lambda: jnp.einsum("tab,cb->tac", y, w) if y.shape[1:] == w.shape else -y,
            lambda: y.max(-1) if whole else jnp.tanh(y),
            lambda: y.mean(1, keepdims=True) if whole else y.mean(1, keepdims=True) + y,
        ]
        return ways[rng.integers(len(ways))]()

    def ended(self, rng, y):
        axes = tuple(range(1, y.ndim))
        ways = [
            lambda: y.mean(axes),
            lambda: jnp.sqrt((y**2).sum(axes)),
            lambda: y.max(axes),
            lambda: lax.top_k(y.reshape(STEPS, -1), 1)[0],
            lambda: (y.min(axes), y.sum(axes)),
            lambda: jnp.argmax(y.reshape(STEPS, -1), 1).astype(jnp.float32),
        ]
        return ways[rng.integers(len(ways))]()


@pytest.mark.parametrize("seed", tiered(range(80), range(10), range(10, 30)))
def test_no_stack_is_left_of_what_is_reduced_step_by_step(seed):
    function, args = Drawn(seed), values((ROWS, COLUMNS), (ROWS, COLUMNS), (STEPS,), seed=seed)
    program = program_of(function, args)
    made = list(forms(original(program, RULES), RULES))
    assert made
    assert stacked_bytes(program) >= 4 * STEPS * ROWS * COLUMNS
    for form in made:
        comparison = same_values(function_of(program), function_of(form), args, tolerance=2e-4)
        assert comparison.same, comparison
    assert stacked_bytes(made[0]) <= stacked_bytes(program) / 2


def function_of(program):
    return lambda *args: list(evaluate(program, args))


# --- what moves, and what stays -----------------------------------------------------------------------


def trajectory(h, w, xs):
    return lax.scan(lambda h, x: (rotated(h, x, w), h), h, xs)[1]


def moved(function, stage=Stage.FUSE):
    """How many values are stacked in place of results."""
    return len(Stages(original(program_of(function, values((ROWS, COLUMNS), (ROWS, COLUMNS), (STEPS,))), RULES), stage).reduced)


STAYS = {
    "a result that is returned too": lambda *a: (lambda ys: (ys.mean((1, 2)), ys))(trajectory(*a)),
    "an elementwise function, which is as large": lambda *a: jnp.exp(trajectory(*a)),
    "what needs all steps at once": lambda *a: jnp.sort(trajectory(*a), 0).mean((1, 2)),
    "a deviation from the mean over steps": lambda *a: ((trajectory(*a) - trajectory(*a).mean(0)) ** 2).sum((1, 2)),
    "a product with what the scan ends with": lambda h, w, xs: (lambda end, ys: (ys * end).sum((1, 2)))(
        *lax.scan(lambda h, x: (rotated(h, x, w), h), h, xs)
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_must_stay_stacked(name):
    assert moved(STAYS[name]) == 0


def test_what_moves():
    assert moved(lambda *a: trajectory(*a).mean((1, 2))) == 1
    assert moved(lambda *a: trajectory(*a).mean((1, 2)), Stage.WRITTEN) == 0
    assert moved(lambda *a: lax.top_k(trajectory(*a).reshape(STEPS, -1), 2)) == 2
    assert moved(lambda h, w, xs: jnp.einsum("tij,ij->t", trajectory(h, w, xs), w)) == 1


def test_a_chain_of_scans_each_keeps_what_is_its_own():
    def chained(h, w, xs):
        first = trajectory(h, w, xs)
        second = lax.scan(lambda c, y: (c + y, c * y), h, first)[1]
        return (first * second).sum((1, 2)), second.max((1, 2))

    args = values((ROWS, COLUMNS), (ROWS, COLUMNS), (STEPS,))
    program = program_of(chained, args)
    made = list(forms(original(program, RULES), RULES))
    for form in made:
        assert same_values(function_of(program), function_of(form), args, tolerance=2e-4).same
    assert stacked_bytes(made[0]) < 0.6 * stacked_bytes(program)  # the first scan's results, which the second reads


def test_norms_of_steps_move_where_their_gradient_runs_the_steps_again_from_checkpoints():
    def norms(h, w, xs):
        return jnp.sqrt((trajectory(h, w, xs) ** 2).sum((1, 2)))

    def function(h, w, xs):
        value, pull = jax.vjp(norms, h, w, xs)
        return value, *pull(jnp.cos(value))

    args = values((ROWS, COLUMNS), (ROWS, COLUMNS), (23,))
    program = program_of(function, args)
    made = list(forms(original(program, RULES), RULES))
    assert len(made) >= 3
    for form in made:
        comparison = same_values(function_of(program), function_of(form), args, tolerance=2e-4)
        assert comparison.same, comparison
    assert stacked_bytes(made[-1]) < 1.5 * 23 * args[0].nbytes  # some JAX stacks three values of each step, some two


def test_bitwise_accuracy_moves_what_keeps_its_bits():
    args = values((ROWS, COLUMNS), (ROWS, COLUMNS), (STEPS,))
    rules = load_rules(accuracy="bitwise")
    for function, count in ((lambda *a: trajectory(*a).max((1, 2)), 1), (lambda *a: jnp.einsum("tij,ij->t", trajectory(*a), a[1]), 0)):
        assert len(Stages(original(program_of(function, args), rules), Stage.FUSE).reduced) == count


@pytest.mark.parametrize("name", ["mean", "norm of a map"])
def test_a_plan_holds_what_is_left(name):
    h, w, xs = values((200, 200), (200, 200), (60,))
    function = {
        "mean": lambda h, w, xs: trajectory(h, w, xs).mean(axis=(1, 2)),
        "norm of a map": lambda h, w, xs: jnp.sqrt((lax.map(lambda x: jnp.exp(jnp.sin(x * w) * h), xs) ** 2).sum((1, 2))),
    }[name]
    optimised = eqsat_mem.optimize(function, memory_limit="1MB")
    assert optimised.plan(h, w, xs).compiled_peak_bytes <= 1e6 < h.nbytes * 60 / 9
    comparison = same_values(function, optimised, (h, w, xs))
    assert comparison.same, comparison
