"""Cards by name: their capacities and rates, and the source of each figure.

A row provides both the figures with which plans are made, and the description of the card for which XLA:GPU compiles
(:mod:`eqsat_mem.backends.gpu.deviceless`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eqsat_mem.errors import OptionError
from eqsat_mem.schedule.device import Link

MiB = 2**20
KiB = 2**10

XLA = "XLA's own description of the card (xla/backends/gpu/target_config/specs, 2026)"
GUIDE = "CUDA C++ Programming Guide 13.0, technical specifications per compute capability"
SYSTEM = "guessed: the total that nvidia-smi shows, less 2 % that the driver keeps"
GUESSED = "guessed"

USUAL = "h100"
"""The card that a GPU is taken for if nothing is known of it, AMD's for example."""
MEMORY_FRACTION = 0.75
"""The fraction of a card's memory that JAX's allocator reserves, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set:
JAX's documentation of its memory allocation."""
COPY_SHARE, MATRIX_SHARE, LANE_SHARE = 0.88, 0.77, 0.745
"""The fractions that programs attain of the data sheet's bandwidth, of its matrix units' rates, and of one instruction per lane
and clock cycle. Measured on an H100 by the stage calibrate of benchmarks/gpu_visit.py: memory moved 2.95e12 of 3.35e12 B/s, float32
products ran at 51.8e12 of 66.9e12 operations per second (bfloat16 at 888e12 of 989e12), additions at 24.9e12 of 33.5e12."""
L2_BYTES_PER_CYCLE, L2_SHARE = 17, 0.8
"""The bytes per clock cycle that a multiprocessor reads from the L2 cache and writes, measured on an H100 likewise (4.4e12 B/s); and the
fraction of that cache that one program's data can occupy, which is guessed."""
LINK_SHARE, LINK_S = 370 / 450, 2e-5
"""The fraction of a link's rate that collectives of gigabytes attain on 8 H100 (How to Scale Your Model, jax-ml/scaling-book, chapter on
GPUs, 2025), and the seconds for the first byte, which are guessed."""


@dataclass(frozen=True)
class Architecture:
    """A multiprocessor of one compute capability.

    Attributes:
        lanes: float32 lanes.
        double_lanes: float64 lanes.
        threads: the most threads resident at a time.
        shared: bytes of shared memory of all its blocks together.
        shared_block: the most bytes of shared memory of one block.
        registers: 32-bit registers.
    """

    lanes: int
    double_lanes: int
    threads: int
    shared: int
    shared_block: int
    registers: int = 65536


ARCHITECTURES: Mapping[tuple[int, int], Architecture] = MappingProxyType(
    {
        (7, 0): Architecture(64, 32, 2048, 96 * KiB, 96 * KiB),
        (7, 5): Architecture(64, 2, 1024, 64 * KiB, 64 * KiB),
        (8, 0): Architecture(64, 32, 2048, 164 * KiB, 163 * KiB),
        (8, 6): Architecture(128, 2, 1536, 100 * KiB, 99 * KiB),
        (8, 9): Architecture(128, 2, 1536, 100 * KiB, 99 * KiB),
        (9, 0): Architecture(128, 64, 2048, 228 * KiB, 227 * KiB),
        (10, 0): Architecture(128, 64, 2048, 228 * KiB, 227 * KiB),
        (12, 0): Architecture(128, 2, 1536, 128 * KiB, 99 * KiB),
    }
)


@dataclass(frozen=True)
class Target:
    """A card. Rates are the data sheet's peak rates per second of the whole card.

    Attributes:
        name: its name for users.
        label: its name for the driver.
        capability: its compute capability.
        multiprocessors: its number of multiprocessors.
        clock: its highest clock rate, in Hz.
        memory_bytes: the bytes of its memory as reported by CUDA.
        memory_rate: bytes per second of its memory.
        l2_bytes: bytes of its L2 cache.
        narrow_flops: multiplications and additions of dense bfloat16 products; of float32 products if it has no bfloat16 units.
        tf32_flops: those of float32 products whose operands are rounded to 10 bits; zero if it does not round.
        double_flops: those of float64 products, by matrix units if it has any for float64.
        link_rate: bytes per second that it receives from other cards of its machine, by NVLink if it has one to all of them.
        sources: the source of each figure, by the figure's name.
    """

    name: str
    label: str
    capability: tuple[int, int]
    multiprocessors: int
    clock: float
    memory_bytes: int
    memory_rate: float
    l2_bytes: int
    narrow_flops: float
    tf32_flops: float
    double_flops: float
    link_rate: float
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.capability]

    @property
    def lanes(self) -> int:
        """The float32 additions that one multiprocessor begins in a clock cycle."""
        return self.architecture.lanes

    @property
    def usable_bytes(self) -> int:
        """The bytes that a program may hold if no limit is given: the memory that JAX's allocator reserves."""
        return int(MEMORY_FRACTION * self.memory_bytes)

    @property
    def rounds(self) -> bool:
        """Whether float32 products round their operands by default."""
        return self.tf32_flops > 0

    @property
    def flops(self) -> float:
        """Multiplications and additions per second of unrounded float32 products: two per lane and clock cycle."""
        return 2.0 * self.multiprocessors * self.lanes * self.clock

    @property
    def elements(self) -> float:
        """The float32 additions per second."""
        return self.flops / 2

    @property
    def double_elements(self) -> float:
        """The float64 additions per second."""
        return self.multiprocessors * self.architecture.double_lanes * self.clock

    @property
    def l2_rate(self) -> float:
        """The bytes per second of the L2 cache."""
        return float(L2_BYTES_PER_CYCLE * self.multiprocessors * self.clock)

    def attained(self) -> dict[str, Any]:
        """Return the figures with which plans are made, by the names of the fields of a device profile.

        Returns:
            The attained rates per second; ``levels`` as pairs of bytes and bytes per second.
        """
        memory = COPY_SHARE * self.memory_rate
        return {
            "name": self.name,
            "flops": MATRIX_SHARE * self.flops,
            "narrow_flops": MATRIX_SHARE * self.narrow_flops,
            "elements": LANE_SHARE * self.elements,
            "levels": ((L2_SHARE * self.l2_bytes, max(self.l2_rate, memory)), (math.inf, memory)),
            "matrix_cores": self.multiprocessors,
            "reused_bytes": self.memory_bytes,
            "fresh_rate": memory,
            "near": Link(LINK_S, LINK_SHARE * self.link_rate),
        }

    def description(self) -> str:
        """Return the description of the card for XLA: a GpuTargetConfigProto in text form."""
        own = self.architecture
        major, minor = self.capability
        limits = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "threads_per_core_limit": own.threads,
            "core_count": self.multiprocessors,
            "fpus_per_core": own.lanes,
            "shared_memory_per_block": 48 * KiB,
            "shared_memory_per_block_optin": own.shared_block,
            "shared_memory_per_core": own.shared,
            "registers_per_block_limit": own.registers,
            "registers_per_core_limit": own.registers,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": int(self.memory_rate),
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock / 1e9,
            "device_memory_size": self.memory_bytes,
        }
        lines = "\n".join(f"  {name}: {value}" for name, value in limits.items())
        return (
            f"gpu_device_info {{\n{lines}\n  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
            f'platform_name: "CUDA"\ndnn_version_info {{ major: {DNN[0]} minor: {DNN[1]} }}\ndevice_description_str: "{self.label}"\n'
        )


DNN = (9, 12)
"""The version of cuDNN in the description: the oldest that jax-cuda13-plugin 0.10 and 0.11 accept."""


def _row(
    name: str,
    label: str,
    capability: tuple[int, int],
    multiprocessors: int,
    ghz: float,
    memory: tuple[int, str],
    rates: tuple[float, float, float, float],
    l2_mib: float,
    link: float,
    sheet: str,
) -> Target:
    """Return a row of the table.

    ``memory`` is the memory in bytes and its source; ``rates`` are the data sheet's GB/s of memory and TFLOP/s of bfloat16, rounded
    float32 and float64 products; ``link`` GB/s in one direction; ``sheet`` is the source of all other figures.
    """
    own = "multiprocessors", "clock", "memory_rate", "l2_bytes", "narrow_flops", "tf32_flops", "double_flops", "link_rate"
    said = dict.fromkeys(own, sheet)
    counted = f"multiprocessors x lanes x clock; lanes: {GUIDE}"
    said |= {"memory_bytes": memory[1], "flops": counted, "elements": counted, "double_elements": counted, "l2_rate": GUESSED}
    rate, narrow, tf32, double = rates
    return Target(
        name, label, capability, multiprocessors, ghz * 1e9, memory[0], rate * 1e9, int(l2_mib * MiB),
        narrow * 1e12, tf32 * 1e12, double * 1e12, link * 1e9, MappingProxyType(said),
    )  # fmt: skip


def _shown(mib: int) -> tuple[int, str]:
    """Return the memory in bytes, from the total in MiB that nvidia-smi shows, and its source."""
    return int(0.98 * mib) * MiB, SYSTEM


_ROWS = [
    _row("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 1.98, (84_942_979_072, XLA), (3352, 989.4, 494.7, 67), 50, 450,
         f"NVIDIA H100 Tensor Core GPU data sheet, SXM, 2023; clock, multiprocessors, cache: {XLA}"),
    _row("h100-pcie", "NVIDIA H100 PCIe", (9, 0), 114, 1.755, (84_942_979_072, XLA), (2039, 756, 378, 51), 50, 64,
         f"NVIDIA H100 Tensor Core GPU data sheet, PCIe, 2022; clock, multiprocessors, cache: {XLA}"),
    _row("h200", "NVIDIA H200", (9, 0), 132, 1.98, (151_397_597_184, XLA), (4800, 989.4, 494.7, 67), 50, 450,
         f"NVIDIA H200 Tensor Core GPU data sheet, SXM, 2023; clock, multiprocessors, cache: {XLA}"),
    _row("b200", "NVIDIA B200", (10, 0), 148, 1.965, (191_514_411_008, XLA), (7672, 2250, 1125, 37), 126.5, 900,
         f"NVIDIA DGX B200 data sheet, an eighth, 2024; clock, multiprocessors, cache: {XLA}"),
    _row("a100-40gb", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 1.41, (42_331_013_120, XLA), (1555, 312, 156, 19.5), 40, 300,
         f"NVIDIA A100 Tensor Core GPU data sheet, 2020; clock, cache: {XLA}"),
    _row("a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 1.41, (85_100_068_864, XLA), (2039, 312, 156, 19.5), 40, 300,
         f"NVIDIA A100 Tensor Core GPU data sheet, SXM, 2021; clock, cache: {XLA}"),
    _row("l4", "NVIDIA L4", (8, 9), 58, 2.04, _shown(23034), (300, 121, 60, 0.47), 48, 32, "NVIDIA L4 Tensor Core GPU data sheet, 2023"),
    _row("l40s", "NVIDIA L40S", (8, 9), 142, 2.52, _shown(46068), (864, 362, 183, 1.43), 96, 32, "NVIDIA L40S data sheet, 2023"),
    _row("a10", "NVIDIA A10", (8, 6), 72, 1.695, _shown(23028), (600, 125, 62.5, 0.49), 6, 32,
         "NVIDIA A10 Tensor Core GPU data sheet, 2021"),
    _row("a6000", "NVIDIA RTX A6000", (8, 6), 84, 1.8, (51_041_271_808, XLA), (768, 154.8, 77.4, 0.6), 6, 32,
         f"NVIDIA RTX A6000 data sheet, 2021; clock, cache: {XLA}"),
    _row("rtx6000-pro", "NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188, 2.6, _shown(97887), (1792, 503.8, 251.9, 1.95), 128, 64,
         f"NVIDIA RTX Blackwell GPU architecture white paper, 2025; clock, multiprocessors, cache: {XLA}"),
    _row("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 2.407, _shown(32607), (1792, 209.5, 104.8, 1.64), 96, 64,
         "NVIDIA RTX Blackwell GPU architecture white paper, 2025"),
    _row("rtx4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 2.52, _shown(24564), (1008, 165.2, 82.6, 1.29), 72, 32,
         "NVIDIA Ada GPU architecture white paper, 2022"),
    _row("rtx3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695, _shown(24576), (936, 71, 35.6, 0.56), 6, 32,
         "NVIDIA Ampere GA102 GPU architecture white paper, 2020"),
    _row("t4", "Tesla T4", (7, 5), 40, 1.59, _shown(15360), (320, 8.1, 0, 0.25), 4, 16, "NVIDIA T4 Tensor Core GPU data sheet, 2018"),
    _row("v100", "Tesla V100-SXM2-16GB", (7, 0), 80, 1.53, (16_935_682_048, XLA), (898, 15.7, 0, 7.8), 6, 150,
         f"NVIDIA V100 Tensor Core GPU data sheet, SXM2, 2017; clock, cache: {XLA}"),
]  # fmt: skip

TARGETS: Mapping[str, Target] = MappingProxyType({row.name: row for row in _ROWS})
"""All cards by name."""
ALIASES: Mapping[str, str] = MappingProxyType(
    {"h100-sxm": "h100", "h100-80gb": "h100", "a100": "a100-80gb", "a10g": "a10", "v100-16gb": "v100"}
)
"""Other names of cards."""


def named(name: str) -> Target:
    """Return the card with a name, which may have any case, and ``_`` or spaces for ``-``.

    Raises:
        OptionError: if no card has this name; the message lists all cards.

    >>> named("H100_SXM").name
    'h100'
    """
    key = "-".join(name.strip().lower().replace("_", " ").split())
    found = TARGETS.get(ALIASES.get(key, key))
    if found is None:
        near = difflib.get_close_matches(key, [*TARGETS, *ALIASES], n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise OptionError(
            f"no device is named {name!r}.{hint} The devices are {', '.join(TARGETS)}; a profile that eqsat-mem calibrate keeps "
            "is named by its file, PROFILE.json."
        )
    return found


def is_profile(name: str) -> bool:
    """Whether a device named by a user is the file of a profile rather than a card."""
    return name.endswith(".json") or Path(name).is_file()


def target_labelled(label: str) -> Target | None:
    """Return the card with a driver's name, which labels the profile of a calibrated card; None if the table lacks it."""
    return next((row for row in TARGETS.values() if row.label.lower() == label.lower()), None)


@cache
def card_of(device: Any) -> Target:
    """Return the card that a GPU of JAX's is: the one with its driver's name, else one like those that the table has of its generation.

    A card that the table lacks has the rates of the one of its compute capability (or the highest below) whose number of multiprocessors is
    closest, in proportion to that number, and so much memory that JAX's allocator reserves what it does.

    Args:
        device: a device of :func:`jax.devices`.
    """
    known = target_labelled(device.device_kind)
    if known is not None:
        return known
    try:
        capability, cores = tuple(int(part) for part in device.compute_capability.split(".")), int(device.core_count)
    except (AttributeError, ValueError):
        return named(USUAL)
    older = [row for row in TARGETS.values() if row.capability <= capability] or [min(TARGETS.values(), key=lambda row: row.capability)]
    newest = max(row.capability for row in older)
    like = min((row for row in older if row.capability == newest), key=lambda row: abs(row.multiprocessors - cores))
    rates = {
        name: getattr(like, name) * cores / like.multiprocessors for name in ("memory_rate", "narrow_flops", "tf32_flops", "double_flops")
    }
    reserved = (device.memory_stats() or {}).get("bytes_limit")
    memory = like.memory_bytes if reserved is None else int(reserved / MEMORY_FRACTION)
    return replace(like, name=device.device_kind, label=device.device_kind, multiprocessors=cores, memory_bytes=memory, sources={}, **rates)
