"""Compiled programs as the compiler counts their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

real_jit = jax.jit
"""``jax.jit`` as it was when this package was imported: scripts, and ``eqsat-mem run``, put their own in its place."""


@dataclass(frozen=True)
class Check:
    """A compiled program.

    Attributes:
        held_bytes: bytes that it holds at its peak.
        compiled: the program; None where it was compiled for a device that is not there.
        doubts: as those of :class:`Hidden`.
    """

    held_bytes: int
    compiled: Any = None
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hidden:
    """Memory of a compiled program that the compiler does not report.

    Attributes:
        nbytes: an estimate, in bytes.
        doubts: sentences on memory that is not in it because it cannot be seen; usually none.
    """

    nbytes: int = 0
    doubts: tuple[str, ...] = ()
