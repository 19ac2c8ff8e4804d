"""The endings of files of StableHLO."""

from __future__ import annotations

from pathlib import Path

from eqsat_mem.errors import StableHLOError

TEXT, BYTECODE, EXPORT = ".mlir", ".mlirbc", ".jax"
ENDINGS = (TEXT, BYTECODE, EXPORT)


def check_ending(path: Path) -> None:
    """Raise ``StableHLOError`` if the ending of a name does not say what to write."""
    if path.suffix not in ENDINGS:
        raise StableHLOError(
            f"{path.name} ends with none of {', '.join(ENDINGS)}: these are StableHLO as text, its bytecode, and a file of jax.export; a "
            "plan for optimize(f, plan=...) ends with .plan."
        )
