"""A jaxpr as one flat list of equations over numbered values: calls inlined, equal equations merged, dead ones gone.

Inlining changes no value: nested ``jit``, ``custom_jvp``, ``custom_vjp`` and checkpoints are their bodies, and a branch that
waits only for the platform is the branch of this platform.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import NamedSharding

from eqsat_mem.frontend.components import with_components
from eqsat_mem.frontend.decompose import plain_form
from eqsat_mem.frontend.elements import with_elements
from eqsat_mem.frontend.equal_updates import with_equal_updates
from eqsat_mem.frontend.flat_jaxpr import Equation, Flat, Plain
from eqsat_mem.frontend.foreign import definition
from eqsat_mem.frontend.known_numbers import known_number
from eqsat_mem.frontend.preferences import PLAIN, Preferences
from eqsat_mem.ir import Source
from eqsat_mem.ir.jaxprs import CALLED, IMPURE
from eqsat_mem.ir.ops import IDENTITIES, is_first_operand
from eqsat_mem.passes import COMPONENTS, ELEMENTS, EVERY, UPDATES, Pass


def flatten(closed: ClosedJaxpr, preferences: Preferences = PLAIN, passes: Collection[Pass] = EVERY) -> Flat:
    """The flat form of a closed jaxpr, as a backend prefers it; ``passes`` may change it."""
    work = _Flattening(Flat(), preferences, frozenset(passes))
    jaxpr = closed.jaxpr
    work.flat.inputs = [work.value(v.aval) for v in jaxpr.invars]
    work.flat.outputs = work.inline(jaxpr, closed.consts, work.flat.inputs, None)
    work.flat.weak = [bool(getattr(v.aval, "weak_type", False)) for v in jaxpr.outvars]
    work.flat.equations = _live(work.flat.equations, work.flat.outputs)
    if UPDATES in passes and (called := with_equal_updates(work.flat)) is not None:
        work.flat.equations = _live(called, work.flat.outputs)
    if ELEMENTS in passes and (apart := with_elements(work.flat)) is not None:
        work.flat.equations = _live(apart, work.flat.outputs)
    if COMPONENTS in passes and (apart := with_components(work.flat)) is not None:
        work.flat.equations = _live(apart, work.flat.outputs)
    used = {v for eqn in work.flat.equations for v in eqn.ins}.union(work.flat.outputs)
    work.flat.literals = {v: value for v, value in work.flat.literals.items() if v in used}
    work.flat.consts = {v: value for v, value in work.flat.consts.items() if v in used}
    return work.flat


def _live(equations: list[Equation], outputs: Iterable[int]) -> list[Equation]:
    """The equations that outputs and effects need."""
    needed, kept = set(outputs), []
    for eqn in reversed(equations):
        if eqn.effects or not needed.isdisjoint(eqn.outs):
            needed.update(eqn.ins)
            kept.append(eqn)
    return kept[::-1]


class _Flattening:
    """The state of one flattening: the numbers of literals and of pure equations seen so far."""

    def __init__(self, flat: Flat, preferences: Preferences, passes: frozenset[Pass]):
        self.flat, self.preferences, self.passes = flat, preferences, passes
        self.applied: frozenset[str] = frozenset()
        self.known_literals: dict[Any, int] = {}
        self.known_consts: dict[int, int] = {}
        self.known_equations: dict[Any, tuple[int, ...]] = {}
        self.producer: dict[int, Equation] = {}

    def value(self, aval: Any) -> int:
        return self.flat.new(getattr(aval, "shape", ()), getattr(aval, "dtype", np.dtype(bool)))

    def inline(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[int], caller: Source | None) -> list[int]:
        """The values of a jaxpr's results; ``caller`` is the line of a library function that holds it."""
        env = dict(zip(jaxpr.invars, args))
        env.update((var, self.const(value, var.aval)) for var, value in zip(jaxpr.constvars, consts))

        def read(atom: Any) -> int:
            return self.literal(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, ins, caller)))
        self.flat.note(env)
        return [read(v) for v in jaxpr.outvars]

    def equation(self, eqn: Any, ins: list[int], caller: Source | None) -> Sequence[int]:
        """The values of one equation's results."""
        name, params = eqn.primitive.name, eqn.params
        source = caller or source_of(eqn)
        if name in CALLED:
            return self.call(params[CALLED[name]], ins, source)
        if name == "cond" and (branch := self.branch(params, ins[0])) is not None:
            return self.call(branch, ins[1:], source)
        if name in IDENTITIES or only_places(name, params):
            return ins
        if is_first_operand(name, params, len(ins)):
            return ins[:1]
        if name == "convert_element_type" and (same := self.converted(ins[0], params["new_dtype"])) is not None:
            return [same]
        if len(eqn.outvars) == 1 and (known := known_number(self.flat, name, params, ins, eqn.outvars[0].aval.dtype)) is not None:
            return [self.literal(known, eqn.outvars[0].aval)]
        plain = plain_form(self.flat, self.producer, name, params, ins, self.preferences, self.passes)
        if plain is not None:
            return self.changed(plain, source)
        if not eqn.effects and (body := definition(eqn.primitive, params, [v.aval for v in eqn.invars])) is not None:
            return self.inline(body.jaxpr, body.consts, ins, source)
        return self.emit(eqn, ins, source)

    def changed(self, plain: Plain, source: Source | None) -> list[int]:
        """The values of what an equation is by its definition, or by a pass."""
        before = self.applied
        self.applied |= {plain.by.name} if plain.by is not None else set()
        try:
            return self.inline(plain.jaxpr.jaxpr, plain.jaxpr.consts, plain.operands, source)
        finally:
            self.applied = before

    def converted(self, value: int, dtype: Any) -> int | None:
        """The value itself if it has this dtype already, or the literal that it is exactly."""
        if self.flat.dtypes[value] == dtype:
            return value
        if value in self.flat.literals:
            before = self.flat.literals[value]
            after = np.asarray(before).astype(dtype)
            if jax.dtypes.issubdtype(before.dtype, np.integer) and after == before:
                return self.literal(after, jax.ShapeDtypeStruct((), dtype))
        return None

    def call(self, body: Any, ins: Sequence[int], source: Source | None) -> list[int]:
        closed = body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())
        return self.inline(closed.jaxpr, closed.consts, ins, source if _in_library(closed.jaxpr) else None)

    def branch(self, params: dict[str, Any], index: int) -> Any:
        """The only branch that can run here: chosen by the platform, or by a literal."""
        branches = params["branches"]
        platforms = params.get("branches_platforms")
        if platforms is not None:
            here = self.preferences.branch
            mine = {here, "cuda", "rocm"} if here == "gpu" else {here}
            return next((b for b, names in zip(branches, platforms) if names is None or mine & set(names)), None)
        if index in self.flat.literals:
            return branches[min(max(int(self.flat.literals[index]), 0), len(branches) - 1)]
        return None

    def emit(self, eqn: Any, ins: list[int], source: Source | None) -> Sequence[int]:
        effects = bool(eqn.effects)
        key = None if effects or eqn.primitive.name in IMPURE else _key(eqn.primitive, eqn.params, ins)
        if key is not None and key in self.known_equations:
            return self.known_equations[key]
        outs = tuple(self.value(v.aval) for v in eqn.outvars)
        new = Equation(eqn.primitive, eqn.params, tuple(ins), outs, effects, source, self.applied)
        self.flat.equations.append(new)
        self.producer.update((v, new) for v in outs)
        if key is not None:
            self.known_equations[key] = outs
        return outs

    def const(self, value: Any, aval: Any) -> int:
        """A closed-over array; scalars become literals, arrays of one identity one value."""
        if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended) and not aval.shape and not isinstance(value, jax.core.Tracer):
            return self.literal(value, aval)
        if id(value) not in self.known_consts:
            number = self.known_consts[id(value)] = self.value(aval)
            self.flat.consts[number] = value
        return self.known_consts[id(value)]

    def literal(self, value: Any, aval: Any) -> int:
        key = (np.dtype(aval.dtype), np.asarray(value, aval.dtype).tobytes())
        if key not in self.known_literals:
            number = self.known_literals[key] = self.value(aval)
            self.flat.literals[number] = np.asarray(value, aval.dtype)[()]
        return self.known_literals[key]


def only_places(name: str, params: Mapping[str, Any]) -> bool:
    """Whether an operation says nothing of values but how they lie on a mesh, in the memory of its devices: the planner places them."""
    if name not in ("sharding_constraint", "device_put"):
        return False
    places = params["devices"] if name == "device_put" else (params["sharding"],)
    return all(place is None or (isinstance(place, NamedSharding) and place.memory_kind in _OF_DEVICES) for place in places)


_OF_DEVICES = frozenset({None, "device"})
"""The names of a device's own memory."""


def _key(prim: Any, params: dict[str, Any], ins: Sequence[int]) -> Any:
    """A key that equal equations share; ``None`` if the parameters do not compare."""
    key = (prim, tuple(ins), tuple(params.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def source_of(eqn: Any) -> Source | None:
    """The user's line that an equation comes from."""
    info = eqn.source_info
    return _source(info.traceback, str(info.name_stack))


@lru_cache(maxsize=4096)
def _source(traceback: Any, scopes: str) -> Source | None:
    """The line of the equations with this traceback: those of equal layers are equal."""
    try:
        from jax._src.source_info_util import user_frames
    except ImportError:  # JAX moved its private module: programs load without lines
        return None
    frames = [frame for frame in user_frames(traceback) if frame.file_name not in _OURS]
    if not frames:
        return _of_scope(scopes)
    called = frames[0]
    users = [frame for frame in frames if not frame.file_name.startswith(_INSTALLED)]
    library = "" if called in users[:1] or not users else f"{called.file_name.rsplit('/', 1)[-1]}:{called.start_line}"
    (file, line, function), *callers = ((frame.file_name, frame.start_line, _named(frame.function_name)) for frame in users or frames[:1])
    return Source(file, line, function, library, _TRANSPOSED in scopes, tuple(callers))


def _named(function: str) -> str:
    """The function that a qualified name is of; of a lambda or a comprehension inside of another, that one.

    >>> _named("outer.<locals>.Model.call"), _named("outer.<locals>.<genexpr>"), _named("<lambda>")
    ('Model.call', 'outer', '<lambda>')
    """
    names = function.split(".<locals>.")
    return next((name for name in reversed(names) if not name.startswith("<")), names[-1])


@contextmanager
def lines_of(source: Source | None) -> Iterator[None]:
    """Equations that are traced here without a line of the user's are said to come from ``source``."""
    if source is None:
        yield
        return
    with jax.named_scope(
        f"{_SCOPE}{source.file}|{source.line}|{source.function}|{source.library}|{_TRANSPOSED if source.backward else ''}|{source.blocks}|"
    ):
        yield


def _of_scope(scopes: str) -> Source | None:
    _, found, text = scopes.rpartition(_SCOPE)
    if not found:
        return None
    file, line, function, library, transposed, blocks = text.split("|")[:6]
    return Source(file, int(line), function, library, bool(transposed), blocks=int(blocks))


_SCOPE = "eqsat_mem line "
_TRANSPOSED = "transpose("
"""The scope in which JAX puts the equations of a backward pass."""
_PACKAGE = Path(__file__).parent.parent
_OURS = frozenset(map(str, _PACKAGE.rglob("*.py"))) - {
    str(_PACKAGE / name) for name in ("cli/demo.py", "egraph/soundness/sample_programs.py")
}
"""Our own files, except those with programs to plan: equations that they add to a program while it is traced are not on the user's line."""
_INSTALLED = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib", "stdlib", "scripts")})
"""Folders of installed packages: a line of a package that the user calls is not where the user looks."""
_LIBRARY = jax.__file__.rsplit("/", 1)[0] + "/"


def _in_library(jaxpr: Jaxpr) -> bool:
    """Whether a body was written inside JAX: JAX keeps it from its first call, so its lines may be another caller's."""
    info = getattr(getattr(jaxpr, "debug_info", None), "func_src_info", None) or ""
    return _LIBRARY in info
