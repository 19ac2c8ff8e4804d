"""What XLA holds for a compiled program, and which donated arguments its outputs can take over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import jit
from jax.extend.core import ClosedJaxpr

from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.schedule.backend import Backend


def compiled_peak(
    function: Callable[..., Any],
    avals: Sequence[Any],
    donate: Sequence[int] = (),
    backend: Backend | None = None,
    optimise: bool = True,
) -> tuple[int, Any]:
    """Bytes that a function of flat arguments holds at its peak when XLA has compiled it, and the compiled program.

    Args:
        function: takes and returns flat arrays; it is compiled, not run.
        avals: the arguments; they have ``shape`` and ``dtype``.
        donate: positions of donated arguments.
        backend: for which target; None is the device in use.
        optimise: whether the program is going to be run. Otherwise the backend may generate machine code that is slower and sooner there,
            and holds the same (some hundred bytes more for a scatter).

    Returns:
        Arguments (used or not), outputs and temporaries, minus outputs in the memory of donated arguments, plus the memory that XLA does
        not report (:meth:`eqsat_mem.schedule.backend.Backend.hidden_bytes`).

    Raises:
        NotImplementedError: if the backend does not analyse memory.
    """
    backend = backend or backend_in_use()
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
    lowered = jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*shapes)
    compiled = lowered.compile() if optimise else _for_check(lowered, backend)
    return held_bytes(compiled, backend), compiled


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


def _for_check(lowered: Any, backend: Backend) -> Any:
    try:
        return lowered.compile(dict(backend.check_options) or None)
    except jax.errors.JaxRuntimeError:  # a jaxlib of other options
        return lowered.compile()


def held_bytes(compiled: Any, backend: Backend | None = None) -> int:
    """Bytes that a compiled program holds at its peak, on the device in use unless another backend is given."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise NotImplementedError("this backend does not tell what a compiled program holds: pass verify=False to plan without it.")
    reported = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return int(reported) + (backend or backend_in_use()).hidden_bytes(compiled)
