"""Texts of values that are the same in every process, and keys made of them."""

from __future__ import annotations

import enum
import hashlib
import sys
import types
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive

from eqsat_mem.frontend.fingerprint import Same, fingerprint
from eqsat_mem.ir import Source

SIMPLE = (type(None), bool, int, float, complex, str, bytes, np.dtype)
RANDOM = ("prng", "threefry")
"""Words in the names of the settings of JAX that decide which random numbers an equation stands for."""


class Unstable(Exception):
    """A value that another process cannot be sure to recognise, such as a function of the user's."""


def program_key(closed: ClosedJaxpr) -> str:
    """A hash that is equal in another process exactly if the traced program is: its equations, constants, and kinds of random numbers.

    The lines that it was written in do not matter.

    Raises:
        Unstable: if it has operations or values of which that is not known.
    """
    config: Any = jax.config
    settings = [(name, getattr(config, name)) for name in sorted(config.values) if any(word in name for word in RANDOM)]
    return hashlib.sha256(f"{settings} {stable(fingerprint(closed, lines=False))}".encode()).hexdigest()


def stable(value: Any) -> str:
    """Text of a value that is equal in another process exactly if the value is.

    Raises:
        Unstable: for objects of which that is not known.
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool:  # what most of a program consists of
        return repr(value)
    if kind is tuple:
        return f"({', '.join(map(stable, value))},)"
    if isinstance(value, enum.Enum):
        return f"{kind.__qualname__}.{value.name}"
    if isinstance(value, Source):
        return _of_source(value, value.backward, value.callers, value.blocks)
    if isinstance(value, SIMPLE):
        return repr(value)
    if isinstance(value, Same):
        return _primitive(value.value)
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return _of_a_library(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{stable(key)}: {stable(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(stable, value))},)"
    if is_dataclass(value):
        return _of_fields(value)
    raise Unstable(kind)


def _of_fields(value: Any) -> str:
    return _of_a_library(type(value)) + stable({f.name: getattr(value, f.name) for f in fields(value)})


@lru_cache(maxsize=4096)
def _of_source(value: Source, *_beside: Any) -> str:
    """The text of a line, which many equations have; it equals others that differ in what stands beside it."""
    return _of_fields(value)


def _primitive(value: Any) -> str:
    """The name of a primitive of JAX's; one of the user's may have another meaning under the same name."""
    if not isinstance(value, Primitive) or not (value in _of_jax() or value in _of_jax.__wrapped__()):
        raise Unstable(value)
    return str(value.name)


@lru_cache(maxsize=1)
def _of_jax() -> frozenset[Any]:
    """The primitives that modules of JAX hold; more of them where further modules have been imported."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "jax"]
    return frozenset(value for module in modules for value in vars(module).values() if isinstance(value, Primitive))


def _of_a_library(value: Any) -> str:
    """The name of a class or function that comes with Python or with a package whose version is part of the key."""
    module = value.__module__ or ""
    if (
        module.partition(".")[0] not in ("builtins", "jax", "jaxlib", "numpy", "ml_dtypes", "eqsat_mem", "enum")
        or "<" in value.__qualname__
    ):
        raise Unstable(value)
    return f"{module}.{value.__qualname__}"
