"""User-defined folds: a monoid whose states may have several values.

A fold is an operation whose function sees one axis (:mod:`eqsat_mem.ir.ops.custom.operation`). It is decomposed into a state computed
from each element, the combination of these states along the axis, which loops may do chunk by chunk, and a result computed from
the combined state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eqsat_mem.errors import OptionError
from eqsat_mem.ir.ops.custom.operation import Operation, positional
from eqsat_mem.ir.ops.monoids import MONOIDS, REDUCTIONS

State = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Monoid:
    """A user-defined fold along one axis, called like ``jnp.sum``.

    Its value is ``finish`` of the combined ``lift`` of all elements, combined in any order; loops fold chunk by chunk. The functions
    consist of elementwise operations on scalars; a state is one value, or a tuple of values. Derivatives are those of a tree of
    combinations, unless each value of a state is combined separately by an operation such as ``+`` or ``jnp.maximum``.

    Attributes:
        name: a lower-case Python name; rule files refer to ``mean_square`` as ``(MeanSquare k a)``, where ``k`` is an index set.
        identity: the state that changes no other when combined with it, as numbers, which are converted to the dtypes of states.
        combine: a function of two states that returns their combination; it must be associative and commutative.
        lift: a function of one element of each operand that returns its state; by default the state is the element.
        finish: a function of a state that returns the result; by default the result is the state, which is then one value.
        cost: the cost of one element in additions, for the choice between the fold and expressions that rules state to be equal; by
            default it is derived from the functions.
        dtype: the position of the operand whose dtype the result has, or the name of a dtype.

    Raises:
        OptionError: if an attribute has an invalid value.

    >>> import jax.numpy as jnp
    >>> mean_square = Monoid(
    ...     "mean_square", (0, 0), lambda a, b: (a[0] + b[0], a[1] + b[1]), lambda x: (x * x, jnp.ones_like(x)), lambda s: s[0] / s[1]
    ... )
    >>> float(mean_square(jnp.array([1.0, 7.0])))
    25.0
    """

    name: str
    identity: Any
    combine: Callable[..., Any]
    lift: Callable[..., Any] | None = None
    finish: Callable[..., Any] | None = None
    cost: float | None = None
    dtype: int | str = 0

    def __post_init__(self) -> None:
        for given in ("combine", "lift", "finish"):
            function = getattr(self, given)
            if not callable(function) and (function is not None or given == "combine"):
                raise OptionError(f"monoid {self.name!r}: {given} must be a function, not {function!r}.")
        if not all(isinstance(n, bool | int | float | np.generic) for n in _tuple(self.identity)):
            raise OptionError(f"monoid {self.name!r}: identity must be a number for each value of a state, not {self.identity!r}.")
        if self.finish is None and len(_tuple(self.identity)) != 1:
            raise OptionError(f"monoid {self.name!r} has states of {len(_tuple(self.identity))} values: pass finish, which makes them one.")
        self.operation  # noqa: B018 -- checks the rest

    def __repr__(self) -> str:
        return f"<monoid {self.name} of {len(self.operation.operands)}>"

    def __call__(self, *operands: Any, axis: int = -1) -> Any:
        """Fold arrays along ``axis``, which all of them have; their other axes are broadcast against each other."""
        if not isinstance(axis, SupportsIndex):
            raise TypeError(f"{self.name} folds one axis, not axis={axis!r}: to fold several, reshape them to one.")
        return self.operation(*(jnp.moveaxis(jnp.asarray(x), axis, -1) for x in operands))

    @cached_property
    def operation(self) -> Operation:
        """The operation that folds a whole axis."""
        operands = len(positional(self.lift)) if self.lift is not None else 1
        if not operands:
            raise OptionError(f"monoid {self.name!r}: lift must name its parameters, one per operand.")
        signature = ",".join(["(k)"] * operands) + "->()"
        each = self.cost
        cost = None if each is None else lambda n: n * float(each)
        return Operation(self.name, self.whole, signature, cost, self.dtype, monoid=self)

    @cached_property
    def checked(self) -> Monoid:
        """The monoid itself, after a check that it is one.

        Raises:
            OptionError: if it is not a commutative monoid.
        """
        problem = self.problem()
        if problem:
            raise OptionError(f"{self.operation.place}: {self.name!r} is no monoid, and may not be folded in chunks: {problem}.")
        return self

    def whole(self, *arrays: Any) -> Any:
        """Fold arrays of one axis."""
        return self.finished(self.total(self.lifted(arrays)))

    def derivable(self, *arrays: Any) -> Any:
        """Fold arrays of one axis by operations that JAX can differentiate."""
        states = self.lifted(arrays)
        return self.finished(self.total(states) if all(self.reductions(states)) else self._tree(states))

    # the parts of a fold

    def lifted(self, arrays: Sequence[Any]) -> State:
        """Return the states of all elements."""
        return jax.vmap(self.lift_scalars)(*arrays)

    def total(self, states: State) -> State:
        """Return the combination of the states of all elements."""
        names = self.reductions(states)
        if all(names):
            return tuple(MONOIDS[str(name)].reduce(s, (0,)) for name, s in zip(names, states))
        return tuple(lax.reduce(states, self.start(states), self.combine_scalars, (0,)))

    def finished(self, state: State) -> Any:
        """Return the result for a state."""
        if self.finish is None:
            return state[0]
        return self.finish(state if isinstance(self.identity, tuple | list) else state[0])

    def lift_scalars(self, *elements: Any) -> State:
        """Apply ``lift`` to one element of each operand, and return its state as a tuple."""
        made = _tuple(elements[0] if self.lift is None else self.lift(*elements))
        if len(made) != len(_tuple(self.identity)):
            raise OptionError(f"monoid {self.name!r}: identity has {len(_tuple(self.identity))} values, and lift makes {len(made)}.")
        return tuple(map(jnp.asarray, made))

    def combine_scalars(self, left: State, right: State) -> State:
        """Apply ``combine`` to two states given as tuples, and return a tuple."""
        one = not isinstance(self.identity, tuple | list)
        made = _tuple(self.combine(left[0], right[0]) if one else self.combine(tuple(left), tuple(right)))
        before, after = [x.dtype for x in left], [jnp.asarray(x).dtype for x in made]
        if before != after:
            raise OptionError(f"monoid {self.name!r}: combine makes {_words(after)} of states of {_words(before)}.")
        return tuple(map(jnp.asarray, made))

    def start(self, states: State) -> State:
        """Return the identity in the dtypes of ``states``."""
        return tuple(np.asarray(n, s.dtype) for n, s in zip(_tuple(self.identity), states))

    def reductions(self, states: State) -> tuple[str | None, ...]:
        """Return, for each value of a state, the monoid of the table that combines it separately from the others, or None."""
        scalars = tuple(jax.ShapeDtypeStruct((), s.dtype) for s in states)
        with jax.disable_jit():
            jaxpr = jax.make_jaxpr(self.combine_scalars)(scalars, scalars).jaxpr
        made_by = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns}
        left, right = jaxpr.invars[: len(scalars)], jaxpr.invars[len(scalars) :]
        names: list[str | None] = []
        for out, a, b, number in zip(jaxpr.outvars, left, right, self.start(states)):
            eqn = made_by.get(out)
            row = MONOIDS.get(eqn.primitive.name) if eqn is not None and {*map(id, eqn.invars)} == {id(a), id(b)} else None
            same = row is not None and row.name in REDUCTIONS.values() and bool(row.identity(number.dtype) == number)
            names.append(row.name if row is not None and same else None)
        return tuple(names)

    def _tree(self, states: State) -> State:
        """Return the combination of all states by a balanced tree."""
        combine = jax.vmap(self.combine_scalars)
        n = len(states[0])
        if n == 0:
            return self.start(states)
        while n > 1:
            half = n // 2
            paired = combine(tuple(s[:half] for s in states), tuple(s[half : 2 * half] for s in states))
            states = tuple(jnp.concatenate([p, s[2 * half :]]) for p, s in zip(paired, states))
            n -= half
        return tuple(s[0] for s in states)

    # the laws of a monoid

    def problem(self) -> str:
        """Describe a violation of the laws of a commutative monoid.

        States of random elements are combined in several orders, with and without the identity. The description is empty if no order
        changes a result by more than rounding.
        """
        rng = np.random.default_rng(0)
        fold = jax.jit(partial(_folded, self))
        with np.errstate(all="ignore"):
            for kind in ("normal", "positive", "whole", "large"):
                samples = [_sample(rng, kind, (ELEMENTS, SAMPLES)) for _ in self.operation.operands]
                left, right, mixed, padded = (np.asarray(x, np.float64) for x in fold(samples))
                for other, what in ((padded, "its identity changes what it is combined with"), (right, "combine is not associative"),
                                    (mixed, "combine is not commutative")):  # fmt: skip
                    bad = _different(left, other)
                    if kind == "large":  # what overflows may do so in one order only
                        bad &= np.isfinite(left) & np.isfinite(other)
                    if bad.any():
                        at = int(np.argmax(bad))
                        elements = "; ".join(", ".join(f"{x:.4g}" for x in s[:, at]) for s in samples)
                        return f"{what}: of the elements {elements} one order gives {left[at]:.6g}, another {other[at]:.6g}"
        return ""


ELEMENTS, SAMPLES = 5, 64


def _folded(monoid: Monoid, samples: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Return the results of folding from the left, from the right, in another order, and with the identity on both sides of each state."""
    combine, lift, finish = (jax.vmap(f) for f in (monoid.combine_scalars, monoid.lift_scalars, lambda *s: monoid.finished(s)))
    states = [lift(*(s[k] for s in samples)) for k in range(ELEMENTS)]
    identity = tuple(jnp.broadcast_to(n, s.shape) for n, s in zip(monoid.start(states[0]), states[0]))
    padded = [combine(combine(identity, s), identity) for s in states]
    right = reduce(lambda after, before: combine(before, after), states[::-1])
    mixed = combine(combine(states[3], states[1]), combine(states[4], combine(states[2], states[0])))
    return finish(*reduce(combine, states)), finish(*right), finish(*mixed), finish(*reduce(combine, padded))


def _sample(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    x = rng.standard_normal(shape, dtype=np.float32)
    match kind:
        case "positive":
            return np.abs(x) + np.float32(0.1)
        case "whole":
            return np.round(2 * x)
        case "large":
            return np.float32(1000) * x
    return x


def _different(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return where two results differ by more than rounding, taken as 1e-3 in relative terms for large results, else absolute."""
    near = np.abs(left - right) <= 1e-3 * (1 + np.maximum(np.abs(left), np.abs(right)))
    return ~(near | (left == right) | (np.isnan(left) & np.isnan(right)))


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def _words(dtypes: Sequence[Any]) -> str:
    return ", ".join(map(str, dtypes))
