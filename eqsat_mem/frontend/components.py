"""Values of all components of what there is much of, such as differences of pairs, computed component by component, gradients included.

Where a program reads components one by one (``d[..., 0] * d[..., 1]``), or JAX takes the gradient of a product over them, cotangents are
padded with zeros to all components and added up, and folds over the rest (forces, gradients of length scales) read these. Values that are
linked so, through elementwise operations, slices, paddings and concatenations of one short axis, form a *family*. If all that is read of
a family are single positions, and folds that are smaller, each of its values is as many values as it has components: paddings and slices
are gone, folds over components are sums of them, and folds over other axes are put side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from eqsat_mem.frontend.apart import Apart, cut_axes, has_steps, met_axis, nbytes, operand_axis, places_read, read_at
from eqsat_mem.frontend.elements import MOST, MOST_MORE, SMALLER, able_values, readers_of
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat
from eqsat_mem.passes import COMPONENTS

_JOINING = {"concatenate": "dimension", "stack": "axis"}
"""Operations that put values side by side, and the parameter that has the axis."""
_CUTTING = (*_JOINING, "slice", "pad", "split", "unstack")
_MOVING = (*_JOINING, "slice", "pad", "broadcast_in_dim", "transpose")
_FOLDS = ("reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "dot_general")


def with_components(flat: Flat) -> list[Equation] | None:
    """The equations with families of components computed one by one; ``None`` where there are none, or would be too many operations."""
    if not any(eqn.prim.name in _CUTTING for eqn in flat.equations):
        return None
    along = _Families(flat).found()
    positions = _positions(flat, along)
    few = sum(map(len, positions.values())) <= MOST_MORE + 3 * len(flat.equations)
    return Apart(flat, along, positions, COMPONENTS).run() if along and few else None


class _Families:
    """The search for values that can be computed apart, each with its axis of components."""

    def __init__(self, flat: Flat):
        self.flat, self.readers = flat, readers_of(flat)
        self.given = {*flat.inputs, *flat.consts, *flat.literals}
        self.able = able_values(flat, _MOVING).difference(flat.outputs)
        self.along: dict[int, int] = {}

    def found(self) -> dict[int, int]:
        for eqn in reversed(self.flat.equations):
            v = eqn.outs[0] if eqn.outs else -1
            if v in self.able and (axis := self.axis(eqn, v)) is not None:
                self.along[v] = axis
        families = defaultdict[int, list[Equation]](list)
        links = self.links()
        for eqn in self.flat.equations:
            if eqn.outs and eqn.outs[0] in self.along:
                families[links[eqn.outs[0]]].append(eqn)
        kept = [family for family in families.values() if self.is_cut(family) and self.is_closed(family)]
        return {eqn.outs[0]: self.along[eqn.outs[0]] for family in kept for eqn in family}

    def axis(self, eqn: Equation, v: int) -> int | None:
        """The one axis of which all readers of a value read single positions, each apart, or fold."""
        shape = self.flat.shapes[v]
        axes = {a for a, n in enumerate(shape) if 1 < n <= MOST}
        if eqn.prim.name in _CUTTING:
            axes &= {eqn.params[_JOINING[eqn.prim.name]]} if eqn.prim.name in _JOINING else set(self.only_cut(eqn))
        for reader in self.readers[v]:
            axes &= self.axes_read(reader, v) if axes else axes
        return axes.pop() if len(axes) == 1 else None

    def only_cut(self, eqn: Equation) -> list[int]:
        """The axis that a slice or a padding cuts, if that is one, and all that is in between is kept."""
        cut = cut_axes(self.flat, eqn)
        return cut if len(cut) == 1 and not has_steps(eqn) else []

    def axes_read(self, reader: Equation, v: int) -> set[int]:
        """The axes of a value whose positions an operation reads apart, or folds to something smaller."""
        if (places := places_read(self.flat, reader)) is not None and reader.outs[0] not in self.along:
            return {places[0]}
        out = reader.outs[0] if len(reader.outs) == 1 else -1
        if out in self.along:
            a = operand_axis(self.flat, reader, v, self.along[out])
            return {a} if a is not None else set()
        if self.is_fold(reader, v) and nbytes(self.flat, out) * SMALLER <= nbytes(self.flat, v):
            return set(range(len(self.flat.shapes[v])))
        return set()

    def is_fold(self, reader: Equation, v: int) -> bool:
        """Whether an operation folds a value, or contracts it with one that has no axes of its own."""
        if reader.prim.name != "dot_general":
            return reader.prim.name in _FOLDS
        contracted, batch = reader.params["dimension_numbers"]
        other = 1 - reader.ins.index(v)
        return reader.ins.count(v) == 1 and len(self.flat.shapes[reader.ins[other]]) == len(contracted[other]) + len(batch[other])

    def links(self) -> dict[int, int]:
        """A representative of the family of each value."""
        parent = {v: v for v in self.along}

        def find(v: int) -> int:
            while parent[v] != v:
                parent[v] = parent[parent[v]]
                v = parent[v]
            return v

        for eqn in self.flat.equations:
            for v, u, _ in self.read_together(eqn):
                if u in self.along:
                    parent[find(u)] = find(v)
        return {v: find(v) for v in self.along}

    def read_together(self, eqn: Equation) -> Iterator[tuple[int, int, int]]:
        """Values of families, each with one that is read at the same positions, an operand or one that meets it, and the axis of these."""
        v = eqn.outs[0] if eqn.outs else -1
        if v in self.along:
            axes = {u: operand_axis(self.flat, eqn, u, self.along[v]) for u in eqn.ins}
            yield from ((v, u, a) for u, a in axes.items() if a is not None)
        elif eqn.prim.name == "dot_general":
            for u, w in (eqn.ins, eqn.ins[::-1]):
                if u in self.along and (a := met_axis(eqn, u, self.along[u])) is not None:
                    yield u, w, a

    def is_cut(self, family: list[Equation]) -> bool:
        """Whether components are put together, or are both read one by one and folded."""
        if any(eqn.prim.name in ("pad", *_JOINING) for eqn in family):
            return True
        readers = {one.prim.name for eqn in family for one in self.readers[eqn.outs[0]]}
        return not readers.isdisjoint(_CUTTING) and not readers.isdisjoint(_FOLDS)

    def is_closed(self, family: list[Equation]) -> bool:
        """Whether no large value that stays whole is read one component at a time."""
        readers = {id(one): one for eqn in family for one in (eqn, *self.readers[eqn.outs[0]])}
        return all(self.is_apart(v, u, a) for one in readers.values() for v, u, a in self.read_together(one))

    def is_apart(self, v: int, u: int, a: int) -> bool:
        """Whether positions of an axis of ``u``, which are read for those of ``v``, are computed apart, or cost little to read."""
        small = nbytes(self.flat, u) * SMALLER <= nbytes(self.flat, v)
        return self.along.get(u, a) == a and (u in self.along or u in self.given or small or self.flat.shapes[u][a] == 1)


def _positions(flat: Flat, along: Mapping[int, int]) -> dict[int, set[int]]:
    """The positions that are read of each value of a family."""
    positions = defaultdict[int, set[int]](set)
    for eqn in reversed(flat.equations):
        v = eqn.outs[0] if eqn.outs else -1
        if v in along:
            for p in positions[v]:
                for u, _, q in read_at(flat, eqn, along[v], p):
                    positions[u] |= {q}
        else:
            for u in eqn.ins:
                if u in along:
                    places = places_read(flat, eqn)
                    positions[u] |= set(places[1] if places is not None else range(flat.shapes[u][along[u]]))
    return {v: positions[v] for v in along}
