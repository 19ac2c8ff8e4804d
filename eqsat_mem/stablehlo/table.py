"""The rows of all operations that JAX has words for; any other is kept as it is."""

from __future__ import annotations

from eqsat_mem.stablehlo.control import CONTROL
from eqsat_mem.stablehlo.elementwise import ELEMENTWISE
from eqsat_mem.stablehlo.folds import FOLDS
from eqsat_mem.stablehlo.operation import Row
from eqsat_mem.stablehlo.shapes import SHAPES

ROWS: dict[str, Row] = {**ELEMENTWISE, **SHAPES, **FOLDS, **CONTROL}
