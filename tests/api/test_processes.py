"""Processes that plan together, played by threads on one store; tests/test_several_processes.py has real ones."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem.api import processes
from eqsat_mem.api.processes import Job
from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.errors import PlanMismatchError
from eqsat_mem.ir.mesh import Devices, Placement
from eqsat_mem.options import Options

PLACEMENT = Placement(Devices((("x", 2),)), ((("x",),),), (None,))


class Store:
    """A store of keys and values as jax.distributed has one."""

    def __init__(self):
        self.values, self.told = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.told:
            assert key not in self.values, "a key is set once"
            self.values[key] = value
            self.told.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.told:
            if not self.told.wait_for(lambda: key in self.values, min(timeout_ms / 1000, 5.0)):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nothing came")
            return self.values[key]


@pytest.fixture(autouse=True)
def store(monkeypatch):
    made = Store()
    monkeypatch.setattr(processes, "global_state", SimpleNamespace(client=made))
    return made


def together(*runs):
    """What each run returns or raises, given its job; all run at once."""
    found = [None] * len(runs)

    def one(k):
        try:
            found[k] = runs[k](Job(tuple(range(len(runs))), k, "round", "f"))
        except Exception as error:
            found[k] = error

    threads = [threading.Thread(target=one, args=(k,)) for k in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def asks(jaxpr, **options):
    def run(job):
        return job.backend(jaxpr, Options(**options), PLACEMENT)

    return run


SINE = jax.make_jaxpr(jnp.sin)(jnp.ones(4))


def test_all_plan_for_the_profile_of_the_first(monkeypatch):
    own = backend_in_use()
    backends = {}
    monkeypatch.setattr(processes, "backend_for", lambda device: backends[threading.get_ident()])

    def asked(cores):
        def run(job):
            backends[threading.get_ident()] = replace(own, device=replace(own.device, matrix_cores=cores))
            return job.backend(SINE, Options(memory_limit=1024), PLACEMENT)

        return run

    found = together(asked(3), asked(5))
    assert [backend.device.matrix_cores for backend in found] == [3, 3]
    assert found[0] == found[1]


def test_other_limits_are_refused():
    for error in together(asks(SINE, memory_limit=1024), asks(SINE, memory_limit=2048)):
        assert isinstance(error, PlanMismatchError)
        assert "processes 0 and 1 do not plan f alike: they differ in memory_limit." in str(error)
        assert error.told == ({"memory_limit": "1024"}, {"memory_limit": "2048"})


def test_another_program_is_refused():
    for error in together(asks(SINE), asks(jax.make_jaxpr(jnp.cos)(jnp.ones(4)))):
        assert "the same functions of the same shapes in the same order" in str(error)


def test_constants_are_part_of_a_program():
    def of(number):
        return jax.make_jaxpr(lambda x: x + jnp.full(4, number) @ jnp.ones((4, 4)))(jnp.ones(4))

    assert isinstance(together(asks(of(1.0)), asks(of(2.0)))[0], PlanMismatchError)


def test_what_was_planned_is_compared():
    def plans(source):
        return lambda job: job.compare_programs(source)

    assert together(plans("a"), plans("a"), plans("a")) == [None] * 3


def test_programs_that_differ_are_refused():
    for error in together(lambda job: job.compare_programs("a"), lambda job: job.compare_programs("b")):
        assert "they were asked for the same and have planned different programs" in str(error)


def test_a_process_that_fails_tells_the_others():
    def fails(job):
        with job.finishing():
            raise ValueError("no room")

    failed, told = together(fails, lambda job: job.compare_programs("a"))
    assert isinstance(failed, ValueError)
    assert isinstance(told, PlanMismatchError)
    assert "no room" in str(told)


def test_a_process_that_never_comes(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE_S", 0.05)
    (error,) = together(lambda job: Job((0, 1), 0, "round", "f").compare_programs("a"))
    assert "process 1 has not planned it within 0.05 seconds" in str(error)


def test_one_process_plans_alone():
    assert processes.job("f", None) is None
    assert processes.job("f", PLACEMENT) is None
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    assert processes.job("f", replace(PLACEMENT, mesh=mesh)) is None
