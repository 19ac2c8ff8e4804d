"""Options of the tests."""

import os

os.environ["EQSAT_MEM_PROFILES"] = "none"  # plans do not depend on what somebody calibrated here


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files of tests/codegen/golden anew")
