"""The collectives of a compiled program, read from its text, and what each device receives by them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

KINDS = {
    "all-reduce": "psum",
    "all-gather": "all_gather",
    "reduce-scatter": "psum_scatter",
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
}
"""XLA's collectives, and the functions of ``jax.lax`` that they come from (``pmax`` and ``pmin`` are all-reduces too)."""
SIZES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}
"""Bytes of the element types whose names do not end in their bits."""

_instruction = re.compile(r"^\s+(?:ROOT )?%?\S+ = (?P<made>\(.*?\)|\S+) (?P<op>[\w-]+)\(")
_header = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) .*\{$")
_called = re.compile(r"\b(?:body|condition|to_apply|calls)=%?([\w.-]+)")
_branches = re.compile(r"branch_computations=\{([^}]*)\}")
_turns = re.compile(r"known_trip_count\D*(\d+)")


def collectives(text: str, devices: int) -> dict[str, tuple[int, float]]:
    """How often each kind of collective runs in one call, and the bytes that a device receives by it.

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
    times, received = Counter[str](), Counter[str]()
    for kind, bytes_each, often in _run(lines, entry, 1, devices):
        times[kind] += often
        received[kind] += bytes_each * often
    return {kind: (times[kind], received[kind]) for kind in times}


def _run(lines: dict[str, list[str]], name: str, often: int, devices: int) -> Iterator[tuple[str, float, int]]:
    """The collectives of a computation that runs so often: their kind, the bytes of each, and how often they run."""
    for line in lines.get(name, []):
        found = _instruction.match(line)
        if found is None:
            continue
        kind = found["op"].removesuffix("-start")
        if kind in KINDS:
            made = _bytes(found["made"]) / (2 if found["op"] == "all-gather-start" else 1)
            yield kind, made * _share(kind, _group(line, devices)), often
            continue
        turns = _turns.search(line) if kind == "while" else None
        called = _called.findall(line) + [n.strip(" %") for names in _branches.findall(line) for n in names.split(",")]
        for inner in called:
            yield from _run(lines, inner, often * (int(turns[1]) if turns else 1), devices)


def _share(kind: str, group: int) -> float:
    """What a device receives, in parts of what the collective makes."""
    rest = (group - 1) / group
    return {"all-reduce": 2 * rest, "reduce-scatter": group - 1.0, "collective-permute": 1.0}.get(kind, rest)


def _group(line: str, devices: int) -> int:
    """How many devices take part."""
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(listed[1].split(",")) if listed else devices


def _bytes(made: str) -> int:
    """The bytes of one or several arrays."""
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", made)
    return sum(_size(kind) * math.prod(int(n) for n in extents.split(",") if n) for kind, extents in found)


def _size(kind: str) -> int:
    bits = re.search(r"\d+$", kind)
    return SIZES[kind] if kind in SIZES else max(int(bits[0]) // 8, 1) if bits else 0
