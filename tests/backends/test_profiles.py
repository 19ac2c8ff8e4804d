"""Device profiles that are measured and kept."""

import math
from dataclasses import fields, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.__main__ import main
from eqsat_mem.backends import calibrate, links, profiles
from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.ir.mesh import Devices
from eqsat_mem.schedule.device import Link
from tests.oracles.targets import CPU

SMALL = replace(CPU, device=replace(CPU.device, levels=((2.0**18, 2e11), (2.0**20, 1e11), (math.inf, 5e10)), reused_bytes=2**22))
"""A processor of which passes over few megabytes tell all."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_PROFILES", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


@pytest.fixture(scope="module")
def measured():
    """This device, measured in as little time as can be as if its caches were small, and what was told of it."""
    told = []
    return calibrate.measure(SMALL, told.append, shortest_s=1e-5), told


def test_profiles_are_kept_where_the_platform_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("EQSAT_MEM_PROFILES")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profiles.folder() == tmp_path / "eqsat_mem"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profiles.folder() == Path.home() / ".cache" / "eqsat_mem"
    monkeypatch.setattr("sys.platform", "darwin")
    assert profiles.folder() == Path.home() / "Library" / "Caches" / "eqsat_mem"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert profiles.folder() == tmp_path / "eqsat_mem"


def test_what_is_kept_is_used_until_it_is_forgotten(home):
    built_in = backend_in_use().device
    assert built_in == CPU.device
    mine = replace(built_in, name="mine", flops=1.0e12, levels=((2.0**20, 3e10), (math.inf, 1e9)))
    path = profiles.keep(mine)
    assert path.parent == home
    assert jax.__version__ in path.name
    assert backend_in_use().device == mine
    assert profiles.forget() == path
    assert profiles.forget() is None
    assert backend_in_use().device == built_in


def test_what_is_measured_is_read_back_as_it_was_kept(home, measured):
    device, _ = measured
    profiles.keep(device)
    assert backend_in_use() == replace(SMALL, device=device)


def test_links_are_read_back_with_their_points(home):
    points = ("all_reduce", 8, ((1e3, 2e-5), (1e6, 1e-3))), ("gather_shares", 2, ((1e3, 1e-5),))
    mine = replace(CPU.device, near=Link(1e-5, 1e9, points))
    path = profiles.keep(mine)
    assert backend_in_use().device == mine
    for damage in (("1000000.0", "0.0"), ('"points"', '"dots"'), ("1000.0", "null")):
        text = path.read_text()
        assert damage[0] in text
        path.write_text(text.replace(*damage, 1))
        with pytest.raises(eqsat_mem.OptionError, match="run eqsat-mem calibrate"):
            backend_in_use()
        path.write_text(text)


def test_measured_exchanges_count_by_kind_devices_and_bytes():
    points = ("all_reduce", 2, ((1e4, 1e-5), (1e6, 1e-4))), ("all_reduce", 8, ((1e4, 1e-3), (1e6, 1e-2)))
    link = Link(1e-6, 1e9, points)
    assert link.seconds("gather_shares", 1e6, 2) == 1e-6 + 1e-3
    assert [link.seconds("all_reduce", received, 2) for received in (1, 1e4, 1e6)] == [1e-5, 1e-5, 1e-4]
    assert link.seconds("all_reduce", 1e5, 2) == pytest.approx(10**-4.5)
    assert link.seconds("all_reduce", 1e7, 2) == pytest.approx(1e-3)
    for devices, first in ((2, 1e-5), (3, 1e-3), (4, 1e-3), (8, 1e-3), (64, 1e-3)):
        assert link.seconds("all_reduce", 0, devices) == first, devices
    ascending = [link.seconds("all_reduce", 10.0**k, 8) for k in range(9)]
    assert ascending == sorted(ascending)


def test_plans_are_made_with_what_was_measured_of_the_link():
    slow = replace(CPU, device=replace(CPU.device, near=Link(1e-6, 1e9, (("gather_shares", 8, ((1e3, 1.0),)),))))
    devices = Devices((("x", 8),))
    assert slow.exchange_s("gather_shares", 1e3, ("x",), devices) == 1.0
    assert slow.exchange_s("all_reduce", 1e3, ("x",), devices) == pytest.approx(2e-6)
    assert slow.exchange_s("gather_shares", 1e3, ("x",), replace(devices, far=frozenset("x"))) < 1.0


def test_functions_distribution_and_thin_sides_cost_as_in_the_profile(home):
    def seconds(f, *shapes, **figures):
        profiles.keep(replace(CPU.device, **figures))
        avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return eqsat_mem.optimize(f, verify=False).plan(*avals).original_predicted_s

    assert seconds(jnp.exp, (2**20,), function_factor=2.0) > 1.5 * seconds(jnp.exp, (2**20,))
    assert seconds(jnp.negative, (2**20,), function_factor=2.0) == seconds(jnp.negative, (2**20,))
    large = (512, 512), (512, 512)
    more = CPU.device.deal_s if CPU.device.matrix_cores > 1 else 0.0
    assert seconds(jnp.matmul, *large, deal_s=2 * CPU.device.deal_s) == pytest.approx(seconds(jnp.matmul, *large) + more)
    thin = (2048, 1024), (1024, 12)
    assert seconds(jnp.matmul, *thin, thin_columns=60.0) > 1.5 * seconds(jnp.matmul, *thin)


def test_plans_are_made_with_the_profile(home):
    def f(x):
        return jnp.sin(x @ x.T).sum()

    x = jax.ShapeDtypeStruct((600, 600), jnp.float32)
    before = eqsat_mem.optimize(f, verify=False).plan(x)
    profiles.keep(replace(CPU.device, flops=CPU.device.flops / 1e3, elements=CPU.device.elements / 1e3))
    after = eqsat_mem.optimize(f, verify=False).plan(x)
    assert after.original_predicted_s > 10 * before.original_predicted_s


def test_without_a_folder_the_built_in_profile_counts(monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_PROFILES", "none")
    assert profiles.profile_path() is None
    assert backend_in_use().device == CPU.device
    with pytest.raises(eqsat_mem.OptionError, match="EQSAT_MEM_PROFILES=none keeps no profiles: unset it, or name a folder"):
        profiles.keep(CPU.device)


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_a_damaged_profile_is_an_error_that_says_what_to_do(home, text):
    path = profiles.keep(CPU.device)
    path.write_text(text)
    with pytest.raises(eqsat_mem.OptionError, match=r"cannot be read .*: run eqsat-mem calibrate, or eqsat-mem calibrate --reset"):
        backend_in_use()


def test_rates_of_a_profile_are_above_zero(home):
    profiles.keep(replace(CPU.device, kernel_s=0.0))
    with pytest.raises(eqsat_mem.OptionError, match="a rate is not above zero"):
        backend_in_use()


def test_a_profile_with_other_fields_is_that_of_another_version(home):
    path = profiles.keep(CPU.device)
    path.write_text(path.read_text().replace('"flops"', '"flips"'))
    assert backend_in_use().device == CPU.device


def test_every_rate_is_measured(measured):
    device, told = measured
    named = {name.strip() for text in told for name in text.split(",")}
    assert named == {f.name for f in fields(device)} - {"name", "matrix_cores", "reused_bytes", "tile_level", "near", "far"}
    assert [size for size, _ in device.levels] == [size for size, _ in SMALL.device.levels]
    rates = [rate for _, rate in device.levels]
    assert rates == sorted(rates, reverse=True)
    assert all(getattr(device, name) > 0 for name in named - {"levels"})


def test_the_command_shows_and_resets(home, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "measure", lambda backend, report: replace(CPU.device, name="measured here", flops=1e9))
    assert main(["calibrate", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "of which nothing has been measured" in shown
    assert shown.splitlines()[1].split() == ["built-in"]
    assert main(["calibrate"]) == 0
    out = capsys.readouterr()
    assert str(home) in out.err
    assert out.out.startswith("measured here\n")
    assert out.out.splitlines()[1].split() == ["built-in", "measured"]
    assert main(["calibrate", "--show"]) == 0
    assert capsys.readouterr().out == out.out
    monkeypatch.setattr(links, "measure", lambda devices, report: Link(1e-5, 7e9))
    assert main(["calibrate", "--mesh"]) == 0
    both = capsys.readouterr().out.splitlines()
    assert both[0] == "measured here"
    assert next(line.split() for line in both if line.startswith("between devices, GB/s"))[-2:] == ["2.0", "7.0"]
    assert next(line.split() for line in both if line.startswith("between machines, GB/s"))[-1] == "-"
    assert main(["calibrate"]) == 0
    assert capsys.readouterr().out.splitlines() == both
    path = profiles.profile_path()
    path.write_text("{")
    assert main(["calibrate"]) == 0
    assert capsys.readouterr().out == out.out
    assert main(["calibrate", "--reset"]) == 0
    assert capsys.readouterr().out.startswith("removed ")
    assert main(["calibrate", "--reset"]) == 0
    assert capsys.readouterr().out == "there is no profile for this device\n"


def test_one_device_has_nobody_to_send_to(capsys):
    assert main(["calibrate", "--mesh"]) == 2
    assert "there is one here. A CPU counts as eight of them with XLA_FLAGS=" in capsys.readouterr().err
