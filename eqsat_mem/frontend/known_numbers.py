"""Whole numbers and truth values computed of literals alone, as those by which JAX counts places from the end of an axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from eqsat_mem.frontend.flat_jaxpr import Flat

_COMPUTED: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "select_n": lambda which, *cases: cases[int(which)],
}
"""Operations that NumPy computes of whole numbers as XLA does: modulo powers of two."""


def known_number(flat: Flat, name: str, ins: Sequence[int], dtype: Any) -> Any:
    """The number that an operation makes of single literals; None where they are not known or not whole."""
    if name not in _COMPUTED or not all(v in flat.literals for v in ins):
        return None
    given = [np.asarray(flat.literals[v]) for v in ins]
    if not all(x.dtype.kind in "biu" and not x.shape for x in given):
        return None
    with np.errstate(over="ignore"):
        return np.asarray(_COMPUTED[name](*given), dtype)
