"""Scans that count: what a step reads or writes at a place that follows from its number is a slice that the scan reads or stacks.

Loops over chunks, as they are written by hand, count their turns, read rows from ``i * size`` on, and write rows there::

    lax.fori_loop(0, n // size, lambda i, out: lax.dynamic_update_slice_in_dim(out, f(rows(x, i * size)), i * size, 0), out)

Where each step reads or writes the rows after those of the step before, the loop is a scan over the rows side by side, which carries
neither a number nor what it writes into.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from eqsat_mem.frontend.flat_jaxpr import Equation
from eqsat_mem.frontend.known_numbers import NUMPY
from eqsat_mem.frontend.roll import strong
from eqsat_mem.ir import Const, Iota, Literal, Map, Program, Rename
from eqsat_mem.passes import AT_ONCE, Pass
from eqsat_mem.transforms.control_flow import Scan, repeats
from eqsat_mem.transforms.retraced import Retracing, retraced
from eqsat_mem.transforms.steps import ADDITIONS, FlatStep, evaluate_equation

Array = Any
NUMBERS = NUMPY.keys() - {"iota", "concatenate", "broadcast_in_dim", "reshape", "squeeze"}
"""Operations on single numbers."""
MOST_ROUNDS = 4
"""Times that scans are looked at again: gradients of gradients count by what gradients stack."""
READS = frozenset({"dynamic_slice", "gather"})
ALIKE = frozenset({"broadcast_in_dim", "reshape", "squeeze", "copy"})
"""Operations that leave a single number as it is."""


def with_counted_steps(program: Program, passes: Collection[Pass]) -> Program | None:
    """The program with scans that read and write rows one after the other as scans over these rows; None where there are none.

    The gradient of such a scan counts by what that scan stacks: it is found once the scan stacks numbers that are known.
    """
    if AT_ONCE not in passes or program.effects:
        return None
    found = None
    for _ in range(MOST_ROUNDS):
        own = found or program
        scans = (scan for scan in repeats(own) if scan.call.prim.name == "scan")
        counting = {scan: step for scan in scans if (step := Counting(scan, own)).is_of_rows}
        if not counting:
            break
        found = retraced(own, lambda args, consts: _OverRows(own, counting, args, consts).outputs(), passes)  # noqa: B023 (run at once)
        found.passes |= {AT_ONCE.name}
    return found


@dataclass(frozen=True)
class Rows:
    """Places along an axis, one after the other: those of the first step along the scan axis begin at ``start``."""

    axis: int
    start: int
    size: int


@dataclass(frozen=True)
class Written:
    """A value that steps write at rows of a carry, or add to them."""

    rows: Rows
    value: int
    adds: bool


class Counting(FlatStep):
    """The step of a scan with what is known of the numbers in it.

    Attributes:
        counters: the carries to which each step adds a number, by position, with the number.
        known: the numbers that are known for all steps, in the order of the scan axis.
        same: the carries that no step changes, by position.
        writes: the carries into which each step writes rows, one after the other, by position.
        reads: the slices, at places one after the other, of values that are the same in all steps, or of which each step reads the rows
            that it writes, by the equations that take them.
    """

    def __init__(self, scan: Scan, program: Program):
        super().__init__(scan)
        order = np.arange(scan.length)[:: -1 if scan.reverse else 1]
        self.counters: dict[int, int] = {}
        self.known: dict[int, np.ndarray] = {}
        for k, (before, after, start) in enumerate(zip(self.carried, self.after, scan.init)):
            number, first = self._counted(before, after), program.terms[start]
            if number is not None and isinstance(first, Literal):
                self.counters[k] = number
                self.known[before] = np.asarray(first.value).astype(first.dtype) + _times(number, order, first.dtype)
        for x, t in zip(self.xs, scan.xs):
            is_number = math.prod(self.flat.shapes[x]) == 1
            if is_number and (numbers := _numbers(program, t)) is not None and numbers.shape == (scan.length,):
                self.known[x] = numbers
        for eqn in self.flat.equations:
            self._know(eqn)
        self.same = [k for k, (before, after) in enumerate(zip(self.carried, self.after)) if before == after]
        written = {k: self._written(before, after) for k, (before, after) in enumerate(zip(self.carried, self.after))}
        self.writes = {k: how for k, how in written.items() if how is not None}
        still = {*self.flat.inputs[: scan.first_carry], *(self.carried[k] for k in (*self.same, *self.writes))}
        found = {eqn: self._read(eqn) for eqn in self.flat.equations if eqn.prim.name in READS and eqn.ins[0] in still}
        self.reads = {eqn: rows for eqn, rows in found.items() if rows is not None}

    @property
    def is_of_rows(self) -> bool:
        """Whether the scan is one over rows, or carries what no step changes."""
        return bool(self.reads or self.writes or self.same)

    def _counted(self, before: int, after: int) -> int | None:
        """The number that a step adds to a carry to make the next one; None if it makes it in another way."""
        eqn, dtype = self.producer.get(after), self.flat.dtypes[before]
        if eqn is None or eqn.prim.name != "add" or self.flat.shapes[before] or not jax.dtypes.issubdtype(dtype, np.integer):
            return None
        others = [v for v in eqn.ins if v != before]
        return int(self.flat.literals[others[0]]) if len(others) == 1 and others[0] in self.flat.literals else None

    def _know(self, eqn: Equation) -> None:
        operands = [self._number(v) for v in eqn.ins]
        if len(eqn.outs) != 1 or not operands or any(a is None for a in operands) or not any(v in self.known for v in eqn.ins):
            return
        dtype = np.dtype(self.flat.dtypes[eqn.outs[0]])
        if eqn.prim.name in NUMBERS and not self.flat.shapes[eqn.outs[0]] and dtype.kind in "iub":
            with np.errstate(over="ignore"):
                self.known[eqn.outs[0]] = np.asarray(NUMPY[eqn.prim.name](eqn.params, operands)).astype(dtype)
        elif eqn.prim.name in ALIKE and math.prod(self.flat.shapes[eqn.outs[0]]) == 1:
            self.known[eqn.outs[0]] = operands[0]

    def _number(self, v: int) -> Any:
        """A number in all steps; None where it is not known."""
        return np.asarray(self.flat.literals[v]) if v in self.flat.literals else self.known.get(v)

    # rows

    def _read(self, eqn: Equation) -> Rows | None:
        """The rows that all steps read, if each reads those after those of the step before it."""
        if eqn.prim.name == "dynamic_slice":
            return self._rows(eqn.ins[0], eqn.outs[0], eqn.ins[1:])
        dims = eqn.params["dimension_numbers"]
        return self._row(eqn.ins[0], eqn.ins[1], eqn.outs[0], dims.collapsed_slice_dims, dims.start_index_map)

    def _rows(self, whole: int, part: int, places: Sequence[int]) -> Rows | None:
        """The rows that all steps read or write, if each has those after those of the step before it along the scan axis."""
        extents, sizes = self.flat.shapes[whole], self.flat.shapes[part]
        cut = [a for a, (n, m) in enumerate(zip(extents, sizes, strict=True)) if n != m]
        if len(cut) != 1 or len(places) != len(extents):
            return None
        return self._along(cut[0], sizes[cut[0]], extents[cut[0]], self._number(places[cut[0]]))

    def _row(self, whole: int, place: int, part: int, axes: Sequence[int], indexed: Sequence[int]) -> Rows | None:
        """The single rows that a gather reads or a scatter writes, each without its axis."""
        extents = self.flat.shapes[whole]
        if len(axes) != 1 or [*axes] != [*indexed] or self.flat.shapes[place] != (1,):
            return None
        is_whole = self.flat.shapes[part] == (*extents[: axes[0]], *extents[axes[0] + 1 :])
        return self._along(axes[0], 1, extents[axes[0]], self._number(place)) if is_whole else None

    def _along(self, axis: int, size: int, extent: int, places: np.ndarray | None) -> Rows | None:
        if places is None or not places.ndim or not size:  # a number is the same in all steps
            return None
        start, wanted = int(places[0]), int(places[0]) + size * np.arange(self.scan.length)
        inside = start >= 0 and start + size * self.scan.length <= extent
        return Rows(axis, start, size) if inside and np.array_equal(places, wanted) else None

    def _written(self, before: int, after: int) -> Written | None:
        """The rows that steps write into a carry, one after the other, or add to it, where they read no other rows of it."""
        eqn, uses = self.producer.get(after), self.flat.outputs.count(after)
        if eqn is None or self.readers[after] or uses > 1 or before in self.flat.outputs or eqn.ins.count(before) != 1:
            return None
        if eqn.prim.name in ADDITIONS:
            (part,) = (v for v in eqn.ins if v != before)
            update = self.producer.get(part)
            is_empty = update is not None and self._is_zero(update.ins[0]) and self.readers[part] == [eqn]
            written = self._update(update, adds=True) if update is not None and is_empty else None
        else:
            written = self._update(eqn, adds=False) if eqn.ins[0] == before else None
        others = [reader for reader in self.readers[before] if reader is not eqn]
        same = written is not None and all(o.prim.name in READS and self._read(o) == written.rows for o in others)
        return written if same else None

    def _update(self, eqn: Equation, adds: bool) -> Written | None:
        """The rows that an equation writes, one after the other, and their values."""
        if eqn.prim.name == "dynamic_update_slice":
            rows = self._rows(eqn.ins[0], eqn.ins[1], eqn.ins[2:])
            return None if rows is None else Written(rows, eqn.ins[1], adds)
        if eqn.prim.name != "scatter":
            return None
        dims = eqn.params["dimension_numbers"]
        row = self._row(eqn.ins[0], eqn.ins[1], eqn.ins[2], dims.inserted_window_dims, dims.scatter_dims_to_operand_dims)
        return None if row is None else Written(row, eqn.ins[2], adds)

    def _is_zero(self, v: int) -> bool:
        eqn = self.producer.get(v)
        return eqn is not None and eqn.prim.name == "broadcast_in_dim" and not self.flat.literals.get(eqn.ins[0], 1)


def _times(number: int, counts: np.ndarray, dtype: Any) -> np.ndarray:
    """Multiples of a whole number, as its dtype has them: modulo a power of two."""
    with np.errstate(over="ignore"):
        return np.asarray(number).astype(dtype) * counts.astype(dtype)


def _numbers(program: Program, t: int, known: dict[int, np.ndarray | None] | None = None) -> np.ndarray | None:
    """The whole numbers that a value of one index consists of, or a number; None where they are not known."""
    known = {} if known is None else known
    if t not in known:
        known[t] = _numbers_of(program, t, known) if program.free[t].bit_count() <= 1 else None
    return known[t]


def _numbers_of(program: Program, t: int, known: dict[int, np.ndarray | None]) -> np.ndarray | None:
    term = program.terms[t]
    match term:
        case Iota():
            return np.arange(program.extent(program.free[t])).astype(term.dtype)
        case Literal():
            return np.asarray(term.value)
        case Rename():
            return _numbers(program, term.arg, known)
        case Const():
            value = program.consts[term.slot]
            is_vector = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
            return value if is_vector else None
        case Map() if term.op in NUMBERS and np.dtype(term.dtype).kind in "iu":
            operands = [_numbers(program, c, known) for c in term.args]
            if all(a is not None for a in operands):
                return np.asarray(NUMPY[term.op](dict(term.params), operands)).astype(term.dtype)
    return None


@dataclass(eq=False)
class _OverRows(Retracing):
    """A program while it is traced with scans over the rows that their steps read and write."""

    scans: Mapping[Scan, Counting]

    def run(self, scan: Scan) -> dict[int, Array]:
        step, operands = self.scans[scan], self.operands(scan)
        flat, first, after = step.flat, scan.first_carry, scan.first_carry + scan.carries
        init, xs = list(map(strong, operands[first:after])), operands[after:]
        one: dict[int, Array] = {**flat.consts, **flat.literals, **dict(zip(flat.inputs[:after], [*operands[:first], *init]))}
        every: dict[int, Array] = dict(zip(step.xs, xs, strict=True))
        for eqn, rows in step.reads.items():
            every[eqn.outs[0]] = _side_by_side(one[eqn.ins[0]], rows, scan.length, flat.shapes[eqn.outs[0]])
        for v, numbers in step.known.items():
            every.setdefault(v, _counted_from(numbers).reshape(scan.length, *flat.shapes[v]))
        kept = [k for k in range(scan.carries) if k not in step.counters and k not in step.writes and k not in step.same]
        stacked = [*step.ys, *(written.value for written in step.writes.values())]
        wanted = [*(step.after[k] for k in kept), *stacked]
        equations = list(step.needed(wanted, every))[::-1]
        read = {v for eqn in equations for v in eqn.ins}.union(wanted)
        every = {v: array for v, array in every.items() if v in read}

        def turn(carry: list[Array], xs: list[Array]) -> tuple[list[Array], list[Array]]:
            values = one | dict(zip(every, xs, strict=True)) | {step.carried[k]: c for k, c in zip(kept, carry, strict=True)}
            for eqn in equations:
                evaluate_equation(eqn, values)
            return [strong(values[step.after[k]]) for k in kept], [values[v] for v in stacked]

        start, unroll = [init[k] for k in kept], scan.call.params["unroll"]
        last, stacks = lax.scan(turn, start, list(every.values()), length=scan.length, reverse=scan.reverse, unroll=unroll)
        results = dict(zip(kept, last, strict=True)) | {scan.carries + k: y for k, y in enumerate(stacks[: len(step.ys)])}
        for (k, written), stack in zip(step.writes.items(), stacks[len(step.ys) :], strict=True):
            results[k] = _written_into(init[k], written, stack)
        for k, number in step.counters.items():
            results[k] = init[k] + _times(number, np.asarray(scan.length), init[k].dtype)
        return results | {k: init[k] for k in step.same}


def _side_by_side(array: Array, rows: Rows, length: int, shape: Sequence[int]) -> Array:
    """The rows that each step reads, along a new leading axis."""
    is_whole = length * rows.size == array.shape[rows.axis]
    part = array if is_whole else lax.slice_in_dim(array, rows.start, rows.start + length * rows.size, axis=rows.axis)
    split = part.reshape(*part.shape[: rows.axis], length, rows.size, *part.shape[rows.axis + 1 :])
    return jnp.moveaxis(split, rows.axis, 0).reshape(length, *shape)


def _written_into(array: Array, written: Written, stack: Array) -> Array:
    """An array with the rows that all steps write, or add."""
    rows, shape = written.rows, list(array.shape)
    shape[rows.axis : rows.axis + 1] = [len(stack), rows.size]
    each = [n for a, n in enumerate(shape) if a != rows.axis]
    whole = jnp.moveaxis(stack.reshape(len(stack), *each), 0, rows.axis)
    whole = whole.reshape(*array.shape[: rows.axis], len(stack) * rows.size, *array.shape[rows.axis + 1 :])
    if whole.shape == array.shape:
        return array + whole if written.adds else whole
    if written.adds:
        whole = whole + lax.slice_in_dim(array, rows.start, rows.start + whole.shape[rows.axis], axis=rows.axis)
    return lax.dynamic_update_slice_in_dim(array, whole, rows.start, rows.axis)


def _counted_from(numbers: np.ndarray) -> Array:
    """Numbers as positions counted from the first one where they are that."""
    difference = int(numbers[1]) - int(numbers[0]) if len(numbers) > 1 and numbers.dtype.kind in "iu" else 0
    counted = numbers[0] + difference * np.arange(len(numbers))
    if numbers.dtype.kind == "b" or not np.array_equal(counted, numbers):
        return jnp.asarray(numbers)
    return numbers[0] + lax.iota(numbers.dtype, len(numbers)) * np.asarray(difference).astype(numbers.dtype)
