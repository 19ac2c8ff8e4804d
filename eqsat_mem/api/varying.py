"""Types inside ``shard_map``: the mesh axes along which a value varies.

A planned program is traced and emitted without these types: a loop's accumulator is initialised with zeros, which vary along no axis,
and a plan is compiled on its own to be measured. The primitives therefore take inputs that all vary along the same axes, and their
outputs vary along these axes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src.config import _check_vma  # set by shard_map(check_vma=False); it has no public form
from jax.core import ShapedArray


def without_varying_types() -> AbstractContextManager[None]:
    """Return a context in which JAX traces as under ``shard_map(check_vma=False)``."""
    context: AbstractContextManager[None] = _check_vma(False)
    return context


def plain_aval(aval: Any) -> Any:
    """Return the abstract value with its shape, dtype and weak type only."""
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def vary_alike(values: Sequence[Any]) -> list[Any]:
    """Cast the values so that each varies along every mesh axis along which any of them varies."""
    own = [jax.typeof(value).manual_axis_type.varying for value in values]
    axes = frozenset().union(*own)
    return [jax.lax.pcast(x, tuple(axes - vma), to="varying") if axes - vma else x for x, vma in zip(values, own, strict=True)]


def varying_as(inputs: Sequence[Any], output: Any) -> Any:
    """Return the abstract value ``output``, varying along the mesh axes of the inputs, which all vary alike."""
    varying = [aval.manual_axis_type for aval in inputs if aval.manual_axis_type.varying]
    return output.update(manual_axis_type=varying[0]) if varying else output
