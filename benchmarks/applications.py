"""Real programs with their gradients, held to a quarter of their temporaries: ``python -m benchmarks.applications [--only NAME]``

Training steps of networks (:mod:`benchmarks.networks`) and programs of the sciences (:mod:`benchmarks.sciences`), each as written, with
``jax.checkpoint`` around its layers or rows, cut by a person (gradients summed over parts of the batch or strips of a
picture, or rows in chunks, computed again), and planned. Every program runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import networks, sciences
from benchmarks.racing import Contest, Question, Row, main, markdown, race
from eqsat_mem.backends.xla import held_bytes
from eqsat_mem.units import format_bytes

SHARE = 1 / 4
"""The share of the temporaries of the program as written that its plan may hold."""
PARTS = 8
"""The number of parts into which a person cuts the batch."""
ROWS = 128
"""The number of rows that a person maps at once."""
MOST_S = 1_800
"""Seconds after which a process is given up."""
VERSIONS = ("plain", "checkpoint", "by hand", "plan")


@dataclass(frozen=True)
class Application:
    """A program with its arguments at each scale and the other ways to write it."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, tuple[Any, ...]]
    others: dict[str, Callable[..., Any]] = field(default_factory=dict)


# --- training ------------------------------------------------------------------------------------------


def training(loss: Callable[..., Any], parts: int = 1) -> Callable[..., Any]:
    """A step of Adam: of (weights, first and second moments), and of a batch whose gradients are summed over ``parts`` of it."""

    def slopes(w: Any, *batch: Any) -> Any:
        if parts == 1:
            return jax.value_and_grad(loss)(w, *batch)

        def step(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(lambda a, b: a + b / parts, total, jax.value_and_grad(loss)(w, *part)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, w)
        return lax.scan(step, zeros, tuple(a.reshape(parts, -1, *a.shape[1:]) for a in batch))[0]

    def step(state: Any, *batch: Any) -> Any:
        w, mean, square = state
        value, slope = slopes(w, *batch)
        mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
        square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, slope)
        w = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), w, mean, square)
        return value, (w, mean, square)

    return step


def trained(
    name: str,
    loss: Callable[..., Any],
    make: Callable[..., Any],
    tiny: tuple[int, ...],
    small: tuple[int, ...],
    in_parts: Callable[..., Any] | None = None,
) -> Application:
    """An application of a loss of a batch, or of one that is written ``in_parts`` by a person; ``tiny`` and ``small`` are sizes."""

    def arguments(*sizes: int) -> tuple[Any, ...]:
        w, *batch = make(*sizes)
        return ((w, jax.tree.map(jnp.zeros_like, w), jax.tree.map(jnp.zeros_like, w)), *batch)

    layered = "block_of" in loss.__code__.co_varnames
    kept = training(partial(loss, block_of=jax.checkpoint) if layered else jax.checkpoint(loss))
    by_hand = training(loss, PARTS) if in_parts is None else training(in_parts)
    return _at_scales(name, training(loss), arguments, tiny, small, {"checkpoint": kept, "by hand": by_hand})


# --- rows ----------------------------------------------------------------------------------------------


def summed(row: Callable[..., Any], mapped: Callable[..., Any]) -> Callable[..., Any]:
    """The mean of a function of a model and of rows, and its gradient with respect to the model."""

    def program(model: Any, *rows: Any) -> Any:
        return jax.value_and_grad(lambda model: jnp.mean(mapped(lambda one: row(model, *one), rows)))(model)

    return program


def of_rows(name: str, row: Callable[..., Any], make: Callable[..., Any], tiny: tuple[int, ...], small: tuple[int, ...]) -> Application:
    """An application of a function of one row."""

    def at_once(one: Callable[..., Any], rows: Any) -> Any:
        return jax.vmap(one)(rows)

    def kept(one: Callable[..., Any], rows: Any) -> Any:
        return jax.vmap(jax.checkpoint(one))(rows)

    def in_chunks(one: Callable[..., Any], rows: Any) -> Any:
        count = len(jax.tree.leaves(rows)[0])
        return lax.map(jax.checkpoint(one), rows, batch_size=min(ROWS, max(count // PARTS, 1)))

    others = {"checkpoint": summed(row, kept), "by hand": summed(row, in_chunks)}
    return _at_scales(name, summed(row, at_once), make, tiny, small, others)


def _at_scales(name: str, function: Any, make: Any, tiny: Any, small: Any, others: Any) -> Application:
    return Application(name, function, {"tiny": (make, tiny), "small": (make, small), "full": (make, small)}, others)


APPLICATIONS = {
    made.name: made
    for made in (
        trained("transformer", networks.language_loss, networks.language_arguments, (8, 8, 8, 2, 20), (8, 256)),
        trained("vision transformer", networks.vision_loss, networks.vision_arguments, (8, 16, 12, 1), (32, 64)),
        trained("U-Net", networks.unet_loss, networks.unet_arguments, (8, 8, 2), (16, 64)),
        trained(
            "picture restoration",
            networks.restoration_loss,
            networks.restoration_arguments,
            (16, 8, 1, 2),
            (768, 384),
            networks.restoration_loss_in_strips,
        ),
        trained("mixture of experts", networks.experts_loss, networks.experts_arguments, (16, 8, 4), (4_096,)),
        trained("state-space layer", networks.state_space_loss, networks.state_space_arguments, (8, 8, 4, 2), (8, 1_024)),
        trained("normalising flow", networks.flow_loss, networks.flow_arguments, (16, 4, 2), (8_192,)),
        trained("policy update", networks.policy_loss, networks.policy_arguments, (16, 4, 8, 3), (8_192,)),
        trained("physics-informed network", networks.physics_loss, networks.physics_arguments, (16, 8), (20_000,)),
        of_rows("Gaussian splatting", sciences.splatting, sciences.splatting_arguments, (12, 4), (1_000, 80)),
        of_rows("molecular dynamics", sciences.particles, sciences.particles_arguments, (16,), (2_000,)),
        of_rows("bodies that attract", sciences.bodies, sciences.bodies_arguments, (16,), (3_000,)),
        of_rows("two-point correlation", sciences.pairs, sciences.pairs_arguments, (16, 3), (2_000,)),
        of_rows("line-by-line spectrum", sciences.spectrum, sciences.spectrum_arguments, (12, 16), (3_000, 4_000)),
        of_rows("phylogenetic tree", sciences.tree, sciences.tree_arguments, (16, 4), (20_000,)),
        of_rows("hidden Markov model", sciences.chain, sciences.chain_arguments, (8, 5, 4, 3), (16, 200)),
        of_rows("temporal classification", sciences.alignment, sciences.alignment_arguments, (8, 9, 12, 3), (8, 200, 4_000)),
    )
}


# --- measuring -----------------------------------------------------------------------------------------


def measured(name: str, scale: str) -> Row:
    """The race of one program in this process; a ``tiny`` one, of which nothing is large, may hold what it does as written."""
    application = APPLICATIONS[name]
    make, sizes = application.arguments[scale]
    args = jax.tree.map(jnp.asarray, tuple(make(*sizes)))
    compiled = jax.jit(application.function).lower(*args).compile()
    known = compiled.memory_analysis()
    fixed = known.argument_size_in_bytes + known.output_size_in_bytes
    temporary = held_bytes(compiled) - fixed
    limit = fixed + (2 * temporary if scale == "tiny" else int(temporary * SHARE))
    return race(Contest(name, {}, args, limit, application.function, application.others, tolerance=None), 2 if scale == "tiny" else 5)


def rows(scale: str) -> Iterator[Row]:
    """Every program in a process of its own; the two that plan fastest where it is ``tiny``."""
    for name in ("molecular dynamics", "bodies that attract") if scale == "tiny" else APPLICATIONS:
        yield in_process(name, scale)


def in_process(name: str, scale: str) -> Row:
    command = [sys.executable, "-m", "benchmarks.applications", "--one", name, scale]
    here = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=MOST_S, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        why = f"no answer in {MOST_S} s" if isinstance(error, subprocess.TimeoutExpired) else str(error.stderr).strip().splitlines()[-1]
        return {"case": name, "limit": 0, "held_bytes": {}, "seconds": {}, "times_faster_than": {}, "errors": {}, "skipped": {"plan": why}}
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def table(rows: Sequence[Row]) -> str:
    """Milliseconds with how many times faster the plan is, and MiB held, by version."""
    lines = [["program", "limit", *VERSIONS, *(f"MiB held: {name}" for name in VERSIONS), "planned in", "compiled in"]]
    lines.append(["---"] + ["---:"] * (len(lines[0]) - 1))
    for row in rows:
        held = [f"{row['held_bytes'][name] / 2**20:,.1f}" if name in row["held_bytes"] else "" for name in VERSIONS]
        seconds = [f"{row[key]:.2f} s" if key in row else "" for key in ("plan_seconds", "compile_seconds")]
        lines.append([row["case"], format_bytes(row["limit"]), *(_cell(row, name) for name in VERSIONS), *held, *seconds])
    return markdown(lines)


def _cell(row: Row, name: str) -> str:
    if name not in row["seconds"]:
        return str(row["skipped"].get(name, ""))
    ratio = f" ({row['times_faster_than'][name]:.2f})" if name in row["times_faster_than"] else ""
    return f"{row['seconds'][name] * 1e3:,.1f} ms{ratio}"


QUESTION = Question("applications", "Programs of several fields, held to a quarter of their temporaries", rows, table)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measured(*sys.argv[2:4])))
    else:
        main(QUESTION)
