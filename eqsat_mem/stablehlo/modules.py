"""Files and texts as modules: StableHLO as text, as bytecode, or as ``jax.export`` serialises it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax import export
from jax.extend.mlir import deserialize_portable_artifact, ir
from jax.interpreters import mlir

from eqsat_mem.errors import StableHLOError
from eqsat_mem.stablehlo.endings import ENDINGS

_BYTECODE = b"ML\xefR"
"""The first bytes of MLIR's bytecode."""

NEEDS_FLATBUFFERS = "files of jax.export need the package flatbuffers: pip install 'eqsat-mem[export]'"
Module = str | bytes | Path | export.Exported
"""Where a module may come from."""


def module_of(given: Module) -> tuple[Any, export.Exported | None, str]:
    """A module in MLIR, the export that it comes from if it does, and the name of its file.

    Raises:
        StableHLOError: if it is no StableHLO.
    """
    name = "module"
    if isinstance(given, str) and "\n" not in given and Path(given).suffix in ENDINGS:
        given = Path(given)
    if isinstance(given, Path):
        name = str(given)
        try:
            given = given.read_bytes()
        except OSError as error:
            raise StableHLOError(f"{name} cannot be read: {error.strerror}.") from error
    if isinstance(given, bytes) and not given.startswith(_BYTECODE):
        given = _text_or_export(given, name)
    with mlir.make_ir_context():
        if isinstance(given, export.Exported):
            return deserialize_portable_artifact(given.mlir_module_serialized), given, name
        return _parsed(given, name), None, name


def _text_or_export(data: bytes, name: str) -> str | export.Exported:
    try:
        text = data.decode()
        if "func" in text:
            return text
    except UnicodeDecodeError:
        pass
    try:
        return export.deserialize(bytearray(data))
    except ImportError as error:
        raise StableHLOError(NEEDS_FLATBUFFERS) from error
    except Exception as error:  # flatbuffers reads whatever it is given, and fails anywhere
        raise StableHLOError(
            f"{name} is neither StableHLO, as text or bytecode, nor a file of jax.export ({type(error).__name__}: {error})."
        ) from error


def _parsed(given: str | bytes, name: str) -> Any:
    try:
        if isinstance(given, str):
            return ir.Module.parse(given)
        try:
            return deserialize_portable_artifact(given)
        except (ValueError, RuntimeError):  # bytecode of StableHLO itself, not of the form that stays the same over versions
            return ir.Module.parse(given)
    except (ir.MLIRError, ValueError) as error:
        raise StableHLOError(f"{name} is not a module of StableHLO: {_in_file(str(error), name)}") from error


def _in_file(message: str, name: str) -> str:
    """An error of MLIR on one line, with the file's name in the place of the text that it was given."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error:")] or lines[:1]
    return told[0].replace('"-":', f"{name}:")
