"""The scans, ``while`` loops and branches of a program: their operands, carries and stacked results, and the indices of their steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr
from jax.interpreters import partial_eval as pe

from eqsat_mem.ir import Axes, Block, Call, Program, Rename, axes_mask, mask_of
from eqsat_mem.ir.jaxprs import consts_and_carries, repeatable


@dataclass(frozen=True, eq=False)
class Scan:
    """A scan of a program.

    Attributes:
        call: its call.
        args: its operands.
        results: its used results, by their position in the call.
        order: its position among the scans, loops and branches of the program.
        axes: its scan axes, the indices that represent its steps, as bits.
        repeatable: whether its steps may be run again with the same result.
    """

    call: Call
    args: tuple[int, ...]
    results: dict[int, int]
    order: int
    axes: int
    repeatable: bool

    @property
    def first_carry(self) -> int:
        return consts_and_carries(self.call.params)[0]

    @property
    def carries(self) -> int:
        return consts_and_carries(self.call.params)[1]

    @property
    def consts(self) -> tuple[int, ...]:
        return self.args[: self.first_carry]

    @property
    def const_axes(self) -> Sequence[Axes]:
        return self.call.in_axes[: self.first_carry]

    @property
    def init(self) -> tuple[int, ...]:
        return self.args[self.first_carry : self.first_carry + self.carries]

    @property
    def xs(self) -> tuple[int, ...]:
        return self.args[self.first_carry + self.carries :]

    def is_stepped(self, axes: Axes) -> bool:
        """Whether a value that lies along these axes has one slice for each step: the first is a scan axis, and no other one is."""
        return len(axes[0]) == 1 and axes_mask(axes) & self.axes == 1 << axes[0][0]

    @property
    def whole_xs(self) -> dict[int, int]:
        """The operands read step by step that have no slice for each step, and so are laid out whole, by position."""
        axes = self.call.in_axes[len(self.args) - len(self.xs) :]
        return {k: t for k, (t, a) in enumerate(zip(self.xs, axes)) if not self.is_stepped(a)}

    @property
    def sliced_xs(self) -> list[int]:
        """The other operands read step by step: each step computes or reads a slice along its scan axis."""
        whole = self.whole_xs
        return [t for k, t in enumerate(self.xs) if k not in whole]

    @property
    def length(self) -> int:
        return int(self.call.params["length"])

    @property
    def reverse(self) -> bool:
        return bool(self.call.params["reverse"])

    @property
    def body(self) -> ClosedJaxpr:
        body: ClosedJaxpr = self.call.params["jaxpr"]
        return body

    def stacked(self) -> Iterator[tuple[int, int]]:
        """Yield the stacked results that are used: their positions among all stacked results, and their terms."""
        return ((k - self.carries, t) for k, t in self.results.items() if k >= self.carries)

    def stepped_results(self) -> list[int]:
        """The stacked results that are used and have one slice for each step."""
        axes = self.call.out_axes[self.carries :]
        return [t for k, t in self.stacked() if self.is_stepped(axes[k])]

    def needs_carry(self, wanted: Iterable[int]) -> bool:
        """Whether a step needs its carry to compute the stacked results at these positions."""
        used = [False] * len(self.body.out_avals)
        for k in wanted:
            used[self.carries + k] = True
        _, inputs = pe.dce_jaxpr(self.body.jaxpr, used)
        return any(inputs[self.first_carry : self.first_carry + self.carries])


@dataclass(frozen=True, eq=False)
class While(Scan):
    """A ``while`` loop: it has a carry, reads the same values in every iteration, and has no stacked results."""

    @property
    def first_carry(self) -> int:
        return self.condition_consts + int(self.call.params["body_nconsts"])

    @property
    def condition_consts(self) -> int:
        return int(self.call.params["cond_nconsts"])

    @property
    def carries(self) -> int:
        return len(self.args) - self.first_carry

    @property
    def condition(self) -> ClosedJaxpr:
        condition: ClosedJaxpr = self.call.params["cond_jaxpr"]
        return condition

    @property
    def body(self) -> ClosedJaxpr:
        body: ClosedJaxpr = self.call.params["body_jaxpr"]
        return body


@dataclass(frozen=True, eq=False)
class Choice(Scan):
    """A ``cond`` or ``switch``: one of its branches runs once, and reads all operands except the number of the branch."""

    @property
    def consts(self) -> tuple[int, ...]:
        return self.args[1:]

    @property
    def const_axes(self) -> Sequence[Axes]:
        return self.call.in_axes[1:]

    @property
    def init(self) -> tuple[int, ...]:
        return self.args[:1]

    @property
    def xs(self) -> tuple[int, ...]:
        return ()

    @property
    def branches(self) -> Sequence[ClosedJaxpr]:
        branches: Sequence[ClosedJaxpr] = self.call.params["branches"]
        return branches


def repeats(program: Program) -> Iterator[Scan]:
    """Yield the scans of more than one step, the ``while`` loops and the choices of a program that have no effects, in order."""
    found: dict[Call, dict[int, int]] = {}
    args: dict[Call, tuple[int, ...]] = {}
    for t in program.reachable():
        term = program.terms[t]
        if isinstance(term, Block) and not term.call.effects and _runs_bodies(term.call):
            found.setdefault(term.call, {})[term.out] = t
            args[term.call] = term.args
    scan_axes = _merged([_scan_axes(program, call, args[call]) if call.prim.name == "scan" else 0 for call in found])
    for order, ((call, results), mask) in enumerate(zip(found.items(), scan_axes)):
        if call.prim.name == "scan":
            yield Scan(call, args[call], results, order, mask, repeatable(call.params["jaxpr"].jaxpr))
        else:
            kind = While if call.prim.name == "while" else Choice
            yield kind(call, args[call], results, order, mask, False)


def _runs_bodies(call: Call) -> bool:
    return call.prim.name in ("while", "cond") or (call.prim.name == "scan" and call.params["length"] > 1)


def _scan_axes(program: Program, call: Call, args: Sequence[int]) -> int:
    """Return the scan axes of a scan as bits, including the index of another scan whose result it reads under a renamed index."""
    consts, carries = consts_and_carries(call.params)
    first = consts + carries
    axes = [*call.in_axes[first:], *call.out_axes[carries:]]
    mask = mask_of(a[0][0] for a in axes if len(a[0]) == 1)
    for arg in args[first:]:
        term = program.terms[arg]
        if isinstance(term, Rename):
            mask |= mask_of(s for s, d in term.pairs if mask >> d & 1)
    return mask


def _merged(masks: list[int]) -> list[int]:
    """Return, for each set of bits, the union of all sets connected to it by intersections, directly or through others."""
    out = list(masks)
    changed = True
    while changed:
        new = [0] * len(out)
        for k, mask in enumerate(out):
            for other in out:
                new[k] |= other if other & mask else 0
        changed, out = new != out, new
    return out
