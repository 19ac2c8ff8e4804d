"""The width of the vectors for which XLA:CPU compiles plans.

By default it compiles for 256 bits on every x86 processor. Elementwise kernels, which most loops of plans are, run up to 1.8 times as
fast with 512 bits on processors that have them; contractions come from libraries and do not change.

With them XLA:CPU computes arc tangents wrongly, by units: ``atan(x)`` and ``atan2(x, 1)`` (jaxlib 0.10.2; all other elementwise operations
are right, also of constants). Programs with angles or complex numbers keep the usual width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from eqsat_mem.ir.jaxprs import dtypes_in, nested_jaxprs
from eqsat_mem.schedule.checks import knows_option

USUAL_BITS = 256
"""The width that XLA:CPU uses by default; ``eqsat-mem calibrate`` compares both."""
WIDE_BITS = 512
"""The width of the widest vectors of x86 processors; ``eqsat-mem calibrate`` compares both."""
OPTION = "xla_cpu_prefer_vector_width"
ANGLES = frozenset({"atan", "atan2"})
"""Primitives that XLA computes by arc tangents; functions of complex numbers are others."""
CPUINFO = Path("/proc/cpuinfo")
SINCE = "avx512_vbmi2"
"""An instruction-set extension of processors whose clock rate hardly falls with 512-bit vectors: Intel since Ice Lake, AMD since Zen 4."""


def machine_bits() -> int:
    """Return the best vector width in bits for this machine's processor, from Linux's description of it; the default if there is none."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return USUAL_BITS
    flags = next((line for line in lines if line.startswith("flags")), "")
    return WIDE_BITS if SINCE in flags.split() else USUAL_BITS


def compiler_options(bits: int) -> dict[str, str]:
    """Return the ``compiler_options`` of ``jax.jit`` and ``compile`` for a vector width.

    Args:
        bits: the width in bits.

    Returns:
        The options; empty if this is XLA's default width, or the installed jaxlib lacks the option.
    """
    if bits == USUAL_BITS or jax.default_backend() != "cpu":
        return {}
    options = {OPTION: str(bits)}
    return options if knows_option(OPTION, str(bits)) else {}


def computes_angles(jaxpr: Any) -> bool:
    """Whether XLA may compute arc tangents for a jaxpr, which are wrong with wide vectors."""
    named = {eqn.primitive.name for inner in nested_jaxprs(jaxpr) for eqn in inner.eqns}
    return not ANGLES.isdisjoint(named) or any(name.startswith("complex") for name in dtypes_in(jaxpr))
