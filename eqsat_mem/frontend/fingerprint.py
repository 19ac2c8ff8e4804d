"""Jaxprs compared by what they compute, and programs: two traces of the same lines have equal fingerprints."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from eqsat_mem.frontend.inline import source_of
from eqsat_mem.ir import Block, Call, Program
from eqsat_mem.ir.jaxprs import CALLED

SMALL_BYTES = 4096
"""Arrays of at most so many bytes are compared by their values, larger ones by identity."""


_SIMPLE = frozenset((str, int, bool, type(None), lax.Precision))
"""Types of most parameters, whose values are compared as they are."""


@dataclass(frozen=True)
class Same:
    """An object that equals itself only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def fingerprint(closed: ClosedJaxpr, *, lines: bool = True) -> Hashable:
    """A key that is equal for jaxprs with the same equations in the same order, of the same lines of the user's, and the same constants.

    Without ``lines`` it does not matter where an equation was written.
    """
    return _jaxpr(closed.jaxpr, lines), tuple(_value(const, lines) for const in closed.consts)


def program_fingerprint(program: Program, of_body: Callable[[ClosedJaxpr], Hashable] = fingerprint) -> Hashable:
    """A key that is equal for programs with the same terms in the same order, of the same lines of the user's, over the same indices.

    ``of_body`` is the key of what scans run in each step.
    """
    ids: dict[int, int] = {}
    calls: dict[Call, int] = {}
    terms: list[Hashable] = []
    for t in program.reachable():
        term, ids[t] = program.on(t, ids), len(ids)
        if isinstance(term, Block):
            terms.append((calls.setdefault(term.call, len(calls)), term.args, term.out, program.source.get(t)))
        else:
            terms.append((term, program.source.get(t)))
    roots = tuple(replace(o, term=ids[o.term]) for o in program.outputs), tuple(ids[t] for t in program.effects)
    known = tuple(program.indices), tuple(program.inputs), tuple(_value(const, True) for const in program.consts)
    changed = program.passes, tuple(program.repeated.items()), program.shares
    return tuple(terms), tuple(_call(call, of_body) for call in calls), roots, known, changed


def _call(call: Call, of_body: Callable[[ClosedJaxpr], Hashable]) -> Hashable:
    if call.effects:
        return Same(call)
    params = dict(call.params)
    body = of_body(params.pop("jaxpr")) if call.prim.name == "scan" else None
    others = tuple((name, _value(value, True)) for name, value in sorted(params.items()))
    axes = call.in_axes, call.out_axes, call.out_dtypes, call.pointwise, call.folds, call.scratch_bytes
    return Same(call.prim), body, others, axes


def _jaxpr(jaxpr: Jaxpr, lines: bool) -> Hashable:
    numbers: dict[Any, int] = {}

    def made(variable: Any) -> Hashable:
        numbers[variable] = len(numbers)
        return _told(variable.aval)

    def read(atom: Any) -> Hashable:
        return (_told(atom.aval)[0], _value(atom.val, lines)) if isinstance(atom, Literal) else numbers[atom]

    given = tuple(map(made, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
        (
            Same(eqn.primitive),
            tuple(map(read, eqn.invars)),
            tuple(map(made, eqn.outvars)),
            _params(eqn, lines),
            source_of(eqn) if lines else None,
        )
        for eqn in jaxpr.eqns
    )
    return given, equations, tuple(map(read, jaxpr.outvars))


@lru_cache(maxsize=4096)
def _told(aval: Any) -> tuple[str, bool]:
    """The text of an abstract value, and whether its type is weak."""
    return str(aval), bool(getattr(aval, "weak_type", False))


def _params(eqn: Any, lines: bool) -> Hashable:
    called = CALLED.get(eqn.primitive.name)
    if called is not None:  # nothing else of a call is looked at
        return _value(eqn.params[called], lines)
    return tuple((name, _value(value, lines)) for name, value in sorted(eqn.params.items()))


def _value(value: Any, lines: bool) -> Hashable:
    kind = type(value)
    if kind in _SIMPLE or isinstance(value, np.dtype):
        return kind, value
    if isinstance(value, ClosedJaxpr):
        return fingerprint(value, lines=lines)
    if isinstance(value, Jaxpr):
        return _jaxpr(value, lines)
    if isinstance(value, tuple | list):
        return kind, tuple(_value(item, lines) for item in value)
    if isinstance(value, Mapping):
        return kind, tuple((key, _value(item, lines)) for key, item in value.items())
    if isinstance(value, np.ndarray | np.generic) and value.nbytes <= SMALL_BYTES and not value.dtype.hasobject:
        return value.shape, value.dtype.str, value.tobytes()
    if isinstance(value, float | complex):
        return kind, repr(value)  # NaN equals itself here, and 0.0 is not -0.0
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return kind, value
