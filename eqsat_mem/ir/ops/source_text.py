"""Source of primitives' parameters, and of calls by a primitive's own ``bind`` where no ``lax`` function is equivalent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive, primitives

from eqsat_mem.ir.ops.elementwise import value_text

PUBLIC = {prim: name for name, prim in vars(primitives).items() if isinstance(prim, Primitive)}
"""The primitives in ``jax.extend.core.primitives``, and their names there."""


def param_text(value: Any) -> str | None:
    """Return source of a parameter in terms of ``lax``, ``jnp`` and ``primitives``; None if it has none."""
    if isinstance(value, Enum):
        home = next((name for name, module in _HOMES if getattr(module, type(value).__name__, None) is type(value)), None)
        return None if home is None else f"{home}.{type(value).__name__}.{value.name}"
    if isinstance(value, Primitive):
        return f"primitives.{PUBLIC[value]}" if value in PUBLIC else None
    if type(value) in (tuple, list):
        items = [param_text(v) for v in value]
        return None if None in items else "(" + ", ".join(map(str, items)) + ("," if len(items) == 1 else "") + ")"
    dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    if value is None or dtype or isinstance(value, bool | int | float | complex | str | np.generic):
        return value_text(value)
    return None


_HOMES = (("lax", lax), ("lax.linalg", lax.linalg))


def params_text(params: Mapping[str, Any]) -> str | None:
    """Return source of keyword arguments, each preceded by a comma; None if one of them has none."""
    texts = {name: param_text(value) for name, value in params.items()}
    return None if None in texts.values() else "".join(f", {name}={text}" for name, text in texts.items())


def primitive_text(prim: Any, params: Mapping[str, Any], args: Sequence[str]) -> str | None:
    """Return source of a call of a primitive's own ``bind``; None if the primitive is not public or a parameter has no source."""
    keywords = params_text(params)
    if prim not in PUBLIC or keywords is None:
        return None
    return f"primitives.{PUBLIC[prim]}.bind({', '.join(args)}{keywords})"


def is_key(dtype: Any) -> bool:
    """Whether a dtype is that of typed random keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))
