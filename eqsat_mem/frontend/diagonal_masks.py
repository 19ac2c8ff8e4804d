"""Masks of diagonals, vectors of positions, and single numbers in the shape of an array, one for each operation that reads them.

``jnp.eye``, ``jnp.trace`` and ``jnp.diag`` compare positions along two axes, which gives one value for all matrices of a size, since equal
equations are merged. Its two axes then have the same names in all places that read it, and matrices that have nothing to do with each other
meet under them: a product that sums over one of the names can no longer be read along its diagonal. Such a mask, and what is computed of it
and of numbers alone, costs nothing; so each place has its own, whose axes are named as that place has them. The same goes for one number in
the shape of an array: means over the rows and the columns of a square matrix divide gradients by one such array. And for vectors of
positions: the labels of a contrastive loss count its rows, and once more its columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from jax.dtypes import issubdtype

from eqsat_mem.frontend.axis_inference import VIEWS
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat
from eqsat_mem.ir import ops

LONGEST = 50
"""The most equations that are copied at once: each of many readers of a longer chain would copy as many."""
MOST_COPIES = 8
"""The most copies of a reduction of a mask, which takes as long as the mask has elements, unless copies turn out to be the same."""


def with_own_masks(flat: Flat) -> None:
    """Give each operation a copy of its own of the mask of a diagonal, of a number in the shape of an array, of what is computed of those
    and of numbers alone, and of a vector of positions, also where that is repeated along other axes."""
    made: dict[int, Equation] = {}
    masks: set[int] = set()
    positions: set[int] = set()
    read: set[int] = set()
    copied: Counter[int] = Counter()
    equations: list[Equation] = []
    for eqn in flat.equations:
        one = _is_one_number(flat, eqn)
        if one or (_is_free(eqn) and all(v in made or v in flat.literals for v in eqn.ins)):
            made.update(dict.fromkeys(eqn.outs, eqn))
            if one or _is_mask(flat, eqn) or not masks.isdisjoint(eqn.ins):
                masks.update(eqn.outs)
            elif _counts(flat, eqn) or (eqn.prim.name == "broadcast_in_dim" and not positions.isdisjoint(eqn.ins)):
                positions.update(eqn.outs)
        else:
            needed = {v: _needed([v], made) for v in (masks | positions).intersection(eqn.ins)}
            again = [v for v, chain in needed.items() if not read.isdisjoint(chain) and len(chain) <= LONGEST]
            again = [v for v in again if copied[v] < MOST_COPIES or not any(made[u].prim.name in ops.REDUCTIONS for u in needed[v])]
            own = _copies(flat, again, made, equations)
            copied.update(again)
            read.update(*needed.values())
            eqn = replace(eqn, ins=tuple(own.get(v, v) for v in eqn.ins))
        equations.append(eqn)
    flat.equations = equations


def _is_free(eqn: Equation) -> bool:
    """Whether an operation makes positions, or is elementwise, a change of axes, a slice or a reduction."""
    name = eqn.prim.name
    return not eqn.effects and (name in ("iota", "slice") or name in VIEWS or name in ops.MAPS or name in ops.REDUCTIONS)


def _counts(flat: Flat, eqn: Equation) -> bool:
    """Whether a result, computed of positions and numbers alone, is a vector of integers or truth values."""
    (v,) = eqn.outs
    counts = any(issubdtype(flat.dtypes[v], kind) for kind in (np.integer, np.bool_))
    return counts and sum(n != 1 for n in flat.shapes[v]) == 1


def _is_mask(flat: Flat, eqn: Equation) -> bool:
    """Whether positions along two axes of one extent are compared."""
    shape = flat.shapes[eqn.outs[0]]
    return eqn.prim.name == "eq" and len(shape) == 2 and shape[0] == shape[1]


def _is_one_number(flat: Flat, eqn: Equation) -> bool:
    """Whether all elements of a result are one number, which has no axes of its own."""
    return eqn.prim.name == "broadcast_in_dim" and not flat.shapes[eqn.ins[0]] and bool(flat.shapes[eqn.outs[0]])


def _needed(values: Iterable[int], made: Mapping[int, Equation]) -> list[int]:
    """Values and what they are computed of besides numbers, operands first."""
    found: set[int] = set()
    stack = list(values)
    while stack:
        v = stack.pop()
        if v in made and v not in found:
            found.add(v)
            stack.extend(made[v].ins)
    return sorted(found)


def _copies(flat: Flat, values: Iterable[int], made: Mapping[int, Equation], equations: list[Equation]) -> dict[int, int]:
    """Values computed once more, by new equations at the end of ``equations``, and those that they are computed of."""
    copies: dict[int, int] = {}
    for v in _needed(values, made):
        copies[v] = flat.new(flat.shapes[v], flat.dtypes[v])
        equations.append(replace(made[v], ins=tuple(copies.get(a, a) for a in made[v].ins), outs=(copies[v],)))
    return copies
