"""Programs on a mesh of eight virtual devices: the plan beside plain ``jax.jit`` with the same shardings and a hand-written ``shard_map``.

    python -m benchmarks.mesh_programs                    bytes at full size, seconds at the size of this machine
    python -m benchmarks.mesh_programs --small            both at small sizes, in a minute
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize
from tests.oracles.collectives import collectives

MiB = 2**20
DEVICES = 8
TURNS = 7
CLOSE = 1e-3
"""By how much of the largest value versions may differ."""

Function = Callable[..., Any]
LINE, GRID = {"x": DEVICES}, {"data": DEVICES // 2, "model": 2}
S, R = P("x"), P()


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# --- programs, and what a person writes -----------------------------------------------------------------


def kernel_product(x: Any, y: Any, v: Any) -> Any:
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


def in_chunks(function: Function, size: int, *arrays: Any) -> Any:
    """A function of rows, a chunk of rows at a time."""
    size = min(size, len(arrays[0]))
    parts = [a.reshape(-1, size, *a.shape[1:]) for a in arrays]
    made = lax.map(lambda own: function(*own), tuple(parts))
    return jax.tree.map(lambda m: m.reshape(-1, *m.shape[2:]), made)


def kernel_product_by_hand(x: Any, y: Any, v: Any) -> Any:
    y, v = (lax.all_gather(a, "x", tiled=True) for a in (y, v))

    def rows(some: Any) -> Any:
        def tile(k: Any, total: Any) -> Any:
            columns, weights = (lax.dynamic_slice_in_dim(a, k * width, width) for a in (y, v))
            return total + kernel_product(some, columns, weights)

        width = min(len(y), 1024)
        return lax.fori_loop(0, len(y) // width, tile, jnp.zeros((len(some), v.shape[1]), v.dtype))

    return in_chunks(rows, 256, x)


def neighbours(x: Any, q: Any) -> Any:
    return tuple(lax.top_k(2.0 * q @ x.T - jnp.sum(x**2, -1)[None] - jnp.sum(q**2, -1)[:, None], 10))


def neighbours_by_hand(x: Any, q: Any) -> Any:
    found, places = in_chunks(lambda some: neighbours(x, some), 64, q)
    places = places + lax.axis_index("x") * len(x)
    found, places = (lax.all_gather(a, "x", axis=1, tiled=True) for a in (found, places))
    best, which = lax.top_k(found, 10)
    return best, jnp.take_along_axis(places, which, 1)


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.swapaxes(1, 2) / jnp.sqrt(q.shape[-1]), -1) @ v


def attention_by_hand(q: Any, k: Any, v: Any) -> Any:
    k, v = (lax.all_gather(a, "x", axis=1, tiled=True) for a in (k, v))
    chunks = in_chunks(lambda some: attention(some.swapaxes(0, 1), k, v).swapaxes(0, 1), 64, q.swapaxes(0, 1))
    return chunks.swapaxes(0, 1)


def means(x: Any, c: Any) -> Any:
    nearest = jnp.argmin(jnp.sum(c**2, -1)[None] - 2.0 * x @ c.T, 1)
    of = jax.nn.one_hot(nearest, len(c), dtype=x.dtype)
    return (of.T @ x) / jnp.maximum(jnp.sum(of, 0), 1.0)[:, None]


def means_by_hand(x: Any, c: Any) -> Any:
    def chunk(k: Any, total: Any) -> Any:
        some = lax.dynamic_slice_in_dim(x, k * size, size)
        nearest = jnp.argmin(jnp.sum(c**2, -1)[None] - 2.0 * some @ c.T, 1)
        of = jax.nn.one_hot(nearest, len(c), dtype=x.dtype)
        return total[0] + of.T @ some, total[1] + jnp.sum(of, 0)

    size = min(len(x), 1000)
    sums, counts = lax.fori_loop(0, len(x) // size, chunk, (jnp.zeros_like(c), jnp.zeros(len(c))))
    sums, counts = lax.psum((sums, counts), "x")
    return sums / jnp.maximum(counts, 1.0)[:, None]


def two_layers(params: Any, x: Any, y: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jax.nn.gelu(x @ p["w1"]) @ p["w2"] - y) ** 2)

    value, slope = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, slope)


def two_layers_by_hand(params: Any, x: Any, y: Any) -> Any:
    """The hidden layer is computed again in the second pass; sums are over hidden units for results, and over data for gradients."""
    size = y.size * GRID["data"]
    w1, w2 = params["w1"], params["w2"]
    hidden = jax.checkpoint(lambda w, x: jax.nn.gelu(x @ w))
    out = lax.psum(hidden(w1, x) @ w2, "model")
    value = lax.psum(jnp.sum((out - y) ** 2), "data") / size
    _, back = jax.vjp(lambda w1, w2: hidden(w1, x) @ w2, w1, w2)
    slope = dict(zip(("w1", "w2"), lax.psum(back(2.0 * (out - y) / size), "data"), strict=True))
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, slope)


def block(p: Any, x: Any) -> Any:
    """A transformer block of [batch, time, feature] with a causal mask."""

    def norm(u: Any) -> Any:
        return (u - u.mean(-1, keepdims=True)) * lax.rsqrt(u.var(-1, keepdims=True) + 1e-5)

    h, t = norm(x), x.shape[1]
    q, k, v = (jnp.einsum("btd,dhe->bhte", h, p[name]) for name in ("q", "k", "v"))
    s = jnp.einsum("bhte,bhse->bhts", q, k) / jnp.sqrt(q.shape[-1])
    s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s, -jnp.inf)
    x = x + jnp.einsum("bhts,bhse,hed->btd", jax.nn.softmax(s, -1), v, p["o"])
    return x + jax.nn.gelu(norm(x) @ p["w1"]) @ p["w2"]


def language_model(params: Any, tokens: Any) -> Any:
    """One step of gradient descent on the next token."""

    def loss(p: Any) -> Any:
        x = p["embed"][tokens[:, :-1]]
        for layer in p["layers"]:
            x = block(layer, x)
        logits = x @ p["embed"].T
        own = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - own)

    value, slope = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 1e-3 * g, params, slope)


def language_model_arguments(layers: int, batch: int, length: int, d: int, heads: int, words: int) -> tuple[Any, Any]:
    head = f32(d, heads, d // heads)
    layer = {"q": head, "k": head, "v": head, "o": f32(heads, d // heads, d), "w1": f32(d, 4 * d), "w2": f32(4 * d, d)}
    tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    return {"embed": f32(words, d), "layers": [layer] * layers}, tokens


# --- rows -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A program, its shardings, and its arguments: at full size, which is only compiled, and at a size that runs here.

    ``limits`` are the bytes that each device may hold at either size.
    """

    name: str
    function: Function
    by_hand: Function | None
    axes: dict[str, int]
    ins: Any
    outs: Any
    full: Sequence[Any]
    runs: Sequence[Any]
    limits: tuple[str, str]


def rows() -> list[Row]:
    T, D = P(None, "x"), P("data")
    layers = {"w1": P(None, "model"), "w2": P("model")}

    def mlp(batch: int, width: int, hidden: int) -> tuple[Any, ...]:
        return {"w1": f32(width, hidden), "w2": f32(hidden, width)}, f32(batch, width), f32(batch, width)

    def points(n: int) -> tuple[Any, ...]:
        return f32(n, 3), f32(n, 3), f32(n, 1)

    return [
        Row("kernel product", kernel_product, kernel_product_by_hand, LINE, (S, S, S), S, points(2**20), points(8192), ("64MiB", "4MiB")),
        Row(
            "nearest neighbours",
            neighbours,
            neighbours_by_hand,
            LINE,
            (S, R),
            R,
            (f32(2**20, 64), f32(4096, 64)),
            (f32(2**14, 64), f32(1024, 64)),
            ("96MiB", "4MiB"),
        ),
        Row(
            "attention",
            attention,
            attention_by_hand,
            LINE,
            (T, T, T),
            T,
            (f32(8, 65536, 64),) * 3,
            (f32(4, 2048, 64),) * 3,
            ("448MiB", "12MiB"),
        ),
        Row(
            "k-means step",
            means,
            means_by_hand,
            LINE,
            (S, R),
            R,
            (f32(1_000_000, 16), f32(1024, 16)),
            (f32(64_000, 16), f32(256, 16)),
            ("32MiB", "3MiB"),
        ),
        Row(
            "two-layer step",
            two_layers,
            two_layers_by_hand,
            GRID,
            (layers, D, D),
            (R, layers),
            mlp(65536, 1024, 8192),
            mlp(4096, 128, 1024),
            ("384MiB", "8MiB"),
        ),
    ]


def step(small: bool) -> Row:
    """Twelve layers of 768 on 32 x 1,024 tokens of 32,768 words, or two layers of 64."""
    big, little = language_model_arguments(12, 32, 1024, 768, 12, 32768), language_model_arguments(2, 8, 64, 64, 4, 256)
    arguments = little if small else big
    return Row("transformer step", language_model, None, GRID, (R, P("data")), R, arguments, little, ("5GiB", "16MiB"))


# --- measuring ------------------------------------------------------------------------------------------


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
        made["by hand"] = jax.jit(local, in_shardings=placed(row.ins), out_shardings=placed(row.outs))
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
