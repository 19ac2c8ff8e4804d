"""The exchanges of a compiled program, as its text has them: those that XLA's partitioner puts into a program that nobody has planned."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from eqsat_mem.backends.hlo import itemsize
from eqsat_mem.ir.mesh import Devices, Names
from eqsat_mem.schedule.backend import Backend

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "gather_shares",
    "reduce-scatter": "sum_to_shares",
    "all-to-all": "exchange_shares",
    "collective-permute": "exchange_shares",
}
"""For each of XLA's collectives the one whose price it has (:data:`eqsat_mem.ir.ops.collectives.EXCHANGES`)."""

_header = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_instruction = re.compile(r"^\s+(?:ROOT )?%?\S+ = (?P<made>\(.*?\)|\S+) (?P<op>[\w-]+)\(")
_called = re.compile(r"\b(?:body|condition|to_apply|calls)=%?([\w.-]+)|branch_computations=\{([^}]*)\}")
_turns = re.compile(r"known_trip_count\D*(\d+)")
_array = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Exchanged:
    """A collective of a compiled program: its name in XLA, the devices that take part, the bytes each receives, and how often it runs."""

    op: str
    devices: int
    received: float
    times: int


def exchanged(text: str, devices: int) -> list[Exchanged]:
    """The collectives of one call of a program compiled for so many devices.

    A loop whose turns are not known counts as one turn, and of a branch all sides.
    """
    lines: dict[str, list[str]] = {}
    entry = own = ""
    for line in text.splitlines():
        if header := _header.match(line):
            own = header["name"]
            lines[own] = []
            entry = own if header["entry"] else entry
        elif own:
            lines[own].append(line)
    return list(_run(lines, entry, devices, 1))


def exchanged_s(every: list[Exchanged], backend: Backend, devices: Devices) -> float:
    """Seconds of some exchanges on a mesh: of so many devices each, along the innermost axes that have so many."""
    return sum(e.times * backend.exchange_s(KINDS[e.op], e.received, _along(devices, e.devices), devices) for e in every)


def _along(devices: Devices, count: int) -> Names:
    names = [name for name, _ in devices.axes]
    stretches = (tuple(names[a:b]) for b in range(len(names), 0, -1) for a in range(b - 1, -1, -1))
    return next((own for own in stretches if devices.count(own) == count), tuple(names))


def _run(lines: dict[str, list[str]], name: str, devices: int, often: int) -> Iterator[Exchanged]:
    """The exchanges of a computation that runs so often."""
    for line in lines.get(name, ()):
        found = _instruction.match(line)
        if found is None:
            continue
        op = found["op"].removesuffix("-start")
        if op in KINDS:
            group = devices if op == "collective-permute" else _group(line, devices)
            arrays = _sizes(found["made"])  # of a collective that is begun its operand, its result and what it needs besides
            made = sum(arrays) if op in (found["op"], "all-reduce") else max(arrays, default=0.0)
            yield Exchanged(op, group, made * _share(op, group), often)
            continue
        turns = _turns.search(line) if op == "while" else None
        for one, several in _called.findall(line):
            for inner in [one] if one else several.replace("%", "").replace(" ", "").split(","):
                yield from _run(lines, inner, devices, often * (int(turns[1]) if turns else 1))


def _share(op: str, group: int) -> float:
    """The bytes that a device receives, in parts of those that the collective makes."""
    rest = (group - 1) / group
    return {"all-reduce": 2 * rest, "reduce-scatter": group - 1.0, "collective-permute": 1.0}.get(op, rest)


def _group(line: str, devices: int) -> int:
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else devices


def _sizes(made: str) -> list[float]:
    """The bytes of the arrays that an instruction makes."""
    return [float(itemsize(kind)) * math.prod(int(n) for n in extents.split(",") if n) for kind, extents in _array.findall(made)]
