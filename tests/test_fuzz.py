"""Random programs: every plan of every one computes what the program computes, with the same shapes and dtypes."""

from __future__ import annotations

import random
from collections.abc import Iterator

import jax
import pytest

from eqsat_mem.frontend.load import load
from eqsat_mem.schedule.memory import Memory
from tests.oracles.differential import case, check_plan, compare, extractions, plans, random_schedule
from tests.oracles.execution import execute
from tests.oracles.fuzz import failure
from tests.oracles.peak import brute_force_peak
from tests.oracles.programs import sample
from tests.oracles.targets import CPU
from tests.tiers import tiered

BLOCKS, SEEDS = 12, 5


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("block", tiered(range(BLOCKS), [7]))
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


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("block", range(8))
@pytest.mark.filterwarnings("ignore")
def test_hundreds_of_programs_their_gradients_and_their_batched_forms(block):
    for seed in range(1000 + 25 * block, 1000 + 25 * (block + 1)):
        assert (found := failure(seed, few=True)) is None, found


@pytest.mark.parametrize("seed", tiered(range(3), [0]))
@pytest.mark.filterwarnings("ignore")
def test_compiled_plans_compute_the_same(seed):
    known = case(sample(seed))
    for word, made in plans(known, seed, thorough=False):
        if "random tree" in word:
            check_plan(known, made, jit=True)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("seed", tiered(range(204, 212), [207, 208, 209, 210]))
@pytest.mark.filterwarnings("ignore")
def test_loop_trees_mean_the_program_and_hold_what_is_predicted(seed):
    known = case(sample(seed))
    rng = random.Random(seed)
    for _, ex in extractions(load(known.jaxpr, known.names), seed):
        made, memory = random_schedule(ex, rng), Memory(ex, CPU)
        compare(known, execute(made, known.args), "the loop tree itself")
        assert memory.peak(made.seq, memory.full_extents(), made.chunks).nbytes == brute_force_peak(made)
