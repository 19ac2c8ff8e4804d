"""The kernels, copies and library calls that a compiled program launches on a GPU, from the thunk sequence that XLA dumps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Launch:
    """One operation that the host launches on the device.

    Attributes:
        kind: ``kernel``, or XLA's name of the thunk's kind: ``Copy``, ``Memset``, ``CublasLtMatmul``, ``CustomCall`` and others.
        name: the name of the kernel, or of the instruction for other kinds.
        blocks: the number of thread blocks; zero if a library chooses it.
        threads: threads per block.
        shared_bytes: bytes of shared memory that a block requests.
        turns: how often the enclosing loops launch it; None if the trip count of one of them is unknown.
        depth: the number of enclosing loops.
    """

    kind: str
    name: str
    blocks: int
    threads: int
    shared_bytes: int
    turns: int | None
    depth: int


@dataclass
class _Loop:
    indent: int
    turns: int | None
    counts: bool = False
    """Whether the following lines belong to the body; the condition is launched only if the trip count is unknown."""


_THUNK = re.compile(
    r"(?P<indent>\s*)(?P<id>\d+): k(?P<kind>\w+)\s*(\[.*?\])?\s*(?P<name>\S+)?"
    r"( grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>[\d, ]+)\]\s*shared_memory: (?P<shared>\d+))?"
)


def read(folder: Path, compiled_text: str) -> tuple[Launch, ...]:
    """Read the launches of the only program whose dump XLA has written to a folder, in order.

    Args:
        folder: the folder given to XLA as ``xla_dump_to``.
        compiled_text: the program's optimised HLO, which has the trip counts of loops.
    """
    sequence = _only(folder, "thunk_sequence.txt")
    names = dict(_names(_only(folder, "thunk_metadata.txt")))
    return tuple(parse(sequence, names, turns_of_loops(compiled_text)))


WAITS = {"AsyncDone"}
"""The kinds of thunks that wait for another thunk's launch."""


def turns_of_loops(compiled_text: str) -> dict[str, int]:
    """Return the trip count of each ``while`` loop that has a known one, by the instruction's name."""
    found = re.finditer(r'%([\w.\-]+) = [^\n]*? while\([^\n]*?"known_trip_count":\{"n":"(\d+)"\}', compiled_text)
    return {match[1]: int(match[2]) for match in found}


def parse(sequence: str, names: dict[int, str], turns: dict[str, int]) -> Iterator[Launch]:
    """Yield the launches of a sequence of thunks.

    Args:
        sequence: a line for each thunk; the thunks inside a loop are indented below it.
        names: the name of the instruction of each thunk, by the thunk's number.
        turns: the known trip counts of loops, by the name of their instruction.
    """
    lines = [line for line in sequence.splitlines() if line.strip()]
    loops: list[_Loop] = []
    for k, line in enumerate(lines):
        thunk = _THUNK.match(line)
        if thunk is None:
            _enter_section(line, loops)
            continue
        indent = len(thunk["indent"])
        while loops and indent <= loops[-1].indent:
            loops.pop()
        name = names.get(int(thunk["id"]), "")
        if thunk["kind"] == "While":
            loops.append(_Loop(indent, turns.get(name)))
        elif thunk["kind"] not in WAITS and not _has_parts(lines, k, indent) and all(loop.counts or loop.turns is None for loop in loops):
            yield _launch(thunk, name, loops)


def _launch(thunk: re.Match[str], name: str, loops: list[_Loop]) -> Launch:
    blocks = threads = 0
    if thunk["grid"]:
        blocks, threads = _product(thunk["grid"]), _product(thunk["threads"])
    count: int | None = 1
    for loop in loops:
        count = None if count is None or loop.turns is None else count * loop.turns
    kind = "kernel" if thunk["grid"] else thunk["kind"]
    return Launch(kind, thunk["name"] if thunk["grid"] else name, blocks, threads, int(thunk["shared"] or 0), count, len(loops))


def _enter_section(line: str, loops: list[_Loop]) -> None:
    """Note that a loop's body begins if the line says so: ``body:`` is indented deeper than its loop, ``condition:`` need not be."""
    if line.strip() != "body:":
        return
    indent = len(line) - len(line.lstrip())
    while loops and indent <= loops[-1].indent:
        loops.pop()
    if loops:
        loops[-1].counts = True


def _has_parts(lines: list[str], k: int, indent: int) -> bool:
    """Whether the next line is a thunk inside this one, in which case this one launches nothing itself."""
    following = _THUNK.match(lines[k + 1]) if k + 1 < len(lines) else None
    return following is not None and len(following["indent"]) > indent


def _names(metadata: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r'profile_annotation: "([^"]*)"\s*thunk_id: (\d+)', metadata):
        yield int(match[2]), match[1]


def _only(folder: Path, ending: str) -> str:
    return next((path.read_text(encoding="utf-8") for path in sorted(folder.glob(f"*{ending}"))), "")


def _product(text: str) -> int:
    product = 1
    for extent in text.split(","):
        product *= int(extent)
    return product
