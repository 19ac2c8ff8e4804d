"""Source of a function that several devices run together."""

from __future__ import annotations

from collections.abc import Sequence

from eqsat_mem.codegen.source import tuple_text
from eqsat_mem.ir.mesh import Shares, Spec
from eqsat_mem.ir.ops.collectives import names_text


def on_mesh(name: str, local: str, arguments: Sequence[str], shares: Shares) -> list[str]:
    """The function of all devices, each of which runs ``local`` on its shares. Without a mesh it takes that of ``jax.set_mesh``."""
    ins, outs = (tuple_text([spec_text(spec) for spec in specs]) for specs in (shares.arguments, shares.results))
    given = ", ".join(arguments)
    return [
        f"def {name}({given}{', ' if given else ''}mesh=None):",
        f"    # on {shares.devices}",
        f"    every = jax.shard_map({local}, mesh=mesh, in_specs={ins}, out_specs={outs}, check_vma=False)",
        f"    return every({given})",
        "",
    ]


def spec_text(spec: Spec) -> str:
    """Source of a ``PartitionSpec``; trailing axes that stay whole are left out."""
    last = max((a + 1 for a, names in enumerate(spec) if names), default=0)
    return f"P({', '.join(names_text(names) if names else 'None' for names in spec[:last])})"
