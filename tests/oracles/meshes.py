"""Random programs on random meshes, with arguments and results that lie at random, against one device.

``XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.oracles.meshes --seconds 60 --seed 0`` prints the first failure.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from eqsat_mem.backends.xla import laid, named_shardings
from eqsat_mem.codegen.emit import Emitted, emit
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.mesh import Devices, Placement, Shares, Spec
from eqsat_mem.mesh.choose import Spread, spread
from eqsat_mem.reports.outline import exchanges
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import schedule, straight
from tests.oracles import stepwise
from tests.oracles.collectives import KINDS, collectives
from tests.oracles.differential import Case, Mismatch, compare, extractions
from tests.oracles.fuzz import command_line, first_failure, search
from tests.oracles.programs import sample
from tests.oracles.targets import TINY

EXTENTS = (1, 2, 4, 8, 8, 16, 16, 24, 3, 6, 13)
"""Extents of programs: most can be dealt out to two devices, many to eight."""
ODD = (1, 3, 5, 6, 7, 9, 9, 11, 12, 13, 17, 8)
"""Extents most of which cannot."""
MESHES: tuple[dict[str, int], ...] = ({"x": 2}, {"x": 8}, {"x": 4, "y": 2})


def mesh_of(axes: dict[str, int]) -> Mesh:
    """A mesh of the devices that there are."""
    count = math.prod(axes.values())
    return Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))


def random_spec(shape: Sequence[int], axes: dict[str, int], rng: random.Random, merged: float) -> Spec:
    """A random spec of an array of a shape; ``merged`` is the probability that two mesh axes deal out one of it."""
    left, spec = list(axes), []
    for extent in shape:
        names: tuple[str, ...] = ()
        for count in (2, 1):
            chosen = tuple(rng.sample(left, count)) if len(left) >= count else ()
            divides = bool(chosen) and extent and extent % math.prod(axes[n] for n in chosen) == 0
            if not names and divides and rng.random() < (merged if count == 2 else 0.6):
                names = chosen
        left = [name for name in left if name not in names]
        spec.append(names)
    return tuple(spec)


def random_placement(known: Case, axes: dict[str, int], rng: random.Random, merged: float) -> Placement:
    """Random specs of arguments and results; some of them are left to the planner."""

    def every(avals: Sequence[Any], left_open: float) -> tuple[Spec | None, ...]:
        return tuple(None if rng.random() < left_open else random_spec(aval.shape, axes, rng, merged) for aval in avals)

    devices = Devices(tuple(axes.items()))
    mesh = mesh_of(axes) if jax.device_count() >= math.prod(axes.values()) else None
    return Placement(devices, every(known.jaxpr.in_avals, 0.2), every(known.jaxpr.out_avals, 0.4), mesh)


def spreads(known: Case, placement: Placement, seed: int) -> Iterator[Spread]:
    """Ways to spread the program as written, for every third seed also some that equal it."""
    found = extractions(load(known.jaxpr, known.names), seed)
    for group in spread([ex for _, ex in islice(found, None if seed % 3 == 0 else 1)], placement, TINY):
        yield from group


def plans(known: Case, placement: Placement, seed: int, most: int = 3) -> Iterator[tuple[str, Schedule]]:
    """Plans of one device among several: of ways drawn at random one without loops, one with."""
    rng, ways = random.Random(seed), list(spreads(known, placement, seed))
    for way in rng.sample(ways, min(most, len(ways))):
        yield "without loops", straight(way.local, TINY)
        yield "smallest", schedule(way.local, 1, TINY)


def check_plan(known: Case, made: Schedule, placement: Placement) -> None:
    """Raises :class:`Mismatch` unless the devices together compute what the program computes."""
    code = emit(made)
    shares = made.ex.program.shares
    assert shares is not None
    for k, (spec, asked) in enumerate(zip(shares.results, placement.results, strict=True)):
        if asked is not None and spec != asked:
            raise Mismatch(f"result {k} lies as {spec}, not as {asked}", code.source)
    try:
        got = simulated(known, code, shares)
    except Exception as error:
        raise Mismatch(f"{type(error).__name__}: {error}", code.source) from error
    compare(known, got, code.source)


def simulated(known: Case, code: Emitted, shares: Shares) -> list[Any]:
    """The results of the devices together, each operation by itself: devices are lanes of ``vmap``, whose axes collectives reduce over."""
    local = code.function.__globals__[f"{code.function.__name__}_on_each_device"]
    local.__globals__["lax"] = _Lanes()
    axes = shares.devices.axes
    ins = [_lanes(a, spec, shares) for a, spec in zip(known.args, shares.arguments, strict=True)]
    lying = [[0 if name in sum(spec, ()) else None for spec in shares.arguments] for name, _ in axes]
    every = local
    for (name, size), own in reversed(list(zip(axes, lying, strict=True))):
        every = jax.vmap(every, in_axes=tuple(own), axis_name=name, axis_size=size)
    jaxpr = jax.make_jaxpr(lambda *args: list(every(*args)))(*ins)
    return [_joined(np.asarray(x), spec, shares) for x, spec in zip(stepwise.run(jaxpr, ins), shares.results, strict=True)]


class _Lanes:
    """``jax.lax`` for lanes of ``vmap``: JAX cannot batch ``psum_scatter`` along one mesh axis within another."""

    def __getattr__(self, name: str) -> Any:
        return getattr(lax, name)

    @staticmethod
    def psum_scatter(x: Any, names: Any) -> Any:
        return lax.dynamic_index_in_dim(lax.psum(x, names), lax.axis_index(names), 0, keepdims=False)


def _lanes(array: Any, spec: Spec, shares: Shares) -> Any:
    """The shares of an array side by side: a leading axis for each mesh axis that deals it out, in the order of the mesh."""
    sizes, shape, names = dict(shares.devices.axes), [], []
    for extent, own in zip(np.shape(array), spec, strict=True):
        shape += [*(sizes[n] for n in own), extent // math.prod(sizes[n] for n in own)]
        names += [*own, ""]
    order = [names.index(n) for n in sizes if n in names] + [k for k, n in enumerate(names) if not n]
    return np.reshape(array, shape).transpose(order)


def _joined(lanes: Any, spec: Spec, shares: Shares) -> Any:
    """An array of its shares, of which each device has one; whole ones are the same everywhere."""
    sizes = dict(shares.devices.axes)
    order, shape, rest = [], [], len(sizes)
    dealt = sum(spec, ())
    for k, own in enumerate(spec):
        order += [*(list(sizes).index(n) for n in own), rest + k]
        shape.append(lanes.shape[rest + k] * math.prod(sizes[n] for n in own))
    whole = [k for k, n in enumerate(sizes) if n not in dealt]
    for k in whole:
        first = np.take(lanes, [0], axis=k)
        if not np.array_equal(np.broadcast_to(first, lanes.shape), lanes, equal_nan=jnp.issubdtype(lanes.dtype, jnp.inexact)):
            raise AssertionError("devices have different values of what all of them have whole")
    picked = lanes[tuple(0 if k in whole else slice(None) for k in range(rest))]
    left = [k for k in range(lanes.ndim) if k not in whole]
    return picked.transpose([left.index(k) for k in order]).reshape(shape)


def check_on_devices(known: Case, made: Schedule, placement: Placement) -> None:
    """Raises :class:`Mismatch` unless XLA runs a plan on devices, with no collective that the plan does not list, and results have shapes,
    dtypes and shardings as they should.
    """
    code = emit(made)
    shares = made.ex.program.shares
    assert shares is not None

    def run(*args: Any) -> list[Any]:
        return list(code.function(*laid(args, placement, shares.arguments), mesh=placement.mesh))

    try:
        args = [jax.device_put(a, s) for a, s in zip(known.args, named_shardings(placement, shares.arguments), strict=True)]
        compiled = jax.jit(run).lower(*args).compile()
        got = compiled(*args)
    except Exception as error:
        raise Mismatch(f"{type(error).__name__}: {error}", code.source) from error
    listed = {exchange.kind.replace("pmax", "psum").replace("pmin", "psum") for exchange in exchanges(made)}
    beyond = {KINDS[kind] for kind in collectives(compiled.as_text(), shares.devices.total)} - listed
    if beyond:
        raise Mismatch(f"{sorted(beyond)} run, and the plan lists {sorted(listed)}", code.source)
    for k, (x, spec) in enumerate(zip(got, shares.results, strict=True)):
        (sharding,) = named_shardings(placement, [spec])
        if x.size and not x.sharding.is_equivalent_to(sharding, x.ndim):  # JAX places what has no element as it likes
            raise Mismatch(f"result {k} lies on {x.sharding}, not {sharding}", code.source)
        if x.shape != known.want[k].shape or x.dtype != known.want[k].dtype:
            raise Mismatch(f"result {k} is {x.dtype}{x.shape}", code.source)


def failure(seed: int, devices: bool = False, odd: bool = False) -> str | None:
    """A script that shows what is wrong with some plan of the program of a seed on some mesh, or None.

    With ``devices`` plans run on them, else as lanes of ``vmap``, which has no collectives over two axes at once. With ``odd`` the extents
    of the program are such that few can be dealt out evenly.
    """
    axes, rng = MESHES[seed % len(MESHES)], random.Random(seed)

    def checks(known: Case) -> Iterator[str]:
        placement = random_placement(known, axes, rng, 0.15 if devices else 0.0)
        where = f"on {axes}, {[*map(_text, placement.arguments)]} -> {[*map(_text, placement.results)]}"
        for word, made in plans(known, placement, seed):
            yield f"{word} {where}"
            (check_on_devices if devices else check_plan)(known, made, placement)

    return first_failure(sample(seed, ODD if odd else EXTENTS), checks)


def _text(spec: Spec | None) -> str:
    return "open" if spec is None else str(P(*(names or None for names in spec)))


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--devices", action="store_true", help="run plans on devices, of which there must be eight")
    parser.add_argument("--odd", action="store_true", help="extents that most meshes do not divide")
    options = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    return search(options, lambda seed: failure(seed, options.devices, options.odd))


if __name__ == "__main__":
    sys.exit(main())
