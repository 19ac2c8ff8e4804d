"""Planning time against the size of programs, stage by stage: ``python -m benchmarks.planning``

Deep programs of several kinds, planned under a limit below what they hold as written where that can be, without XLA's compilation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.racing import Question, Row, main, markdown
from eqsat_mem.errors import MemoryLimitError
from eqsat_mem.frontend.inline import flatten
from eqsat_mem.ir.jaxprs import aval_bytes
from eqsat_mem.options import Options
from eqsat_mem.pipeline import plan

SIZES = {"tiny": [40, 80], "small": [100, 300, 1_000, 2_500, 5_000], "full": [100, 300, 1_000, 2_500, 5_000]}
"""Equations, about."""
ROOM = 48 * 2**20
"""Bytes beside arguments and results that programs of every depth are planned for."""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def training_step(depth: int) -> tuple[Callable[..., Any], Any]:
    """The loss of a residual network of square layers, and its gradient: each layer reads the one before under two names."""

    def loss(layers: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for w, b in layers:
            h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            x = x + jax.nn.gelu(h @ w + b)
        return jnp.mean((x - y) ** 2)

    return jax.value_and_grad(loss), ([(f32(256, 256), f32(256))] * depth, f32(4_096, 256), f32(4_096, 256))


def transformer(depth: int) -> tuple[Callable[..., Any], Any]:
    """Blocks of attention and two layers, forward."""

    def norm(x: jax.Array) -> jax.Array:
        return (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)

    def forward(blocks: Any, x: jax.Array) -> jax.Array:
        for wq, wk, wv, wo, w1, w2 in blocks:
            h = norm(x)
            q, k, v = (jnp.einsum("bsd,dhe->bhse", h, w) for w in (wq, wk, wv))
            a = jax.nn.softmax(jnp.einsum("bhqe,bhke->bhqk", q, k) / 8, -1)
            x = x + jnp.einsum("bhqe,hed->bqd", jnp.einsum("bhqk,bhke->bhqe", a, v), wo)
            x = x + jax.nn.gelu(norm(x) @ w1) @ w2
        return x

    return forward, ([(f32(128, 4, 32),) * 3 + (f32(4, 32, 128), f32(128, 512), f32(512, 128))] * depth, f32(4, 512, 128))


def elementwise(depth: int) -> tuple[Callable[..., Any], Any]:
    """One value after another, and a sum at the end."""

    def chain(x: jax.Array, y: jax.Array) -> jax.Array:
        for k in range(depth):
            x = jnp.sin(x) * y + k
        return jnp.sum(x)

    return chain, (f32(100_000), f32(100_000))


def kernels(depth: int) -> tuple[Callable[..., Any], Any]:
    """Kernel products one after the other: each has something to expand and to split."""

    def products(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
        for k in range(depth):
            v = jnp.exp(-(1.0 + k) * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v
        return v

    return products, (f32(2_000, 3), f32(2_000, 3), f32(2_000))


FAMILIES = {f.__name__: f for f in (training_step, transformer, elementwise, kernels)}


def equations(made: tuple[Callable[..., Any], Any]) -> int:
    return len(flatten(jax.make_jaxpr(made[0])(*made[1])).equations)


def measure(family: str, wanted: int) -> Row:
    """Plan a program of a family with about so many equations."""
    make = FAMILIES[family]
    one, two = equations(make(2)), equations(make(3))
    depth = max(1, round((wanted - one) / (two - one)) + 2)
    function, args = make(depth)
    jaxpr = jax.make_jaxpr(function)(*args)
    names = [f"x{k}" for k in range(len(jaxpr.in_avals))]
    row: Row = {"case": f"{family}, {depth} layers", "family": family, "equations": len(flatten(jaxpr).equations)}
    limit = aval_bytes(jaxpr.in_avals) + aval_bytes(jaxpr.out_avals) + ROOM
    start = time.perf_counter()
    try:
        stages = plan(jaxpr, Options(memory_limit=limit, verify=False), names).seconds
    except MemoryLimitError:  # which is known when the search is over
        stages = {}
    return row | {"seconds": time.perf_counter() - start, "stages": dict(stages)}


def rows(scale: str) -> Iterator[Row]:
    for family in FAMILIES:
        for wanted in SIZES[scale]:
            yield measure(family, wanted)


def table(rows: Sequence[Row]) -> str:
    """Seconds by stage, and the exponent with which the total grows from the size before."""
    stages = list(dict.fromkeys(stage for row in rows for stage in row["stages"]))
    lines = [["program", "equations", "seconds", "exponent", *stages]]
    lines.append(["---"] + ["---:"] * (len(lines[0]) - 1))
    before: Row | None = None
    for row in rows:
        exponent = ""
        if before is not None and before["family"] == row["family"] and row["equations"] > before["equations"]:
            exponent = f"{math.log(row['seconds'] / before['seconds']) / math.log(row['equations'] / before['equations']):.2f}"
        lines.append(
            [row["case"], f"{row['equations']:,}", f"{row['seconds']:.2f}", exponent, *(f"{row['stages'].get(s, 0):.2f}" for s in stages)]
        )
        before = row
    return markdown(lines)


QUESTION = Question("planning", "Planning time against the number of equations", rows, table)

if __name__ == "__main__":
    main(QUESTION)
