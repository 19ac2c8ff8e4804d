"""A request for a plan: a traced function, a limit, a backend, the time for planning, and what is compiled on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from eqsat_mem.backends.xla import devices_here, donations, named_shardings
from eqsat_mem.codegen.emit import Emitted
from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.egraph.rule_files import RuleSet, load_rules
from eqsat_mem.errors import DeviceCompilerError, OptionError
from eqsat_mem.events import Compiled, tell
from eqsat_mem.ir.jaxprs import nested_jaxprs
from eqsat_mem.ir.mesh import Placement, Spec
from eqsat_mem.options import Options, format_bytes, resolve_limit, resolve_planning_seconds
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.checks import Check, lowered

SCRATCHES = 2
"""Plans that may hold less than so many times the scratch of libraries do without it from the beginning: guessed."""
HARDLY = 0.95
"""Bytes that a program holds of those predicted, over those of the one that held least of them, from which on it is expected to."""
LEAST_S = 60.0
"""The least bound on planning that is set by default, in seconds."""
COMPILATIONS = 5
"""How many times as long as XLA is expected to compile a program its planning may take by default."""


def rules_of(options: Options, backend: Backend) -> RuleSet:
    """The rules and passes that options allow and that help a backend."""
    without = (*options.without_rules, *backend.needless_rules)
    return load_rules(options.rules, options.accuracy, options.only_rules, without, options.operations)


def planning_seconds(jaxpr: ClosedJaxpr, backend: Backend) -> float:
    """The bound on planning where none is given: five times what XLA is expected to take to compile the program, at least 60 s."""
    equations = sum(len(inner.eqns) for inner in nested_jaxprs(jaxpr.jaxpr))
    return max(LEAST_S, COMPILATIONS * backend.compile_equation_s * equations)


def deadline_of(options: Options, jaxpr: ClosedJaxpr, backend: Backend) -> Deadline:
    """The end of the time for planning a program, which begins now."""
    return Deadline(resolve_planning_seconds(options) or planning_seconds(jaxpr, backend))


@dataclass(frozen=True, eq=False)
class Request:
    """The function to be planned: traced, with the limit in bytes and the backend that its options and the machine come to.

    Within a request, bytes are counted as if no output took the memory of an argument: the limit, predictions and what XLA holds alike.
    What leaves it (:meth:`held`) is less by ``shared_bytes``.
    """

    jaxpr: ClosedJaxpr
    arg_names: tuple[str, ...]
    name: str
    options: Options
    limit: int
    backend: Backend
    taken: tuple[int, ...]
    shared_bytes: int
    placement: Placement | None = None
    deadline: Deadline = NEVER
    """The end of the time for planning."""
    is_body: bool = False
    """Whether it is the body of a loop or branch."""
    compared: list[tuple[int, int]] = field(default_factory=list)
    """The bytes predicted of each program that was compiled, and those that it holds."""
    unchecked: list[str] = field(default_factory=list)
    """The reasons for which nothing can be compiled for the target here, once that has turned out."""

    def held(self, counted: int) -> int:
        """The bytes that are held at once, of bytes counted within the request."""
        return counted - self.shared_bytes

    def runnable(self, code: Emitted, checked: bool = False) -> Callable[..., Any]:
        """The function of a plan; on a mesh of several devices that of them all, to run or to be ``checked``."""
        if self.placement is None:
            return code.inlined
        return partial(code.function, mesh=None if self.placement.around and not checked else self.placement.mesh)

    def compiled(self, backend: Backend, run: Callable[..., Any], predicted: int, lying: Sequence[Spec | None] = ()) -> Check | None:
        """A function of the program's arguments as compiled for a backend; the bytes that it holds are told beside their prediction.

        On a mesh ``lying`` says how arguments lie, else as they were given. None where nothing is compiled: it is not asked for, or there
        is no compiler for the target here.
        """
        if not self.verifies:
            return None
        shardings = None if self.placement is None else named_shardings(self.placement, lying or self.placement.arguments)
        try:
            check = backend.check(run, self.jaxpr.in_avals, self.taken, limit=self.held(self.limit), shardings=shardings)
        except DeviceCompilerError as reason:
            self.unchecked.append(str(reason))
            return None
        tell(Compiled(check.held_bytes, self.held(predicted), self.held(self.limit)))
        held = check.held_bytes + self.shared_bytes
        self.compared.append((predicted, held))
        return replace(check, held_bytes=held)

    def most_predicted(self, fixed: int) -> float:
        """The bytes up to which a plan may be predicted to hold that fits: what it holds besides so many ``fixed`` ones is expected to be
        hardly less of its prediction than that of any program that was compiled, if there was one."""
        shares = [(held - fixed) / max(predicted - fixed, 1) for predicted, held in self.compared]
        return fixed + (self.limit - fixed) / (HARDLY * max(min(shares), 0.01)) if shares else math.inf

    def executable(self, backend: Backend, code: Emitted, as_written: bool) -> Any:
        """A plan compiled as it will be run, but to be run again and again on the same arguments, none of which is donated; None if it
        holds more than the limit then."""
        options = {} if as_written else backend.compiler_options
        program = lowered(code.function if as_written else self.runnable(code), self.jaxpr.in_avals)
        compiled = program.compile(dict(options) or None)
        return compiled if backend.checked(compiled).held_bytes <= self.held(self.limit) else None

    @property
    def verifies(self) -> bool:
        """Whether programs are compiled and compared with the limit: where there are devices to compile for."""
        return self.options.verify and not self.unchecked and (self.placement is None or self.placement.mesh is not None)

    @property
    def stopped(self) -> tuple[str, ...]:
        """A sentence for those whose program does not fit, where planning was cut short."""
        bound = f"{self.deadline.seconds:.3g} s (max_planning_seconds)"
        said = f"Planning was cut short to end within {bound}: with more time a smaller plan may be found."
        return (said,) if self.deadline.struck else ()

    @property
    def asks_for_loops(self) -> bool:
        """Whether sizes of values are bounded, whatever that costs."""
        return self.options.tensor_size_threshold is not None or self.options.tensor_split_size is not None


def request_of(
    jaxpr: ClosedJaxpr,
    options: Options,
    arg_names: Sequence[str],
    name: str,
    backend: Backend,
    donated: Sequence[int] = (),
    placement: Placement | None = None,
    deadline: Deadline | None = None,
) -> Request:
    """The request for a plan; arguments are those of :func:`eqsat_mem.pipeline.plan`.

    Raises:
        OptionError: if the limit is more than the device has, or plans for a device that is not here were to be run.
    """
    refuse_tuning_elsewhere(options, backend)
    limit = resolve_limit(options, backend.capacity_bytes)
    _refuse_more_than_there_is(limit, backend)
    taken, shared_bytes = donations(jaxpr, donated, placement)
    if placement is not None:
        backend = backend.among(devices_here(placement))
    backend = backend.compiling(jaxpr)
    backend = replace(backend, donated=taken) if taken and placement is None else backend
    backend = (backend.narrowed() or backend) if limit < SCRATCHES * backend.library_bytes else backend
    backend = backend.keeping_bits() if options.accuracy == "bitwise" else backend
    backend = backend if options.tiles and options.accuracy == "all" and placement is None else backend.without_tiles()
    deadline = deadline or deadline_of(options, jaxpr, backend)
    return Request(jaxpr, tuple(arg_names), name, options, limit + shared_bytes, backend, taken, shared_bytes, placement, deadline)


def narrowing(backend: Backend) -> Iterator[Backend]:
    """A backend with ever more compiler options under which programs hold less."""
    narrowed = backend.narrowed()
    while narrowed is not None:
        yield narrowed
        narrowed = narrowed.narrowed()


def refuse_tuning_elsewhere(options: Options, backend: Backend) -> None:
    """Raise ``OptionError`` if plans for a device that is not here were to be run."""
    if options.tune is not None and not backend.is_here:
        raise OptionError(
            f"tune runs plans on the device in use, {jax.local_devices()[0].device_kind}, and this plan is for {backend.device.name}: "
            "tune it there, or leave out tune= and take what is predicted."
        )


def _refuse_more_than_there_is(limit: int, backend: Backend) -> None:
    memory = backend.memory_bytes
    if memory is not None and limit > memory:
        raise OptionError(
            f"memory_limit = {format_bytes(limit)} is more than {backend.device.name} has, {format_bytes(memory)}: lower the limit, "
            "leave it out for all that a program may hold there, or name a larger device."
        )
