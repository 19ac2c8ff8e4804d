"""How long XLA:GPU takes: small programs, each of which is about one figure of ``eqsat_mem/backends/gpu/measured.py``, as predicted and
as measured.

    python -m benchmarks.gpu_times [--card h200] [--only TEXT]    predictions for a card beside what was measured there
    python -m benchmarks.gpu_times --measure [--only TEXT]        on a machine with a GPU: measure, and write results/gpu_times_CARD.json

A call takes the 30 us in which JAX launches it at least, so programs are as large as they must be to take longer.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.gpu_model import kernel_fold, squares
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.deviceless import SETTINGS
from eqsat_mem.backends.gpu.products import Products
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load
from eqsat_mem.schedule.search import straight

RESULTS = Path(__file__).parent / "results"
CARDS = tuple(sorted(path.stem.removeprefix("gpu_times_") for path in RESULTS.glob("gpu_times_*.json")))
"""Those that were measured."""
ROUNDS, LONG_S = 3, 0.02
"""Each program runs in so many rounds, of as many calls as take so many seconds."""
F32, BF16, F64, I32 = jnp.float32, jnp.bfloat16, jnp.float64, jnp.int32
FULL = lax.Precision.HIGHEST


@dataclass(frozen=True)
class Timed:
    """A program with the shapes of its arguments; ``setting`` says by what products are computed (:data:`SETTINGS`), if that is asked."""

    function: Callable[..., Any]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    setting: str | None = None

    @property
    def x64(self) -> bool:
        return any(aval.dtype == F64 for aval in self.avals)

    def divided(self, by: int) -> Timed:
        """The same with its larger extents divided."""
        smaller = (tuple(n // by if n > by else n for n in aval.shape) for aval in self.avals)
        return replace(self, avals=tuple(of(*shape, dtype=aval.dtype) for shape, aval in zip(smaller, self.avals, strict=True)))


def of(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def repeated(function: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
    """A function applied so many times."""

    def run(x: Any) -> Any:
        for _ in range(times):
            x = function(x)
        return x

    return run


def solved(matrix: jax.Array, right: jax.Array) -> jax.Array:
    lower = jnp.tril(matrix) + 50 * jnp.eye(matrix.shape[0], dtype=matrix.dtype)
    return lax.linalg.triangular_solve(lower, right, left_side=True, lower=True)


def factorised(x: jax.Array) -> jax.Array:
    return jnp.linalg.cholesky(x @ x.T + 1e3 * jnp.eye(x.shape[0], dtype=x.dtype))


def convolved(layouts: tuple[str, str, str]) -> Callable[..., Any]:
    return lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layouts)


def products() -> Mapping[str, Timed]:
    """Products by both libraries: of squares, of thin and of deep matrices, in each precision."""
    found = {}
    shapes = [(4096, 4096, 4096), (16384, 256, 16384), (64, 64, 1 << 20), (1024, 50_000, 1024), (8192, 8192, 64)]
    for setting in SETTINGS:
        for kind, precision in (("", FULL), ("rounded ", None)):
            for m, n, k in shapes:
                product = lambda a, b, precision=precision: jnp.matmul(a, b, precision=precision)  # noqa: E731
                found[f"{kind}product {m} x {k} x {n}, {setting}"] = Timed(product, (of(m, k), of(k, n)), setting)
            batched = lambda a, b, precision=precision: jnp.einsum("bik,bjk->bij", a, b, precision=precision)  # noqa: E731
            found[f"{kind}products 64 x 1024 x 64 x 1024, {setting}"] = Timed(batched, (of(64, 1024, 64), of(64, 1024, 64)), setting)
        found[f"bfloat16 product 4096, {setting}"] = Timed(jnp.matmul, (of(4096, 4096, dtype=BF16),) * 2, setting)
        found[f"float64 product 2048, {setting}"] = Timed(jnp.matmul, (of(2048, 2048, dtype=F64),) * 2, setting)
    vector = lambda a, v: jnp.matmul(a, v, precision=FULL)  # noqa: E731
    found["matrix 10000 times vector"] = Timed(vector, (of(10_000, 10_000), of(10_000)))
    found["vector times matrix 10000"] = Timed(vector, (of(10_000), of(10_000, 10_000)))
    return found


def pairs() -> Mapping[str, Timed]:
    """Folds of pairs of points, in so many dimensions."""
    found = {f"kernel of {d}": Timed(kernel_fold, (of(16384, d), of(16384, d), of(16384))) for d in (1, 2, 3, 5, 8, 15, 16, 40)}
    for n in (8192, 32_768, 65_536):
        found[f"kernel of 3, {n} points"] = Timed(kernel_fold, (of(n, 3), of(n, 3), of(n)))
    kernel = (of(8192, 3, dtype=F64), of(8192, 3, dtype=F64), of(8192, dtype=F64))
    found["kernel of 3 in float64"] = Timed(kernel_fold, kernel)
    columns = lambda x, y, v: jnp.sum(jnp.exp(-squares(x, y)) * v[:, None], 0)  # noqa: E731
    found["kernel of 3, by columns"] = Timed(columns, (of(16384, 3), of(16384, 3), of(16384)))
    found["furthest of 3"] = Timed(lambda x, y: jnp.max(squares(x, y), 1), (of(16384, 3), of(16384, 3)))
    found["logsumexp of 3"] = Timed(lambda x, y: jax.nn.logsumexp(-squares(x, y), 1), (of(16384, 3), of(16384, 3)))
    for d in (3, 16, 64):
        found[f"nearest of {d}"] = Timed(lambda x, y: jnp.argmin(squares(x, y), 1), (of(32_768, d), of(2048, d)))
    for d in (16, 64):
        found[f"L1 distances of {d}"] = Timed(lambda x, y: jnp.abs(x[:, None] - y[None]).sum(-1), (of(8192, d), of(4096, d)))
    return found


def elementwise() -> Mapping[str, Timed]:
    """Functions in turn, so that they and not memory take the time; and memory."""
    functions: Mapping[str, Callable[[Any], Any]] = {
        "exp": lambda x: jnp.exp(-x),
        "log": lambda x: jnp.log(x + 2),
        "tanh": jnp.tanh,
        "sin": jnp.sin,
        "erf": lax.erf,
        "sqrt": lambda x: jnp.sqrt(x + 1),
        "div": lambda x: 1 / (x + 1.5),
        "logistic": lax.logistic,
    }
    found = {f"{name}, 16 times": Timed(repeated(function, 16), (of(1 << 24),)) for name, function in functions.items()}
    found["exp, 16 times, in float64"] = Timed(repeated(functions["exp"], 16), (of(1 << 22, dtype=F64),))
    found["sum and product, 64 times"] = Timed(repeated(lambda x: x * 0.99 + 0.1, 64), (of(1 << 24),))
    found |= {f"one more, 2^{p}": Timed(lambda x: x + 1.0, (of(1 << p),)) for p in (26, 28)}
    found["outer product written"] = Timed(lambda x, y: x[:, None] * y, (of(16384), of(16384)))
    found["transposed"] = Timed(lambda x: x.T + 0.0, (of(8192, 8192),))
    return found


def rows() -> Mapping[str, Timed]:
    """Sums and softmaxes of arrays in memory."""
    matrix = (of(8192, 8192),)
    return {
        "sums of rows": Timed(lambda x: x.sum(1), matrix),
        "sums of columns": Timed(lambda x: x.sum(0), matrix),
        "sum": Timed(jnp.sum, matrix),
        "sums of a middle axis": Timed(lambda x: x.sum(1), (of(64, 1024, 1024),)),
        "sums of rows of 40": Timed(lambda x: x.sum(1), (of(1 << 20, 40),)),
        "softmax of rows": Timed(lambda x: jax.nn.softmax(x, 1), matrix),
        "softmax of long rows": Timed(lambda x: jax.nn.softmax(x, 1), (of(1024, 65_536),)),
        "softmax of columns": Timed(lambda x: jax.nn.softmax(x, 0), matrix),
    }


def selection() -> Mapping[str, Timed]:
    """Selections and sorts."""
    found = {}
    for r, n, k in ((2048, 2000, 10), (2048, 60_000, 10), (10_000, 10_000, 10), (40_000, 2000, 10), (1, 1 << 20, 10)):
        found[f"{k} of {r} x {n}"] = Timed(lambda x, k=k: lax.top_k(x, k), (of(r, n),))
    found["10 of 2048 x 20"] = Timed(lambda x: lax.top_k(x, 10), (of(2048, 20),))
    found["100 of 2048 x 60000"] = Timed(lambda x: lax.top_k(x, 100), (of(2048, 60_000),))
    for r, n in ((2048, 2048), (256, 65_536), (1, 1 << 20)):
        found[f"sort of {r} x {n}"] = Timed(lambda x: jnp.sort(x, 1), (of(r, n),))
    return found


def solvers() -> Mapping[str, Timed]:
    """Linear algebra, convolutions and transforms."""
    found = {}
    for n, dtype in ((2048, F32), (200, F64), (1024, F64)):
        found[f"cholesky of {n}, {dtype.__name__}"] = Timed(factorised, (of(n, n, dtype=dtype),))
    for n, m, dtype in ((1024, 1024, F32), (1024, 65_536, F32), (200, 500, F64)):
        found[f"triangular solve of {n} for {m}, {dtype.__name__}"] = Timed(solved, (of(n, n, dtype=dtype), of(n, m, dtype=dtype)))
    found["eigh of 512"] = Timed(lambda x: jnp.linalg.eigh(x + x.T)[0], (of(512, 512),))
    found["qr of 1024"] = Timed(lambda x: jnp.linalg.qr(x)[1], (of(1024, 1024),))
    found["svd of 256"] = Timed(lambda x: jnp.linalg.svd(x)[1], (of(256, 256),))
    found["convolution, channels last"] = Timed(convolved(("NHWC", "HWIO", "NHWC")), (of(64, 56, 56, 64), of(3, 3, 64, 64)))
    found["fft of 1024 x 4096"] = Timed(lambda x: jnp.fft.fft(x, axis=1).real, (of(1024, 4096),))
    return found


def summed(x: jax.Array) -> jax.Array:
    """Two kernels, a fold and a map that needs it."""
    return x * 0.999 + x.sum() * 1e-6


def turns(count: int, body: Callable[..., Any]) -> Callable[..., Any]:
    """A function applied so many times by a loop; other arguments stay."""
    return lambda x, *others: lax.fori_loop(0, count, lambda t, x: body(x, *others), x)


def loops() -> Mapping[str, Timed]:
    """Turns of loops."""
    small = lambda x: lax.fori_loop(0, 1000, lambda t, x: x * 1.001 + t, x)  # noqa: E731
    scan = lambda x: lax.scan(lambda c, y: (c * 0.9 + y, c.sum()), jnp.zeros(x.shape[1]), x)  # noqa: E731
    vector = (of(1 << 14),)
    return {
        "1000 turns": Timed(small, (of(1 << 12),)),
        "scan of 500": Timed(scan, (of(500, 1024),)),
        "1000 turns of a sum": Timed(turns(1000, summed), vector),
        "1000 turns of 3 sums": Timed(turns(1000, repeated(summed, 3)), vector),
        "200 turns of 12 sums": Timed(turns(200, repeated(summed, 12)), vector),
        "100 x 5 turns of 2 sums": Timed(turns(100, turns(5, repeated(summed, 2))), vector),
        "100 turns of a factorisation": Timed(turns(100, factorised), (of(16, 16),)),
        "100 turns of a convolution": Timed(turns(100, convolved(("NHWC", "HWIO", "NHWC"))), (of(1, 16, 16, 16), of(3, 3, 16, 16))),
        "100 turns of a transform": Timed(turns(100, lambda x: jnp.abs(jnp.fft.fft(x)) * 0.01), (of(64, 64),)),
        "500 turns of a product": Timed(turns(500, lambda x, w: jnp.tanh(x @ w)), (of(64, 64),) * 2),
    }


PROGRAMS: Mapping[str, Mapping[str, Timed]] = {
    part.__name__: part() for part in (products, pairs, elementwise, rows, selection, solvers, loops)
}


def path_of(card: str) -> Path:
    """The file of what was measured on a card."""
    return RESULTS / f"gpu_times_{card}.json"


def predicted_s(timed: Timed, card: str) -> float:
    """The seconds that the planner's model of a card predicts of a program as written."""
    own = GpuBackend.of(named(card)).without_tiles()
    own = replace(own, products=Products.BY_TRITON) if timed.setting == "triton" else own
    with jax.enable_x64(timed.x64):
        jaxpr = jax.make_jaxpr(timed.function)(*timed.avals)
        program = load(jaxpr, [f"x{k}" for k in range(len(timed.avals))], own.preferences)
        return straight(Extraction(program), own, emitted=False).seconds


def measured_s(divided: int = 1, only: str = "") -> dict[str, float]:
    """The seconds of each program, or of those with some text in their name, on the device in use, with extents divided by so many. They
    are compiled side by side, and run one by one."""
    found: dict[str, float] = {}
    options = GpuBackend.built_in().compiler_options
    on_gpu = jax.default_backend() == "gpu"
    every = {name: timed.divided(divided) for part in PROGRAMS.values() for name, timed in part.items() if only in name}

    def compiled(timed: Timed) -> Any:
        with jax.enable_x64(timed.x64):
            lowered = jax.jit(timed.function).lower(*timed.avals)
        return lowered.compile({**options, **(SETTINGS[timed.setting] if timed.setting else {})} if on_gpu else None)

    with ThreadPoolExecutor(8) as pool:
        programs = dict(zip(every, pool.map(compiled, every.values())))
    for name, timed in every.items():
        with jax.enable_x64(timed.x64):
            found[name] = _seconds(programs[name], [_drawn(aval) for aval in timed.avals])
        print(f"{name}: {found[name] * 1e6:.1f} us", flush=True)
    return found


def _drawn(aval: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).random(aval.shape, dtype=np.float32), aval.dtype)


def _seconds(compiled: Any, args: list[Any]) -> float:
    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            out = compiled(*args)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    run(1)
    calls = max(1, math.ceil(LONG_S / run(1)))
    return min(run(calls) / calls for _ in range(ROUNDS))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--card", choices=CARDS, default="h100", help="(default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="programs with this in their name: others keep what was measured")
    options = parser.parse_args(argv)
    card = options.card
    if options.measure:
        if jax.default_backend() != "gpu":
            parser.error("there is no GPU here to measure")
        card = GpuBackend.built_in().target.name
        about = {"card": jax.local_devices()[0].device_kind, "jax": jax.__version__}
        before = json.loads(path_of(card).read_text(encoding="utf-8"))["seconds"] if options.only else {}
        seconds = before | measured_s(only=options.only)
        path_of(card).write_text(json.dumps({**about, "seconds": seconds}, indent=1) + "\n", encoding="utf-8")
    known = json.loads(path_of(card).read_text(encoding="utf-8"))
    print(f"{known['card']}, JAX {known['jax']}\n\n| program | measured, us | predicted, us | ratio |\n| --- | ---: | ---: | ---: |")
    for part in PROGRAMS.values():
        for name, timed in part.items():
            if options.only in name and name in known["seconds"]:
                measured, predicted = known["seconds"][name], predicted_s(timed, card)
                print(f"| {name} | {measured * 1e6:,.1f} | {predicted * 1e6:,.1f} | {predicted / measured:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
