"""Plans for a device that is named: what they say, and what they refuse."""

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.backends.gpu import deviceless
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.errors import DeviceCompilerError, DeviceError

X = jnp.ones((2000, 3))


def total(x):
    return jnp.sum(jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1)))


def planned(**options):
    return eqsat_mem.optimize(total, device="h100", **options)


def missing(monkeypatch):
    def installed():
        raise DeviceCompilerError("plans for a GPU are compiled by two wheels that are not installed")

    monkeypatch.setattr(deviceless, "installed", installed)
    monkeypatch.setattr(deviceless, "_devices", {})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the device may be there")
def test_a_plan_for_another_device_is_looked_at_but_not_run(monkeypatch):
    missing(monkeypatch)
    f = planned(memory_limit="8MiB")
    plan = f.plan(X)
    assert plan.device.startswith("h100")
    assert "def total" in plan.source
    with pytest.raises(DeviceError, match=r"this plan of total is for h100.*, and the device in use is cpu: run it there, or leave out"):
        f(X)


def test_without_its_compiler_a_plan_says_that_nothing_was_compiled(monkeypatch):
    missing(monkeypatch)
    plan = planned(memory_limit="8MiB").plan(X)
    assert plan.compiled_peak_bytes is None
    assert any("two wheels that are not installed" in doubt for doubt in plan.doubts)


def test_a_limit_above_the_memory_of_a_device_is_an_error():
    with pytest.raises(eqsat_mem.OptionError, match=r"memory_limit = 200 GiB is more than h100.* has, .*: lower the limit, leave it out"):
        planned(memory_limit="200GiB").plan(X)


def test_without_a_limit_the_device_has_one(monkeypatch):
    missing(monkeypatch)
    assert planned().plan(X).limit_bytes == named("h100").usable_bytes


def test_an_unknown_device_lists_those_that_are_known():
    with pytest.raises(eqsat_mem.OptionError, match=r"no device is named 'h1000'.*The devices are h100, .*v100"):
        eqsat_mem.optimize(total, memory_limit="8MiB", device="h1000").plan(X)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "there is no device profile"), ("{}", "another version of eqsat-mem"), ("[]", "it is no JSON object")]
)
def test_a_profile_that_is_none_is_refused(tmp_path, text, message):
    path = tmp_path / "card.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(eqsat_mem.OptionError, match=message):
        eqsat_mem.optimize(total, memory_limit="8MiB", device=str(path)).plan(X)
