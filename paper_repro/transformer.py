"""An encoder-decoder transformer: peak memory and time against the length of sequences, for inference and for a training step.

    python -m paper_repro.transformer
    python -m paper_repro.transformer --scale paper     batch 64, width 512, sequences of 250 to 7000

The network is that of "Attention is all you need" (Vaswani and others, 2017) in plain JAX, with attention as its formula says. All columns
run the same function objects. Points are kept; a re-run continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring import RESULTS, measure_jax
from benchmarks.plots import legend_below
from paper_repro.experiment import Experiment, Point, Row, main
from paper_repro.showing import device_line, grid_table, limit_label, lines, memory, seconds

Parameters = dict[str, Any]

SEED = 111
STEP = 1e-2
"""The learning rate of the training step."""


@dataclass(frozen=True)
class Scale:
    """The network, the batch, what is run at which lengths, and under which limits."""

    batch: int
    width: int
    heads: int
    hidden: int
    layers: int
    source_words: int
    target_words: int
    lengths: dict[str, tuple[int, ...]]
    limits: tuple[str, ...]


SCALES = {
    "tiny": Scale(2, 16, 2, 32, 1, 30, 40, {"inference": (24, 96), "training": (24,)}, ("400kB",)),
    "small": Scale(2, 128, 4, 512, 2, 1000, 1000, {"inference": (256, 512, 1024, 2048), "training": (128, 256, 512, 1024)}, ("200MB",)),
    "paper": Scale(
        64,
        512,
        8,
        2048,
        2,
        8500,
        8000,
        {"inference": (250, 500, 1000, 2000, 3500, 5000, 7000), "training": (250, 500, 1000, 2000)},
        ("10GB",),
    ),
}

# --- the network --------------------------------------------------------------------------------------


def inference(parameters: Parameters, source: jax.Array, target: jax.Array) -> jax.Array:
    """Logits of each next word, of shape (batch, target length, words); words are integers of shape (batch, length)."""
    seen = embed(parameters["source"], source)
    for layer in parameters["encoder"]:
        seen = normalise(seen + attend(layer["self"], seen, seen))
        seen = normalise(seen + feed_forward(layer, seen))
    out = embed(parameters["target"], target)
    past = jnp.tril(jnp.ones((target.shape[1], target.shape[1]), bool))
    for layer in parameters["decoder"]:
        out = normalise(out + attend(layer["self"], out, out, past))
        out = normalise(out + attend(layer["cross"], out, seen))
        out = normalise(out + feed_forward(layer, out))
    return out @ parameters["words"]


def training(parameters: Parameters, source: jax.Array, target: jax.Array) -> tuple[Parameters, jax.Array]:
    """A step of gradient descent on the mean cross-entropy of each next word: the new parameters and the loss."""
    loss, gradient = jax.value_and_grad(cross_entropy)(parameters, source, target)
    return jax.tree.map(lambda p, g: p - STEP * g, parameters, gradient), loss


PROGRAMS = {"inference": inference, "training": training}


def cross_entropy(parameters: Parameters, source: jax.Array, target: jax.Array) -> jax.Array:
    """The mean negative log probability of the words after the first."""
    logits = inference(parameters, source, target[:, :-1])
    picked = jnp.take_along_axis(logits, target[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def embed(table: jax.Array, words: jax.Array) -> jax.Array:
    """Vectors of words with sines and cosines of their positions added, of shape (batch, length, width)."""
    width = table.shape[1]
    rates = 10_000.0 ** (-jnp.arange(width // 2) * 2 / width)
    angles = jnp.arange(words.shape[1])[:, None] * rates
    return table[words] * np.sqrt(width) + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def attend(weights: Parameters, x: jax.Array, y: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Attention of several heads from x to y; weights have shapes (width, heads, width / heads), the last one the other way round."""
    q = jnp.einsum("bid,dhk->bhik", x, weights["query"])
    k = jnp.einsum("bjd,dhk->bhjk", y, weights["key"])
    v = jnp.einsum("bjd,dhk->bhjk", y, weights["value"])
    scores = jnp.einsum("bhik,bhjk->bhij", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    mixed = jnp.einsum("bhij,bhjk->bhik", jax.nn.softmax(scores, -1), v)
    return jnp.einsum("bhik,hkd->bid", mixed, weights["out"])


def feed_forward(layer: Parameters, x: jax.Array) -> jax.Array:
    """Two layers, applied to each position."""
    return jax.nn.relu(x @ layer["up"]) @ layer["down"]


def normalise(x: jax.Array) -> jax.Array:
    """Zero mean and unit variance over the last axis."""
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)


def random_parameters(scale: Scale) -> Parameters:
    """Parameters in float32, of the sizes that keep variances near one."""
    rng = np.random.default_rng(SEED)
    width, heads, part = scale.width, scale.heads, scale.width // scale.heads

    def normal(*shape: int, inputs: int = width) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(inputs)).astype(np.float32)

    def attention() -> Parameters:
        weights: Parameters = {name: normal(width, heads, part) for name in ("query", "key", "value")}
        return weights | {"out": normal(heads, part, width)}

    def layer(*attentions: str) -> Parameters:
        ends = {"up": normal(width, scale.hidden), "down": normal(scale.hidden, width, inputs=scale.hidden)}
        return {name: attention() for name in attentions} | ends

    return {
        "source": normal(scale.source_words, width),
        "target": normal(scale.target_words, width),
        "encoder": [layer("self") for _ in range(scale.layers)],
        "decoder": [layer("self", "cross") for _ in range(scale.layers)],
        "words": normal(width, scale.target_words),
    }


# --- the experiment -----------------------------------------------------------------------------------


def arguments(scale: Scale, length: int) -> tuple[Any, ...]:
    """Parameters, and words of the source and the target."""
    rng = np.random.default_rng(SEED)
    shape = (scale.batch, length)
    words = [rng.integers(0, count, shape, dtype=np.int32) for count in (scale.source_words, scale.target_words)]
    return random_parameters(scale), *words


def measure_point(point: Point, folder: Path) -> dict[str, Any]:
    """One length in one column; ``value`` is the mean of the logits' squares, or the loss, which columns should agree on."""
    args = arguments(SCALES[point["scale"]], point["length"])
    limit = None if point["column"] == "plain" else point["column"]
    out, results = measure_jax(PROGRAMS[point["program"]], lambda: args, limit)
    if out is None:
        return results
    return results | {"value": float(jnp.mean(out**2) if point["program"] == "inference" else out[1])}


def grid(options: argparse.Namespace) -> Iterator[Point]:
    """Inference and training at every length, as written and under each limit."""
    scale = SCALES[options.scale]
    for program, lengths in scale.lengths.items():
        for length in lengths:
            for column in ["plain", *(options.limit or scale.limits)]:
                yield {"program": program, "length": length, "column": column, "scale": options.scale}


def tables(rows: Sequence[Row]) -> str:
    """Seconds and memory for each length; seconds of planning."""
    heads = {"program": "program", "length": "length"}
    shown = {"Seconds of a run:": seconds, "Memory that the compiled program holds (and that the process grew by):": memory}
    parts = [f"{title}\n\n{grid_table(rows, heads, 'column', cell, limit_label)}" for title, cell in shown.items()]
    planned = [float(row["plan_seconds"]) for row in rows if row["column"] != "plain" and row["plan_seconds"]]
    if planned:
        parts.append(f"Planning took {min(planned):.1f} to {max(planned):.1f} s.")
    return "\n\n".join([*parts, device_line(rows)])


def draw(rows: Sequence[Row], figure: Any) -> None:
    """Memory and seconds against the length, of inference and of training."""
    for k, (axes, program) in enumerate(zip(figure.subplots(1, 4), ["inference", "inference", "training", "training"])):
        chosen = [row for row in rows if row["program"] == program]
        field, label, scale = ("seconds", "seconds", 1.0) if k % 2 else ("resident_bytes", "MB resident", 1e-6)
        lines(chosen, axes, "length", field, label, scale)
        axes.set_title(program)
    legend_below(figure)


EXPERIMENT = Experiment(
    module="paper_repro.transformer",
    about=__doc__,
    keys=("program", "length", "column", "scale"),
    results=(*RESULTS, "value"),
    grid=grid,
    measure=measure_point,
    tables=tables,
    draw={"transformer": draw},
)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT))
