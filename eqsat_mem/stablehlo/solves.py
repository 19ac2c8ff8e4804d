"""Calls of library routines that are primitives of JAX: a row each, for operands laid out column by column as those want them."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from eqsat_mem.backends.cpu.custom_calls import TRIANGULAR_SOLVES
from eqsat_mem.stablehlo.operation import Op, Row
from eqsat_mem.stablehlo.values import Unreadable, integers


def triangular_solve(op: Op, a: Any, b: Any) -> Any:
    rank = np.ndim(a)
    by_columns = (rank - 2, rank - 1, *range(rank - 3, -1, -1))
    if any(integers(layout) != by_columns for name in ("operand_layouts", "result_layouts") for layout in op.attributes[name]):
        raise Unreadable("arrays that do not lie column by column")
    said = op.with_attributes("mhlo.backend_config")
    side, uplo, transposes, diagonal = (chr(said.value(name)) for name in ("side", "uplo", "trans_x", "diag"))
    return lax.linalg.triangular_solve(
        a,
        b,
        left_side=side == "L",
        lower=uplo == "L",
        transpose_a=transposes in "TC",
        conjugate_a=transposes == "C",
        unit_diagonal=diagonal == "U",
    )


SOLVES: dict[str, Row] = dict.fromkeys(TRIANGULAR_SOLVES, triangular_solve)
