"""The memory and the kernels of XLA:GPU: small programs, one for each assumption of a model of memory and fusion, compiled for a card
that is not there.

    python -m benchmarks.gpu_model [--device h100] [--only TEXT] [--thresholds]

Prints a markdown table, products by Triton and by cuBLAS: temporaries in bytes, as XLA plans them, and launches,
each with its blocks and how often it is started. ``--thresholds`` prints the sizes from which on XLA does something
else, found by bisection. docs/xla-gpu.md says what follows. Needs the extra ``gpu``; about a second a program.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eqsat_mem.backends.gpu import deviceless
from eqsat_mem.backends.gpu.targets import Target, named
from eqsat_mem.backends.gpu.thunks import Launch

F32, BF16, F64, I32 = jnp.float32, jnp.bfloat16, jnp.float64, jnp.int32
Case = tuple[Callable[..., Any], list[Any]]


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, F32)


def of(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def squares(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def expanded(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.maximum((x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * x @ y.T, 0)


def kernel_fold(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    return (jnp.exp(-squares(x, y)) * v).sum(1)


def kernel_product(x: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.exp(-squares(x, y)) @ v


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.T / 8, -1) @ v


def slices(x: jax.Array, turn: Any, chunk: int, axis: int = 0) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, turn * chunk, chunk, axis)


def stacked(body: Callable[..., jax.Array], chunk: int) -> Callable[..., Any]:
    """A loop over chunks of rows of the first argument, whose results stand below one another."""

    def loop(x: jax.Array, *others: jax.Array) -> Any:
        turns = x.shape[0] // chunk
        shape = jax.eval_shape(body, x[:chunk], *others)
        start = jnp.zeros((turns * chunk, *shape.shape[1:]), shape.dtype)

        def turn(t: Any, done: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(done, body(slices(x, t, chunk), *others), t * chunk, 0)

        return lax.fori_loop(0, turns, turn, start)

    return loop


def kernel_columns(x: jax.Array, y: jax.Array, v: jax.Array) -> Any:
    def turn(t: Any, total: jax.Array) -> jax.Array:
        return total + kernel_fold(x, slices(y, t, 256), slices(v, t, 256))

    return lax.fori_loop(0, y.shape[0] // 256, turn, jnp.zeros(x.shape[0], x.dtype))


def accumulated(a: jax.Array, b: jax.Array) -> Any:
    def turn(t: Any, total: jax.Array) -> jax.Array:
        return total + slices(a, t, 256, 1) @ slices(b, t, 256)

    return lax.fori_loop(0, b.shape[0] // 256, turn, jnp.zeros((a.shape[0], b.shape[1]), a.dtype))


def repeated(body: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *others: lax.fori_loop(0, 10, lambda _, carry: body(carry, *others), x)


N, M = 16_384, 4096
POINTS = [f32(N, 3), f32(N, 3)]
PROGRAMS: dict[str, dict[str, Case]] = {
    "maps into folds": {
        "sum_k exp(-d) v": (kernel_fold, [*POINTS, f32(N)]),
        "the same, d of 15 terms": (kernel_fold, [f32(M, 15), f32(M, 15), f32(M)]),
        "the same, d of 16 terms": (kernel_fold, [f32(M, 16), f32(M, 16), f32(M)]),
        "sum_i exp(-d)": (lambda x, y: jnp.exp(-squares(x, y)).sum(0), POINTS),
        "argmin_k d": (lambda x, y: jnp.argmin(squares(x, y), 1), POINTS),
        "argmin_k d, d of 64 terms": (lambda x, y: jnp.argmin(squares(x, y), 1), [f32(N, 64), f32(N, 64)]),
        "min_ik d": (lambda x, y: squares(x, y).min(), POINTS),
        "logsumexp_k -d": (lambda x, y: jax.nn.logsumexp(-squares(x, y), 1), POINTS),
        "sums over k and over i": (lambda x, y: (jnp.exp(-squares(x, y)).sum(1), jnp.exp(-squares(x, y)).sum(0)), POINTS),
        "var_k exp(-d)": (lambda x, y: jnp.var(jnp.exp(-squares(x, y)), 1), POINTS),
        "a map that is an output and folded": (lambda x: (jnp.exp(x), jnp.exp(x).sum(1)), [f32(M, M)]),
    },
    "a matrix times a vector": {
        f"exp(-d) v, {n} x {n}, {jnp.dtype(dtype).name}": (kernel_product, [of(dtype, n, 3), of(dtype, n, 3), of(dtype, n)])
        for dtype in (F32, BF16, F64)
        for n in (3000, 4096)
    }
    | {
        "exp(-d) v, two columns": (kernel_product, [f32(2000, 3), f32(2000, 3), f32(2000, 2)]),
        "v exp(-d), 2000 x 2000": (lambda x, y, v: v @ jnp.exp(-squares(x, y)), [f32(2000, 3), f32(2000, 3), f32(2000)]),
    },
    "folds": {
        f"{name} of {' x '.join(map(str, shape))}": (function, [f32(*shape)])
        for name, function, shapes in (
            ("sum of rows", lambda x: x.sum(1), ((1000, 512), (1000, 16_384), (1000, 16_385), (1000, 122_880), (1000, 10**6))),
            ("sum of columns", lambda x: x.sum(0), ((16, 1000), (4096, 1000), (4097, 1000), (122_880, 1000))),
            ("sum over the middle axis", lambda x: x.sum(1), ((64, 4096, 64),)),
            ("sum", lambda x: x.sum(), ((10**8,),)),
        )
        for shape in shapes
    },
    "softmax": {
        f"softmax of 1000 x {n}": (lambda x: jax.nn.softmax(x, -1), [f32(1000, n)]) for n in (1000, 16_384, 16_385, 65_536)
    }
    | {
        f"softmax of computed 1000 x {n}": (lambda x, y: jax.nn.softmax(-squares(x, y), -1), [f32(1000, 3), f32(n, 3)])
        for n in (4096, 16_384, 32_768)
    }
    | {
        "softmax of columns, 4096 x 1000": (lambda x: jax.nn.softmax(x, 0), [f32(4096, 1000)]),
        "attention, 4096 x 64": (attention, [f32(4096, 64)] * 3),
    },
    "products": {
        f"{m} x {k} x {n}, {jnp.dtype(dtype).name}": (jnp.matmul, [of(dtype, m, k), of(dtype, k, n)])
        for m, k, n, dtype in (
            (1024, 1024, 1024, F32), (4096, 4096, 64, F32), (64, 10**6, 64, F32), (1001, 1001, 1001, BF16), (4096, 4096, 2, F64),
        )
    }
    | {
        "exp(a b^T) v, 8 columns": (lambda a, b, v: jnp.exp(a @ b.T) @ v, [f32(M, 64), f32(M, 64), f32(M, 8)]),
        "sum_k exp(a b^T)": (lambda a, b: jnp.exp(a @ b.T).sum(1), [f32(M, 64), f32(M, 64)]),
        "exp(a) sin(b)": (lambda a, b: jnp.exp(a) @ jnp.sin(b), [f32(M, M)] * 2),
        "exp(x_i y_k) c": (lambda x, y, c: jnp.exp(x[:, None] * y[None]) @ c, [f32(M), f32(M), f32(M, 64)]),
        "exp(-d) c": (kernel_product, [f32(M, 3), f32(M, 3), f32(M, 64)]),
        "sum_k of an expanded distance": (lambda x, y, v: (jnp.exp(-expanded(x, y)) * v).sum(1), [f32(M, 3), f32(M, 3), f32(M)]),
        "a batch of eight": (jnp.matmul, [f32(8, 512, 512)] * 2),
    },
    "transposes": {
        "a * b^T": (lambda a, b: a * b.T, [f32(M, M)] * 2),
        "sum_ij a_ij b_ji": (lambda a, b: (a * b.T).sum(), [f32(M, M)] * 2),
        "a^T b": (lambda a, b: a.T @ b, [f32(M, 1024)] * 2),
        "triangular solve, 1024 x 4096": (
            lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True), [f32(1024, 1024), f32(1024, 4096)],
        ),
        "Cholesky, 1024": (jnp.linalg.cholesky, [f32(1024, 1024)]),
    },
    "loops": {
        "rows of a fold": (stacked(kernel_fold, 256), [*POINTS, f32(N)]),
        "columns of a fold": (kernel_columns, [*POINTS, f32(N)]),
        "rows of a product": (stacked(jnp.matmul, 256), [f32(M, 1024), f32(1024, 512)]),
        "products added up": (accumulated, [f32(512, M), f32(M, 512)]),
        "rows of a map": (stacked(jnp.sin, 256), [f32(M, 1000)]),
        "a carried map": (repeated(jnp.sin), [f32(1000, 1000)]),
        "a carried product": (repeated(jnp.matmul), [f32(1000, 1000)] * 2),
        "two carried arrays": (lambda x: repeated(lambda c: (c[1], jnp.sin(c[0]) + c[1]))((x, x + 1)), [f32(1000, 1000)]),
        "until a condition fails": (lambda x: lax.while_loop(lambda c: c.sum() < 10, jnp.sin, x), [f32(1000, 1000)]),
    },
    "selection": {
        f"top_k {k} of 1000 x {n}, {jnp.dtype(dtype).name}": (lambda x, k=k: lax.top_k(x, k), [of(dtype, 1000, n)])
        for k, n, dtype in (
            *((10, 10_000, dtype) for dtype in (F32, F64, BF16, jnp.float16, I32)),
            (16, 10_000, F32),
            (17, 10_000, F32),
            (10, 1000, F32),
        )
    }
    | {
        "top_k 10 of distances": (lambda x, y: lax.top_k(-squares(x, y), 10), [f32(1000, 3), f32(10_000, 3)]),
        "sort of 1000 x 1000": (lambda x: jnp.sort(x, 1), [f32(1000, 1000)]),
        "cumsum of 1000 x 10000": (lambda x: jnp.cumsum(x, 1), [f32(1000, 10_000)]),
    },
    "moves": {
        "sin(x)[i]": (lambda x, i: jnp.sin(x)[i], [f32(10_000, 64), of(I32, 5000)]),
        "x[i] b": (lambda x, i, b: x[i] @ b, [f32(10_000, 64), of(I32, 5000), f32(64, 32)]),
        "scatter of sin(v)": (lambda i, v: jnp.zeros((10_000, 64)).at[i].add(jnp.sin(v)), [of(I32, 5000), f32(5000, 64)]),
        "concatenated, times a matrix": (lambda x, y, z: jnp.concatenate([jnp.sin(x), y], 1) @ z, [f32(1000, 1000)] * 2 + [f32(2000, 500)]),
        "random numbers folded": (lambda x: (jax.random.uniform(jax.random.key(0), x.shape, F32) * x).sum(1), [f32(M, M)]),
        "convolution, NCHW": (lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"), [f32(8, 32, 64, 64), f32(64, 32, 3, 3)]),
    },
}  # fmt: skip


def writes_out(compiled: deviceless.Compiled) -> bool:
    """Whether a value for each pair is in memory."""
    return compiled.temporaries >= 4 * M**2


@dataclass(frozen=True)
class Threshold:
    """A size from which on XLA does something else: ``make`` gives the program of a size, which lies between the
    two. ``measures`` are the constants of :mod:`eqsat_mem.backends.gpu` that follow from it."""

    name: str
    measures: tuple[str, ...]
    low: int
    high: int
    make: Callable[[int], Case]
    step: int = 1
    see: Callable[[deviceless.Compilation], Any] = field(
        default=lambda c: [launch.name.rstrip("_0123456789") for launch in c.launches or ()]
    )


def searched(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.argmin(squares(x, y), -1)


def squared(times: int, x: jax.Array, y: jax.Array, of: Callable[[jax.Array], jax.Array] = lambda w: w) -> jax.Array:
    """A map of all pairs that takes 2 ``times`` + 1 additions and products, and a function of it."""
    w = x[:, None, 0] - y[None, :, 0]
    for _ in range(times):
        w = w * w + 1.0
    return of(w)


def read_by_two(times: int, n: int, of: Callable[[jax.Array], jax.Array] = lambda w: w) -> Case:
    def folds(x: jax.Array, y: jax.Array) -> Any:
        w = squared(times, x, y, of)
        total = w.sum(1)
        return total, (w & (total > 5)[:, None]).any(1) if w.dtype == bool else (w * total[:, None]).max(1)

    return folds, [f32(n, 1), f32(n, 1)]


def read_along(times: int, n: int, d: int) -> Case:
    def fold(x: jax.Array, y: jax.Array) -> jax.Array:
        return (squared(times, x, y)[:, :, None] * (x[:, None] - y[None])).sum(1)

    return fold, [f32(n, d), f32(n, d)]


def holds(nbytes: int) -> Callable[[deviceless.Compilation], Any]:
    return lambda compiled: compiled.temporaries >= nbytes


ESTIMATED = {"w": lambda w: w, "1 / w": lambda w: 1.0 / w, "exp": jnp.exp, "sqrt": jnp.sqrt, "logistic": jax.nn.sigmoid, "erf": lax.erf}
"""Functions of which the sweep finds what XLA thinks that they take."""
WEIGHTS = ("weights.ESTIMATED", "weights.SHORT", "weights.LONG")

THRESHOLDS = [
    *(Threshold(f"a map of 2 k + 1 additions and {name} is written out before two folds, k", ("habits.WRITTEN", "habits.READ", *WEIGHTS),
                0, 40, lambda k, of=of: read_by_two(k, 2000, of), see=holds(3 * 2000**2)) for name, of in ESTIMATED.items()),
    Threshold("truth of a map of 2 k + 1 additions is written out before two folds, k", ("habits.NARROW",), 0, 40,
              lambda k: read_by_two(k, 4000, lambda w: w > 0.5), see=holds(4000**2)),
    *(Threshold(f"a map of 2 k + 1 additions is written out before a fold that reads each {d} times, k", ("habits.EACH_TIME",), 0, 40,
                lambda k, d=d: read_along(k, 2000, d), see=holds(3 * 2000**2)) for d in (2, 3, 4, 8)),
    *(Threshold(f"the same, 5000 x 5000, {d} times, k", ("habits.WRITTEN_FAR", "habits.READ_FAR"), 0, 40,
                lambda k, d=d: read_along(k, 5000, d), see=holds(3 * 5000**2)) for d in (2, 3, 4, 8)),
    Threshold("n x n matrix times a vector is no fold any more, n", ("habits.VECTOR_ELEMENTS",), 3000, 4096,
              lambda n: (kernel_product, [f32(n, 3), f32(n, 3), f32(n)])),
    Threshold("1000 x k matrix times a vector, k", ("habits.VECTOR_ELEMENTS",), 8000, 12_000,
              lambda k: (kernel_product, [f32(1000, 3), f32(k, 3), f32(k)])),
    Threshold("a fold of rows takes two passes, elements", ("habits.ROW_FOLD",), 1000, 40_000,
              lambda n: (lambda x: x.sum(1), [f32(64, n)])),
    Threshold("a fold of columns takes two passes, elements", ("habits.COLUMN_FOLD",), 1000, 40_000,
              lambda n: (lambda x: x.sum(0), [f32(n, 1000)])),
    Threshold("a fold is written out before a sum that reads it, terms", ("habits.INNER_FOLD",), 2, 100,
              lambda d: (kernel_fold, [f32(M, d), f32(M, d), f32(M)])),
    Threshold("a fold is written out before a search that reads it, terms", ("habits.SEARCHED_FOLD",), 2, 400,
              lambda d: (searched, [f32(M, d), f32(M, d)]), see=writes_out),
    Threshold("a fold of 2 n + 1 terms is written out before what reads it, n", ("habits.LOOPED_FOLD",), 1, 40,
              lambda n: (lambda x, y: jnp.exp(squares(x, y)), [f32(M, 2 * n + 1), f32(M, 2 * n + 1)])),
    Threshold("softmax takes several kernels, elements of a row", ("habits.STREAMED_ROW",), 1000, 40_000,
              lambda n: (lambda x: jax.nn.softmax(x, -1), [f32(64, n)])),
    Threshold("two products of one matrix are no longer one, columns", ("habits.MERGED_BYTES",), 10_000, 20_000,
              lambda n: (lambda x, y, w: (jnp.tanh(x @ w).sum(0), jnp.tanh(y @ w).sum(0)), [f32(1024, 128), f32(1024, 128), f32(128, n)])),
    Threshold("top_k sorts, k", ("habits.TOP_K",), 1, 64, lambda k: (lambda x: lax.top_k(x, k), [f32(100, 10_000)])),
    Threshold("top_k of 10 does not sort, elements of a row", ("habits.TOP_K_ROW",), 100, 4000,
              lambda n: (lambda x: lax.top_k(x, 10), [f32(100, n)])),
]  # fmt: skip


def told(launches: tuple[Launch, ...] | None, most: int = 6) -> str:
    """Launches in short: how often, which, with how many blocks."""
    said = []
    for launch in launches or ():
        times = "" if launch.turns == 1 else f"{launch.turns or '?'} x "
        blocks = f" {launch.blocks}" if launch.blocks else ""
        said.append(f"{times}{launch.name.replace('_fusion', '') if launch.blocks else launch.kind}{blocks}")
    return ", ".join([*said[:most], *([f"... {len(said)} in all"] if len(said) > most else [])])


def rows(case: Case, target: Target) -> Iterator[tuple[str, deviceless.Compilation]]:
    function, avals = case
    for compiled in deviceless.compile_for(function, avals, target, launches=True).settings:
        yield compiled.setting, compiled


def show(target: Target, only: str) -> None:
    for heading, programs in PROGRAMS.items():
        chosen = {name: case for name, case in programs.items() if only in f"{heading} {name}"}
        if chosen:
            print(f"\n### {heading}\n\n| program | products by | temporaries, B | launches, with blocks |\n|---|---|---:|---|")
        for name, case in chosen.items():
            found = dict(rows(case, target))
            same = found["triton"].temporaries == found["cublas"].temporaries and found["triton"].launches == found["cublas"].launches
            for setting, compiled in found.items():
                if not same or setting == "triton":
                    how = "either" if same else {"triton": "Triton", "cublas": "cuBLAS"}[setting]
                    print(f"| {name} | {how} | {compiled.temporaries:,} | {told(compiled.launches)} |", flush=True)


def bisected(threshold: Threshold, target: Target) -> int | None:
    """The first size at which XLA does something else than at the low one; None if it does the same at the high one."""

    def seen(size: int) -> Any:
        function, avals = threshold.make(size)
        return threshold.see(deviceless.compile_for(function, avals, target, settings=["triton"], launches=True).settings[0])

    low, high = threshold.low, threshold.high
    before = seen(low)
    if seen(high) == before:
        return None
    while high - low > threshold.step:
        middle = (low + high) // 2
        low, high = (middle, high) if seen(middle) == before else (low, middle)
    return high


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100", help="the card (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="programs whose heading or name has this text")
    parser.add_argument("--thresholds", action="store_true", help="sizes from which on XLA does something else")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    target = named(options.device)
    print(f"XLA:GPU of JAX {jax.__version__} for {target.label}")
    if options.thresholds:
        print("\n| from which on | size |\n|---|---:|")
        for threshold in THRESHOLDS:
            print(f"| {threshold.name} | {bisected(threshold, target)} |", flush=True)
    else:
        show(target, options.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
