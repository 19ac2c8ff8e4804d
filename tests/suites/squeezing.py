"""A plugin for pytest in the processes of ``python -m tests.suites``: it chooses tests, notes how they end, and squeezes functions.

Under ``eqsat-mem run`` each function that a test compiles gets a limit of its own: its arguments, its outputs and 25 to 60 % of what its
equations make, so that it is planned. It stands alone, because suites have packages of the name ``tests`` too.

Variables of the environment: ``SUITES_OUTCOMES`` is the file of outcomes, a line of JSON for each test; ``SUITES_SAMPLE`` the share of the
tests that are run, ``SUITES_SEED`` which ones; ``SUITES_SECONDS`` the seconds of the processor that it may take.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from dataclasses import replace

import pytest

SHARES = 0.25, 0.60
signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background inherit that interrupts are ignored


class TooLong(BaseException):  # it is no error, so that no test takes it for one
    """A test took longer than it may."""


def drawn(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return zlib.crc32(f"{os.environ['SUITES_SEED']} {text}".encode()) / 2**32


def pytest_collection_modifyitems(config, items):
    chosen = [item for item in items if drawn(item.nodeid) < float(os.environ["SUITES_SAMPLE"])]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


def pytest_collection_finish(session):
    if "eqsat_mem" in sys.modules:
        squeeze()


def squeeze():
    """Give each function a limit of its own."""
    import jax
    from jax._src import test_util

    from eqsat_mem.api import planning
    from eqsat_mem.ir.jaxprs import aval_bytes, total_bytes

    plain = planning.options_for

    def options_for(jaxpr, mesh=None):
        kept = aval_bytes(jaxpr.in_avals) + aval_bytes(jaxpr.out_avals)
        made = total_bytes(jaxpr) - aval_bytes(jaxpr.in_avals)
        low, high = SHARES
        share = low + (high - low) * drawn(f"{len(jaxpr.jaxpr.eqns)} {jaxpr.in_avals}")
        return replace(plain(jaxpr, mesh), memory_limit=max(int(kept + share * made), 1))

    planning.options_for = options_for
    planning.SMALL_BYTES = 0
    private = test_util.api

    class Api:
        """The private module by which JAX's own tests call ``jit``."""

        jit = staticmethod(jax.jit)

        def __getattr__(self, name):
            return getattr(private, name)

    test_util.api = Api()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    def stop(*_):
        raise TooLong(f"more than {seconds:.0f} s")

    seconds = float(os.environ["SUITES_SECONDS"])
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    item.began = time.process_time()
    note(item.nodeid, "began")
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    result = yield
    report = result.get_result()
    too_long = call.excinfo is not None and call.excinfo.errisinstance(TooLong)
    if call.when == "call" or report.outcome != "passed":
        outcome = "too long" if too_long else "error" if call.when != "call" and report.failed else report.outcome
        said = "" if call.excinfo is None else call.excinfo.exconly(tryshort=True)[-2000:]
        note(item.nodeid, outcome, seconds=round(time.process_time() - item.began, 3), said=said)


def note(test, outcome, **more):
    with open(os.environ["SUITES_OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, **more}) + "\n")
