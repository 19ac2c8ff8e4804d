"""Check a program against XLA (what the compiled program holds) and against the original (its values)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import jit
from jax.extend.core import ClosedJaxpr

from eqsat_mem.backends.cpu.hidden_scratch import hidden_scratch_bytes, workspace_bytes
from eqsat_mem.ir.jaxprs import aval_bytes

# --- memory ------------------------------------------------------------------------------------------


DOUBT = 2
"""How often estimated scratch of kernel libraries counts towards what a program holds: chains of contractions took twice the estimate."""
UNOPTIMISED: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": "1",
}
"""Options of a compilation that is only asked what it holds: XLA:CPU assigns buffers before it generates machine code, for which it then
takes the shortest way. Without its fusion emitters a scatter becomes a loop, whose counters are some hundred bytes."""


def compiled_peak(function: Callable[..., Any], avals: Sequence[Any], donate: Sequence[int] = (), optimise: bool = True) -> tuple[int, Any]:
    """Bytes that a function of flat arguments holds at its peak when XLA has compiled it, and the compiled program.

    Arguments (used or not), outputs and temporaries, less what outputs share with donated arguments, plus the scratch that
    XLA does not report (:mod:`eqsat_mem.backends.cpu.hidden_scratch`). ``avals`` have ``shape`` and ``dtype``. Runs nothing. Where the
    program is not going to be run, ``optimise=False`` has XLA:CPU generate slower machine code, which holds the same (some hundred bytes
    more for a scatter), in a quarter of the time.

    Raises:
        NotImplementedError: if the backend does not analyse memory.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
    lowered = jit(function, donate_argnums=tuple(donate), keep_unused=True).lower(*shapes)
    compiled = lowered.compile() if optimise or jax.default_backend() != "cpu" else _unoptimised(lowered)
    return held_bytes(compiled), compiled


def donations(jaxpr: ClosedJaxpr, donated: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Those of the donated arguments whose memory outputs can take, each one output of the same shape and dtype, and their bytes."""
    free = Counter((aval.shape, aval.dtype) for aval in jaxpr.out_avals)
    taken = []
    for k in donated:
        aval = jaxpr.in_avals[k]
        if free[aval.shape, aval.dtype]:
            free[aval.shape, aval.dtype] -= 1
            taken.append(k)
    return tuple(taken), aval_bytes([jaxpr.in_avals[k] for k in taken])


def _unoptimised(lowered: Any) -> Any:
    try:
        return lowered.compile(UNOPTIMISED)
    except jax.errors.JaxRuntimeError:  # a jaxlib of other options
        return lowered.compile()


def held_bytes(compiled: Any) -> int:
    """What a compiled program holds at its peak, in bytes."""
    memory = compiled.memory_analysis()
    if memory is None:
        raise NotImplementedError("this backend does not tell what a compiled program holds: pass verify=False to plan without it.")
    reported = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    text = compiled.as_text()
    return int(reported + max(DOUBT * hidden_scratch_bytes(text), workspace_bytes(text)))


# --- values ------------------------------------------------------------------------------------------

LARGEST_TOLERANCE = 0.1
WRONG_INTEGERS = 1e-3
"""Share of integers that may differ: the rank of nearly equal values turns on rounding."""


@dataclass(frozen=True)
class Comparison:
    """The worst difference between the results of two functions.

    Attributes:
        error: largest absolute difference within one result, over the largest absolute value in it; 1 where integers, shapes, dtypes
            or the places of infinities and NaNs differ.
        tolerance: the bound for ``error``.
        where: the result with that difference, as a path.
        why: what differs, in words.
    """

    error: float
    tolerance: float
    where: str
    why: str

    @property
    def same(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        verdict = "agrees" if self.same else "DIFFERS"
        return f"{verdict}: {self.why} at {self.where}: error {self.error:.2g}, tolerance {self.tolerance:.2g}"


def same_values(
    fun: Callable[..., Any],
    other: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    tolerance: float | None = None,
) -> Comparison:
    """Run both functions and compare all results; give the worst.

    ``tolerance`` bounds the relative error of each result (see :class:`Comparison`); by default 1000 roundings in its dtype.

    Raises:
        ValueError: if the results are not the same pytree.

    >>> same_values(np.sin, lambda x: np.sin(x) + 1e-3, [np.arange(3.0)]).same
    False
    """
    expected, actual = fun(*args, **(kwargs or {})), other(*args, **(kwargs or {}))
    paths = jax.tree_util.tree_flatten_with_path(expected)[0]
    tree: Any = jax.tree.structure(expected)
    other_tree: Any = jax.tree.structure(actual)
    if not tree == other_tree:  # a PyTreeDef declares only ==
        raise ValueError(f"the functions return different pytrees: {tree} and {other_tree}.")
    found = [
        _compare(_plain(x), _plain(y), f"result{jax.tree_util.keystr(path)}", tolerance)
        for (path, x), y in zip(paths, jax.tree.leaves(actual), strict=True)
    ]
    return max(found, key=lambda c: c.error / c.tolerance, default=Comparison(0.0, 1.0, "result", "nothing is returned"))


def _plain(value: Any) -> np.ndarray[Any, Any]:
    dtype = getattr(value, "dtype", None)
    is_key = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def _compare(expected: np.ndarray[Any, Any], actual: np.ndarray[Any, Any], where: str, tolerance: float | None) -> Comparison:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        types = f"{expected.dtype}{list(expected.shape)} and {actual.dtype}{list(actual.shape)}"
        return Comparison(1.0, LARGEST_TOLERANCE, where, f"{types} are not one type")
    if not jax.numpy.issubdtype(expected.dtype, np.inexact):
        wrong = float(np.mean(expected != actual)) if expected.size else 0.0
        return Comparison(0.0 if wrong <= WRONG_INTEGERS else 1.0, LARGEST_TOLERANCE, where, f"{wrong:.2%} of integers differ")
    bound = min(1000 * float(jax.numpy.finfo(expected.dtype).eps), LARGEST_TOLERANCE) if tolerance is None else tolerance
    wide = np.complex128 if np.issubdtype(expected.dtype, np.complexfloating) else np.float64
    expected, actual = expected.astype(wide), actual.astype(wide)
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True) or not np.all(np.isfinite(actual[finite])):
        return Comparison(1.0, bound, where, "infinities and NaNs stand elsewhere")
    scale = float(np.max(np.abs(expected[finite]), initial=0.0))
    worst = float(np.max(np.abs(expected[finite] - actual[finite]), initial=0.0))
    return Comparison(worst / scale if scale else worst, bound, where, f"largest difference {worst:.2g} where values reach {scale:.2g}")
