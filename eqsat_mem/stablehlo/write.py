"""JAX functions as files of StableHLO."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.extend.mlir import deserialize_portable_artifact
from jax.interpreters import mlir

from eqsat_mem.errors import StableHLOError
from eqsat_mem.stablehlo.endings import BYTECODE, EXPORT, TEXT, check_ending
from eqsat_mem.stablehlo.kept import inside
from eqsat_mem.stablehlo.modules import NEEDS_FLATBUFFERS


def written(fun: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], path: Path, platform: str | None = None) -> bytes:
    """The contents of a file of StableHLO with a function; the ending of its name says in which form.

    Args:
        fun: the function; the module of one that ``optimize`` has made donates the arguments that a call does.
        args: its positional arguments, pytrees of arrays or ``jax.ShapeDtypeStruct``.
        kwargs: its keyword arguments, likewise.
        path: the file.
        platform: JAX's name of the platform that the module is for; None is that in use.

    Raises:
        StableHLOError: if JAX cannot export the function, or the name has another ending.
    """
    check_ending(path)
    jitted = fun.for_a_file(*args, **kwargs) if hasattr(fun, "for_a_file") else jax.jit(fun, keep_unused=True)
    platforms = None if platform is None else (platform,)
    try:
        traced = jitted.trace(*args, **kwargs)
        lowered = traced.lower() if platforms is None else traced.lower(lowering_platforms=platforms)
        calls = [op.attributes["call_target_name"].value for op in inside(_module(lowered)) if "call_target_name" in op.attributes]
        checks = [export.DisabledSafetyCheck.custom_call(target) for target in dict.fromkeys(calls)]
        exported = export.export(jitted, platforms=platforms, disabled_checks=checks)(*args, **kwargs)
        return _WRITERS[path.suffix](exported)
    except (NotImplementedError, ValueError) as error:
        raise StableHLOError(f"the plan cannot be written as StableHLO: {error}") from error


def _module(lowered: Any) -> Any:
    return lowered.compiler_ir("stablehlo").operation


def _text(exported: export.Exported) -> bytes:
    with mlir.make_ir_context():
        module = deserialize_portable_artifact(exported.mlir_module_serialized)
        return str(module.operation.get_asm(enable_debug_info=False)).encode()


def _serialized(exported: export.Exported) -> bytes:
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise StableHLOError(NEEDS_FLATBUFFERS) from error


_WRITERS: dict[str, Callable[[export.Exported], bytes]] = {
    TEXT: _text,
    BYTECODE: lambda exported: exported.mlir_module_serialized,
    EXPORT: _serialized,
}
