"""Compiled programs as the compiler counts their memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from eqsat_mem.errors import DeviceCompilerError

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


@cache
def knows_option(option: str, value: str | bool) -> bool:
    """Whether the installed jaxlib has a compiler option for the device in use, found by compiling an empty program with it."""
    try:
        real_jit(lambda: 0).lower().compile({option: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


_MISSING = re.compile(r"No (?:FFI handler registered for|registered implementation for (?:untyped )?custom call to) (\S+)")


def lowered(function: Callable[..., Any], avals: Sequence[Any], donate: Sequence[int] = (), shardings: Sequence[Any] | None = None) -> Any:
    """A function of flat arguments, to be compiled; arguments are those of :meth:`Backend.check`."""
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False), sharding=sharding)
        for a, sharding in zip(avals, shardings or [None] * len(avals), strict=True)
    ]
    return real_jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*shapes)


@contextmanager
def telling_of_missing_calls() -> Iterator[None]:
    """A context that compiles: raises ``DeviceCompilerError`` where a program calls what another process has registered with its XLA."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        missing = _MISSING.search(str(error))
        if missing is None:
            raise
        raise DeviceCompilerError(
            f"{missing[1]}, which the program calls, is not registered with XLA here: the peak is predicted."
        ) from error
