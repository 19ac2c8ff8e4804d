"""Figure 2 of the paper: y = K(x, x') v with a squared exponential kernel, float64, one dimension; memory and time against n.

    python -m paper_repro.kernel_mvm                    sizes for a 2-core machine
    python -m paper_repro.kernel_mvm --scale paper      n up to 10^6, limits of 0.1 to 20 GB
    python -m paper_repro.kernel_mvm --limit 50MB       these limits only

All columns run the same function object, which knows nothing of memory: plain ``jax.jit``, and ``eqsat_mem.optimize`` under each
limit. Every point is measured in a process of its own and appended to ``paper_repro/results/kernel_mvm.csv``; a re-run continues
where the last one ended.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
FIELDS = ["n", "limit", "device", "status", "held_bytes", "seconds", "plan_seconds", "error"]
SCALES: dict[str, dict[str, Any]] = {
    "small": {"sizes": [1_000, 3_000, 10_000, 30_000, 100_000], "limits": ["none", "10MB", "30MB", "100MB"], "plain_bytes": 6e9},
    "paper": {
        "sizes": [1_000, 10_000, 100_000, 250_000, 500_000, 750_000, 1_000_000],
        "limits": ["none", "100MB", "1GB", "2GB", "5GB", "7GB", "10GB", "20GB"],
        "plain_bytes": 60e9,
    },
}
SEED = 111


def product(x: Any, y: Any, v: Any) -> Any:
    """K(x, y) v for the squared exponential kernel of unit scale: x of shape (n, 1), y of shape (m, 1), v of shape (m, 1)."""
    import jax.numpy as jnp

    distance = jnp.sum((x[:, None, :] - y[None, :, :]) ** 2, axis=-1)
    return jnp.exp(-0.5 * distance) @ v


def measure(n: int, limit: str) -> dict[str, Any]:
    """One point: bytes held by the compiled program, seconds of one run after a warm-up, and the error of sampled rows."""
    import jax
    import numpy as np

    import eqsat_mem
    from eqsat_mem.verify import held_bytes

    rng = np.random.default_rng(SEED)
    x, y, v = (rng.standard_normal((n, 1)) for _ in range(3))
    with jax.enable_x64(True):
        start = time.perf_counter()
        fast = jax.jit(product) if limit == "none" else eqsat_mem.optimize(product, memory_limit=limit)
        lowered = fast.lower(x, y, v)
        planned = time.perf_counter() - start
        run = lowered.compile()
        jax.block_until_ready(run(x, y, v))
        start = time.perf_counter()
        out = jax.block_until_ready(run(x, y, v))
        seconds = time.perf_counter() - start
    rows = rng.integers(0, n, 8)
    want = np.exp(-0.5 * (x[rows] - y[:, 0]) ** 2) @ v
    return {
        "device": jax.devices()[0].device_kind,
        "status": "ok",
        "held_bytes": held_bytes(run),
        "seconds": seconds,
        "plan_seconds": planned,
        "error": float(np.max(np.abs(np.asarray(out)[rows] - want)) / np.max(np.abs(want))),
    }


def points(scale: dict[str, Any], limits: list[str]) -> Iterator[tuple[int, str]]:
    """The grid, less plain programs that would not fit the machine."""
    for limit in limits:
        for n in scale["sizes"]:
            if limit != "none" or 8.0 * n * n <= scale["plain_bytes"]:
                yield n, limit


def measured(path: Path) -> dict[tuple[int, str], dict[str, str]]:
    """The points of earlier runs."""
    if not path.exists():
        return {}
    with path.open() as file:
        return {(int(row["n"]), row["limit"]): row for row in csv.DictReader(file)}


def in_own_process(n: int, limit: str) -> dict[str, Any]:
    """A point measured by a fresh interpreter, so that one that dies takes nothing with it."""
    command = [sys.executable, "-m", "paper_repro.kernel_mvm", "--point", str(n), limit]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    if done.returncode:
        return {"status": (done.stderr.strip().splitlines() or ["died"])[-1][:120]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(rows: dict[tuple[int, str], dict[str, str]]) -> str:
    """The figure as text: seconds and MiB held for each n and limit."""
    limits = list(dict.fromkeys(limit for _, limit in rows))
    lines = ["| n | " + " | ".join("plain JAX" if limit == "none" else f"limit {limit}" for limit in limits) + " |"]
    lines.append("| ---: |" + " ---: |" * len(limits))
    for n in sorted({n for n, _ in rows}):
        cells = [rows.get((n, limit)) for limit in limits]
        texts = [
            f"{float(c['seconds']):.3g} s, {float(c['held_bytes']) / 2**20:,.1f} MiB" if c and c["status"] == "ok" else "does not fit"
            for c in cells
        ]
        lines.append(f"| {n:,} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def picture(rows: dict[tuple[int, str], dict[str, str]], path: Path) -> bool:
    """Memory and time against n; False where matplotlib (the extra ``plots``) is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for limit in dict.fromkeys(limit for _, limit in rows):
        chosen = sorted((n, row) for (n, at), row in rows.items() if at == limit and row["status"] == "ok")
        label = "plain JAX" if limit == "none" else f"limit {limit}"
        axes[0].loglog([n for n, _ in chosen], [float(r["held_bytes"]) / 1e6 for _, r in chosen], "o-", label=label)
        axes[1].loglog([n for n, _ in chosen], [float(r["seconds"]) for _, r in chosen], "o-", label=label)
    for axis, name in zip(axes, ("MB held", "seconds"), strict=True):
        axis.set_xlabel("n")
        axis.set_ylabel(name)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    return True


def main() -> int:
    """Measure what is missing, then print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--limit", action="append", help="a limit such as 100MB, or none for plain JAX; may be given several times")
    parser.add_argument("--point", nargs=2, metavar=("N", "LIMIT"), help="measure one point and print it as JSON")
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(int(options.point[0]), options.point[1])))
        return 0
    scale = SCALES[options.scale]
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "kernel_mvm.csv"
    todo = list(points(scale, options.limit or scale["limits"]))
    for count, (n, limit) in enumerate(todo, 1):
        if (n, limit) in measured(path):
            continue
        print(f"[{count}/{len(todo)}] n = {n:,}, limit {limit}", file=sys.stderr, flush=True)
        row = {"n": n, "limit": limit, **in_own_process(n, limit)}
        fresh = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if fresh:
                writer.writeheader()
            writer.writerow(row)
    rows = measured(path)
    print(table(rows))
    if not picture(rows, path.with_suffix(".png")):
        print("no picture: matplotlib is missing (pip install '.[plots]')", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
