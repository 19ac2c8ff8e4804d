"""The indices of which devices may take shares: those along which arguments and results lie, and those along which most can be computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice, product

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.ir import Axes, Input, Program, Rename, bits, children, folded
from eqsat_mem.ir.mesh import Names, Placement, Spec, Spreading
from eqsat_mem.mesh.bodies import Bodies, Links
from eqsat_mem.mesh.pieces import linked_by_pieces
from eqsat_mem.mesh.sliding import linked_by_windows

MOST_HEADS = 4
"""The number of indices at rest on a mesh axis that are tried as the one that terms prefer."""
MOST_OTHERS = 3
"""The number of indices that are tried besides, those along which most bytes can be computed in shares."""
MOST_UNEVEN = 2
"""The number of indices that devices do not divide which are tried, where more bytes can be computed along them than along others."""
MOST_SPREADINGS = 16
"""The number of ways to spread a program that are tried."""


def spreadings(
    ex: Extraction, placement: Placement, idle: bool, loops: Bodies | None = None
) -> Iterator[tuple[Spreading, dict[int, Names]]]:
    """Ways to spread a program, with the mesh axes of every index that is dealt out, what lies at rest first.

    Indices whose extent devices do not divide are to be padded (:mod:`eqsat_mem.mesh.padding`).
    Mesh axes along which nothing lies are left alone unless ``idle`` ones are to be used. What lies in shares before a loop whose body is
    planned does so after it.
    """
    program = ex.program
    shifted = [*linked_by_pieces(ex), *linked_by_windows(program)]
    links = shifted if loops is None else [*loops.links(program), *shifted]
    rest, able = linked(at_rest(program, placement), links), abilities(ex)
    choices: list[list[tuple[tuple[int, Names], ...]]] = []
    for names in _groups(placement, rest) if idle else dict.fromkeys(rest.values()):
        lying = sorted((i for i, own in rest.items() if own == names), key=lambda i: (-able[i], i))
        count = placement.devices.count(names)
        others = sorted((i for i in able if i not in rest and program.indices[i].extent >= count), key=lambda i: (-able[i], i))
        even = [i for i in others if program.indices[i].extent % count == 0][:MOST_OTHERS]
        most = max((able[i] for i in (*lying, *even)), default=0)
        uneven = [i for i in others if program.indices[i].extent % count and able[i] > most][:MOST_UNEVEN]
        heads: list[int | None] = [*lying[:MOST_HEADS], *even, *uneven, *([] if lying else [None])]
        own = [[] if h is None else [i for i in linked({h: names}, shifted) if rest.get(i, names) == names] for h in heads]
        choices.append([tuple((i, names) for i in dict.fromkeys([*way, *lying])) for way in own])
    ways = islice(product(*choices), MOST_SPREADINGS)  # of no choices there is one way: nothing is spread
    orders = [tuple(chain.from_iterable(way)) for way in ways]
    once = [order for order in orders if len(dict(order)) == len(order)]
    for order in once or [_by_the_first(orders[0])]:
        given = dict(order)
        dealt = divided(program, {**rest, **given}, links)
        divides = {i for i, names in dealt.items() if program.indices[i].extent % placement.devices.count(names) == 0}
        yield Spreading(order), {i: names for i, names in dealt.items() if i in given or i in divides}


def _by_the_first(order: tuple[tuple[int, Names], ...]) -> tuple[tuple[int, Names], ...]:
    """The indices that are dealt out along the first mesh axes of those that each stands with."""
    first: dict[int, Names] = {}
    for i, names in order:
        first.setdefault(i, names)
    return tuple(first.items())


def _groups(placement: Placement, rest: Mapping[int, Names]) -> list[Names]:
    """The groups of mesh axes that deal out indices: those that arguments and results name together, and each axis that none names."""
    groups = list(dict.fromkeys(rest.values()))
    named = {name for names in groups for name in names}
    return groups + [(name,) for name, size in placement.devices.axes if name not in named and size > 1]


def at_rest(program: Program, placement: Placement) -> dict[int, Names]:
    """The indices along which arguments and results lie in shares; of several ways to deal one out the first."""
    found: dict[int, Names] = {}

    def note(axes: Axes, spec: Spec | None) -> None:
        for axis, names in zip(axes, spec or (), strict=bool(spec)):
            if names and axis and program.indices[axis[0]].extent % placement.devices.count(names) == 0:
                found.setdefault(axis[0], names)

    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Input):
            note(term.axes, placement.arguments[term.slot])
    for o, spec in zip(program.outputs, placement.results, strict=True):
        note(o.axes, spec)
    return found


def abilities(ex: Extraction) -> Counter[int]:
    """For each index, the bytes of the values that can be computed in shares of it."""
    program, able = ex.program, Counter[int]()
    for t in program.reachable():
        read = max((program.nbytes(c) for c in children(program.terms[t])), default=0)
        free = ex.splits.get(t, 0) & program.free[t]
        for i in bits(free):
            able[i] += program.nbytes(t)
        for i in bits(ex.accumulates.get(t, 0) & folded(program.terms[t])):
            able[i] += read
    return able


def divided(program: Program, given: Mapping[int, Names], same: Links) -> dict[int, Names]:
    """The mesh axes of every index that is dealt out: those given, and other names of the same values, so that whole values are alike."""
    links = list(same)
    reads: dict[int, Axes] = {}
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Rename):
            links += term.pairs
        elif isinstance(term, Input):
            first = reads.setdefault(term.slot, term.axes)
            links += [pair for one, other in zip(first, term.axes, strict=True) if len(one) == len(other) for pair in zip(one, other)]
    return linked(given, links)


def linked(given: Mapping[int, Names], links: Links) -> dict[int, Names]:
    """The mesh axes of some indices, and of those that are linked to them."""
    found, size = dict(given), -1
    while size != len(found):
        size = len(found)
        for i, j in links:
            if i in found and j not in found:
                found[j] = found[i]
            elif j in found and i not in found:
                found[i] = found[j]
    return found
