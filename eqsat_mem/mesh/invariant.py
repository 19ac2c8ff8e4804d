"""The invariant of programs of one device: a value that differs between devices is a share, or on its way to a collective.

It is checked term by term, from what terms and collectives mean, whatever wrote the program.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from eqsat_mem.ir import (
    Axes,
    Block,
    Dot,
    Fold,
    Input,
    Iota,
    Literal,
    Map,
    Program,
    Rename,
    Term,
    axes_mask,
    bits,
    children,
    folded,
    mask_of,
)
from eqsat_mem.ir.mesh import Shares, Spec
from eqsat_mem.ir.ops import MONOIDS, block_op
from eqsat_mem.mesh.padding import UPDATES
from eqsat_mem.mesh.rows import row_axis

JOINING = frozenset({"all_reduce", "gather_shares", "sum_to_shares", "merge_top_k", "merge_top_k_in_rounds"})
"""Collectives after which nobody's part is missing along their mesh axes."""


def check(program: Program) -> None:
    """Raise ``AssertionError`` naming the term if a program of one device takes for the whole what is its own."""
    shares = program.shares
    if shares is None:
        return
    parts: list[frozenset[str]] = []
    positions: set[int] = set()
    for t, term in enumerate(program.terms):
        try:
            _check_term(program, shares, t, parts, positions)
        except AssertionError as error:
            error.add_note(f"at %{t}: {term}")  # only now: a loop's text has all that it runs
            raise
    for k, (o, spec) in enumerate(zip(program.outputs, shares.results, strict=True)):
        missing = parts[o.term] ^ frozenset(name for s in shares.sums if s.result == k for name in s.names)
        assert not missing, f"result {k} is a part along {sorted(parts[o.term])}, and not along {sorted(missing)} as it should be"
        assert o.term not in positions, f"result {k} has positions in a share"
        assert not axes_mask(o.axes) & mask_of(shares.padded), f"result {k} has positions beyond the last"
        try:
            _check_lying(o.axes, spec, shares)
        except AssertionError as error:
            error.add_note(f"at result {k}")
            raise


def _check_term(program: Program, shares: Shares, t: int, parts: list[frozenset[str]], positions: set[int]) -> None:
    """Check a term, given along which mesh axes those before are parts, and which of them are positions in a share; note both of it."""
    term = program.terms[t]
    parts.append(_missing(program, shares, t, parts))
    names = shares.names(program.free[t])
    assert len(set(names)) == len(names), "two indices in shares along one mesh axis"
    if isinstance(term, Input):
        _check_lying(term.axes, shares.arguments[term.slot], shares)
    elif _counts_own_rows(program, shares, t, positions):
        positions.add(t)
    elif not _is_exchange(program, t):
        _check_operands(program, shares, t)
        assert all(_ends(program, shares, c, i) for c, i in _summed(program, shares, t)), "positions beyond the last are summed"
        if positions.intersection(children(term)) and not _reads_own_rows(program, term):
            assert any(_counts_devices(program, a) for a in children(term)), "positions in a share without its beginning"


def _is_exchange(program: Program, t: int) -> bool:
    term = program.terms[t]
    return isinstance(term, Block) and "devices" in term.call.params and "names" in term.call.params


def _counts_own_rows(program: Program, shares: Shares, t: int, positions: Container[int]) -> bool:
    """Whether a value is positions in a share, or counts on from such by as much on every device."""
    term = program.terms[t]
    if isinstance(term, Iota):
        return bool(shares.dealt_out(1 << term.index))
    counted = [a for a in children(term) if a in positions]
    others = (program.terms[a] for a in children(term) if a not in positions)
    return isinstance(term, Map) and len(counted) == 1 and all(isinstance(other, Literal) for other in others)


def _reads_own_rows(program: Program, term: Term) -> bool:
    """Whether rows are read at positions that count from where the share of a device begins, or from a row before it that it received."""
    if not isinstance(term, Block) or term.call.prim.name != "slice_at":
        return False
    rows = program.terms[term.args[0]]
    return bool(_shifted_rows(program, term)) or (isinstance(rows, Block) and rows.call.prim.name == "neighbouring_rows")


def _shifted_rows(program: Program, term: Block) -> int:
    """The rows of its own share that a device reads at positions in the share, or in windows that lie in it side by side."""
    if program.shares is None:
        return 0
    if term.call.prim.name != "slice_at":
        return _side_by_side(program, program.shares, term)
    return program.shares.dealt_out(program.free[term.args[0]]) & axes_mask((term.call.in_axes[0][term.call.params["axis"]],))


def _side_by_side(program: Program, shares: Shares, term: Block) -> int:
    """The rows of its own share on which a device has whole windows side by side, as many as its share of them has."""
    row = block_op(term.call.prim.name).windows
    if row is None or row.cuts:
        return 0
    others = axes_mask((*term.call.out_axes[0], *sum(term.call.in_axes[1:], ())))
    read = axes_mask(term.call.in_axes[0]) & ~term.call.pointwise
    extents, spread = [index.extent for index in program.indices], shares.spread
    pairs = ((i, o) for i in bits(shares.dealt_out(read)) for o in bits(shares.dealt_out(others)))
    return mask_of(i for i, o in pairs if spread[i] == spread[o] and extents[i] % extents[o] == 0)


def _check_operands(program: Program, shares: Shares, t: int) -> None:
    """Operands agree on what they have whole, and an operation binds nothing of which it has a share."""
    term, every = program.terms[t], program.free[t]
    if isinstance(term, Rename):
        shared = [sorted(shares.names(mask)) for mask in (program.free[term.arg], program.free[t])]
        assert shared[0] == shared[1], "new names are dealt out otherwise"
        return
    if isinstance(term, Block) and term.call.bodies and all(b is not None and b.ex.program.shares is not None for b in term.call.bodies):
        return  # a loop or branch, whose bodies take shares and have been checked themselves
    for c in children(term):
        every |= program.free[c]
    for c in (c for c in children(term) if not isinstance(program.terms[c], Iota)):  # positions in a share are those of every share
        mixed = shares.dealt_out(program.free[c]) & ~shares.dealt_out(every)
        assert not mixed, "a share meets the whole"
    if isinstance(term, Block):
        bound = axes_mask(sum(term.call.in_axes, ())) & ~(
            term.call.pointwise | term.call.folds | _own_rows(program, term) | _untouched(term) | _shifted_rows(program, term)
        )
        assert not shares.dealt_out(axes_mask(sum(term.call.in_axes, ()))) & bound, "an operation binds an index in shares"


def _untouched(term: Block) -> int:
    """The indices of axes that a reshape leaves as they are: shares of them are as good as the whole."""
    if term.call.prim.name != "reshape":
        return 0
    return axes_mask(tuple(a for a, b in zip(term.call.in_axes[0], term.call.out_axes[0]) if a == b))


def _summed(program: Program, shares: Shares, t: int) -> Iterator[tuple[int, int]]:
    """The operands of a fold with the padded indices that it folds of them, unless what stands beyond the last position changes nothing."""
    term = program.terms[t]
    monoid = term.monoid if isinstance(term, Fold) else "add"
    if isinstance(term, Fold | Dot) and not MONOIDS[monoid].idempotent:
        yield from ((c, i) for c in children(term) for i in bits(term.over & program.free[c]) if i in shares.padded)
    if isinstance(term, Block) and (row := block_op(term.call.prim.name)).writes_into and not MONOIDS[row.monoid or "max"].idempotent:
        yield from ((term.args[UPDATES], i) for i in bits(term.call.folds) if i in shares.padded)


def _ends(program: Program, shares: Shares, t: int, i: int) -> bool:
    """Whether a value is nothing beyond the last position of a padded index: it is chosen there by a comparison of positions."""
    term = program.terms[t]
    if _is_exchange(program, t):
        return any(_ends(program, shares, c, i) for c in children(term))
    return isinstance(term, Map) and term.op == "select_n" and _compares(program, shares, term.args[0], i)


def _compares(program: Program, shares: Shares, t: int, i: int) -> bool:
    term = program.terms[t]
    if isinstance(term, Map) and term.op == "and":
        return any(_compares(program, shares, a, i) for a in term.args)
    if not isinstance(term, Map) or term.op != "lt" or not program.free[t] >> i & 1:
        return _is_exchange(program, t) and any(_compares(program, shares, c, i) for c in children(term))
    last = program.terms[term.args[1]]
    return isinstance(last, Literal) and last.value == shares.padded[i]


def _missing(program: Program, shares: Shares, t: int, parts: list[frozenset[str]]) -> frozenset[str]:
    """The mesh axes along which a value is a part, which others have to be combined with."""
    term = program.terms[t]
    if isinstance(term, Input):
        return frozenset(name for s in shares.sums if s.argument == term.slot for name in s.names)
    if isinstance(term, Block) and (inside := _of_body(term)) is not None:
        before = term.call.params.get("cond_nconsts", 0)
        begun = {s.argument + before for s in inside.sums}  # of which no other result is made
        found = frozenset[str]().union(*(parts[c] for k, c in enumerate(term.args) if k not in begun))
        return found.union(name for s in inside.sums if s.result == term.out for name in s.names)
    found = frozenset[str]().union(*(parts[c] for c in children(term)))
    if isinstance(term, Block) and term.call.prim.name == "gather":
        return found.union(shares.names(shares.dealt_out(program.free[term.args[0]]) & _own_rows(program, term)))
    if isinstance(term, Block) and term.call.prim.name in JOINING:
        return found.difference(term.call.params["names"])
    read = 0
    for c in children(term):
        read |= program.free[c]
    found = found.union(_of_first(program, term))
    return found.union(shares.names(read & folded(term))) if shares.dealt_out(read) & folded(term) else found


def _of_first(program: Program, term: Term) -> Iterator[str]:
    """The mesh axes along which a value is that of the first device, and nothing on others: a part of what it is there."""
    if isinstance(term, Map) and term.op == "select_n":
        chosen, other = program.terms[term.args[0]], program.terms[term.args[1]]
        if isinstance(other, Literal) and other.value == 0 and isinstance(chosen, Map) and chosen.op == "eq":
            number, first = (program.terms[a] for a in chosen.args)
            if isinstance(number, Block) and number.call.prim.name == "device_number" and isinstance(first, Literal) and first.value == 0:
                yield from number.call.params["names"]


def _of_body(term: Block) -> Shares | None:
    """The shares in the body of a loop that has been planned."""
    body = term.call.bodies[-1] if term.call.bodies else None
    return None if body is None else body.ex.program.shares


def _own_rows(program: Program, term: Block) -> int:
    """The rows that a gather or scatter reads and writes at positions that the device counts from where its share begins."""
    a = row_axis(term.call)
    if a is None or not _counts_devices(program, term.args[1]):
        return 0
    return axes_mask((term.call.in_axes[0][a], term.call.out_axes[0][a] if term.call.prim.name != "gather" else ()))


def _check_lying(axes: Axes, spec: Spec, shares: Shares) -> None:
    """An array in shares has along each axis the share of an index first, and none of another."""
    inside = shares.dealt_out(axes_mask(axes))
    for axis, names in zip(axes, spec, strict=True):
        own = [(a, shares.spread[i]) for a, i in enumerate(axis) if inside >> i & 1]
        assert own == ([(0, names)] if names else []), f"shares along {names} where {own} are dealt out"


def _counts_devices(program: Program, t: int) -> bool:
    """Whether a value is made of the number of the device, or of those of all."""
    term, shares = program.terms[t], program.shares
    if isinstance(term, Block):
        return bool(term.call.prim.name == "device_number")
    if isinstance(term, Iota):
        return shares is not None and term.index in shares.across.values()
    return isinstance(term, Map) and any(_counts_devices(program, a) for a in term.args)
