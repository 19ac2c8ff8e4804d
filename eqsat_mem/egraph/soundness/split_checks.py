"""What splitting rules state of a term, done: computed slice by slice, accumulated chunk by chunk, or written out, and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from eqsat_mem import ir
from eqsat_mem.egraph.soundness.compare import first_difference
from eqsat_mem.egraph.soundness.sequential_interpreter import Sequential
from eqsat_mem.ir import Program, bits, children
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.ir.ops import searched

Found = tuple[str, int] | None


def wrong_piece(program: Program, t: int, stated: Mapping[str, int], values: Mapping[int, np.ndarray], sound: str) -> Found:
    """What is wrong with the index sets ``stated`` of a term, and in which sample; ``values`` has its own value and its operands'."""
    term = program.terms[t]
    if isinstance(term, ir.Rename):
        return None
    over = term.over if isinstance(term, ir.Fold | ir.Dot) else ir.folded(term) if isinstance(term, ir.Block) else 0
    for fact, mask in stated.items():
        name = fact.removesuffix("-dot")
        if name == "splits" and (fact == "splits-dot") is not isinstance(term, ir.Dot):
            continue
        known = program.free[t] if name == "splits" else over
        if name == "unrolls" and isinstance(term, ir.Block):
            known = searched(term.call)
        if mask & ~known:
            names = [ir.names(program, m) or "no index" for m in (mask, known)]
            return f"it states ({name}) of {names[0]}, where the term {'depends on' if name == 'splits' else 'folds'} {names[1]}", 0
        for index in bits(mask) if not isinstance(term, ir.Block) else ():  # what a call does with pieces is tested with its row
            whole = values[t]
            if name == "splits":
                axis = 1 + list(bits(program.free[t])).index(index)
                parts = [_piece(program, t, values, index, p, p + 1) for p in range(program.indices[index].extent)]
                done = np.concatenate(parts, axis)
            else:
                done = _accumulated(program, t, values, index, chunk=1 if name == "unrolls" else 2)
            found = _compare(sound, whole, done, values, children(term))
            if found is not None:
                return f"{name} along {program.indices[index].name}: {found[0]}", found[1]
    return None


def _accumulated(program: Program, t: int, values: Mapping[int, np.ndarray], index: int, chunk: int) -> np.ndarray:
    term, extent, machine = program.terms[t], program.indices[index].extent, Sequential()
    monoid = term.monoid if isinstance(term, ir.Fold) else "add"
    out: np.ndarray | None = None
    for start in range(0, extent, chunk):
        part = _piece(program, t, values, index, start, min(start + chunk, extent))
        out = part if out is None else machine.combine(monoid, out, part)
    assert out is not None
    return out


def _piece(program: Program, t: int, values: Mapping[int, np.ndarray], index: int, start: int, stop: int) -> np.ndarray:
    """The term on operands of which only positions ``start`` to ``stop`` along ``index`` are there."""
    one = program.empty_like()
    args: list[np.ndarray] = []
    one.indices[index] = ir.Index(program.indices[index].name, stop - start)
    sample = one.new_index("sample", len(values[t]))
    one.inputs = []
    operands = []
    for c in children(program.terms[t]):
        inner = list(bits(program.free[c]))
        array = values[c]
        if index in inner:
            array = np.take(array, range(start, stop), axis=1 + inner.index(index))
        one.inputs.append(ir.Buffer(f"x{len(args)}", array.shape, array.dtype))
        operands.append(one.add(ir.Input(array.dtype, len(args), ((sample,), *((i,) for i in inner)))))
        args.append(array)
    term = one.add(ir.with_children(program.terms[t], tuple(operands)))
    one.outputs = [ir.Output(term, ((sample,), *((i,) for i in bits(program.free[t]))))]
    return np.asarray(evaluate(one, args, Sequential())[0])


def _compare(sound: str, whole: np.ndarray, done: np.ndarray, values: Mapping[int, np.ndarray], operands: Sequence[int]) -> Found:
    met = [np.abs(a.astype(np.float64)).reshape(len(whole), -1) for a in (whole, *(values[c] for c in operands))]
    finite = np.all([~np.isinf(m).any(1) for m in met], axis=0)
    largest = np.max([np.where(np.isfinite(m), m, 0.0).max(1, initial=1.0) for m in met], axis=0)
    return first_difference(sound, whole, done, largest**2, finite)
