"""Options of the tests."""

import os
from collections.abc import Iterator

import jax
import pytest

os.environ["EQSAT_MEM_PROFILES"] = "none"  # plans do not depend on what somebody calibrated here


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files of tests/golden anew")


@pytest.fixture
def unoptimised() -> Iterator[None]:
    """Programs that run equation by equation compile single operations, which need no optimising."""
    yield from _with_most_optimisations(False)


@pytest.fixture
def optimised() -> Iterator[None]:
    """Machine code as users have it, for tests of what it computes bit by bit: ``make test`` does without optimising it."""
    yield from _with_most_optimisations(True)


def _with_most_optimisations(on: bool) -> Iterator[None]:
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", not on)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
