"""What XLA holds for a compiled program, and which donated arguments its outputs can take over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import jit
from jax.extend.core import ClosedJaxpr

from eqsat_mem.backends.cpu.hidden_scratch import hidden_scratch_bytes, workspace_bytes
from eqsat_mem.ir.jaxprs import aval_bytes

DOUBT = 2
"""How often estimated scratch of kernel libraries counts towards what a program holds: chains of contractions took twice the estimate."""
UNOPTIMISED: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": "1",
}
"""Options of a compilation that is only asked what it holds: XLA:CPU assigns buffers before it generates machine code, for which it then
takes the shortest way. Without its fusion emitters a scatter becomes a loop, whose counters are some hundred bytes."""


def compiled_peak(function: Callable[..., Any], avals: Sequence[Any], donate: Sequence[int] = (), optimise: bool = True) -> tuple[int, Any]:
    """Bytes that a function of flat arguments holds at its peak when XLA has compiled it, and the compiled program.

    Arguments (used or not), outputs and temporaries, less what outputs share with donated arguments, plus the scratch that
    XLA does not report (:mod:`eqsat_mem.backends.cpu.hidden_scratch`). ``avals`` have ``shape`` and ``dtype``. Runs nothing. Where the
    program is not going to be run, ``optimise=False`` has XLA:CPU generate slower machine code, which holds the same (some hundred bytes
    more for a scatter), in a quarter of the time.

    Raises:
        NotImplementedError: if the backend does not analyse memory.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
    lowered = jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*shapes)
    compiled = lowered.compile() if optimise or jax.default_backend() != "cpu" else _unoptimised(lowered)
    return held_bytes(compiled), compiled


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


def _unoptimised(lowered: Any) -> Any:
    try:
        return lowered.compile(UNOPTIMISED)
    except jax.errors.JaxRuntimeError:  # a jaxlib of other options
        return lowered.compile()


def held_bytes(compiled: Any) -> int:
    """What a compiled program holds at its peak, in bytes."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise NotImplementedError("this backend does not tell what a compiled program holds: pass verify=False to plan without it.")
    reported = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    text = compiled.as_text()
    return int(reported + max(DOUBT * hidden_scratch_bytes(text), workspace_bytes(text)))
