"""A finished plan, and how it prints: as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from eqsat_mem.errors import Tensor
from eqsat_mem.ir.source import EMITTED
from eqsat_mem.reports.exchanges import Exchange, SpreadIndex
from eqsat_mem.reports.measured import Tuning
from eqsat_mem.reports.plan_text import headline, html_of, text_of
from eqsat_mem.units import count

WORDS_FOR_AXES = ("elements of", "rows of", "columns of")
MOST_VALUES = 2
"""Values of each kind that the line of a loop names; its attributes have all."""


@dataclass(frozen=True)
class LoopSummary:
    """One loop of a plan.

    Attributes:
        index: the name of the index it runs over.
        extent: how many positions the index has.
        chunk: how many of them one turn computes.
        depth: how many loops stand around it.
        accumulates: the results to which each turn adds, in words and with their lines.
        stacks: the results of which each turn writes a slice, likewise.
        axis: the axis that it runs over: of an argument or result (``rows of x``), else of the largest value that it cuts.
        inside: the user's loop or branch in which it stands, with its line; empty for a loop of the plan itself.
        never_whole: the values that it computes in chunks and that are whole nowhere, less those of loops around it: the largest first, in
            words, with the bytes that they would have whole and their lines.
        lines: the user's lines that it computes, by functions.
    """

    index: str
    extent: int
    chunk: int
    depth: int = 0
    accumulates: Sequence[str] = ()
    stacks: Sequence[str] = ()
    axis: str = ""
    inside: str = ""
    never_whole: Sequence[str] = ()
    lines: str = ""

    @property
    def turns(self) -> int:
        """Turns of the loop, a shorter last one included."""
        return -(-self.extent // self.chunk)

    def __str__(self) -> str:
        text = "; never whole: ".join(filter(None, [self.turn(), _first(self.never_whole)]))
        return "; ".join(filter(None, [text, self.results() if not self.never_whole else ""]))

    def turn(self, smallest: int | None = None) -> str:
        """The work of a turn in words; of several loops that only differ in their chunks, from the ``smallest`` on."""
        sizes = f"{self.chunk:,}" if smallest in (None, self.chunk) else f"{smallest:,} to {self.chunk:,}"
        axis = self.axis or f"index {self.index}"
        along = "" if axis.startswith(WORDS_FOR_AXES) else "along "
        turns = f" ({count(self.turns, 'turn')}" + (f", the last of {self.extent % self.chunk:,})" if self.extent % self.chunk else ")")
        text = f"{sizes} of {self.extent:,} {along}{axis} at a time" + (turns if smallest in (None, self.chunk) and self.chunk > 1 else "")
        if self.depth:
            return f"{'  ' * self.depth}within, {text}"
        where = ", ".join(filter(None, [f"in {self.inside}" if self.inside else "", self.lines]))
        return f"{where}: {text}" if where else text

    def results(self) -> str:
        """The results to which turns add, and those of which they write slices, in words."""
        parts = ("accumulates", self.accumulates), ("stacks", self.stacks)
        return "; ".join(f"{title} {_first(values)}" for title, values in parts if values)


def _first(values: Sequence[str]) -> str:
    """The first of some values, and how many more there are."""
    left = len(values) - MOST_VALUES
    return ", ".join(values[:MOST_VALUES]) + (f" and {left:,} more" if left > 0 else "")


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """The plan that :func:`eqsat_mem.optimize` made of a function for arguments of certain shapes and dtypes.

    ``print(plan)`` shows it in about a dozen lines, and so does a notebook. All peaks count arguments, outputs and temporaries.
    A plan can be saved and pickled; what is loaded has everything but ``program``, ``schedule`` and ``record``, and its function is that
    of its source.

    Attributes:
        name: the user's function.
        source: the JAX program as source. It imports JAX and numpy only; ``exec(plan.source, dict(plan.namespace))`` defines it.
        function: the same as a callable: flat arrays in, a list of flat arrays out; JAX can trace it.
        namespace: the values that the source names but does not define, by name: closed-over arrays of more than a few elements, and
            operations that have no source (callbacks, primitives of other packages).
        limit_bytes: the bytes that the program may hold at its peak.
        peak_bytes: the bytes that the plan is predicted to hold at its peak.
        compiled_peak_bytes: the bytes that XLA reserves for it, or None where it was not compiled.
        original_peak_bytes: the bytes that the function is predicted to hold as written.
        argument_bytes, output_bytes: the parts of every peak that no plan can change.
        unchanged: whether the function was left as it was, because it fits and would not get faster.
        predicted_s, original_predicted_s: seconds by the time model, or None where it was not asked.
        seconds: seconds that each stage of planning took.
        loops: the loops of the plan in the order of the program, outer ones before those inside, then those that it puts into the
            bodies of the user's own loops and branches.
        computed_again: the results that several loops compute, each for itself, rather than keep: the largest first, in words, with the
            bytes that they would have whole and their lines.
        rules_fired: the names of the rules that matched something in the program, and of the passes that changed it.
        peak_tensors: ``(description, bytes, source)`` of every tensor that is held at the plan's predicted peak, largest first.
        lines: the user's lines of ``peak_tensors`` by their sources, as far as they can be read.
        device: the device that the plan is for.
        compiler_options: the options that XLA compiles the plan with when the function is called on its own, to be passed to a ``jax.jit``
            around a caller of it; empty for a program that is left as it was, and where XLA's own choices are the best that is known.
        doubts: sentences on what the check of the compiled peak could not see; usually none.
        planning_bound_s: the bound on planning in seconds (``max_planning_seconds``) where that cut planning short, so that this is the
            best plan found in time; None where planning came to its end.
        tuning: the measurements by which the plan was chosen, where ``tune`` asked for them (:class:`Tuning`); else None.
        mesh: the mesh of devices that run the plan together, each of which all figures are for; None for one device.
        in_specs, out_specs: how arguments and results lie on it, None where that is left to XLA.
        spread: the indices of which each device computes a share.
        collectives: the exchanges of devices, in the order of the program.
        program, schedule: the chosen terms and their loop tree, for those who want to look further; None in a plan from the cache, of
            which ``with_search()`` makes them.
        record: the record from which :meth:`explain` and :meth:`show` work, or None for a plan put together by hand.
    """

    name: str
    source: str
    function: Callable[..., Any] = field(repr=False)
    limit_bytes: int
    peak_bytes: int
    compiled_peak_bytes: int | None = None
    original_peak_bytes: int
    argument_bytes: int
    output_bytes: int
    unchanged: bool = False
    predicted_s: float | None = None
    original_predicted_s: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    loops: Sequence[LoopSummary] = ()
    computed_again: Sequence[str] = ()
    rules_fired: Sequence[str] = ()
    peak_tensors: Sequence[Tensor] = ()
    lines: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    namespace: Mapping[str, Any] = field(default_factory=dict, repr=False)
    mesh: Any = None
    in_specs: Sequence[PartitionSpec | None] = ()
    out_specs: Sequence[PartitionSpec | None] = ()
    spread: Sequence[SpreadIndex] = ()
    collectives: Sequence[Exchange] = ()
    program: Any = field(default=None, repr=False)
    schedule: Any = field(default=None, repr=False)
    compiler_options: Mapping[str, str | bool] = field(default_factory=dict)
    doubts: Sequence[str] = ()
    planning_bound_s: float | None = None
    tuning: Tuning | None = None
    record: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        return text_of(self)

    def __repr__(self) -> str:
        return f"<plan of {self.name}, which {headline(self)}>"

    def _repr_html_(self) -> str:
        """The text of the plan for notebooks, with the source to unfold."""
        return html_of(self)

    def __reduce__(self) -> Any:
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_PICKLED}
        kept["mesh"] = None if self.mesh is None else self.mesh.abstract_mesh  # devices belong to their process
        return _from_source, (kept,)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self  # nobody changes it

    @property
    def in_shardings(self) -> list[NamedSharding | None]:
        """The sharding of each argument of ``function`` on the mesh, as ``jax.device_put`` and ``jax.jit`` take it; empty for one
        device."""
        return [None if spec is None else NamedSharding(self.mesh, spec) for spec in self.in_specs]

    @property
    def out_shardings(self) -> list[NamedSharding | None]:
        """The sharding of each result of ``function`` on the mesh, like :attr:`in_shardings` for arguments."""
        return [None if spec is None else NamedSharding(self.mesh, spec) for spec in self.out_specs]

    @property
    def held_bytes(self) -> int:
        """The bytes that the plan holds at its peak: what XLA reserves for it, or else what it is predicted to hold."""
        return self.peak_bytes if self.compiled_peak_bytes is None else self.compiled_peak_bytes

    @property
    def received_bytes(self) -> int:
        """Bytes that each device receives from others in one call."""
        return sum(exchange.received for exchange in self.collectives)

    @property
    def stands_alone(self) -> bool:
        """Whether the source defines everything that it names."""
        return not self.namespace

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file, which ``optimize(f, plan=path)`` takes in another process or on another machine.

        Args:
            path: the file to write. It holds code, which is run by those who load it.

        Raises:
            NotImplementedError: for a plan of several devices, and where the source calls operations of Python.
            ValueError: for a plan that was put together by hand.
        """
        from eqsat_mem.reports.plan_files import save

        save(self, Path(path))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Plan:
        """The plan in a file that :meth:`save` wrote, to be looked at, or to be given to ``optimize``.

        Args:
            path: the file. It holds code, which is run: load files only of those whom you trust.

        Raises:
            OptionError: if it cannot be read, or is not such a file.
        """
        from eqsat_mem.reports.plan_files import load

        return load(Path(path))

    def explain(self, max_seconds: float | None = None) -> Any:
        """Explain this plan: the rules that it needs, the effects of its loops, the runners-up, and the contents of the peaks.

        The search is run again without each rule that matched, so this takes about as many times the planning as rules matched.

        Args:
            max_seconds: the seconds after which no further search begins and one that runs ends; None is no limit. The explanation says
                of which rules it could not tell. Asked again, it goes on where it stopped.

        Returns:
            An :class:`eqsat_mem.reports.explanation.Explanation`, which prints; the same one if asked again.

        Raises:
            ValueError: for a plan that was put together by hand.
        """
        plan = self.with_search()
        return plan.record.explain(plan, max_seconds)

    def show(self, path: str | PathLike[str] | None = None) -> Any:
        """A picture of memory over the points of the program, before and after, with the limit.

        Args:
            path: a file to write it to, such as ``"plan.png"`` or ``"plan.svg"``; None opens a window, or shows it in a notebook.

        Returns:
            The :class:`matplotlib.figure.Figure` if it was written to a file, else None.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
            ValueError: for a plan that was put together by hand.
        """
        plan = self.with_search()
        return plan.record.show(plan, path)

    def with_search(self) -> Plan:
        """This plan with its ``program``, ``schedule`` and search: one that was loaded from the cache is made once more.

        Raises:
            ValueError: for a plan that was put together by hand.
        """
        if self.record is None:
            raise ValueError("this plan was not made by optimize(), or not in this process, so there is no search to explain.")
        return self if self.schedule is not None else self.record.planned

    @property
    def is_here(self) -> bool:
        """Whether the plan is for the device in use."""
        backend = None if self.record is None else self.record.backend
        return backend is None or bool(backend.is_here)

    def to_json(self) -> str:
        """The figures, loops, rules and source of the plan as one JSON object."""
        return to_json(self)


_NOT_PICKLED = ("function", "program", "schedule", "record")  # they hold traces, which JAX does not pickle


def _from_source(kept: dict[str, Any]) -> Plan:
    namespace = dict(kept["namespace"])
    exec(compile(kept["source"], EMITTED.format(kept["name"]), "exec"), namespace)
    return Plan(function=namespace[kept["name"]], **kept)


# --- JSON -------------------------------------------------------------------------------------------


def to_json(plan: Plan) -> str:
    """The plan as a JSON object; its keys are the attributes of :class:`Plan` less callables, terms and the search."""
    record = {
        item.name: getattr(plan, item.name) for item in fields(plan) if item.name not in ("function", "program", "schedule", "record")
    }
    record["seconds"], record["lines"] = dict(plan.seconds), dict(plan.lines)
    record["loops"] = [asdict(loop) for loop in plan.loops]
    record["tuning"] = None if plan.tuning is None else asdict(plan.tuning)
    record["mesh"] = None if plan.mesh is None else dict(plan.mesh.shape)
    for name in ("in_specs", "out_specs"):
        record[name] = [None if spec is None else list(spec) for spec in getattr(plan, name)]
    record["spread"], record["collectives"] = [asdict(index) for index in plan.spread], [asdict(sent) for sent in plan.collectives]
    for name in ("computed_again", "rules_fired", "doubts"):
        record[name] = list(getattr(plan, name))
    record["peak_tensors"] = [dict(zip(("description", "bytes", "source"), tensor, strict=True)) for tensor in plan.peak_tensors]
    return json.dumps(record, indent=2)
