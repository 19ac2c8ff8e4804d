"""Random programs: every plan of every one computes what the program computes, with the same shapes and dtypes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.search import straight
from tests.oracles import stepwise
from tests.oracles.differential import Case, Mismatch, case, check_plan, compare, extractions, plans, random_schedule
from tests.oracles.execution import execute
from tests.oracles.fuzz import failure
from tests.oracles.peak import brute_force_peak
from tests.oracles.programs import sample
from tests.oracles.targets import CPU, TINY
from tests.tiers import tiered

BLOCKS, SEEDS = 12, 5


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("block", tiered(range(BLOCKS), [7], [0]))
@pytest.mark.filterwarnings("ignore")  # random programs warn of casts and overflows of their own
def test_plans_of_random_programs_compute_the_same(block):
    for seed in range(SEEDS * block, SEEDS * (block + 1)):
        assert (found := failure(seed, thorough=False)) is None, found


WRONG_ONCE = {
    "a value that a move ties is read whole in a loop that slices it": (71900047, "as written, random tree 0, values computed again"),
    "sums of bfloat16 of the program as written are rounded as rarely as those of plans": (71900034, "as written, random tree 0"),
}


@pytest.mark.parametrize(("seed", "word"), WRONG_ONCE.values(), ids=WRONG_ONCE)
@pytest.mark.filterwarnings("ignore")
def test_plans_that_were_wrong_once(seed, word):
    known = case(sample(seed))
    check_plan(known, next(made for name, made in plans(known, seed) if name == word))


@pytest.mark.parametrize("block", tiered(range(8), [], [0]))
@pytest.mark.filterwarnings("ignore")
def test_hundreds_of_programs_their_gradients_and_their_batched_forms(block):
    for seed in range(1000 + 25 * block, 1000 + 25 * (block + 1)):
        assert (found := failure(seed, few=True)) is None, found


@pytest.mark.usefixtures("compiled_as_everybodys")
@pytest.mark.parametrize("seed", tiered(range(3), [0]))
@pytest.mark.filterwarnings("ignore")
def test_compiled_plans_compute_the_same(seed):
    known = case(sample(seed))
    for word, made in plans(known, seed, thorough=False):
        if "random tree" in word:
            check_plan(known, made, jit=True)


@pytest.mark.parametrize("seed", tiered(range(204, 212), [207, 208, 209, 210]))
@pytest.mark.filterwarnings("ignore")
def test_loop_trees_mean_the_program_and_hold_what_is_predicted(seed):
    known = case(sample(seed))
    rng = random.Random(seed)
    for _, ex in extractions(load(known.jaxpr, known.names), seed):
        made, memory = random_schedule(ex, rng), Memory(ex, CPU.inside())
        compare(known, execute(made, known.args), "the loop tree itself")
        assert memory.peak(made.seq, memory.full_extents(), made.chunks).nbytes == brute_force_peak(made)


POINTS = np.random.default_rng(0).standard_normal((5, 3))


def case_of(function: Callable[..., Any], *args: Any) -> Case:
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(function(*a)))(*args)
    return Case(jaxpr, [*args], stepwise.run(jaxpr, args), [f"x{k}" for k in range(len(args))])


def squared_norms(x: Any) -> Any:
    return jnp.sum(jnp.linalg.norm(x[:, None] - x[None], axis=-1) ** 2)


def distances(x: Any) -> Any:
    return jnp.sum(jnp.linalg.norm(x[:, None] - x[None], axis=-1))


def about_zero(x: Any) -> Any:
    return jnp.sum(jnp.sqrt(jnp.abs(x - x)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_where_a_distance_is_zero_its_derivative_may_be_the_number_that_it_is_about_zero(dtype):
    points = POINTS.astype(dtype)
    known = case_of(jax.grad(squared_norms), points)
    derivative = 4 * (len(points) * points - np.sum(points, 0))
    assert np.all(np.isnan(known.want[0]))
    compare(known, known.want, "")
    compare(known, [derivative.astype(dtype)], "")
    for wrong in (1.1 * derivative, np.where(derivative > 1, np.nan, -derivative), np.where(derivative > 1, np.inf, derivative)):
        with pytest.raises(Mismatch, match="result 0 differs"):
            compare(known, [wrong.astype(dtype)], "")


def test_a_number_that_depends_on_the_rounding_of_the_zero_may_be_any():
    known = case_of(lambda x: jax.grad(distances)(x)[0] + jnp.linalg.norm(x - x) ** -0.5, POINTS)
    assert np.all(np.isnan(known.want[0]))
    for some in (17.0, -1e6):
        compare(known, [np.full_like(known.want[0], some)], "")


@pytest.mark.parametrize(
    ("function", "points"),
    [
        (lambda x: jax.grad(squared_norms)(x) + (x - x) / (x - x), POINTS),  # not a number for another reason as well
        (lambda x: (x - x) / (x - x) + squared_norms(x), POINTS),  # a distance of zero whose root has no derivative here
        (lambda x: jax.grad(squared_norms)(x) + jnp.log(-jnp.abs(x)), POINTS),
        (jax.grad(about_zero), POINTS),  # a root of something else
        pytest.param(jax.grad(squared_norms), POINTS.astype("bfloat16"), marks=pytest.mark.slow),  # whose distances no rule expands
    ],
)
def test_a_number_in_the_place_of_any_other_nan_is_wrong(function, points):
    known = case_of(function, points)
    assert np.all(np.isnan(known.want[0]))
    compare(known, known.want, "")
    with pytest.raises(Mismatch, match="result 0 differs"):
        compare(known, [np.asarray(4 * (len(points) * points - np.sum(points, 0)), points.dtype)], "")


def test_nan_in_the_place_of_a_number_is_wrong():
    known = case_of(jax.grad(lambda x: squared_norms(x[:1]) + jnp.sum(x[1:])), POINTS)
    assert np.isnan(known.want[0]).tolist() == [[True] * 3] + [[False] * 3] * 4
    with pytest.raises(Mismatch, match="result 0 differs"):
        compare(known, [np.full_like(known.want[0], np.nan)], "")


def test_a_rule_that_makes_numbers_of_nan_is_caught_beside_a_derivative_of_a_norm(tmp_path):
    text = """
    ;; a / a = 1
    ;; sound:  real -- not of zero
    ;; memory: none
    (rule ((= e (Div a a)) (= f (free a)) (= f 0) (= t (dtype a))) ((union e (Lit 1.0 t))) :ruleset simplify :name "quotient-with-itself")
    """
    (tmp_path / "own.egg").write_text(text)
    known = case_of(lambda x, z: (jax.grad(squared_norms)(x), x * (z / z)), POINTS, np.asarray(0.0))
    program = load(known.jaxpr, known.names)
    for rules, is_wrong in ((load_rules(), False), (load_rules([tmp_path / "own.egg"]), True)):
        made = straight(dict(extractions(program, 0, rules))["fastest"], TINY)
        if is_wrong:
            with pytest.raises(Mismatch, match="result 1 differs"):
                check_plan(known, made)
        else:
            check_plan(known, made)
