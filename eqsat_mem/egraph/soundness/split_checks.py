"""The facts that splitting rules state of a term, carried out: slice by slice, chunk by chunk, or written out, and compared."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph.soundness.compare import first_difference
from eqsat_mem.egraph.soundness.evaluation import Values, cut, evaluated
from eqsat_mem.egraph.soundness.sequential_interpreter import Sequential
from eqsat_mem.ir import Program, bits, children
from eqsat_mem.ir.ops import searched

Found = tuple[str, int] | None
MOST_UNROLLED = 16
"""Elements that are written out one by one; more are taken in three chunks."""


def able(program: Program, t: int, fact: str) -> int:
    """The indices along which the operation of a term can do what a fact says, whatever comes of it."""
    term = program.terms[t]
    if fact.startswith("splits"):
        return program.free[t]
    if fact == "unrolls" and isinstance(term, ir.Block):
        return searched(term.call)
    return ir.folded(term)


def wrong_piece(program: Program, t: int, fact: str, index: int, values: Values, claim: str, kinds: Sequence[str]) -> Found:
    """The difference that computing a term in pieces along an index makes, and its sample; ``values`` are its own and its operands'."""
    if isinstance(program.terms[t], ir.Block | ir.Rename) or not program.indices[index].extent:
        return None  # what a call does with pieces is tested with its row
    whole = values.of[t]
    if fact.startswith("splits"):
        axis = 1 + list(bits(program.free[t])).index(index)
        extent = program.indices[index].extent
        edges = [*range(extent)] if extent <= MOST_UNROLLED else [0, extent // 3, extent - 1]
        pieces = zip(edges, [*edges[1:], extent])
        done = np.concatenate([_piece(program, t, values, index, start, stop) for start, stop in pieces], axis)
    else:
        done = _accumulated(program, t, values, index, chunk=1 if fact == "unrolls" else 2)
    met = [np.abs(np.nan_to_num(a.astype(np.complex128), posinf=0, neginf=0)).reshape(len(whole), -1) for a in _met(program, t, values)]
    largest = np.max([m.max(1, initial=1.0) for m in met], axis=0)
    with np.errstate(over="ignore"):
        found = first_difference(claim, whole, done, largest**2, values.finite[t], kinds)
    return None if found is None else (f"{fact} along {program.indices[index].name}: {found[0]}", found[1])


def _met(program: Program, t: int, values: Values) -> list[np.ndarray]:
    return [values.of[t], *(values.of[c] for c in children(program.terms[t]))]


def _accumulated(program: Program, t: int, values: Values, index: int, chunk: int) -> np.ndarray:
    term, extent, machine = program.terms[t], program.indices[index].extent, Sequential()
    monoid = term.monoid if isinstance(term, ir.Fold) else "add"
    chunk = chunk if extent <= MOST_UNROLLED else -(-extent // 3)
    out = _piece(program, t, values, index, 0, min(chunk, extent))
    with np.errstate(all="ignore"):
        for start in range(chunk, extent, chunk):
            out = machine.combine(monoid, out, _piece(program, t, values, index, start, min(start + chunk, extent)))
    return out


def _piece(program: Program, t: int, values: Values, index: int, start: int, stop: int) -> np.ndarray:
    """The term on operands of which only positions ``start`` to ``stop`` along ``index`` are there."""
    positions = range(start, stop)
    known = {c: cut(program, c, values.of[c], index, positions) for c in children(program.terms[t])}
    return evaluated(program, {}, [t], len(values.of[t]), known, {index: len(positions)}).of[t]
