"""Files that hold one plan each: those that ``Plan.save`` writes, and those of plans kept between processes.

A file is a line that says what it is, a line of JSON that can be read without running anything, and the pickled plan. A plan holds code:
who loads it trusts whoever wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from eqsat_mem.errors import OptionError
from eqsat_mem.frontend.stable import Unstable, program_key
from eqsat_mem.reports.plan import Plan

MAGIC = b"eqsat_mem plan 1\n"

Header = dict[str, Any]


@dataclass(frozen=True)
class Identity:
    """The program that a plan is for, as another process recognises it.

    Attributes:
        program: the hash of the traced program and its donated arguments.
        arguments: each argument as text: ``x: float32[600,3]``.
    """

    program: str
    arguments: tuple[str, ...]


def identity(jaxpr: ClosedJaxpr, arg_names: Sequence[str], donated: Sequence[int]) -> Identity:
    """The identity of a traced function.

    Raises:
        Unstable: if another process cannot recognise it.
    """
    arguments = (f"{name}: {aval.str_short()}" for name, aval in zip(arg_names, jaxpr.in_avals, strict=True))
    return Identity(f"{program_key(jaxpr)} {list(donated)}", tuple(arguments))


@dataclass(frozen=True, eq=False)
class LoadedRecord:
    """The record of a plan from a file that no function has taken yet."""

    identity: Identity
    versions: dict[str, str]
    backend: None = None

    @property
    def planned(self) -> Plan:
        """Raises ``ValueError``: there is no search."""
        raise ValueError("this plan comes from a file: optimize(f, plan=...).plan(...) can be explained and shown.")


def versions() -> dict[str, str]:
    """The versions of what compiles plans."""
    return {name: version(name) for name in ("jax", "jaxlib")}


def is_storable(plan: Plan) -> bool:
    """Whether the source of a plan names nothing but arrays: operations of Python cannot be stored."""
    return all(isinstance(value, np.ndarray | np.generic | jax.Array) for value in plan.namespace.values())


def packed(plan: Plan, **more: Any) -> bytes:
    """The content of a file with a plan, and with ``more`` in its header.

    Raises:
        TypeError, pickle.PicklingError: if it holds arrays that cannot be stored, such as those of random keys.
    """
    payload = pickle.dumps(plan)
    header = {
        **more,
        "sha256": hashlib.sha256(payload).hexdigest(),
        "name": plan.name,
        "limit_bytes": plan.limit_bytes,
        "peak_bytes": plan.held_bytes,
        "planned_s": sum(plan.seconds.values()),
    }
    return MAGIC + json.dumps(header).encode() + b"\n" + payload


def parts(data: bytes) -> tuple[Header, bytes]:
    """The header and the pickled plan of a file's content.

    Raises:
        ValueError: if it is no plan.
    """
    if not data.startswith(MAGIC):
        raise ValueError("it is no plan of this version")
    head, _, payload = data[len(MAGIC) :].partition(b"\n")
    header: Header = json.loads(head)
    return header, payload


def unpacked(header: Header, payload: bytes) -> Plan:
    """The plan of a file; running what it holds, unless it is damaged.

    Raises:
        ValueError: if it is damaged.
    """
    if header["sha256"] != hashlib.sha256(payload).hexdigest():
        raise ValueError("its content is not what its header says")
    plan: Plan = pickle.loads(payload)
    return plan


def saved(plan: Plan) -> bytes:
    """The content of a file that :func:`load` reads; raises what :meth:`Plan.save` does."""
    if plan.record is None:
        raise ValueError("this plan was not made by optimize(), so that nothing tells which function it is for.")
    if plan.mesh is not None:
        raise NotImplementedError("a plan for several devices cannot be saved: its devices belong to this process.")
    try:
        told = plan.record.identity
        if not is_storable(plan):
            raise Unstable
    except Unstable:
        raise NotImplementedError(
            f"the plan of {plan.name} cannot be saved: it calls operations of Python, such as callbacks or primitives of other packages."
        ) from None
    return packed(plan, program=told.program, arguments=told.arguments, versions=versions())


def save(plan: Plan, path: Path) -> None:
    """Write a plan to a file, whole or not at all: see :meth:`Plan.save`."""
    data = saved(plan)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)


def load(path: Path) -> Plan:
    """The plan in a file that :func:`save` wrote: see :meth:`Plan.load`."""
    try:
        header, payload = parts(path.read_bytes())
        told = Identity(header["program"], tuple(header["arguments"]))
        plan = unpacked(header, payload)
    except OSError as error:
        raise OptionError(f"the plan {path} cannot be read: {error.strerror}.") from None
    except Exception as error:  # whatever a damaged file makes Python raise
        raise OptionError(f"{path} is not a plan that Plan.save of this version wrote ({error}): plan again, and save that.") from error
    return replace(plan, record=LoadedRecord(told, header["versions"]))
