"""The bytes that a compiled program would hold if products by cuBLAS had more scratch than it was compiled with, as they have on the card.

Without a card XLA allocates less. Its heap holds scratch like any value, the largest first and each in the smallest gap, so more of it
costs nothing where other values are at their most, and may cost more where it keeps values apart. The values and their lifetimes
are read from the text of the compiled program, whose instructions stand in the order in which they run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eqsat_mem.backends.hlo import itemsize
from eqsat_mem.schedule.packing import Placed, packed_beside_outputs

SMALL = 1 << 16
"""Bytes below which a value is left out: of thousands of these none matters beside scratch. Guessed."""
MOST_VALUES = 1500
"""Of programs with more values nothing is placed, which takes seconds: guessed."""
NEAR = 0.1
"""The part of what XLA reports by which what is placed may differ from it, for an answer: guessed."""
VIEWS = frozenset({"bitcast", "opt-barrier", "optimization-barrier", "async-done", "copy-done"})
"""Operations whose result is their operand."""
IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})
"""Operations that write into their first operand where nothing else reads it."""
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<types>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<operands>[^()]*)\)(?P<rest>.*)")
_ARRAY = re.compile(r"([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
_CALLED = re.compile(r"(body|to_apply|branch_computations|true_computation|false_computation|calls)=(\{[^}]*\}|%?[\w.\-]+)")
_OVER = re.compile(r"output_to_operand_aliasing=\{\{\d*\}: \((\d+), \{\}\)")
_CUBLASLT = '"__cublas$lt$matmul'


class _Line(NamedTuple):
    name: str
    op: str
    sizes: tuple[int, ...]
    operands: tuple[str, ...]
    rest: str
    is_root: bool


Buffers = tuple[int, ...]
"""The numbers of the values that an instruction's result is made of, one for each array; -1 for arguments and constants."""


@dataclass
class _Heap:
    """Values with their lifetimes, in the order in which they are made; those that lie in one place are one."""

    computations: Mapping[str, Sequence[_Line]]
    folds_take_over: bool = False
    """Whether results lie where operands did that are folded by the same kernel, which XLA decides by how it reads them."""
    sizes: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    scratch: set[int] = field(default_factory=set)
    products: set[int] = field(default_factory=set)
    now: int = 0

    def run(self, name: str, given: Sequence[Buffers]) -> Buffers:
        """Make the values of a computation; its result."""
        own: dict[str, Buffers] = {}
        lines = self.computations[name]
        last_read = {operand: k for k, line in enumerate(lines) for operand in line.operands}
        result: Buffers = ()
        for k, line in enumerate(lines):
            self.now += 1
            read = [own[operand] for operand in line.operands]
            dying = [own[operand] for operand in line.operands if last_read[operand] == k]
            made = own[line.name] = self._made(line, read, dying, given)
            self._touch(b for buffers in (*read, made) for b in buffers)
            if line.is_root:
                result = made
        return result

    def _made(self, line: _Line, read: Sequence[Buffers], dying: Sequence[Buffers], given: Sequence[Buffers]) -> Buffers:
        if line.op == "parameter":
            return given[int(line.rest)] if given else (-1,) * len(line.sizes)
        if line.op == "constant":
            return (-1,) * len(line.sizes)
        if line.op == "tuple":
            return tuple(b for buffers in read for b in buffers)
        if line.op == "get-tuple-element":
            number = int(line.rest)
            return read[0][number : number + 1]
        if line.op in VIEWS:
            return read[0]
        if line.op == "while":
            (body,) = _called(line, "body")
            for before, after in zip(read[0], self.run(body, [read[0]]), strict=True):
                self._join(before, after)
            self._touch(read[0])
            return read[0]
        if line.op in ("call", "conditional", "async-start"):
            results = [self.run(name, read if line.op != "conditional" else read[1 + k : 2 + k]) for k, name in enumerate(_called(line))]
            return results[-1] if results else self._new(line)
        made = self._new(line)
        if _CUBLASLT in line.rest and len(made) > 1:
            self.scratch.add(made[-1])
            self.products.add(made[0])
        if over := _OVER.search(line.rest):
            self._join(read[int(over[1])][0], made[0])
        elif line.op in IN_PLACE or (line.op == "fusion" and ("kind=kLoop" in line.rest or "scatter" in line.name or self.folds_take_over)):
            self._take_over(made, dying)
        return made

    def _new(self, line: _Line) -> Buffers:
        made = tuple(range(len(self.sizes), len(self.sizes) + len(line.sizes)))
        self.sizes.extend(line.sizes)
        self.place.extend(made)
        self.first.extend(self.now for _ in made)
        self.last.extend(self.now for _ in made)
        return made

    def _take_over(self, made: Buffers, dying: Sequence[Buffers]) -> None:
        """Let elementwise results lie where operands of their sizes do that are read for the last time, and are no products."""
        free = [b for buffers in dying for b in buffers if b >= 0 and b not in self.products]
        for b in made:
            alike = next((f for f in free if self.sizes[f] == self.sizes[b]), None)
            if alike is not None:
                free.remove(alike)
                self._join(alike, b)

    def _root(self, b: int) -> int:
        while self.place[b] != b:
            b = self.place[b]
        return b

    def _join(self, before: int, after: int) -> None:
        if before < 0 or after < 0 or (one := self._root(before)) == (other := self._root(after)):
            return
        self.place[other] = one
        self.first[one] = min(self.first[one], self.first[other])
        self.last[one] = max(self.last[one], self.last[other])

    def _touch(self, buffers: Iterator[int] | Buffers) -> None:
        for b in buffers:
            if b >= 0:
                self.last[self._root(b)] = self.now

    def placed(self, outputs: Buffers, scratch: int | None = None) -> list[Placed]:
        """All values, of which outputs have no end; ``scratch`` is what products have, if it is not what was read."""
        kept = {self._root(b) for b in outputs if b >= 0}
        found = []
        for b, nbytes in enumerate(self.sizes):
            size = scratch if scratch is not None and b in self.scratch else nbytes
            if self.place[b] == b and size >= SMALL:
                found.append(Placed(size, self.first[b], math.inf if b in kept else self.last[b]))
        return found


def more_with(text: str, scratch: int, temporaries: int) -> int | None:
    """The bytes that a program holds besides with so much scratch for each product by cuBLASLt; None where its text does not tell.

    Args:
        text: optimised HLO.
        scratch: bytes for each product.
        temporaries: bytes that the program holds besides arguments and results, as compiled.
    """
    computations, entry = _read(text)
    found: list[tuple[float, int]] = []
    for folds_take_over in (False, True):
        heap = _Heap(computations, folds_take_over)
        try:
            outputs = heap.run(entry, ())
        except (IndexError, KeyError, ValueError):
            return None
        values = heap.placed(outputs)
        if len(values) > MOST_VALUES:
            return None
        before = packed_beside_outputs(values)
        found.append((abs(before - temporaries), max(packed_beside_outputs(heap.placed(outputs, scratch)) - before, 0)))
    off, more = min(found)
    return more if off <= NEAR * temporaries else None


def _read(text: str) -> tuple[dict[str, list[_Line]], str]:
    found: dict[str, list[_Line]] = {}
    own: list[_Line] = []
    entry = ""
    for line in text.splitlines():
        if not line[:1].isspace():
            own = []
            if head := _COMPUTATION.match(line):
                found[head["name"]] = own
                entry = head["name"] if head["entry"] else entry
        elif made := _LINE.match(line):
            own.append(_line(made))
    return found, entry


def _line(made: re.Match[str]) -> _Line:
    op, rest = made["op"], made["rest"]
    if op == "parameter":
        rest = made["operands"]
    elif op == "get-tuple-element" and (number := re.search(r"index=(\d+)", rest)):
        rest = number[1]
    operands = () if op in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-]+)", made["operands"]))
    sizes = tuple(
        math.prod(int(extent) for extent in shape.split(",") if extent) * itemsize(kind) for kind, shape in _ARRAY.findall(made["types"])
    )
    return _Line(made["name"], op, sizes, operands, rest, made["root"] is not None)


def _called(line: _Line, which: str | None = None) -> list[str]:
    return [name for key, names in _CALLED.findall(line.rest) if which in (None, key) for name in re.findall(r"[\w.\-]+", names)]
