"""Single rows at computed positions, where devices have the rows in shares: each reads and writes its own.

Positions count from where the share of a device begins. Of rows that are read each device has its own, and zeros in place of others. The
sum over devices has all, bit for bit, since it is that of the bits as integers. What is written to rows of others is dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jax import lax

from eqsat_mem.ir import Block, Call, Map, Source, Term, bits, mask_of
from eqsat_mem.ir.mesh import Names
from eqsat_mem.mesh.local import PLACES, Local

if TYPE_CHECKING:
    from eqsat_mem.mesh.localise import Localiser

MODE = lax.GatherScatterMode


def row_axis(call: Call) -> int | None:
    """The axis of its first operand along which a call reads or writes single rows, at positions that are its second operand."""
    numbers: Any = call.params.get("dimension_numbers")
    if call.prim.name == "gather":
        places, single = numbers.start_index_map, numbers.collapsed_slice_dims
    elif call.prim.name.startswith("scatter"):
        places, single = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
    else:
        return None
    return int(places[0]) if len(places) == 1 and places[0] in single else None


def read(term: Term) -> int:
    """The index of the rows that a gather reads, as a mask; none where it does something else."""
    if not isinstance(term, Block) or term.call.prim.name != "gather" or np.dtype(term.dtype).kind in "bc":
        return 0
    a, params = row_axis(term.call), term.call.params
    if a is None or len(term.call.in_axes[0][a]) != 1 or (params["mode"] is MODE.FILL_OR_DROP and params["fill_value"] is None):
        return 0
    return 1 << term.call.in_axes[0][a][0]


def written(at: Localiser, term: Block) -> int:
    """The index of the rows that a scatter writes, as a mask, if devices can do so for their shares of them."""
    a = row_axis(term.call)
    if a is None or term.call.prim.name == "gather" or len(term.call.out_axes[0][a]) != 1:
        return 0
    free, (before, *_), (after,) = at.old.free, (*term.call.in_axes[0][a], -1), term.call.out_axes[0][a]
    alike = before == -1 or not free[term.args[0]] >> before & 1 or at.divided.get(before) == at.divided.get(after)
    return 1 << after if alike and not any(free[arg] >> after & 1 for arg in term.args[1:]) else 0


def with_rows(at: Localiser, t: int, shares: int) -> int:
    """The shares that a term is computed in, with those of rows.

    A gather reads from shares of its rows where they are in shares, if less is exchanged for what it reads than for the rows themselves; a
    scatter that writes shares has those of what it writes into.
    """
    term, old, count = at.old.terms[t], at.old, at.local.devices.count
    if isinstance(term, Block) and shares & written(at, term):
        return with_table(at, t, shares)
    rows = read(term)
    if not rows or not isinstance(term, Block):
        return shares
    table, (i,) = term.args[0], bits(rows)
    lying = at.natural(table)
    known = any(u == table and not own & rows for u, own in at.given)
    if not lying & rows or known or rows & (old.free[t] | old.free[term.args[1]]):
        return shares
    names = at.divided[i]
    rest = mask_of(j for j in bits(shares) if not set(names).intersection(at.divided[j]))
    made, gathered = (
        old.nbytes(u) / count([n for j in bits(own & old.free[u]) for n in at.divided[j]]) for u, own in ((t, rest), (table, lying & ~rows))
    )
    part = (count(names) - 1) / count(names)
    kinds = ("all_reduce", 2 * made), ("gather_shares", gathered)
    summed, exchanged = (at.backend.exchange_s(kind, b * part, names, at.local.devices) for kind, b in kinds)
    return rest | rows if summed <= exchanged else shares


def with_table(at: Localiser, t: int, shares: int) -> int:
    """The shares that a term is computed in: a scatter has those of what it writes into where it writes shares, and there only."""
    term = at.old.terms[t]
    if not isinstance(term, Block) or not (rows := written(at, term)):
        return shares
    before, *_ = (*term.call.in_axes[0][row_axis(term.call) or 0], -1)
    table = 1 << before & at.old.free[term.args[0]] if before >= 0 else 0
    return shares | table if shares & rows else shares & ~table


def local_call(call: Call, computed: int, local: Call) -> Call:
    """The ``local`` form of a call, where positions count from the beginning of a share."""
    a = _in_shares(call, computed)
    if a is None:
        return local
    params: dict[str, Any] = {**call.params, "unique_indices": False}
    if call.prim.name == "gather":
        return replace(local, params={**params, "mode": MODE.CLIP, "fill_value": None})
    table = (*local.in_axes[0][:a], local.out_axes[0][a], *local.in_axes[0][a + 1 :])
    in_axes = local.in_axes if _is_read(call, a, computed) else (table, *local.in_axes[1:])
    return replace(local, in_axes=in_axes, params={**params, "mode": MODE.FILL_OR_DROP})


def local_args(at: Localiser, term: Block, computed: int, args: tuple[int, ...]) -> tuple[int, ...]:
    """The operands of a local call, with positions in the share."""
    a = _in_shares(term.call, computed)
    if a is None:
        return args
    axes = (term.call.in_axes if term.call.prim.name == "gather" else term.call.out_axes)[0]
    return (args[0], _counted(at, term.call, axes[a][0], args[1]), *args[2:])


def own_rows(at: Localiser, t: int, computed: int, found: int) -> int:
    """The rows that a device adds to those that all read: what it has ``found`` in its share, as integers.

    What stands for rows beyond the last comes from the first device.
    """
    term, local = at.old.terms[t], at.local
    assert isinstance(term, Block)
    (i,), mode = bits(read(term)), term.call.params["mode"]
    positions = at.value(term.args[1], computed & at.old.free[term.args[1]])
    dtype = np.dtype(term.dtype)
    nothing = local.number(0, dtype)
    if mode is MODE.FILL_OR_DROP:
        beyond = _outside(at, _wide(at, positions), at.old.indices[i].extent)
        first = local.device_number(at.divided[i])
        fills = local.map("and", beyond, local.map("eq", first, local.number(0, PLACES), dtype=np.dtype(bool)))
        nothing = local.map("select_n", fills, nothing, local.number(term.call.params["fill_value"], dtype), dtype=dtype)
    others = _outside(at, _counted(at, term.call, i, positions), local.share_extent(i))
    rows = local.map("select_n", others, found, nothing, dtype=dtype)
    return rows if dtype.kind in "iu" else _with_bits_of(local, rows, np.dtype(f"i{dtype.itemsize}"))


def all_rows(local: Local, own: int, dtype: Any, names: Names, source: Source | None) -> int:
    """The rows that devices have read of their shares, together."""
    total = local.reduced(own, "add", names, source)
    return total if local.program.terms[total].dtype == dtype else _with_bits_of(local, total, np.dtype(dtype))


def _with_bits_of(local: Local, t: int, dtype: np.dtype[Any]) -> int:
    return local.add(Map(dtype, "bitcast_convert_type", (t,), (("new_dtype", dtype),)))


def _in_shares(call: Call, computed: int) -> int | None:
    """The axis of the rows of a call that is computed in shares of them."""
    a = row_axis(call)
    if a is None:
        return None
    axis = (call.in_axes if call.prim.name == "gather" else call.out_axes)[0][a]
    return a if len(axis) == 1 and computed >> axis[0] & 1 else None


def _is_read(call: Call, a: int, computed: int) -> bool:
    """Whether the array that a scatter writes into has its rows in shares."""
    return any(computed >> i & 1 for i in call.in_axes[0][a])


def _wide(at: Localiser, positions: int) -> int:
    dtype = np.dtype(at.local.program.terms[positions].dtype)
    return positions if dtype.itemsize >= 4 else at.local.convert(positions, PLACES)


def _counted(at: Localiser, call: Call, i: int, positions: int) -> int:
    """Positions from where the share of a device begins; those that stand for the nearest rows are theirs."""
    local, positions = at.local, _wide(at, positions)
    dtype = local.program.terms[positions].dtype
    if call.params["mode"] is MODE.CLIP:
        last = local.number(at.old.indices[i].extent - 1, dtype)
        positions = local.map("min", local.map("max", positions, local.number(0, dtype)), last)
    first = local.map("mul", local.device_number(at.divided[i]), local.number(local.share_extent(i), PLACES))
    return local.map("sub", positions, local.convert(first, dtype))


def _outside(at: Localiser, positions: int, extent: int) -> int:
    """Whether there are no such positions."""
    local, boolean = at.local, np.dtype(bool)
    dtype = local.program.terms[positions].dtype
    ends = (local.map(name, positions, local.number(n, dtype), dtype=boolean) for name, n in (("lt", 0), ("ge", extent)))
    return local.map("or", *ends)
