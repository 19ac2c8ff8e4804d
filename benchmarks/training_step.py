"""Memory over time of a training step of a transformer: ``python -m benchmarks.training_step [--write]``.

The step runs as written, with ``jax.checkpoint`` around each layer, and planned under a limit, each in a process of its own. A second
process samples what the first one holds while it runs its first step, which is compiled by then: what a process has held once it may
keep, so that later steps would show less. Seconds are the processor's, so that other work on the machine counts little. ``--write``
draws the README's picture. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring import device_name, prepare, warm_up
from eqsat_mem.units import format_bytes

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "training_step.svg"
LAYERS, BATCH, LENGTH, WIDTH, HEADS, WORDS = 8, 4, 512, 256, 8, 16_384
LIMIT = 256 * 2**20
RATE = 0.01
EVERY_S = 0.005
POINTS = 300
"""About as many points has the longest line of the picture."""
VERSIONS = {"as written": "#bc2f27", "jax.checkpoint per layer": "#b07800", "planned": "#1f5fbf"}
"""The versions of the step, and their colours in the picture."""


# --- the program --------------------------------------------------------------------------------------


def normal(x: Any) -> Any:
    """Each token's vector with mean 0 and variance 1: (..., width)."""
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def layer(x: Any, p: Any) -> tuple[Any, None]:
    """Causal attention and a perceptron: (batch, length, width) to the same."""
    q, k, v = (jnp.einsum("btd,dhe->bhte", normal(x), p[name]) for name in "qkv")
    scores = jnp.einsum("bhte,bhse->bhts", q, k) / jnp.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    x = x + jnp.einsum("bhte,hed->btd", jax.nn.softmax(scores, -1) @ v, p["out"])
    return x + jax.nn.gelu(normal(x) @ p["up"]) @ p["down"], None


def step(each: Callable[..., Any], parameters: Any, tokens: Any) -> Any:
    """Parameters after a step of gradient descent, and the loss before it; ``each`` is a layer."""

    def loss(p: Any) -> Any:
        x, _ = jax.lax.scan(each, p["embedding"][tokens[:, :-1]], p["layers"])
        logits = normal(x) @ p["embedding"].T
        own = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - own)

    value, slope = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - RATE * g, parameters, slope), value


def arguments() -> tuple[Any, Any]:
    """Random parameters and tokens."""
    rng = np.random.default_rng(0)

    def made(inputs: int, *shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, dtype=np.float32) * np.float32(0.3 / inputs**0.5))

    head = WIDTH // HEADS
    layers = {name: made(WIDTH, LAYERS, WIDTH, HEADS, head) for name in "qkv"}
    layers |= {"out": made(WIDTH, LAYERS, HEADS, head, WIDTH), "up": made(WIDTH, LAYERS, WIDTH, 4 * WIDTH)}
    layers["down"] = made(4 * WIDTH, LAYERS, 4 * WIDTH, WIDTH)
    tokens = jnp.asarray(rng.integers(0, WORDS, (BATCH, LENGTH + 1)), jnp.int32)
    return {"embedding": made(WIDTH, WORDS, WIDTH), "layers": layers}, tokens


# --- one version in one process -----------------------------------------------------------------------


def run(version: str) -> dict[str, Any]:
    """What the compiled program holds, the loss, and samples during one step: (processor seconds, resident bytes with the arguments)."""
    each = jax.checkpoint(layer) if version == "jax.checkpoint per layer" else layer
    args = jax.block_until_ready(arguments())
    made = prepare(partial(step, each), args, LIMIT if version == "planned" else None)
    warm_up(jnp.float32)
    watch = subprocess.Popen(
        [sys.executable, "-c", WATCH, str(os.getpid()), str(EVERY_S)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert watch.stdout is not None
    watch.stdout.readline()  # it has begun
    _, loss = jax.block_until_ready(made.compiled(*args))
    samples = json.loads(watch.communicate("\n")[0])
    begin, ground = samples[0][0], samples[0][1] - sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    return {
        "held_bytes": made.held_bytes,
        "plan_seconds": made.plan_seconds,
        "loss": float(loss),
        "samples": [(seconds - begin, nbytes - ground) for seconds, nbytes in samples],
    }


WATCH = """
import json, os, select, sys
pid, every = sys.argv[1], float(sys.argv[2])
samples = []
def sample():
    pages = int(open(f"/proc/{pid}/statm").read().split()[1])
    used = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    samples.append(((int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE") * pages))
sample()
print("ready", flush=True)
while not select.select([sys.stdin], [], [], every)[0]:
    sample()
sample()
print(json.dumps(samples))
"""
"""The second process: it samples until it is written a line."""


# --- the picture --------------------------------------------------------------------------------------


def thinned(samples: Sequence[tuple[float, int]], apart_s: float) -> tuple[list[float], list[int]]:
    """Seconds and bytes of the largest of the samples in each stretch of ``apart_s`` seconds, and of the last one.

    >>> thinned([(0.0, 1), (0.1, 9), (0.2, 5), (1.1, 3), (1.2, 2)], 1.0)
    ([0.1, 1.1, 1.2], [9, 3, 2])
    """
    stretches: dict[int, tuple[float, int]] = {}
    for seconds, nbytes in samples:
        stretch = int(seconds / apart_s)
        if stretch not in stretches or nbytes > stretches[stretch][1]:
            stretches[stretch] = (seconds, nbytes)
    kept = [*stretches.values()]
    if kept[-1] != tuple(samples[-1]):
        kept.append((samples[-1][0], samples[-1][1]))
    return [seconds for seconds, _ in kept], [nbytes for _, nbytes in kept]


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Resident memory over the seconds of a step, a line for each version, and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "eqsat_mem", "font.size": 11})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.6, 3.6), layout="constrained")
    longest = max(result["samples"][-1][0] for result in found.values())
    for name, color in VERSIONS.items():
        seconds, nbytes = thinned(found[name]["samples"], longest / POINTS)
        mib = [n / 2**20 for n in nbytes]
        axes.fill_between(seconds, mib, color=color, alpha=0.1, linewidth=0)
        axes.plot(seconds, mib, color=color, linewidth=2, label=f"{name}: {max(mib):,.0f} MiB")
    axes.axhline(LIMIT / 2**20, color="black", linestyle="--", linewidth=1.2, label=f"limit: {LIMIT / 2**20:,.0f} MiB")
    axes.set_xlabel("processor seconds since the step began")
    axes.set_ylabel("MiB held")
    axes.set_xlim(0, 1.02 * longest)
    axes.set_ylim(0, None)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Run each version in a process of its own; print what was found, or draw it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_step", description=__doc__.splitlines()[0])
    parser.add_argument("--version", choices=VERSIONS, help="run this one here, and print JSON")
    parser.add_argument("--write", action="store_true", help=f"draw docs/pictures/{PICTURE.name}")
    options = parser.parse_args(argv)
    if options.version:
        print(json.dumps(run(options.version)))
        return
    found = {}
    for name in VERSIONS:
        command = [sys.executable, "-m", "benchmarks.training_step", "--version", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        samples = found[name]["samples"]
        peak = format_bytes(max(nbytes for _, nbytes in samples))
        print(
            f"{name:25}  resident {peak:>10}, compiled {format_bytes(found[name]['held_bytes']):>10}, {samples[-1][0]:.2f} processor s, "
            f"loss {found[name]['loss']:.5f}, traced and planned in {found[name]['plan_seconds']:.1f} s",
            flush=True,
        )
    print(f"{device_name()}, limit {format_bytes(LIMIT)}")
    if options.write:
        draw(found, PICTURE)


if __name__ == "__main__":
    main()
