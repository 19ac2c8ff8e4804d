"""Equal elementwise expressions that only results depend on, such as the updates of all parameters: each kind becomes one operation.

An optimiser updates every array of a network by the same few expressions, a dozen operations for each, which are most of a training step's
equations. Nothing reads what they make, so that rules have nothing to gain there. Expressions are fanout-free cones: a result, or a
value that several equations read, with all that is computed for it alone. Those with the same operations on operands of the same dtypes,
arrays or single numbers of whatever values, are calls of one function of scalars. Time is linear in the equations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eqsat_mem.frontend.flat_jaxpr import Equation, Flat
from eqsat_mem.ir.bitwise import COMPARISONS
from eqsat_mem.ir.jaxprs import IMPURE
from eqsat_mem.ir.ops import Operation, is_elementwise, operation_of
from eqsat_mem.ir.ops.custom.primitive import operation_p
from eqsat_mem.passes import UPDATES

SUMS = frozenset({"add", "sub", "add_any"})
"""Operations by which values are added up."""
LEAST_EQUAL = 4
"""Fewer expressions of a kind are left as they are."""
LEAST_SAVED = 48
"""Programs are left as they are where this would not spare them so many equations: they are planned fast anyway."""
FEW = 3
"""Expressions of at most so many operations that add to an argument which nothing else reads are left as they are: sums over steps."""
NAME = "update"
"""What the operations are called."""


def with_equal_updates(flat: Flat) -> list[Equation] | None:
    """The equations of a flat jaxpr with the equal expressions that only results depend on as operations; None where too few are equal."""
    cones = _Tail(flat).cones() if len(flat.equations) > LEAST_SAVED else []
    groups: defaultdict[Hashable, list[_Cone]] = defaultdict(list)
    for cone in cones:
        groups[cone.key].append(cone)
    equal = [group for group in groups.values() if len(group) >= LEAST_EQUAL]
    if sum(len(cone.equations) - 1 for group in equal for cone in group) < LEAST_SAVED:
        return None
    called: dict[Equation, Equation | None] = {}
    for group in equal:
        operation = group[0].operation(flat)
        for cone in group:
            called.update(dict.fromkeys(cone.equations))
            called[cone.equations[-1]] = cone.call(flat, operation)
    return [new for eqn in flat.equations if (new := called.get(eqn, eqn)) is not None]


@dataclass(frozen=True, eq=False)
class Update(Operation):
    """An operation on operands of some ``dtypes`` each."""

    dtypes: tuple[Any, ...] = ()

    @property
    def _samples(self) -> Sequence[tuple[Any, ...]]:
        return [self.dtypes]


@dataclass(frozen=True, eq=False)
class _Cone:
    """Elementwise equations in order, the last of which makes what only they compute; ``leaves`` are the values that they read."""

    equations: tuple[Equation, ...]
    leaves: tuple[int, ...]
    operands: tuple[tuple[int, ...], ...]
    """The operands of each equation: leaves, or values of equations."""
    key: Hashable

    def operation(self, flat: Flat) -> Operation:
        """The function of scalars that it computes, as an operation."""
        result = flat.dtypes[self.equations[-1].outs[0]]
        dtypes = tuple(flat.dtypes[v] for v in self.leaves)
        dtype = dtypes.index(result) if result in dtypes else np.dtype(result).name
        literals = {v: flat.literals[v] for operands in self.operands for v in operands if v in flat.literals}

        def compute(*scalars: Any) -> Any:
            values = literals | dict(zip(self.leaves, scalars, strict=True))
            for eqn, operands in zip(self.equations, self.operands):
                values[eqn.outs[0]] = eqn.prim.bind(*(values[v] for v in operands), **eqn.params)
            return values[self.equations[-1].outs[0]]

        return Update(NAME, compute, f"{','.join(['()'] * len(self.leaves))}->()", dtype=dtype, dtypes=dtypes)

    def call(self, flat: Flat, operation: Operation) -> Equation:
        """The equation that has its result by an operation."""
        last = self.equations[-1]
        has = tuple(bool(flat.shapes[v]) for v in self.leaves)
        params = {"operation": operation, "mapped": (has,) * len(flat.shapes[last.outs[0]])}
        passes = frozenset({UPDATES.name}).union(*(eqn.passes for eqn in self.equations))
        return Equation(operation_p, params, self.leaves, last.outs, False, last.source, passes)


class _Tail:
    """The elementwise equations of a flat jaxpr that only results depend on.

    Attributes:
        number_of: the single number that each value which repeats one has everywhere.
        elementwise: the values that elementwise operations make.
        read_once: the arguments that one equation reads.
        maker: the equations, by the value that each makes.
        inner: the values that one of these equations reads and nothing else.
    """

    def __init__(self, flat: Flat):
        self.flat = flat
        self.number_of = {eqn.outs[0]: eqn.ins[0] for eqn in flat.equations if self._repeats_a_number(eqn)}
        self.elementwise = {v for eqn in flat.equations if is_elementwise(eqn.prim, eqn.params) for v in eqn.outs}
        reading = Counter(v for eqn in flat.equations for v in set(eqn.ins))
        self.read_once = {v for v in flat.inputs if reading[v] == 1}
        self.maker: dict[int, Equation] = {}
        outputs, elsewhere = frozenset(flat.outputs), set[int]()
        readers: Counter[int] = Counter()
        for eqn in reversed(flat.equations):
            if elsewhere.isdisjoint(eqn.outs) and self._is_plain(eqn):
                self.maker[eqn.outs[0]] = eqn
                readers.update(set(eqn.ins))
            elif not any(v in self.number_of for v in eqn.outs):
                elsewhere.update(eqn.ins)
        self.inner = {v for v in self.maker if readers[v] == 1 and v not in outputs}

    def _repeats_a_number(self, eqn: Equation) -> bool:
        return eqn.prim.name == "broadcast_in_dim" and self.flat.shapes[eqn.ins[0]] == ()

    def _is_plain(self, eqn: Equation) -> bool:
        """Whether an equation is one of JAX's elementwise operations on arrays of numbers of one shape, and single numbers.

        Comparisons of numbers that round are not: one may be selected from the other, which has to be seen. Nor are sums of values that
        other operations make, contractions say, which may be added up in place.
        """
        flat = self.flat
        if eqn.effects or eqn.prim.name in IMPURE or operation_of(eqn.params) is not None or self.elementwise.isdisjoint(eqn.outs):
            return False
        shape = flat.shapes[eqn.outs[0]]
        if not shape or not all(_is_number(flat.dtypes[v]) for v in (*eqn.ins, *eqn.outs)):
            return False
        if eqn.prim.name in COMPARISONS and not any(v in flat.literals or flat.dtypes[v].kind in "biu" for v in eqn.ins):
            return False
        if eqn.prim.name in SUMS and not any(v in flat.literals or v in self.elementwise for v in eqn.ins):
            return False
        return all(flat.shapes[v] in (shape, ()) for v in eqn.ins)

    def cones(self) -> list[_Cone]:
        """The expressions of two or more equations, in order."""
        roots = (eqn for eqn in self.flat.equations if eqn.outs and eqn.outs[0] in self.maker and eqn.outs[0] not in self.inner)
        return [cone for root in roots if (cone := self.cone(root)) is not None]

    def cone(self, root: Equation) -> _Cone | None:
        """The expression of one value; None for a single equation, or one whose parameters cannot be compared."""
        flat = self.flat
        equations: list[Equation] = []
        operands: list[tuple[int, ...]] = []
        leaves: dict[int, int] = {}
        made: dict[int, int] = {}
        key: list[Hashable] = []
        stack = [(root, False)]
        while stack:
            eqn, is_ready = stack.pop()
            if not is_ready:
                stack.append((eqn, True))
                stack += [(self.maker[v], False) for v in reversed(dict.fromkeys(eqn.ins)) if v in self.inner]
                continue
            read = tuple(self.number_of.get(v, v) for v in eqn.ins)
            places: list[Hashable] = []
            for v in read:
                if v in made:
                    places.append(("made", made[v]))
                elif v in flat.literals:
                    places.append((flat.dtypes[v], np.asarray(flat.literals[v]).tobytes()))
                else:
                    kind = flat.dtypes[v], bool(flat.shapes[v])
                    places.append((leaves.setdefault(v, len(leaves)), *kind))
            made[eqn.outs[0]] = len(made)
            equations.append(eqn)
            operands.append(read)
            key.append((eqn.prim, tuple(eqn.params.items()), tuple(places)))
        adds_up = root.prim.name in SUMS and len(equations) <= FEW and not self.read_once.isdisjoint(root.ins)
        if len(equations) < 2 or adds_up or not any(flat.shapes[v] for v in leaves):
            return None
        try:
            hash(tuple(key))
        except TypeError:
            return None
        return _Cone(tuple(equations), tuple(leaves), tuple(operands), tuple(key))


def _is_number(dtype: Any) -> bool:
    """Whether an operation may have a dtype by its name."""
    return isinstance(dtype, np.dtype) and (dtype.kind in "biufc" or dtype.name == "bfloat16")
