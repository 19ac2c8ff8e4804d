"""The width of the vectors for which XLA:CPU compiles plans.

Left alone it compiles for 256 bits on every x86 processor. Elementwise kernels, which most loops of plans are, run up to 1.8 times as
fast with 512 where the processor has them; contractions come from libraries and do not change.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
from jax import jit

USUAL_BITS = 256
"""What XLA:CPU prefers by itself; ``eqsat-mem calibrate`` compares both."""
WIDE_BITS = 512
"""The width of the widest vectors of x86 processors; ``eqsat-mem calibrate`` compares both."""
OPTION = "xla_cpu_prefer_vector_width"
CPUINFO = Path("/proc/cpuinfo")
SINCE = "avx512_vbmi2"
"""An extension of the processors whose clock hardly falls while they work on 512 bits: Intel's since Ice Lake, AMD's since Zen 4."""


def machine_bits() -> int:
    """The width that this machine's processor works best on, from Linux's description of it; the usual one where there is none."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return USUAL_BITS
    flags = next((line for line in lines if line.startswith("flags")), "")
    return WIDE_BITS if SINCE in flags.split() else USUAL_BITS


def compiler_options(bits: int) -> dict[str, str]:
    """What ``jax.jit`` and ``compile`` take as ``compiler_options`` for vectors of so many bits; nothing where XLA chooses so by itself."""
    if bits == USUAL_BITS or jax.default_backend() != "cpu":
        return {}
    options = {OPTION: str(bits)}
    return options if _known(OPTION, str(bits)) else {}


@cache
def _known(option: str, value: str) -> bool:
    """Whether this jaxlib has an option, asked with a program that does nothing."""
    try:
        jit(lambda: 0).lower().compile({option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True
