"""Bytes that derivatives and batched forms hold: ``python -m benchmarks.gradients [--only NAME] [--write]``.

Each program is compiled as written, with its rows in ``lax.map``, likewise with ``jax.checkpoint`` around each of them, and planned under
a limit: before the transformation and after it. None of them is run. ``--write`` puts the tables into ``docs/gradients.md``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import eqsat_mem
from eqsat_mem.backends.xla import compiled_peak

PAGE = Path(__file__).resolve().parent.parent / "docs" / "gradients.md"
BEGIN, END = "<!-- begin: benchmarks.gradients -->", "<!-- end: benchmarks.gradients -->"
MIB = 2**20
ROWS_AT_ONCE = 100
"""``batch_size`` of ``lax.map``."""
COPIES = 4
"""The size of the axis that ``vmap`` adds."""

Rows = Callable[[Callable[..., Any], Any], Any]
"""A way to make a function of all rows of one of a single row: ``jax.vmap``, or ``lax.map`` in one of its forms."""


@dataclass(frozen=True)
class Program:
    """A program written by rows: ``function(rows, *args)``, shapes of its arguments, and what it may hold."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    limit_bytes: int


def kernel_product(rows: Rows, x: Any, y: Any, v: Any) -> Any:
    return rows(lambda p: jnp.exp(-0.5 * jnp.sum((p - y) ** 2, -1)) @ v, x)


def attention(rows: Rows, q: Any, k: Any, v: Any) -> Any:
    return rows(lambda p: jax.nn.softmax(k @ p / jnp.sqrt(1.0 * p.size)) @ v, q)


def soft_neighbours(rows: Rows, x: Any, y: Any, values: Any) -> Any:
    """A k-nearest-neighbour average whose weights are smooth."""
    return rows(lambda p: jax.nn.softmax(-4 * jnp.sqrt(jnp.sum((p - y) ** 2, -1) + 1e-6)) @ values, x)


def sinkhorn(rows: Rows, x: Any, y: Any) -> Any:
    """The dual potentials of a regularised transport between two clouds of points."""

    def soft_minimum(p: Any, others: Any, potential: Any) -> Any:
        return -jax.nn.logsumexp(potential - jnp.sum((p - others) ** 2, -1))

    def step(potentials: Any, _: None) -> tuple[Any, None]:
        _, g = potentials
        f = rows(lambda p: soft_minimum(p, y, g), x)
        return (f, rows(lambda p: soft_minimum(p, x, f), y)), None

    return jnp.concatenate(lax.scan(step, (x[:, 0] * 0, y[:, 0] * 0), None, length=10)[0])


def network(rows: Rows, x: Any, a: Any, b: Any, c: Any) -> Any:
    return rows(lambda p: jnp.tanh(jnp.tanh(p @ a) @ b) @ c, x)


PROGRAMS = [
    Program("kernel product", kernel_product, ((3000, 3), (3000, 3), (3000,)), 4 * MIB),
    Program("attention", attention, ((2000, 32), (2000, 32), (2000, 32)), 6 * MIB),
    Program("soft nearest neighbours", soft_neighbours, ((2000, 8), (3000, 8), (3000,)), 4 * MIB),
    Program("Sinkhorn in a scan", sinkhorn, ((1000, 3), (1200, 3)), 4 * MIB),
    Program("three-layer network", network, ((10_000, 32), (32, 256), (256, 256), (256,)), 8 * MIB),
]


# --- transformations and variants ---------------------------------------------------------------------


def gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """With respect to all arguments, of the sum of squares of the results."""

    def of_all(*args: Any) -> Any:
        return jax.grad(lambda *a: jnp.sum(function(*a) ** 2), tuple(range(len(args))))(*args)

    return of_all


def hessian_product(function: Callable[..., Any]) -> Callable[..., Any]:
    """The Hessian of the sum of squares, times the arguments."""
    return lambda *args: jax.jvp(gradient(function), args, args)[1]


def batched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Several first arguments at once."""
    return lambda *args: jax.vmap(function, (0, *[None] * (len(args) - 1)))(jnp.stack([args[0] * k for k in range(COPIES)]), *args[1:])


TRANSFORMATIONS: dict[str, Callable[..., Any]] = {
    "forward": lambda function: function,
    "gradient": gradient,
    "Hessian-vector product": hessian_product,
    f"`vmap` over {COPIES}": batched,
}


def mapped(checkpoint: bool) -> Rows:
    return lambda row, rows: lax.map(jax.checkpoint(row) if checkpoint else row, rows, batch_size=ROWS_AT_ONCE)


def variants(program: Program, transformation: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The programs of one line of a table."""

    def written(rows: Rows) -> Callable[..., Any]:
        return partial(program.function, rows)

    def plain(row: Callable[..., Any], rows: Any) -> Any:
        return jax.vmap(row)(rows)

    optimize = partial(eqsat_mem.optimize, memory_limit=program.limit_bytes)
    return {
        "as written": transformation(written(plain)),
        "`lax.map`": transformation(written(mapped(False))),
        "with `checkpoint`": transformation(written(mapped(True))),
        "`optimize(T(f))`": optimize(transformation(written(plain))),
        "`T(optimize(f))`": transformation(optimize(written(plain))),
    }


def held(function: Callable[..., Any], program: Program) -> str:
    """MiB that a variant holds once compiled, or what is the least that was found."""
    try:
        return f"{compiled_peak(function, [jax.ShapeDtypeStruct(s, jnp.float32) for s in program.shapes])[0] / MIB:,.1f}"
    except eqsat_mem.MemoryLimitError as error:
        return f"no plan ({error.smallest_bytes / MIB:,.1f})"


def tables(programs: list[Program]) -> str:
    """A Markdown table for each transformation, in MiB."""
    text = []
    for word, transformation in TRANSFORMATIONS.items():
        lines: list[list[str]] = []
        for program in programs:
            row = {name: held(function, program) for name, function in variants(program, transformation).items()}
            print(word, program.name, row, flush=True)
            lines = lines or [[word, "limit", *row], ["---"] + ["---:"] * (len(row) + 1)]
            lines.append([program.name, f"{program.limit_bytes / MIB:,.0f}", *row.values()])
        text.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(text)


def main() -> None:
    """Compile everything, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[p.name for p in PROGRAMS])
    parser.add_argument("--write", action="store_true", help=f"write the tables into docs/{PAGE.name}")
    options = parser.parse_args()
    text = tables([p for p in PROGRAMS if not options.only or p.name in options.only])
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        between = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
        PAGE.write_text(between.sub(lambda _: f"{BEGIN}\n{text}\n{END}", page), encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
