"""Types inside ``shard_map``: which mesh axes a value varies along.

A planned program is traced and emitted without them: a loop's accumulator starts from zeros, which vary along no axis, and a plan is
compiled on its own to be measured. So the primitives take inputs that all vary along the same axes, and their outputs vary as
those do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax._src.config import _check_vma  # what shard_map(check_vma=False) sets; it has no public form
from jax.core import ShapedArray


def without_varying_types() -> AbstractContextManager[None]:
    """Within it, JAX traces as if under ``shard_map(check_vma=False)``."""
    context: AbstractContextManager[None] = _check_vma(False)
    return context


def plain_aval(aval: Any) -> Any:
    """The shape, dtype and weak type alone."""
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def vary_alike(values: Sequence[Any]) -> list[Any]:
    """The same values, each varying along every axis that one of them varies along."""
    own = [jax.typeof(value).manual_axis_type.varying for value in values]
    axes = frozenset().union(*own)
    return [jax.lax.pcast(x, tuple(axes - vma), to="varying") if axes - vma else x for x, vma in zip(values, own, strict=True)]


def varying_as(inputs: Sequence[Any], output: Any) -> Any:
    """The abstract value ``output``, varying along the axes of the inputs."""
    varying = [aval.manual_axis_type for aval in inputs if aval.manual_axis_type.varying]
    return output.update(manual_axis_type=varying[0]) if varying else output
