"""Random programs on random meshes run on devices as they should lie."""

import jax
import pytest

from tests.oracles.meshes import failure
from tests.tiers import tiered


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("block", tiered(range(12), [0], []))
@pytest.mark.filterwarnings("ignore")
def test_plans_of_random_programs_run(block):
    for seed in range(6 * block, 6 * (block + 1)):
        assert (found := failure(seed, devices=True)) is None, found


@pytest.mark.parametrize(("first", "devices"), tiered([(18, False), *((k, k % 4 == 0) for k in range(300, 330, 6))], [(18, False)], []))
@pytest.mark.filterwarnings("ignore")
def test_plans_of_programs_with_odd_extents_run(first, devices):
    for seed in range(first, first + 6):
        assert (found := failure(seed, devices, odd=True)) is None, found


ON_DEVICES = (33, 3080, 11041)
ONCE_FAILED = (33, 1007, 1015, 1268, 2015, 3080, 7014, 10075, 11041, 500084)


@pytest.mark.parametrize("seed", tiered(ONCE_FAILED, [33, 3080, 7014, 11041, 500084], []))
@pytest.mark.filterwarnings("ignore")
def test_programs_that_once_failed(seed):
    """Shares laid out anew under other names; fewer elements in a share than are picked; shares along one of two mesh axes that deal out
    another index together; a result one axis of which is laid out anew beside another in shares; a value compared with its maximum, once
    computed in shares and once whole; places without values; one number that is added at places beyond the last; a roll of
    what does not depend on another of its axes."""
    assert (found := failure(seed, seed in ON_DEVICES)) is None, found
