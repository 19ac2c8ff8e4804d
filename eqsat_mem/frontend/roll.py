"""Chains of equal blocks as loops: each becomes one ``lax.scan`` over the values that its blocks read, side by side.

The values that later blocks need of one before are its carry, and those that anything else reads are its stacked results. A chain that
reads the blocks of another backwards is a scan in reverse, so that it reads what the other stacks as it is.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval as pe

from eqsat_mem.frontend.flat_jaxpr import Equation, Flat
from eqsat_mem.frontend.inline import flatten, lines_of
from eqsat_mem.frontend.preferences import PLAIN, Preferences
from eqsat_mem.frontend.repeats import Chain, Given, Made, with_chains
from eqsat_mem.ir import Source
from eqsat_mem.passes import EVERY, UPDATES, Pass

Array = Any
Values = tuple[int, ...]
Result = tuple[int, int]
"""A result of a block: the offset of an equation, and which of its results."""
MOST_OF = 3 / 4
"""The share of a block's equations that the function after which it is named has made: a few are of the gradient as a whole."""
LEAST_PIECE = 2
"""Blocks of a chain that are a loop of their own: XLA writes out a loop of one step, and begins all loops inside at once."""
NOTHING = -1
"""The value that enters a first block where no block reads it, and only the end is read of what is carried."""


def rolled(closed: ClosedJaxpr, preferences: Preferences = PLAIN, pieces: int = 1, passes: Collection[Pass] = EVERY) -> ClosedJaxpr | None:
    """The same function with its chains of equal blocks as scans, each as about so many pieces; None if it has none.

    Of ``passes``, only equal updates change it.
    """
    flat, chains = with_chains(flatten(closed, preferences, {UPDATES}.intersection(passes)))
    chains = [chain for chain in chains if chain.carried()]
    if not chains:
        return None
    avals = [jax.ShapeDtypeStruct(flat.shapes[v], flat.dtypes[v]) for v in flat.inputs]

    def run(args: Sequence[Array], consts: Sequence[Array]) -> list[Array]:
        return _Rolling(flat, chains, pieces, dict(zip(flat.inputs, args)) | dict(zip(flat.consts, consts))).outputs()

    return traced(run, avals, list(flat.consts.values()))


def traced(run: Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]], avals: Sequence[Any], consts: Sequence[Any]) -> ClosedJaxpr:
    """The jaxpr of a function of arguments and closed-over arrays, which are those of the jaxpr; nothing in it is dead."""
    closed_over = [jax.ShapeDtypeStruct(np.shape(c), c.dtype) for c in consts]
    closed = jax.make_jaxpr(lambda *arrays: run(arrays[: len(avals)], arrays[len(avals) :]))(*avals, *closed_over)
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    jaxpr = jaxpr.replace(
        invars=jaxpr.invars[: len(avals)],
        constvars=[*jaxpr.constvars, *jaxpr.invars[len(avals) :]],
        debug_info=jaxpr.debug_info._replace(arg_names=None),
    )
    return ClosedJaxpr(jaxpr, [*closed.consts, *consts])


@dataclass(eq=False)
class _Scan:
    """Blocks of a chain that follow one another as a scan: what it carries, how long, and what it stacks.

    Attributes:
        flat: the jaxpr.
        chain: the chain.
        blocks: which of its blocks.
        reverse: whether it runs from the last of what it reads to the first.
        carried: the carried results, with the values that enter the first blocks.
        stacked: the stacked results.
        entering: the carried results of which the values that enter each block are stacked.
    """

    flat: Flat
    chain: Chain
    blocks: range
    reverse: bool = False
    carried: dict[Result, Values] = field(default_factory=dict)
    stacked: list[Result] = field(default_factory=list)
    entering: list[Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        for result, first in self.chain.carried().items():
            self.carried[result] = (*first, *self._made(result))[self.blocks.start :][: len(first)]

    @property
    def start(self) -> int:
        """The first of its equations."""
        return self.chain.start + self.blocks.start * self.chain.period

    @property
    def end(self) -> int:
        return self.chain.start + self.blocks.stop * self.chain.period

    @property
    def body(self) -> Sequence[Equation]:
        """The equations of its first block."""
        return self.flat.equations[self.start : self.start + self.chain.period]

    def given(self) -> Iterator[tuple[Given, Values]]:
        """The operands from outside that differ from block to block of the chain, with those of its blocks."""
        return ((role, self._own(role.values)) for role in self.chain.given() if not role.is_same)

    def made(self, result: Result) -> Values:
        """The values of a result of all its blocks."""
        return self._own(self._made(result))

    def entering_of(self, result: Result) -> Values:
        """The values of a carried result that enter each block."""
        return self._own((self.chain.carried()[result][-1], *self._made(result)))

    def ordered(self, values: Sequence[int]) -> Values:
        """The values of all blocks in the order in which the scan has them side by side."""
        return tuple(reversed(values)) if self.reverse else tuple(values)

    def _own(self, values: Values) -> Values:
        return values[self.blocks.start : self.blocks.stop]

    def _made(self, result: Result) -> Values:
        """The values of a result of all blocks of the chain."""
        offset, out = result
        chain, equations = self.chain, self.flat.equations
        return tuple(equations[k].outs[out] for k in range(chain.start + offset, chain.end, chain.period))


class _Rolling:
    """A flat jaxpr while it is traced with its chains as scans.

    Attributes:
        values: arrays by number.
        within: the stacked results of scans that hold a value, and its position there.
        sides: arrays by the values that lie side by side in them.
    """

    def __init__(self, flat: Flat, chains: Sequence[Chain], pieces: int, values: dict[int, Array]):
        self.flat, self.values = flat, values
        self.within: dict[int, tuple[Array, int]] = {}
        self.sides: dict[Values, Array] = {}
        self.slices = _slices(flat)
        self.scans = self._scans(list(_cut(flat, chains, pieces)))

    def outputs(self) -> list[Array]:
        at = {scan.start: scan for scan in self.scans}
        k = 0
        while k < len(self.flat.equations):
            if k in at:
                self.run(at[k])
                k = at[k].end
            else:
                self.equation(self.flat.equations[k])
                k += 1
        return [self.read(v) for v in self.flat.outputs]

    def read(self, v: int) -> Array:
        """A value as one array."""
        if v in self.flat.literals:
            return self.flat.literals[v]
        if v not in self.values:
            stack, k = self.within[v]
            self.values[v] = lax.index_in_dim(stack, k, 0, keepdims=False)
        return self.values[v]

    def equation(self, eqn: Equation) -> None:
        with lines_of(eqn.source):
            self.values.update(zip(eqn.outs, results_of(eqn, [self.read(v) for v in eqn.ins])))

    # scans

    def run(self, scan: _Scan) -> None:
        """Trace a scan, and keep where its results are."""
        chain, body = scan.chain, scan.body
        for k in range(scan.start, scan.end):
            if chain.operands[(k - chain.start) % chain.period] is None:
                self.equation(self.flat.equations[k])
        line = _line(body, len(scan.blocks))
        with lines_of(line):
            xs = {role: self.side_by_side(scan.ordered(values)) for role, values in scan.given()}
        same = {role: self.read(role.values[0]) for role in chain.given() if role.is_same}
        init = {result: [strong(self.start(v, result, scan)) for v in first] for result, first in scan.carried.items()}

        def step(carry: dict[Result, list[Array]], x: dict[Given, Array]) -> Any:
            made: dict[Result, Array] = {}

            def operand(role: Made | Given) -> Array:
                if isinstance(role, Made):
                    result = role.offset, role.out
                    return carry[result][-role.lag] if role.lag else made[result]
                return same[role] if role.is_same else x[role]

            for offset, (eqn, roles) in enumerate(zip(body, chain.operands)):
                if roles is not None:
                    with lines_of(eqn.source):
                        made.update(((offset, out), y) for out, y in enumerate(results_of(eqn, list(map(operand, roles)))))
            after = {result: [*before[1:], strong(made[result])] for result, before in carry.items()}
            return after, ([made[result] for result in scan.stacked], [carry[result][-1] for result in scan.entering])

        keys = {role: str(k) for k, role in enumerate(xs)}  # what a scan takes is sorted by name
        names = {result: str(k) for k, result in enumerate(init)}

        def named(carry: dict[str, list[Array]], x: dict[str, Array]) -> Any:
            after, stacks = step({r: carry[n] for r, n in names.items()}, {r: x[n] for r, n in keys.items()})
            return {names[r]: y for r, y in after.items()}, stacks

        with lines_of(line):
            last, (stacks, entering) = lax.scan(
                named,
                {names[r]: y for r, y in init.items()},
                {keys[r]: y for r, y in xs.items()},
                length=len(scan.blocks),
                reverse=scan.reverse,
            )
        for result, stack in zip(scan.entering, entering):
            self.sides[scan.ordered(scan.entering_of(result))] = stack
        for result, stack in zip(scan.stacked, stacks):
            values = scan.ordered(scan.made(result))
            self.sides[values] = stack
            self.within.update((v, (stack, k)) for k, v in enumerate(values))
        for result, name in names.items():
            values = (*scan.carried[result], *scan.made(result))
            self.values.update(zip(values[-len(last[name]) :], last[name]))

    def start(self, v: int, result: Result, scan: _Scan) -> Array:
        """A value that enters the first block; anything where no block reads it."""
        if v != NOTHING:
            return self.read(v)
        made = scan.made(result)[0]
        return jnp.zeros(self.flat.shapes[made], self.flat.dtypes[made])

    def _scans(self, scans: list[_Scan]) -> list[_Scan]:
        """The scans with all results that are read outside of them."""
        given = [values for scan in scans for _, values in scan.given()]
        asked = {*given, *(values[::-1] for values in given)}
        entering = {(scan, result): values for scan in scans for result in scan.carried if (values := scan.entering_of(result)) in asked}
        wanted = self._wanted(scans, {*entering.values(), *(values[::-1] for values in entering.values())})
        known: set[Values] = set()
        for scan in scans:
            scan.reverse = self._backwards(scan, known)
            scan.entering = [result for of, result in entering if of is scan]
            roles, count = scan.chain.operands, len(scan.blocks)
            results = [(k, out) for k, eqn in enumerate(scan.body) if roles[k] is not None for out in range(len(eqn.outs))]
            for result in results:
                used = {b for b, v in enumerate(scan.made(result)) if v in wanted}
                kept = len(scan.carried.get(result, ()))
                if used == {count - 1} and not kept:
                    scan.carried[result] = (NOTHING,)
                elif used - set(range(count - kept, count)):
                    scan.stacked.append(result)
            known.update(scan.ordered(scan.made(result)) for result in scan.stacked)
            known.update(scan.ordered(entering[scan, result]) for result in scan.entering)
            known.update(scan.ordered(values) for _, values in scan.given())
        return scans

    def _wanted(self, scans: Sequence[_Scan], together: Collection[Values]) -> set[int]:
        """The values that are read one by one, or side by side with others but not ``together`` as they are already."""
        equations = self.flat.equations
        inside = {k for chain in {scan.chain for scan in scans} for offset, k in chain.places() if chain.operands[offset] is not None}
        wanted = {*self.flat.outputs, *(v for k, eqn in enumerate(equations) if k not in inside for v in eqn.ins)}
        for scan in scans:
            wanted.update(v for first in scan.carried.values() for v in first)
            wanted.update(v for _, values in scan.given() if values not in together for v in values)
            wanted.update(role.values[0] for role in scan.chain.given() if role.is_same)
        return wanted

    def _backwards(self, scan: _Scan, known: Collection[Values]) -> bool:
        """Whether more elements of what a scan reads lie side by side in the order of its blocks reversed."""
        lists = [values for _, values in scan.given()]
        sizes = [1 + math.prod(self.flat.shapes[values[0]]) for values in lists]
        return sum(size * ((values[::-1] in known) - (values in known)) for size, values in zip(sizes, lists)) > 0

    # values side by side

    def side_by_side(self, values: Values) -> Array:
        """Values along a new leading axis: an array that has them so, else one that is put together."""
        if values not in self.sides:
            backwards = self.sides.get(values[::-1])
            self.sides[values] = self._together(values) if backwards is None else lax.rev(backwards, [0])
        return self.sides[values]

    def _together(self, values: Values) -> Array:
        if all(v in self.flat.literals for v in values):
            return jnp.asarray(np.stack([self.flat.literals[v] for v in values]))
        cut = self._one_array(values)
        if cut is not None:
            return cut
        pieces: list[Array] = []
        k = 0
        while k < len(values):
            n = self._run_within(values[k:])
            if n > 1:
                stack, place = self.within[values[k]]
                pieces.append(lax.slice_in_dim(stack, place, place + n, axis=0))
            else:
                pieces.append(jnp.expand_dims(self.read(values[k]), 0))
            k += max(n, 1)
        return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, 0)

    def _run_within(self, values: Values) -> int:
        """The number of values from the first on that lie side by side in one array."""
        if values[0] not in self.within:
            return 0
        stack, place = self.within[values[0]]
        n = 1
        while (
            n < len(values) and values[n] in self.within and self.within[values[n]][0] is stack and self.within[values[n]][1] == place + n
        ):
            n += 1
        return n

    def _one_array(self, values: Values) -> Array | None:
        """The part of an array of which the values are consecutive slices along one axis."""
        known = [self.slices.get(v) for v in values]
        first = known[0]
        if first is None:
            return None
        array, axis, start = first
        if any(s is None or s[:2] != (array, axis) or s[2] != start + k for k, s in enumerate(known)):
            return None
        part = lax.slice_in_dim(self.read(array), start, start + len(values), axis=axis)
        front = jnp.moveaxis(part, axis, 0)
        return front.reshape(len(values), *self.flat.shapes[values[0]])


def _cut(flat: Flat, chains: Sequence[Chain], pieces: int) -> Iterator[_Scan]:
    """Chains whole, or in about so many pieces of two blocks or more. A chain that reads what pieces of others make is cut where most of it
    begins to come from another piece, so that it reads theirs whole."""
    if pieces == 1:
        yield from (_Scan(flat, chain, range(chain.count)) for chain in chains)
        return
    maker: dict[int, int] = {}
    for chain in chains:
        makers = [Counter(maker[role.values[b]] for role in chain.given() if role.values[b] in maker) for b in range(chain.count)]
        most = [max(counts, key=counts.__getitem__, default=-1) for counts in makers]
        changes = [b for b in range(1, chain.count) if most[b] != most[b - 1]]
        starts = [0]
        for b in changes if max(most) >= 0 else [chain.count * k // pieces for k in range(1, pieces)]:
            if b - starts[-1] >= LEAST_PIECE and chain.count - b >= LEAST_PIECE:
                starts.append(b)
        for start, stop in itertools.pairwise((*starts, chain.count)):
            scan = _Scan(flat, chain, range(start, stop))
            yield scan
            maker.update((v, scan.start) for eqn in flat.equations[scan.start : scan.end] for v in eqn.outs)


def _slices(flat: Flat) -> dict[int, tuple[int, int, int]]:
    """The values that are one position of an axis of another, by number: the other, the axis, and the position."""
    found: dict[int, tuple[int, int, int]] = {}
    for eqn in flat.equations:
        v = eqn.ins[0] if eqn.ins else -1
        if eqn.prim.name == "slice" and eqn.params["strides"] is None:
            shape, out = flat.shapes[v], flat.shapes[eqn.outs[0]]
            cut = [a for a, (whole, part) in enumerate(zip(shape, out)) if whole != part]
            if len(cut) == 1 and out[cut[0]] == 1:
                found[eqn.outs[0]] = v, cut[0], eqn.params["start_indices"][cut[0]]
        elif eqn.prim.name == "squeeze" and v in found:
            found[eqn.outs[0]] = found[v]
    return found


def _line(body: Sequence[Equation], count: int) -> Source | None:
    """The line where a block begins, in the innermost function that made most of it, with the number of blocks."""
    sources = [eqn.source for eqn in body if eqn.source is not None]
    if not sources:
        return None
    calls = [[*reversed(source.callers), (source.file, source.line, source.function)] for source in sources]
    paths = [tuple((file, function) for file, _, function in frames) for frames in calls]
    shared = Counter(path[:depth] for path in paths for depth in range(1, len(path) + 1))
    around = max((path for path, n in shared.items() if n >= MOST_OF * len(paths)), key=len, default=paths[0])
    first = next(k for k, path in enumerate(paths) if path[: len(around)] == around)
    file, line, function = calls[first][len(around) - 1]
    return Source(file, line, function, backward=sources[first].backward, blocks=count)


def results_of(eqn: Equation, operands: Sequence[Array]) -> list[Array]:
    """The results of an equation on other operands."""
    results = eqn.prim.bind(*operands, **eqn.prim.get_bind_params(eqn.params))
    return list(results) if eqn.prim.multiple_results else [results]


def strong(x: Array) -> Array:
    """The same without a weak type."""
    return x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else lax.convert_element_type(x, x.dtype)
