"""Chains of products and networks of tensors: plans against the order as written and opt_einsum's. ``python -m benchmarks.chains``"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import peers
from benchmarks.racing import Contest, Question, contests, main, table

CHAINS = {
    "thin": (1, 8, 1, 8, 0),
    "wide, narrow, wide": (8, 1, 8, 1, 8, 1, 8),
    "down": (8, 6, 4, 3, 2, 1, 1),
    "up, read by a vector": (1, 2, 4, 6, 8, 0),
}
"""Extents of chains of matrices in units of a scale; 0 is an extent of one."""
UNIT = {"tiny": 16, "small": 250, "full": 600}
LENGTHS = {"tiny": [4], "small": [8, 12], "full": [8, 12, 20]}
"""Tensors of trains that are closed to a number: a matrix product state with itself."""


def in_order(*matrices: jax.Array) -> jax.Array:
    """From left to right."""
    return reduce(jnp.matmul, matrices)


def train(*tensors: jax.Array) -> jax.Array:
    """The inner product of a train of tensors of shape (left, middle, right) with itself, all bonds written out, site after site."""
    out = jnp.ones((1, 1), tensors[0].dtype)
    for tensor in tensors:
        pair = jnp.einsum("amb,cmd->acbd", tensor, tensor)
        out = jnp.einsum("ac,acbd->bd", out, pair)
    return out[0, 0]


def make(scale: str) -> Iterator[Contest]:
    """Chains of matrices, then trains."""
    unit = UNIT[scale]
    for name, extents in CHAINS.items():
        rng = np.random.default_rng(0)
        shapes = itertools.pairwise([max(unit * n, 1) for n in extents])
        matrices = [(rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32) for shape in shapes]
        spec = ",".join(f"{chr(97 + k)}{chr(98 + k)}" for k in range(len(matrices))) + f"->a{chr(97 + len(matrices))}"
        limit = 3 * sum(m.nbytes for m in matrices) + matrices[0].shape[0] * matrices[-1].shape[1] * 4 + 2**20
        yield Contest(name, {"length": len(matrices)}, matrices, limit, in_order, _opt_einsum(spec))
    for length in LENGTHS[scale]:
        rng = np.random.default_rng(0)
        bond = max(unit // 4, 2)
        bonds = [1, *[bond] * (length - 1), 1]
        tensors = [(rng.standard_normal((a, 4, b)) / np.sqrt(4 * a)).astype(np.float32) for a, b in itertools.pairwise(bonds)]
        yield Contest(f"train of {length}, bonds of {bond}", {"length": length}, tensors, "64MiB", train, _opt_einsum(_train_spec(length)))


def _train_spec(length: int) -> str:
    """The whole network at once; an operand stands for the upper and for the lower layer."""
    import opt_einsum

    letter = opt_einsum.get_symbol
    sites = [(3 * k, 3 * k + 1, 3 * k + 2, 3 * k + 3, 3 * k + 4) for k in range(length)]
    return ",".join(f"{letter(a)}{letter(m)}{letter(b)},{letter(c)}{letter(m)}{letter(d)}" for a, c, m, b, d in sites) + "->"


def _opt_einsum(spec: str) -> dict[str, Callable[..., Any]]:
    return {"opt_einsum": partial(peers.opt_einsum_contract, spec)} if peers.has("opt_einsum") else {}


QUESTION = Question("chains", "Chains of products and trains of tensors", contests(make, turns=9), table)

if __name__ == "__main__":
    main(QUESTION)
