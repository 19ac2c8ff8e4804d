"""Sums that a body of a loop takes and leaves in parts, and that loops leave so: where each is summed over devices.

Each device has a part, and what is linear in the sum is linear in the parts. Whoever reads the sum otherwise gets it from all devices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from eqsat_mem.ir import Block, Input, bits
from eqsat_mem.ir.mesh import Names
from eqsat_mem.mesh.bodies import flow_of

if TYPE_CHECKING:
    from eqsat_mem.mesh.localise import Localiser


def in_parts(at: Localiser, t: int) -> Names:
    """The mesh axes along which an argument, or a result of a loop, is a sum of which each device has a part."""
    term = at.old.terms[t]
    if isinstance(term, Input):
        return next((s.names for s in at.placement.sums if s.argument == term.slot), ())
    if isinstance(term, Block) and (flow := flow_of(at, term)) is not None:
        return flow.parts[term.out]
    return ()


def unsummed(at: Localiser, t: int) -> int:
    """An argument or a result of a loop as a device has it: its part, where it is a sum in parts."""
    term = at.old.terms[t]
    if isinstance(term, Input):
        return at.arrived(t, term, at.arriving(term))
    assert isinstance(term, Block)
    flow = flow_of(at, term)
    assert flow is not None
    result = at.local.program.add(replace(term, call=flow.call, args=flow.args), at.old.source.get(t))
    at.local.state(at.ex, t, result, 0)
    return result


def summed(at: Localiser, u: int, t: int, have: int, want: int) -> tuple[int, int]:
    """The sum over devices of a value that is in parts, and the shares in which it then is: those wanted, if they are dealt out."""
    names, local, source = in_parts(at, t), at.local, at.old.source.get(t)
    if not names:
        return u, have
    wide = local.widened(u)
    far = not at.backend.scatters_far and not local.devices.far.isdisjoint(names)
    own = next((i for i in bits(want & ~have) if at.divided[i] == names and not far), None)
    total = local.reduced(wide, "add", names, source) if own is None else local.scattered(wide, local.across[own], names, source)
    return local.convert(total, local.program.terms[u].dtype), have | (0 if own is None else 1 << own)
