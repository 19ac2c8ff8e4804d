"""Costs of operations in additions: how many float32 additions take as long.

A :class:`Weights` holds one table for elementwise operations and one for blocks. The base tables count arithmetic, as any
textbook does; a backend replaces the rows that it has measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax.numpy as jnp

from eqsat_mem.ir import Call, Map
from eqsat_mem.ir.jaxprs import inner_jaxprs, nested_jaxprs
from eqsat_mem.ir.ops import ALIASES, MAPS, Monoid, Operation, Shapes, operation_of
from eqsat_mem.ir.ops import BLOCKS as OPERATIONS
from eqsat_mem.ir.ops.custom.operation import traced

Params = Mapping[str, Any]
BlockWeight = Callable[[Shapes, Shapes, Params], float]
"""A figure of a call from the shapes of its operands and results, and its parameters."""

CHEAP = 1.5
"""XLA computes an operation of at most this weight again in every consumer (``IsExpensive`` in its instruction fusion)."""
RECOMPUTED = frozenset({"integer_pow", "population_count"})
"""Heavier operations that XLA computes again all the same: they are lowered to cheap ones."""
UNKNOWN_TRIPS = 10
"""Assumed turns of a ``while`` loop, whose number is known only when it runs."""


@dataclass(frozen=True)
class Weights:
    """The costs of operations for one backend.

    Attributes:
        elementwise: additions per element, by primitive; an operation without an entry costs one.
        blocks: additions per call, by primitive; a call without an entry costs an addition for each element that it reads or
            writes, and what the jaxprs inside it cost.
        workspaces: elements of the first operand that a call holds besides its operands and results, by primitive; none
            without an entry.
        step: additions to combine one more element by a user's monoid, besides the combination itself.
        combined: additions for each operation of such a combination.
    """

    elementwise: Mapping[str, float]
    blocks: Mapping[str, BlockWeight]
    workspaces: Mapping[str, BlockWeight] = field(default_factory=dict)
    step: float = 1.0
    combined: float = 1.0

    def of_map(self, term: Map) -> float:
        """Additions per element of an elementwise operation; a positive integer power costs the products that it is made of."""
        if not term.params:
            return self.elementwise.get(term.op, 1.0)
        own = operation_of(dict(term.params))
        if own is not None:
            return self.of_operation(own, ((),) * len(own.operands))
        power = dict(term.params).get("y", 0) if term.op == "integer_pow" else 0
        return max(power.bit_length() + power.bit_count() - 2, 1) if power > 0 else self.elementwise.get(term.op, 1.0)

    def is_cheap(self, term: Map) -> bool:
        """Whether XLA computes an elementwise operation again in every consumer."""
        own = operation_of(dict(term.params)) if term.params else None
        weight = self.elementwise.get(term.op, 1.0) if own is None else self.of_map(term)
        return weight <= CHEAP or (own is None and term.op in RECOMPUTED)

    def of_block(self, call: Call, ins: Shapes, outs: Shapes) -> float:
        """Additions of a call on operands and results of these shapes."""
        own = operation_of(call.params)
        if own is not None:
            return self.of_operation(own, _named_shapes(own, ins)) * _batch(call.params["mapped"], outs)
        weight = self.blocks.get(call.prim.name)
        if weight is not None:
            return weight(ins, outs, call.params)
        return elements(ins, outs, call.params) + trips(call) * sum(map(jaxpr_weight, inner_jaxprs(call.params)))

    def workspace(self, call: Call, ins: Shapes, outs: Shapes) -> float:
        """Elements of the first operand that a call holds besides operands and results.

        A user's operation holds its largest inner value, for all calls of the batch at once, where that is larger than its
        operands and its result.
        """
        own = operation_of(call.params)
        if own is not None:
            shapes = _named_shapes(own, ins)
            outside = max(map(math.prod, (*shapes, outs[0][len(call.params["mapped"]) :])))
            largest = _largest_inner_value(own, shapes)
            return float(largest * _batch(call.params["mapped"], outs)) if largest > outside else 0.0
        workspace = self.workspaces.get(call.prim.name)
        return 0.0 if workspace is None else workspace(ins, outs, call.params)

    def of_operation(self, operation: Operation, shapes: Shapes) -> float:
        """Additions of one call of a user's operation on operands of these shapes.

        Raises:
            OptionError: if its function cannot be traced, so that its operations cannot be counted.
        """
        if callable(operation.cost):
            extents = {name: n for names, shape in zip(operation.operands, shapes) for name, n in zip(names, shape)}
            return float(operation.cost(*(extents[name] for name in operation.dimensions)))
        if operation.cost is not None:
            return float(operation.cost)
        if operation.monoid is not None:
            return shapes[0][-1] * self._of_element(operation.monoid)
        return self._of_jaxpr(traced(operation, tuple(map(tuple, shapes))))

    def _of_element(self, monoid: Monoid) -> float:
        """Additions to fold one more element by a user's monoid."""
        scalars = ((),) * len(monoid.operation.operands)
        signature = ",".join(["()"] * len(scalars)) + "->()"

        def lift(*x: Any) -> Any:
            return reduce(jnp.add, monoid.lift_scalars(*x))

        def combine(*x: Any) -> Any:
            return reduce(jnp.add, monoid.combine_scalars(*[monoid.lift_scalars(*x)] * 2))

        lifting, combining = (self.of_operation(Operation(monoid.name, f, signature), scalars) for f in (lift, combine))
        return self.step + lifting + self.combined * combining

    def _of_jaxpr(self, jaxpr: Any) -> float:
        """Additions of a user's function: elementwise operations by their table, an addition per element of other results."""
        total = 0.0
        for eqn in jaxpr.eqns:
            name = ALIASES.get(eqn.primitive.name, eqn.primitive.name)
            inside = list(inner_jaxprs(eqn.params))
            if name in MAPS:
                total += self.elementwise.get(name, 1.0) * math.prod(eqn.outvars[0].aval.shape)
            elif inside and "length" not in eqn.params:
                total += sum(map(self._of_jaxpr, inside))
            else:
                total += _equation_weight(eqn)
        return total


def elements(ins: Shapes, outs: Shapes, params: Params) -> float:
    """An addition for every element read or written."""
    return float(sum(map(math.prod, ins)) + sum(map(math.prod, outs)))


def trips(call: Call) -> int:
    """The number of times that a loop is expected to run its body; one where there is no loop."""
    return int(call.params.get("length", UNKNOWN_TRIPS if call.prim.name == "while" else 1))


def jaxpr_weight(jaxpr: Any) -> float:
    """Additions of one run of a jaxpr, an elementwise operation being one."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(map(_equation_weight, inner.eqns), 0.0)


def _equation_weight(eqn: Any) -> float:
    size = float(sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape")))
    if eqn.primitive.name == "dot_general":
        contracted = eqn.params["dimension_numbers"][0][0]
        return 2.0 * size * math.prod(eqn.invars[0].aval.shape[int(a)] for a in contracted)
    return size + eqn.params.get("length", 1) * sum(map(jaxpr_weight, inner_jaxprs(eqn.params)), 0.0)


# --- users' operations ---------------------------------------------------------------------------------


def _largest_inner_value(operation: Operation, shapes: Shapes) -> int:
    """Elements of the largest value that one call of a user's function makes."""
    every = nested_jaxprs(traced(operation, tuple(map(tuple, shapes))))
    sizes = (math.prod(v.aval.shape) for jaxpr in every for eqn in jaxpr.eqns for v in eqn.outvars if hasattr(v.aval, "shape"))
    return max(sizes, default=0)


def _named_shapes(operation: Operation, ins: Shapes) -> tuple[tuple[int, ...], ...]:
    """The extents of the named axes of each operand."""
    return tuple(tuple(shape[len(shape) - len(names) :]) for shape, names in zip(ins, operation.operands))


def _batch(mapped: Sequence[Any], outs: Shapes) -> int:
    """The number of calls of a user's function: one for every element of the batch."""
    return math.prod(outs[0][: len(mapped)])


# --- the base tables -----------------------------------------------------------------------------------

_FUNCTION, _SPECIAL = 10.0, 100.0
_FUNCTIONS = (
    "sqrt",
    "rsqrt",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log1p",
    "logistic",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "erf",
    "erfc",
    "erf_inv",
    "cbrt",
)
_SPECIAL_FUNCTIONS = (
    "pow",
    "atan2",
    "lgamma",
    "digamma",
    "polygamma",
    "zeta",
    "igamma",
    "igammac",
    "igamma_grad_a",
    "regularized_incomplete_beta",
    "bessel_i0e",
    "bessel_i1e",
)

ELEMENTWISE: Mapping[str, float] = {
    **dict.fromkeys(_FUNCTIONS, _FUNCTION),
    **dict.fromkeys(_SPECIAL_FUNCTIONS, _SPECIAL),
    "div": 5.0,
    "rem": 10.0,
    "integer_pow": 2.0,
    "nextafter": 4.0,
    "population_count": 2.0,
    "clz": 2.0,
    **dict.fromkeys(("lt_to", "le_to"), 6.0),
}
"""Additions per element where nothing is measured: by the order of magnitude of a polynomial, or of a series."""


def moved(ins: Shapes, outs: Shapes, params: Params) -> float:
    """A slice reads as much as it writes."""
    return 2.0 * sum(map(math.prod, outs))


def free(ins: Shapes, outs: Shapes, params: Params) -> float:
    """Nothing is computed."""
    return 0.0


def per_element(cost: float) -> BlockWeight:
    """A constant number of additions for each element of the first operand."""
    return lambda ins, outs, params: cost * math.prod(ins[0])


def per_result(cost: float) -> BlockWeight:
    """A constant number of additions for each element of the results."""
    return lambda ins, outs, params: cost * sum(map(math.prod, outs))


def cubic(factor: float) -> BlockWeight:
    """``factor`` m n min(m, n) additions per m x n matrix."""

    def weight(ins: Shapes, outs: Shapes, params: Params) -> float:
        *batch, m, n = ins[0]
        return factor * math.prod(batch) * m * n * min(m, n)

    return weight


def substitution(ins: Shapes, outs: Shapes, params: Params) -> float:
    """A product for each element of the matrix and each column of the right side."""
    return float(ins[0][-1] * math.prod(ins[1]))


def convolution(ins: Shapes, outs: Shapes, params: Params) -> float:
    """A product for each element of the result and each element of a patch."""
    kernel = params["dimension_numbers"][1]
    return float(math.prod(outs[0]) * math.prod(n for a, n in enumerate(ins[1]) if a != kernel[0]))


def _fourier(ins: Shapes, outs: Shapes, params: Params) -> float:
    size = max(math.prod(ins[0]), math.prod(outs[0]))
    return 5.0 * size * math.log2(max(2, math.prod(params["fft_lengths"])))


def _window(ins: Shapes, outs: Shapes, params: Params) -> float:
    return float(math.prod(params["window_dimensions"]) * max(math.prod(outs[0]), math.prod(ins[0])))


def reduction(step: float, combined: float) -> BlockWeight:
    """A fold by a function of the user's, element by element."""
    return lambda ins, outs, params: math.prod(ins[0]) * (step + combined * jaxpr_weight(params["jaxpr"]))


def sorting(cost: float) -> BlockWeight:
    """n log n comparisons along the sorted axis."""

    def weight(ins: Shapes, outs: Shapes, params: Params) -> float:
        length = ins[0][params["dimension"]]
        return cost * sum(map(math.prod, ins)) * max(1.0, math.log2(max(length, 1)))

    return weight


def _selection(ins: Shapes, outs: Shapes, params: Params) -> float:
    return math.prod(ins[0]) * (1.0 + math.log2(max(params["k"], 1)))


THREEFRY = 60.0
"""Additions per random number: Threefry-2x32 is twenty rounds of an addition, a rotation and an exclusive or."""
SCATTERS = tuple(name for name, row in OPERATIONS.items() if row.writes_into)
_SLICES = ("slice", "slice_at", "shift_to", "dynamic_slice", "dynamic_update_slice")
_MOVES = (*_SLICES, "pad", "pieces", "concatenate", "split", "stack", "unstack", "rev")
RANDOM_DRAWS = ("random_bits", "random_split", "random_fold_in", "threefry2x32")
SLIDING = (
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_gather_add",
    "select_and_scatter_add",
)

BLOCKS: Mapping[str, BlockWeight] = {
    **dict.fromkeys(_MOVES, moved),
    "reshape": free,
    "gather": moved,
    **dict.fromkeys(SCATTERS, lambda ins, outs, params: 2.0 * math.prod(ins[2]) + math.prod(outs[0])),
    "optimization_barrier": free,
    **dict.fromkeys(RANDOM_DRAWS, per_result(THREEFRY)),
    "random_gamma": lambda ins, outs, params: 500.0 * math.prod(outs[0]),
    "cholesky": cubic(0.33),
    "triangular_solve": substitution,
    "lu": cubic(0.67),
    "qr": cubic(2),
    "householder_product": cubic(2),
    "eigh": cubic(10),
    "eig": cubic(25),
    "svd": cubic(20),
    "schur": cubic(25),
    "hessenberg": cubic(4),
    "tridiagonal": cubic(2),
    "tridiagonal_solve": lambda ins, outs, params: 10.0 * math.prod(outs[0]),
    "conv_general_dilated": convolution,
    "fft": _fourier,
    **dict.fromkeys(SLIDING, _window),
    "reduce": reduction(1.0, 1.0),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), per_element(2.0)),
    "cumlogsumexp": per_element(25.0),
    **dict.fromkeys(("argmax", "argmin"), per_element(2.0)),
    "sort": sorting(2.0),
    "top_k": _selection,
    "approx_top_k": per_element(2.0),
    "own_share": moved,
    "device_number": free,
}
"""Additions per call where nothing is measured: operations counted as textbooks do."""

WORKSPACES: Mapping[str, BlockWeight] = {
    **dict.fromkeys(("argmax", "argmin"), per_result(1.0)),  # XLA computes extremes together with their places
    "threefry2x32": lambda ins, outs, params: float(math.prod(outs[0])),
    "merge_top_k": lambda ins, outs, params: 4.0 * params["devices"] * math.prod(ins[0]),
    "merge_top_k_in_rounds": lambda ins, outs, params: 8.0 * math.log2(params["devices"]) * math.prod(ins[0]),
}

BASE = Weights(ELEMENTWISE, BLOCKS, WORKSPACES)
