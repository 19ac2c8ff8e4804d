"""Memory of compiled programs, and which donated arguments their outputs can take over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.schedule.backend import Backend


def compiled_peak(
    function: Callable[..., Any], avals: Sequence[Any], donate: Sequence[int] = (), backend: Backend | None = None, optimise: bool = True
) -> tuple[int, Any]:
    """Bytes that a function of flat arguments holds at its peak when it is compiled, and the compiled program.

    See :meth:`eqsat_mem.schedule.backend.Backend.check`; ``backend`` is that of the device in use unless another is given.
    """
    check = (backend or backend_in_use()).check(function, avals, donate, optimise)
    return check.held_bytes, check.compiled


def donations(jaxpr: ClosedJaxpr, donated: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Those of the donated arguments whose memory outputs can take, each one output of the same shape and dtype, and their bytes."""
    free = Counter((aval.shape, aval.dtype) for aval in jaxpr.out_avals)
    taken = []
    for k in donated:
        aval = jaxpr.in_avals[k]
        if free[aval.shape, aval.dtype]:
            free[aval.shape, aval.dtype] -= 1
            taken.append(k)
    return tuple(taken), aval_bytes([jaxpr.in_avals[k] for k in taken])


def held_bytes(compiled: Any, backend: Backend | None = None) -> int:
    """Bytes that a compiled program holds at its peak, on the device in use unless another backend is given.

    Raises:
        NotImplementedError: if the compiler does not analyse memory.
    """
    return (backend or backend_in_use()).checked(compiled).held_bytes
