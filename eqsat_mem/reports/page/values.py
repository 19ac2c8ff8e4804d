"""The e-classes of the values of three programs: the jaxpr's variables, the plan's terms, and those of the program as written."""

from __future__ import annotations

from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.frontend.load import load_with_variables
from eqsat_mem.passes import named
from eqsat_mem.reports.page.classes import class_data, plan_classes
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.record import Record


class ShownValues:
    """The e-classes of the values of three programs: the jaxpr's variables, the plan's terms, and those of the program as written.

    Where the plan is of another form of the program (its scans fold or checkpoint what they stacked), it comes from another e-graph. The
    classes of that one are numbered on.
    """

    def __init__(self, plan: Plan, record: Record) -> None:
        seen, best = record.search()
        view = seen.searched[0].view
        winner = next((found.view for found in seen.searched if found.schedule is best), view)
        shift = 0 if winner is view else len(view.nodes)
        loaded, variables = load_with_variables(record.jaxpr, record.arg_names, record.backend.preferences, named(record.loaded.passes))
        same = dict(zip(loaded.reachable(), view.program.reachable()))  # bodies were planned in between, which keeps the order
        self.of_loaded = {t: view.class_of[u] for t, u in same.items()}
        self.of_variables = {variable: self.of_loaded[t] for variable, t in variables.items() if t in self.of_loaded}
        self.of_before = dict(view.class_of)
        repeated = str(best.ex.program) == str(plan.program)  # not where a limit in seconds had stopped the first search
        of_best, chosen = plan_classes(winner, best.ex) if repeated and not plan.unchanged else ({}, {})
        self.of_plan = self.of_before if plan.unchanged else {t: c + shift for t, c in of_best.items()}
        self.of_names = self._of_names(plan, record)
        called = {c: name for name, c in reversed(self.of_names.items())}
        written = plan_classes(view, Extraction(view.program))[1] if plan.unchanged else {}
        first = [*self.of_variables.values(), *self.of_before.values()]
        self.classes = class_data(view, record.backend, written if shift or plan.unchanged else chosen, first, called)
        self.classes |= class_data(winner, record.backend, chosen, of_best.values(), called, shift)

    def _of_names(self, plan: Plan, record: Record) -> dict[str, int]:
        """The classes of the emitted source's variables."""
        of_source = self.of_loaded if plan.unchanged else self.of_plan
        found = {name: of_source[t] for name, t in record.names.items() if t in of_source}
        arguments = zip(record.arg_names, map(self.of_variables.get, record.jaxpr.jaxpr.invars))
        return found | {name: c for name, c in arguments if c is not None and name in record.names and name not in found}
