"""Programs on a mesh of eight virtual devices: the plan beside plain ``jax.jit`` with the same shardings and a hand-written ``shard_map``.

    python -m benchmarks.mesh_programs                    bytes at full size, seconds at the size of this machine
    python -m benchmarks.mesh_programs --small            both at the size that runs here
    python -m benchmarks.mesh_programs --step             the training step of twelve transformer layers on 4 x 2
    python -m benchmarks.mesh_programs --only kernel

Held and received are bytes of one device, of the compiled program and counted in its text; nothing runs at full size. Seconds are
medians of turns that the versions take one after the other; virtual devices share the cores of one machine, so that only ratios within a
row say anything. Prints a markdown table; ``--json FILE`` keeps the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.mesh_rows import Row, rows, step
from benchmarks.mesh_shapes import DEVICES
from eqsat_mem import optimize
from tests.oracles.collectives import collectives

MiB = 2**20
TURNS = 7
CLOSE = 1e-3
"""By how much of the largest value versions may differ."""


def measured(row: Row, small: bool, timed: bool) -> dict[str, Any]:
    """The figures of one row: bytes of each version, seconds of planning and of running."""
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(row.axes.values())), tuple(row.axes))
    shapes, limit = (row.runs, row.limits[1]) if small else (row.full, row.limits[0])
    found: dict[str, Any] = {"name": row.name, "limit": limit, "held": {}, "received": {}, "seconds": {}}
    start = time.process_time()
    planned(row, mesh, limit).plan(*shapes)
    found["planning"] = time.process_time() - start
    for name, function in versions(row, mesh, limit).items():
        compiled = function.lower(*shapes).compile()
        memory = compiled.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
        found["held"][name] = held
        found["received"][name] = sum(received for _, received in collectives(compiled.as_text(), DEVICES).values())
    if timed:
        found["seconds"] = raced(row, mesh)
    return found


def planned(row: Row, mesh: Mesh, limit: str) -> Any:
    return optimize(row.function, memory_limit=limit, mesh=mesh, in_shardings=row.ins, out_shardings=row.outs)


def versions(row: Row, mesh: Mesh, limit: str) -> dict[str, Any]:
    """Functions that JAX compiles, by what wrote them."""

    def placed(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda spec: isinstance(spec, P))

    made = {"plan": planned(row, mesh, limit), "jit": jax.jit(row.function, in_shardings=placed(row.ins), out_shardings=placed(row.outs))}
    if row.by_hand is not None:
        local = jax.shard_map(row.by_hand, mesh=mesh, in_specs=row.ins, out_specs=row.outs, check_vma=False)
        made["by hand"] = jax.jit(row.by_hand if row.whole else local, in_shardings=placed(row.ins), out_shardings=placed(row.outs))
    return made


def raced(row: Row, mesh: Mesh) -> dict[str, float]:
    """Median seconds of each version, which take turns; their values are compared before."""
    rng = np.random.default_rng(0)

    def value(spec: Any) -> Any:
        return rng.integers(0, 64, spec.shape).astype(np.int32) if spec.dtype == np.int32 else rng.standard_normal(spec.shape, np.float32)

    arguments = jax.tree.map(value, tuple(row.runs))
    every = versions(row, mesh, row.limits[1])
    arguments = jax.tree.map(
        lambda own, prefix: jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, prefix)), own),
        arguments,
        jax.tree.broadcast(row.ins, arguments, is_leaf=lambda spec: isinstance(spec, P)),
    )
    values = {name: jax.tree.map(np.asarray, function(*arguments)) for name, function in every.items()}
    for name, got in values.items():
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(values["jit"]), strict=True):
            away = np.max(np.abs(one - other)) / max(np.max(np.abs(other)), 1e-30)
            assert away < CLOSE, f"{row.name}: {name} differs from jit by {away:.1e}"
    taken: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(TURNS):
        for name, function in every.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(own) for name, own in taken.items()}


def table(found: Sequence[dict[str, Any]]) -> str:
    """The figures as a markdown table."""
    lines = [
        "| program | limit | held: plan | jit | by hand | received: plan | jit | by hand | ms: plan | jit | by hand | planned in |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        cells = [row["name"], row["limit"]]
        for kind, unit in (("held", MiB), ("received", MiB), ("seconds", 1e-3)):
            cells += [f"{row[kind][name] / unit:,.1f}" if name in row[kind] else "" for name in ("plan", "jit", "by hand")]
        lines.append(f"| {' | '.join(cells)} | {row['planning']:.1f} s |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="bytes too at the size that runs here")
    parser.add_argument("--step", action="store_true", help="the training step alone")
    parser.add_argument("--untimed", action="store_true", help="bytes alone")
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    if jax.device_count() < DEVICES:  # JAX decides how many there are when it starts
        flags = f"--xla_force_host_platform_device_count={DEVICES} {os.environ.get('XLA_FLAGS', '')}"
        arguments = sys.argv[1:] if argv is None else argv
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.mesh_programs", *arguments], {**os.environ, "XLA_FLAGS": flags})
    chosen = [step(options.small)] if options.step else [row for row in rows() if options.only in row.name]
    found = []
    for row in chosen:
        print(f"{row.name} ...", file=sys.stderr, flush=True)
        found.append(measured(row, options.small, not options.untimed and (options.small or not options.step)))
    print(f"MiB and milliseconds on each of {DEVICES} virtual devices; seconds of planning are those of the processor.\n\n{table(found)}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
