"""Options of the tests."""

import os

os.environ["EQSAT_MEM_PROFILES"] = "none"  # plans do not depend on what somebody calibrated here
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where the compiler for GPUs is installed, JAX complains of the GPU that is not there


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files of tests/codegen/golden anew")
