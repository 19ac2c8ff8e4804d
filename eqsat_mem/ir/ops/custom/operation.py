"""User-defined operations: rows of the operation table defined in Python, which functions call and rule files name.

All of them are one primitive with the operation as a parameter, so that nothing is registered: a program has the operations that it
calls as parameters, and rules have those with which they are loaded.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from eqsat_mem.errors import OptionError, RuleError
from eqsat_mem.ir import Axis, Call, axes_mask, bits, mask_of
from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Place, Shapes
from eqsat_mem.ir.ops.custom.primitive import Mapped, bind, least, operation_p
from eqsat_mem.ir.ops.elementwise import MapOp, camel

if TYPE_CHECKING:
    from eqsat_mem.ir.ops.custom.monoid import Monoid

Dimensions = tuple[str, ...]

_DIMENSIONS = r"\([\w\s,]*\)"
_SIGNATURE = re.compile(rf"\s*{_DIMENSIONS}(?:\s*,\s*{_DIMENSIONS})*\s*->\s*{_DIMENSIONS}\s*")


@dataclass(frozen=True, eq=False)
class Operation:
    """A user-defined operation, called like ``jnp.vectorize(fun, signature=signature)``; rules see it as one node.

    Under ``jax.jit``, ``jax.vmap`` and ``jax.grad``, with and without ``optimize``, its values are those of ``fun``. Loops may compute
    it slice by slice along every axis that ``fun`` does not see.

    Attributes:
        name: a lower-case Python name; rule files refer to ``soft_difference`` as ``(SoftDifference a b)``.
        fun: a JAX function of arrays with the axes of ``signature`` only; it has no side effects and returns one array.
        signature: the axes that ``fun`` sees, by name, as in ``"(m,n),(n)->(m)"``; axes with the same name have the same extent. In rule
            files an index for each name, in this order, precedes the operands. By default the operation is elementwise, and ``fun`` is
            a function of scalars.
        cost: the cost of one call of ``fun`` in additions: a number, or a function of the extents of the named axes. By default it
            is derived from the operations of ``fun``.
        dtype: the position of the operand whose dtype the result has, or the name of a dtype, such as ``"bool"``.
        monoid: the :class:`Monoid` whose fold the operation is, or None.

    Raises:
        OptionError: if an attribute has an invalid value.

    >>> import jax.numpy as jnp
    >>> soft_difference = Operation("soft_difference", lambda x, y: jnp.log1p(jnp.exp(x - y)))
    >>> soft_difference(jnp.zeros((3, 1)), jnp.zeros(2)).shape
    (3, 2)
    """

    name: str
    fun: Callable[..., Any]
    signature: str | None = None
    cost: float | Callable[..., float] | None = None
    dtype: int | str = 0
    monoid: Monoid | None = None

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise OptionError(f"an operation has a name in small letters, such as 'soft_difference', not {self.name!r}.")
        if not callable(self.fun):
            raise OptionError(f"operation {self.name!r}: fun must be a function, not {self.fun!r}.")
        if not _is_cost(self.cost):
            raise OptionError(f"operation {self.name!r}: cost must be a number of additions above zero, or a function, not {self.cost!r}.")
        self.operands  # noqa: B018 -- reads the signature, or the parameters of the function
        if isinstance(self.dtype, int) and not 0 <= self.dtype < len(self.operands):
            raise OptionError(f"operation {self.name!r} has no operand {self.dtype} to take the dtype of its result from.")
        if not isinstance(self.dtype, int) and not _is_dtype(self.dtype):
            raise OptionError(
                f"operation {self.name!r}: dtype must be the position of an operand or the name of a dtype, not {self.dtype!r}."
            )

    def __repr__(self) -> str:
        return f"<{self.name} {self.text}>"

    def __call__(self, *operands: Any) -> Any:
        """Apply the operation to arrays, whose leading axes are broadcast against each other."""
        if len(operands) != len(self.operands):
            raise TypeError(f"{self.name} takes {len(self.operands)} operands, not {len(operands)}.")
        arrays = [_array(x, operands) for x in operands]
        ranks = [len(dimensions) for dimensions in self.operands]
        for k, (array, rank) in enumerate(zip(arrays, ranks)):
            if array.ndim < rank:
                raise ValueError(f"{self.name} is {self.text}: operand {k} has {array.ndim} axes, and needs at least {rank}.")
        return bind(self, *least(arrays, ranks))

    # the signature

    @cached_property
    def _sides(self) -> tuple[tuple[Dimensions, ...], Dimensions]:
        """The named axes of each operand, and of the result."""
        if self.signature is None:
            return ((),) * _scalars(self.name, self.fun), ()
        if not _SIGNATURE.fullmatch(str(self.signature)):
            raise OptionError(f"operation {self.name!r}: a signature is written '(m,n),(n)->(m)', not {self.signature!r}.")
        before, after = ([_names(d) for d in re.findall(_DIMENSIONS, side)] for side in self.signature.split("->"))
        for dimensions in (*before, *after):
            if len(set(dimensions)) < len(dimensions) or not all(name.isidentifier() for name in dimensions):
                raise OptionError(
                    f"operation {self.name!r}: the axes of one array have different names; {self.signature!r} has {dimensions}."
                )
        unknown = sorted(set(after[0]).difference(*before))
        if unknown:
            raise OptionError(
                f"operation {self.name!r}: no operand in {self.signature!r} has the axis {unknown[0]!r} of the result, whose extent is "
                "that of an operand's axis of this name."
            )
        return tuple(before), after[0]

    @property
    def operands(self) -> tuple[Dimensions, ...]:
        """The named axes of each operand."""
        return self._sides[0]

    @property
    def result(self) -> Dimensions:
        """The named axes of the result."""
        return self._sides[1]

    @cached_property
    def dimensions(self) -> Dimensions:
        """All named axes in the order of the signature."""
        return tuple(dict.fromkeys(name for dimensions in self.operands for name in dimensions))

    @property
    def text(self) -> str:
        """The signature as text, ``(),()->()`` for an elementwise operation of two operands."""
        sides = (*self.operands, self.result)
        *before, after = (f"({','.join(dimensions)})" for dimensions in sides)
        return f"{','.join(before)}->{after}"

    @property
    def elementwise(self) -> bool:
        """Whether ``fun`` is a function of scalars."""
        return not self.dimensions

    @property
    def parameters(self) -> Dimensions:
        """A name for each operand: that of the parameter of ``fun``, or ``x0``, ``x1`` and so on if Python does not know it."""
        names = tuple(positional(self.fun))[: len(self.operands)]
        return names if len(names) == len(self.operands) else tuple(f"x{k}" for k in range(len(self.operands)))

    @property
    def _samples(self) -> Sequence[tuple[Any, ...]]:
        """Dtypes of operands that its function may be traced with, to count its operations: the first that it takes."""
        return [(np.dtype(dtype),) * len(self.operands) for dtype in (np.float32, np.int32, np.bool_, np.complex64)]

    @cached_property
    def _known(self) -> dict[Any, Any]:
        """Results of tracing its function, by shapes and dtypes: kept for as long as the operation is."""
        return {}

    # for rules and the operation table

    @property
    def constructor(self) -> str:
        """The name in rule files."""
        return camel(self.name)

    @property
    def place(self) -> str:
        """The file and line of ``fun`` for messages, or the operation's name if Python does not know them."""
        code = getattr(inspect.unwrap(self.fun if self.monoid is None else self.monoid.combine), "__code__", None)
        return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code is not None else f"operation {self.name}"

    def evaluate(self, *arrays: Any) -> Any:
        """Apply ``fun`` to arrays that have the axes of the signature only.

        Raises:
            OptionError: if the result has another shape or dtype than the operation declares.
        """
        out = self.fun(*arrays)
        if not hasattr(out, "dtype"):
            out = jnp.asarray(out)
        extents = {name: n for names, x in zip(self.operands, arrays) for name, n in zip(names, jnp.shape(x))}
        shape = tuple(extents[name] for name in self.result)
        if jnp.shape(out) != shape:
            raise OptionError(
                f"operation {self.name!r} is {self.text}, and its function returns an array of shape {jnp.shape(out)}, not {shape}."
            )
        said = arrays[self.dtype].dtype if isinstance(self.dtype, int) else np.dtype(self.dtype)
        if out.dtype != said:
            raise OptionError(
                f"the result of operation {self.name!r} is {out.dtype}, not {said}: pass dtype={str(out.dtype)!r}, or the position of the "
                "operand whose dtype it has."
            )
        return out

    def derivable(self, *arrays: Any) -> Any:
        """Compute the same as :meth:`evaluate` by operations that JAX can differentiate."""
        return self.evaluate(*arrays) if self.monoid is None else self.monoid.derivable(*arrays)

    @cached_property
    def row(self) -> MapOp:
        """The row of the operation table, for an elementwise operation."""
        return _UserMap(self.name, None, operation_p, self.constructor, {}, len(self.operands))


@dataclass(frozen=True)
class _UserMap(MapOp):
    """The row of a user's elementwise operation, whose function is a parameter."""

    def bind(self, *args: Any, **params: Any) -> Any:
        return params["operation"](*args)


def traced(operation: Operation, shapes: tuple[tuple[int, ...], ...]) -> Any:
    """The jaxpr of a user's function on operands of these shapes, of the first dtypes that it takes.

    Raises:
        OptionError: if it takes none.
    """
    if shapes in operation._known:
        return operation._known[shapes]
    for dtypes in operation._samples:
        try:
            found = operation._known[shapes] = jax.make_jaxpr(operation.fun)(*map(jax.ShapeDtypeStruct, shapes, dtypes)).jaxpr
            return found
        except TypeError:
            continue
    raise OptionError(f"the cost of operation {operation.name!r} cannot be counted: pass cost=, in additions per call of its function.")


# --- the row of blocks --------------------------------------------------------------------------------


def _pointwise(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return the groups of the batch axes."""
    mapped: Mapped = params["mapped"]
    groups: list[Group] = []
    for axis, has in enumerate(mapped):
        places: list[Place] = [("in", k, sum(before[k] for before in mapped[:axis])) for k, one in enumerate(has) if one]
        groups.append((*places, ("out", 0, axis)))
    return groups


def _named(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each named axis: its places in the operands and the result."""
    operation: Operation = params["operation"]
    places: dict[str, list[Place]] = {name: [] for name in operation.dimensions}
    for side, arrays, shapes in (("in", operation.operands, ins), ("out", (operation.result,), outs)):
        for k, (dimensions, shape) in enumerate(zip(arrays, shapes)):
            for a, name in enumerate(dimensions, len(shape) - len(dimensions)):
                places[name].append((side, k, a))
    return [tuple(group) for group in places.values()]


USER = [BlockOp("operation", _pointwise, shared=_named)]


# --- calls as terms -----------------------------------------------------------------------------------


def named_axes(operation: Operation, call: Call) -> dict[str, Axis]:
    """Return the axis of a call, a product of indices, for each named axis of its operation."""
    axes: dict[str, Axis] = {}
    for names, array in zip(operation.operands, call.in_axes):
        axes.update(zip(names, array[len(array) - len(names) :]))
    return {name: axes[name] for name in operation.dimensions}


def call_on(operation: Operation, named: Sequence[Axis], free: Sequence[int], dtype: Any) -> Call:
    """Return the call of an operation in a rule's result. Its batch axes are all indices that are not in named axes, ascending.

    Args:
        operation: the operation.
        named: the axis, as a product of indices, for each named axis of the operation.
        free: the indices on which each operand depends, as bits.
        dtype: the dtype of the result.

    Raises:
        RuleError: if one index would occur in two axes of the result.
    """
    axis_of = dict(zip(operation.dimensions, named))
    own = [tuple(axis_of[name] for name in names) for names in operation.operands]
    batch = [mask & ~axes_mask(axes) for mask, axes in zip(free, own)]
    whole = sorted({i for mask in batch for i in bits(mask)})
    mapped = tuple(tuple(bool(mask >> i & 1) for mask in batch) for i in whole)
    in_axes = tuple((*((i,) for i in bits(mask)), *axes) for mask, axes in zip(batch, own))
    out_axes = (*((i,) for i in whole), *(axis_of[name] for name in operation.result))
    if set(whole) & {i for name in operation.result for i in axis_of[name]}:
        raise RuleError(
            f"a rule made ({operation.constructor} ...) whose result has an index that another operand depends on as well: guard the rule, "
            "as in (= (& k (free b)) 0)."
        )
    params = {"operation": operation, "mapped": mapped}
    bound = axes_mask(tuple(named))
    folds = bound if operation.monoid is not None else 0
    return Call(operation_p, params, in_axes, (out_axes,), (dtype,), mask_of(whole) & ~bound, folds)


# --- reading arguments --------------------------------------------------------------------------------


def _array(x: Any, operands: Sequence[Any]) -> Any:
    """Return an operand as an array; a Python number takes the promoted dtype of all operands if it can represent the number's kind."""
    if isinstance(x, bool | int | float | complex):
        common, own = jnp.result_type(*operands), jnp.result_type(x)
        kinds = {bool: np.bool_, int: np.number, float: np.inexact, complex: np.complexfloating}
        return jnp.asarray(x, common if jnp.issubdtype(common, kinds[type(x)]) else own)
    return jnp.asarray(x)


def positional(fun: Callable[..., Any]) -> list[str]:
    """Return the names of the positional parameters of a function that have no defaults.

    Returns:
        The names; empty if Python does not know the signature, or the function takes any number of positional arguments.
    """
    try:
        found = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # functions that are not written in Python
        return []
    if any(p.kind is p.VAR_POSITIONAL for p in found):
        return []
    return [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]


def _scalars(name: str, fun: Callable[..., Any]) -> int:
    """Return the number of scalars that a function takes."""
    found = positional(fun)
    if not found:
        raise OptionError(f"operation {name!r}: how many operands its function takes is not to be seen: pass signature='(),()->()', say.")
    return len(found)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[a-z]\w*", name, re.ASCII) is not None


def _is_cost(cost: Any) -> bool:
    number = isinstance(cost, int | float) and not isinstance(cost, bool) and 0 < cost < math.inf
    return cost is None or callable(cost) or number


def _names(dimensions: str) -> Dimensions:
    inside = dimensions.strip()[1:-1].strip()
    return tuple(name.strip() for name in inside.split(",")) if inside else ()


def _is_dtype(name: Any) -> bool:
    try:
        return isinstance(name, str) and np.dtype(name).name == name
    except TypeError:
        return name == "bfloat16"


def operation_of(params: Mapping[str, Any]) -> Operation | None:
    """Return the user's operation among the parameters of a term or an equation, or None."""
    found = params.get("operation")
    return found if isinstance(found, Operation) else None
