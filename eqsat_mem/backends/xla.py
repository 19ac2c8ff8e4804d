"""What XLA holds for a compiled program, and which donated arguments its outputs can take over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import jit
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.ir.mesh import Placement, Spec
from eqsat_mem.schedule.backend import Backend


def compiled_peak(
    function: Callable[..., Any],
    avals: Sequence[Any],
    donate: Sequence[int] = (),
    backend: Backend | None = None,
    optimise: bool = True,
    shardings: Sequence[Any] | None = None,
) -> tuple[int, Any]:
    """Bytes that a function of flat arguments holds at its peak when XLA has compiled it, and the compiled program.

    Args:
        function: takes and returns flat arrays; it is compiled, not run.
        avals: the arguments; they have ``shape`` and ``dtype``.
        donate: positions of donated arguments.
        backend: for which target; None is the device in use.
        optimise: whether the program is going to be run. Otherwise the backend may generate machine code that is slower and sooner there,
            and holds the same (some hundred bytes more for a scatter).
        shardings: how each argument lies on several devices; what is counted then is what each of them holds.

    Returns:
        Arguments (used or not), outputs and temporaries, minus outputs in the memory of donated arguments, plus the memory that XLA does
        not report (:meth:`eqsat_mem.schedule.backend.Backend.hidden_bytes`).

    Raises:
        NotImplementedError: if the backend does not analyse memory.
    """
    backend = backend or backend_in_use()
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False), sharding=sharding)
        for a, sharding in zip(avals, shardings or [None] * len(avals), strict=True)
    ]
    lowered = jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*shapes)
    compiled = lowered.compile() if optimise else _for_check(lowered, backend)
    return held_bytes(compiled, backend), compiled


def donations(jaxpr: ClosedJaxpr, donated: Sequence[int], placement: Placement | None = None) -> tuple[tuple[int, ...], int]:
    """Those of the donated arguments whose memory outputs can take, each one output of the same shape and dtype, and their bytes.

    On a mesh argument and output are given to lie alike, and the bytes are those of a share.
    """
    ins, outs = ([None] * len(jaxpr.in_avals), [None] * len(jaxpr.out_avals)) if placement is None else (placement.arguments, placement.results)
    free = Counter((aval.shape, aval.dtype, spec) for aval, spec in zip(jaxpr.out_avals, outs, strict=True) if placement is None or spec is not None)
    taken = []
    for k in donated:
        kind = jaxpr.in_avals[k].shape, jaxpr.in_avals[k].dtype, ins[k]
        if free[kind]:
            free[kind] -= 1
            taken.append(k)
    return tuple(taken), sum(aval_bytes([jaxpr.in_avals[k]]) // dealt(placement, ins[k]) for k in taken)


def dealt(placement: Placement | None, spec: Spec | None) -> int:
    """How many devices an array is dealt out to."""
    return 1 if placement is None else math.prod(placement.devices.count(names) for names in spec or ())


def named_shardings(placement: Placement, specs: Sequence[Spec | None]) -> list[Any]:
    """JAX's shardings for specs; None where nothing is said."""
    return [None if spec is None else NamedSharding(placement.mesh, partition_spec(spec)) for spec in specs]


def partition_spec(spec: Spec) -> PartitionSpec:
    """JAX's form of a spec."""
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in spec))


def constrained(function: Callable[..., Any], placement: Placement) -> Callable[..., Any]:
    """A function of flat arrays, whose arguments and results JAX is told to place."""

    def run(*args: Any) -> tuple[Any, ...]:
        given = map(_constrain, args, named_shardings(placement, placement.arguments))
        return tuple(map(_constrain, function(*given), named_shardings(placement, placement.results)))

    return run


def _constrain(x: Any, sharding: Any) -> Any:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def devices_here(placement: Placement) -> int:
    """How many devices of a mesh this machine runs."""
    if placement.mesh is None:
        return 1 if jax.default_backend() == "cpu" else placement.devices.count([name for name, _ in placement.devices.axes])
    return len(placement.mesh.local_devices)


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
