"""The table of cards, and the command that shows it."""

from __future__ import annotations

import json
import re

import pytest

from eqsat_mem.__main__ import main
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.targets import ALIASES, ARCHITECTURES, TARGETS, USUAL, card_of, is_profile, named, target_labelled
from eqsat_mem.errors import OptionError


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_figures_agree_with_one_another(target):
    assert target.capability in ARCHITECTURES
    assert target.flops == pytest.approx(2 * target.elements)
    assert target.narrow_flops >= 2 * target.tf32_flops * 0.98
    assert target.rounds == (target.capability >= (8, 0))
    assert target.double_flops >= 0.9 * 2 * target.double_elements
    assert 0 < target.usable_bytes < target.memory_bytes
    assert target.l2_bytes < target.memory_bytes


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_every_figure_names_its_source(target):
    figures = {
        "multiprocessors",
        "clock",
        "memory_bytes",
        "memory_rate",
        "l2_bytes",
        "narrow_flops",
        "tf32_flops",
        "double_flops",
        "flops",
        "link_rate",
    }
    assert figures <= set(target.sources)
    assert all(source == "guessed" or re.search(r"\d{4}|guessed|multiprocessors", source) for source in target.sources.values())


def test_float32_rates_are_those_of_data_sheets():
    sheets = {
        "h100": 67,
        "h100-pcie": 51,
        "a100": 19.5,
        "l4": 30.3,
        "l40s": 91.6,
        "rtx4090": 82.6,
        "rtx3090": 35.6,
        "v100": 15.7,
        "t4": 8.1,
    }
    for name, tera in sheets.items():
        assert named(name).flops / 1e12 == pytest.approx(tera, rel=0.01), name


def test_figures_make_a_profile():
    own = named("h100")
    device = GpuBackend.of(own).device
    assert device.name == "h100"
    assert device.levels[-1][1] < own.memory_rate
    assert device.bandwidth(2**20) > device.bandwidth(2**30)
    assert device.near.rate == pytest.approx(370e9)
    assert GpuBackend.of(named("l4")).device.near.rate < device.near.rate / 10


def test_names_are_found_as_users_write_them():
    assert named("H100_SXM") is named("h100")
    assert named(" a100 ") is TARGETS["a100-80gb"]
    assert named("RTX4090").name == "rtx4090"
    assert all(name in TARGETS for name in ALIASES.values())


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(OptionError, match=r"no device is named 'h10'. Did you mean h100\? The devices are h100, .*t4, v100") as error:
        named("h10")
    assert "PROFILE.json" in str(error.value)


def test_files_are_profiles(tmp_path):
    assert is_profile("card.json")
    assert not is_profile("h100")
    (tmp_path / "card").write_text("{}")
    assert is_profile(str(tmp_path / "card"))


def test_labels_of_drivers_are_found():
    assert target_labelled("NVIDIA H100 80GB HBM3") is named("h100")
    assert target_labelled("another") is None


class Device:
    """A GPU of JAX's, as far as cards are known by it."""

    def __init__(self, kind, capability, cores, reserved=None):
        self.device_kind, self.compute_capability, self.core_count = kind, capability, cores
        self.memory_stats = lambda: None if reserved is None else {"bytes_limit": reserved}


def test_a_card_in_use_is_known_by_its_driver():
    """Names are those that drivers gave an H100 and an H200."""
    assert card_of(Device("NVIDIA H100 80GB HBM3", "9.0", 132)) is named("h100")
    assert card_of(Device("NVIDIA H200", "9.0", 132)) is named("h200")


def test_a_card_that_the_table_lacks_is_one_of_its_generation():
    card = card_of(Device("NVIDIA GeForce RTX 4060", "8.9", 24, 6 * 2**30))
    assert card.capability == (8, 9)
    assert card.multiprocessors == 24
    assert card.memory_bytes == 8 * 2**30
    assert card.usable_bytes == 6 * 2**30
    like = min((row for row in TARGETS.values() if row.capability == (8, 9)), key=lambda row: row.multiprocessors)
    assert card.flops / like.flops == pytest.approx(24 / like.multiprocessors)
    assert card.narrow_flops / like.narrow_flops == pytest.approx(24 / like.multiprocessors)
    assert GpuBackend.of(card).device.name == "NVIDIA GeForce RTX 4060"


def test_generations_that_the_table_lacks_are_the_one_before():
    assert card_of(Device("NVIDIA Thor", "11.0", 20)).capability == (10, 0)
    assert card_of(Device("NVIDIA P100", "6.0", 56)).capability == (7, 0)


@pytest.mark.parametrize("capability", ["gfx942", None])
def test_cards_of_others_are_taken_for_the_usual_one(capability):
    assert card_of(Device("AMD Instinct MI300X", capability, 304)) is named(USUAL)


def test_the_description_has_every_field_once():
    text = named("a100-40gb").description()
    names = re.findall(r"^\s*(\w+)(?::| \{)", text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert "core_count: 108" in text
    assert "major: 8 minor: 0" in text
    assert text.count("{") == text.count("}")


def test_the_command_lists_devices(capsys):
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "device"
    assert {line.split()[0] for line in lines[1 : len(TARGETS) + 1]} == set(TARGETS)


def test_the_command_shows_sources(capsys):
    assert main(["devices", "l40s"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA L40S data sheet, 2023" in out
    assert "guessed" in out


def test_the_command_prints_json(capsys):
    assert main(["devices", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(TARGETS)
    assert rows[0]["memory_rate"]["value"] == 3352e9
    assert "data sheet" in rows[0]["memory_rate"]["source"]


def test_the_command_refuses_unknown_names(capsys):
    assert main(["devices", "h10"]) == 2
    assert "Did you mean h100?" in capsys.readouterr().err
