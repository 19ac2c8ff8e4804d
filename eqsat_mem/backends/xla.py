"""Memory of compiled programs, and which donated arguments their outputs can take over."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.ir.mesh import Placement, Spec
from eqsat_mem.schedule.backend import Backend


def compiled_peak(
    function: Callable[..., Any], avals: Sequence[Any], donate: Sequence[int] = (), backend: Backend | None = None, optimise: bool = True
) -> tuple[int, Any]:
    """Bytes that a function of flat arguments holds at its peak when it is compiled, and the compiled program.

    See :meth:`eqsat_mem.schedule.backend.Backend.check`; ``backend`` is that of the device in use unless another is given.
    """
    check = (backend or backend_in_use()).check(function, avals, donate, optimise)
    return check.held_bytes, check.compiled


def donations(jaxpr: ClosedJaxpr, donated: Sequence[int], placement: Placement | None = None) -> tuple[tuple[int, ...], int]:
    """Those of the donated arguments whose memory outputs can take, each one output of the same shape and dtype, and their bytes.

    On a mesh argument and output are given to lie alike, and the bytes are those of a share.
    """
    ins: Sequence[Spec | None] = [None] * len(jaxpr.in_avals) if placement is None else placement.arguments
    outs: Sequence[Spec | None] = [None] * len(jaxpr.out_avals) if placement is None else placement.results
    known = [placement is None or spec is not None for spec in outs]
    free = Counter((aval.shape, aval.dtype, spec) for aval, spec, told in zip(jaxpr.out_avals, outs, known, strict=True) if told)
    taken = []
    for k in donated:
        kind = jaxpr.in_avals[k].shape, jaxpr.in_avals[k].dtype, ins[k]
        if free[kind]:
            free[kind] -= 1
            taken.append(k)
    return tuple(taken), sum(aval_bytes([jaxpr.in_avals[k]]) // dealt(placement, ins[k]) for k in taken)


def dealt(placement: Placement | None, spec: Spec | None) -> int:
    """The number of devices that an array is dealt out to."""
    return 1 if placement is None else math.prod(placement.devices.count(names) for names in spec or ())


def named_shardings(placement: Placement, specs: Sequence[Spec | None]) -> list[Any]:
    """JAX's shardings for specs; None where nothing is said."""
    return [None if spec is None else NamedSharding(placement.mesh, partition_spec(spec)) for spec in specs]


def partition_spec(spec: Spec) -> PartitionSpec:
    """JAX's form of a spec."""
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in spec))


def partition_specs(specs: Sequence[Spec | None]) -> list[PartitionSpec | None]:
    """JAX's form of specs; None where nothing is said."""
    return [None if spec is None else partition_spec(spec) for spec in specs]


def shown_mesh(placement: Placement) -> Mesh | AbstractMesh:
    """The mesh that a plan is for: its devices, or their numbers where functions take them from ``jax.set_mesh``."""
    if placement.mesh is not None and not placement.around:
        mesh: Mesh = placement.mesh
        return mesh
    names, sizes = zip(*placement.devices.axes, strict=True)
    return AbstractMesh(sizes, names)


def constrained(function: Callable[..., Any], placement: Placement) -> Callable[..., Any]:
    """A function of flat arrays, whose arguments and results JAX is told to place."""

    def run(*args: Any) -> tuple[Any, ...]:
        results = function(*laid(args, placement, placement.arguments))
        return tuple(laid(results, placement, placement.results))

    return run


def laid(arrays: Sequence[Any], placement: Placement, specs: Sequence[Spec | None]) -> list[Any]:
    """Arrays that JAX is told to place on a mesh; where nothing is said, it is told of the mesh alone."""
    every = [
        PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim) if spec is None else partition_spec(spec) for x, spec in zip(arrays, specs)
    ]
    return [jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, spec)) for x, spec in zip(arrays, every, strict=True)]


def devices_here(placement: Placement) -> int:
    """The number of devices of a mesh that a machine runs: the most that one process has, so that all processes say the same."""
    if placement.mesh is None:
        return 1 if jax.default_backend() == "cpu" else placement.devices.total
    return max(Counter(device.process_index for device in placement.mesh.devices.flat).values())


def held_bytes(compiled: Any, backend: Backend | None = None) -> int:
    """Bytes that a compiled program holds at its peak, on the device in use unless another backend is given.

    Raises:
        NotImplementedError: if the compiler does not analyse memory.
    """
    return (backend or backend_in_use()).checked(compiled).held_bytes
