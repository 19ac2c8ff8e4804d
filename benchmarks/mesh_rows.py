"""The rows of the benchmark of several devices: programs, shardings, and the sizes and limits at which both versions are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.mesh_kernels import (
    attention,
    attention_by_hand,
    attention_gradients,
    discrepancy,
    discrepancy_by_hand,
    kernel_product,
    kernel_product_by_hand,
    means,
    means_by_hand,
    neighbours,
    neighbours_by_hand,
    of_a_share_of_keys,
    roots,
    sparse_bound,
    sparse_bound_by_hand,
    sparse_gradients,
    spectra,
    transport,
    transport_by_hand,
    with_itself,
    with_itself_by_hand,
)
from benchmarks.mesh_shapes import GRID, LINE, f32
from benchmarks.mesh_steps import (
    contrast,
    language_model,
    language_model_arguments,
    language_model_checkpointed,
    two_layers,
    two_layers_by_hand,
    words,
)

Function = Callable[..., Any]
S, R, T, D = P("x"), P(), P(None, "x"), P("data")


@dataclass(frozen=True)
class Row:
    """A program, its shardings, and its arguments: at full size, which is only compiled, and at a size that runs here.

    ``limits`` are the bytes that each device may hold at either size. ``by_hand`` is what each device runs, or, ``whole``, a program of
    all of them for ``jax.jit``.
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
    whole: bool = False


def rows() -> list[Row]:
    layers = {"w1": P(None, "model"), "w2": P("model")}

    def mlp(batch: int, width: int, hidden: int) -> tuple[Any, ...]:
        return {"w1": f32(width, hidden), "w2": f32(hidden, width)}, f32(batch, width), f32(batch, width)

    def points(n: int) -> tuple[Any, ...]:
        return f32(n, 3), f32(n, 3), f32(n, 1)

    def process(n: int, inducing: int) -> tuple[Any, ...]:
        return f32(n, 8), f32(n, 1), f32(inducing, 8), f32(8), f32()

    def labelled(n: int, width: int, count: int) -> tuple[Any, ...]:
        return f32(n, width), f32(width, count), jax.ShapeDtypeStruct((n,), jnp.int32)

    kernel_by_hand = kernel_product_by_hand
    neighbouring = ((f32(2**20, 64), f32(4096, 64)), (f32(2**14, 64), f32(1024, 64)))
    attending = ((f32(8, 65536, 64),) * 3, (f32(4, 2048, 64),) * 3)
    models = (language_model_arguments(2, 32, 512, 256, 4, 4096), language_model_arguments(2, 16, 128, 128, 4, 1024))
    return [
        Row("kernel product", kernel_product, kernel_by_hand, LINE, (S, S, S), S, points(2**20), points(8192), ("24MiB", "2MiB")),
        Row(
            "kernel product with itself",
            with_itself,
            with_itself_by_hand,
            LINE,
            (S, S),
            S,
            (f32(2**17, 3), f32(2**17, 1)),
            (f32(8192, 3), f32(8192, 1)),
            ("4MiB", "4MiB"),
        ),
        Row(
            "kernel product, 4 x 2",
            kernel_product,
            None,
            GRID,
            (D, P("model"), P("model")),
            D,
            points(2**17),
            points(8192),
            ("24MiB", "4MiB"),
        ),
        Row("nearest neighbours", neighbours, neighbours_by_hand, LINE, (S, R), R, *neighbouring, ("96MiB", "4MiB")),
        Row("attention", attention, attention_by_hand, LINE, (T, T, T), T, *attending, ("448MiB", "12MiB")),
        Row("attention, keys in shares", attention, of_a_share_of_keys, LINE, (R, T, T), T, *attending, ("512MiB", "16MiB")),
        Row(
            "attention gradients",
            attention_gradients,
            None,
            LINE,
            (T, T, T),
            (T, T, T),
            (f32(8, 16384, 64),) * 3,
            (f32(4, 1024, 64),) * 3,
            ("256MiB", "12MiB"),
        ),
        Row(
            "sparse Gaussian process",
            sparse_bound,
            sparse_bound_by_hand,
            LINE,
            (S, S, R, R, R),
            R,
            process(10**6, 512),
            process(32_000, 128),
            ("12MiB", "4MiB"),
        ),
        Row(
            "its gradients", sparse_gradients, None, LINE, (S, S, R, R, R), R, process(10**6, 512), process(32_000, 128), ("48MiB", "6MiB")
        ),
        Row(
            "contrastive loss, gradients",
            contrast,
            None,
            LINE,
            (S, S),
            (R, (S, S)),
            (f32(32768, 256),) * 2,
            (f32(2048, 128),) * 2,
            ("256MiB", "6MiB"),
        ),
        Row(
            "loss of words, gradients",
            words,
            None,
            LINE,
            (R, T, R),
            (R, (R, T)),
            labelled(16384, 1024, 131072),
            labelled(4096, 128, 16384),
            ("384MiB", "16MiB"),
        ),
        Row(
            "mean discrepancy",
            discrepancy,
            discrepancy_by_hand,
            LINE,
            (S, S),
            R,
            (f32(65536, 16),) * 2,
            (f32(4096, 16),) * 2,
            ("11MiB", "4MiB"),
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
        Row("Fourier transforms", spectra, spectra, LINE, (S,), S, (f32(4096, 4096),), (f32(4096, 4096),), ("48MiB", "48MiB")),
        Row("Cholesky factors", roots, roots, LINE, (S,), S, (f32(64, 512, 512),), (f32(64, 128, 128),), ("28MiB", "8MiB")),
        Row("Sinkhorn", transport, transport_by_hand, LINE, (S, S), R, (f32(65536, 3),) * 2, (f32(2048, 3),) * 2, ("64MiB", "2MiB")),
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
        Row("transformer step", language_model, language_model_checkpointed, GRID, (R, D), R, *models, ("192MiB", "12MiB"), whole=True),
    ]


def step(small: bool) -> Row:
    """Twelve layers of 768 on 32 x 1,024 tokens of 32,768 words, or two layers of 64."""
    big, little = language_model_arguments(12, 32, 1024, 768, 12, 32768), language_model_arguments(2, 8, 64, 64, 4, 256)
    arguments = little if small else big
    return Row("transformer step of 12 layers", language_model, None, GRID, (R, P("data")), R, arguments, little, ("5GiB", "16MiB"))
