"""Plans from files in the place of plans that would be made: they run if they are for the function at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike

from jax.extend.core import jaxpr_as_fun

from eqsat_mem.errors import OptionError
from eqsat_mem.frontend.stable import Unstable
from eqsat_mem.options import format_bytes
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.plan_files import Identity, LoadedRecord, identity, versions
from eqsat_mem.request import Request, narrowing
from eqsat_mem.schedule.backend import Backend


@dataclass(frozen=True, eq=False)
class TakenUpRecord:
    """The record of a plan that was loaded: it plans once more where a search is asked for.

    Attributes:
        request: the request that the plan answers.
        again: makes the plan once more.
    """

    request: Request
    again: Callable[[], Plan]

    @property
    def backend(self) -> Backend:
        """The backend that the plan is for."""
        return self.request.backend

    @property
    def identity(self) -> Identity:
        """The identity of the planned program."""
        return identity(self.request.jaxpr, self.request.arg_names, self.request.taken)

    @cached_property
    def planned(self) -> Plan:
        """The plan made once more, with its search."""
        return self.again()


def taken_up(plan: Plan, request: Request, again: Callable[[Plan], Plan]) -> Plan:
    """A loaded plan as the answer to a request, less compiler options that are not for it here; ``again`` makes it once more."""
    if plan.unchanged:  # such a program runs bit for bit as it was traced, and not as its source
        run = jaxpr_as_fun(request.jaxpr)
        plan = replace(plan, function=lambda *args: tuple(run(*args)))
    known = {item for backend in (request.backend, *narrowing(request.backend)) for item in backend.compiler_options.items()}
    options = {name: value for name, value in plan.compiler_options.items() if (name, value) in known}
    return replace(plan, record=TakenUpRecord(request, partial(again, plan)), compiler_options=options)


@dataclass(frozen=True)
class GivenPlan:
    """A plan that a user gave, with what tells which function it is for, and the versions of JAX that checked it."""

    plan: Plan
    identity: Identity
    versions: Mapping[str, str]


def given_plan(plan: Plan | str | PathLike[str]) -> GivenPlan:
    """A plan, or the one in a file, with what tells which function it is for.

    Raises:
        OptionError: if it is neither, or tells nothing.
    """
    if not isinstance(plan, Plan | str | PathLike):
        raise OptionError(f"plan must be a plan or the file of one, not {plan!r}.")
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if plan.record is None:
        raise OptionError("plan= does not tell which function it is for: give a file that plan.save wrote, or a plan of optimize().")
    if plan.mesh is not None:
        raise OptionError("plan= is for several devices, which belong to the process that made it: leave out plan=.")
    try:
        told: Identity = plan.record.identity
    except Unstable:
        raise OptionError(f"plan= is of {plan.name}, which calls operations of Python and cannot be recognised: leave out plan=.") from None
    return GivenPlan(plan, told, plan.record.versions if isinstance(plan.record, LoadedRecord) else versions())


def checked(given: GivenPlan, request: Request, again: Callable[[Plan], Plan]) -> Plan:
    """A plan that the user gave as the answer to a request. Where another JAX made it, what it holds is asked for anew.

    Raises:
        OptionError: if it is for another function, other arguments or another device, or does not fit the limit.
    """
    if request.placement is not None:
        raise OptionError("plan= is for one device, and this function runs on a mesh: leave out plan=.")
    plan, told = given.plan, given.identity
    try:
        ours = identity(request.jaxpr, request.arg_names, request.taken)
    except Unstable:
        raise OptionError(f"plan= cannot be compared with {request.name}, which calls operations of Python: leave out plan=.") from None
    if told.arguments != ours.arguments:
        raise OptionError(
            f"plan= is for {plan.name}({', '.join(told.arguments)}), but this call is {request.name}({', '.join(ours.arguments)}): "
            "call it with these, or plan for them without plan= and save that."
        )
    if told.program != ours.program:
        raise OptionError(
            f"plan= is for another program than {request.name} is now: its operations, constants, donated arguments or kind of random "
            "numbers have changed, or JAX traces it otherwise. Plan without plan= and save that."
        )
    if plan.device != request.backend.device.name:
        raise OptionError(f"plan= is for {plan.device}, and this call for {request.backend.device.name}: plan for it without plan=.")
    taken = taken_up(plan, request, again)
    check = None
    if given.versions != versions():
        check = request.compiled(request.backend, taken.function, plan.held_bytes + request.shared_bytes)
    if check is not None:
        taken = replace(taken, compiled_peak_bytes=request.held(check.held_bytes))
    limit = request.held(request.limit)
    if taken.held_bytes > limit:
        raise OptionError(
            f"plan= holds {format_bytes(taken.held_bytes)}, more than the limit of {format_bytes(limit)}: plan for it without plan=."
        )
    return replace(taken, limit_bytes=limit)
