"""Options of the tests, and what several of them set."""

import gc
import os

os.environ["EQSAT_MEM_PROFILES"] = "none"  # plans do not depend on what somebody calibrated here
os.environ["EQSAT_MEM_MAX_PLANNING_SECONDS"] = "3600"  # nor on how busy the machine is
os.environ["EQSAT_MEM_CACHE_DIR"] = "none"  # nor on what was planned before
os.environ.setdefault("EQSAT_MEM_DEBUG", "0")  # no line of progress among what commands write
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where the compiler for GPUs is installed, JAX complains of the GPU that is not there
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")  # which takes longer than what some tests try in vain

import jax
import pytest

gc.set_threshold(50_000, 50, 100)  # a twentieth of the time of tests is that of looking through what JAX and hypothesis keep


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files of tests/codegen/golden anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What is thorough is slow, too. The tests that take minutes come first: at the end one worker would run them alone."""
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.name not in ("test_several_devices.py", "test_several_processes.py", "test_site.py"))


@pytest.fixture
def quick_compilation():
    """LLVM does not optimise: for tests whose programs run for microseconds and are judged by their values."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def filtered_tracebacks():
    """Tracebacks as users see them; for the other tests the filter is off."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)
