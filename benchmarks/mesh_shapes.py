"""The meshes of the benchmark of several devices, and its shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

DEVICES = 8
LINE, GRID = {"x": DEVICES}, {"data": DEVICES // 2, "model": 2}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
