"""A finished plan, and how it prints: as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from eqsat_mem.errors import Tensor, tensor_lines
from eqsat_mem.reports.exchanges import Exchange, SpreadIndex
from eqsat_mem.units import format_bytes


@dataclass(frozen=True)
class LoopSummary:
    """One loop of a plan.

    Attributes:
        index: the name of the index it runs over.
        extent: how many positions the index has.
        chunk: how many of them one turn computes.
        depth: how many loops stand around it.
        accumulates: what each turn adds to, in words.
        stacks: what each turn writes a slice of, in words.
    """

    index: str
    extent: int
    chunk: int
    depth: int = 0
    accumulates: Sequence[str] = ()
    stacks: Sequence[str] = ()

    @property
    def turns(self) -> int:
        """Turns of the loop, a shorter last one included."""
        return -(-self.extent // self.chunk)

    def __str__(self) -> str:
        text = f"{'  ' * self.depth}over {self.index}: {self.extent:,} in {_count(self.turns, 'chunk')} of {self.chunk:,}"
        if self.extent % self.chunk:
            text += f" (the last of {self.extent % self.chunk:,})"
        if self.accumulates:
            text += f"; accumulates {', '.join(self.accumulates)}"
        if self.stacks:
            text += f"; stacks {', '.join(self.stacks)}"
        return text


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What :func:`eqsat_mem.optimize` made of a function for arguments of certain shapes and dtypes.

    ``print(plan)`` shows it as a table. All peaks count arguments, outputs and temporaries. A plan can be pickled; what is loaded
    has everything but ``program``, ``schedule`` and ``record``, and its function is that of its source.

    Attributes:
        name: the user's function.
        source: the JAX program as source. It imports JAX and numpy only; ``exec(plan.source, dict(plan.namespace))`` defines it.
        function: the same as a callable: flat arrays in, a list of flat arrays out; JAX can trace it.
        namespace: what the source names but does not define, by name: closed-over arrays of more than a few elements, and
            operations that have no source (callbacks, primitives of other packages).
        limit_bytes: what the program may hold at its peak.
        peak_bytes: what the plan is predicted to hold at its peak.
        compiled_peak_bytes: what XLA reserves for it, or None where it was not compiled.
        original_peak_bytes: what the function is predicted to hold as written.
        argument_bytes, output_bytes: the parts of every peak that no plan can change.
        unchanged: whether the function was left as it was, because it fits and would not get faster.
        predicted_s, original_predicted_s: seconds by the time model, or None where it was not asked.
        seconds: seconds that each stage of planning took.
        loops: the loops of the plan in the order of the program, outer ones before those inside.
        rules_fired: the names of the rules that matched something in the program, and of the passes that changed it.
        peak_tensors: ``(description, bytes, source)`` of what is held at the plan's peak.
        device: the device that the plan is for.
        compiler_options: the options that XLA compiles the plan with when the function is called on its own, to be passed to a ``jax.jit``
            around a caller of it; empty for a program that is left as it was, and where XLA's own choices are the best that is known.
        doubts: sentences on what the check of the compiled peak could not see; usually none.
        mesh: the mesh of devices that run the plan together, each of which all figures are for; None for one device.
        in_specs, out_specs: how arguments and results lie on it, None where that is left to XLA.
        spread: the indices of which each device computes a share.
        collectives: what devices exchange, in the order of the program.
        program, schedule: the chosen terms and their loop tree, for those who want to look further.
        record: what :meth:`explain` and :meth:`show` work from, or None for a plan put together by hand.
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
    rules_fired: Sequence[str] = ()
    peak_tensors: Sequence[Tensor] = ()
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
    record: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        return table(self)

    def __reduce__(self) -> Any:
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_PICKLED}
        kept["mesh"] = None if self.mesh is None else self.mesh.abstract_mesh  # devices belong to their process
        return _from_source, (kept,)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self  # nobody changes it

    @property
    def in_shardings(self) -> list[NamedSharding | None]:
        """How each argument of ``function`` lies on the mesh, as ``jax.device_put`` and ``jax.jit`` take it; empty for one device."""
        return [None if spec is None else NamedSharding(self.mesh, spec) for spec in self.in_specs]

    @property
    def out_shardings(self) -> list[NamedSharding | None]:
        """How each result of ``function`` lies on the mesh, as :attr:`in_shardings` says of arguments."""
        return [None if spec is None else NamedSharding(self.mesh, spec) for spec in self.out_specs]

    @property
    def received_bytes(self) -> int:
        """Bytes that each device receives from others in one call."""
        return sum(exchange.received for exchange in self.collectives)

    @property
    def stands_alone(self) -> bool:
        """Whether the source defines everything that it names."""
        return not self.namespace

    def explain(self) -> Any:
        """Why this plan: the rules it needs, what its loops save and cost, the runners-up, and what the peaks consist of.

        The search is run again without each rule that matched, so this takes about as many times the planning as rules matched.

        Returns:
            An :class:`eqsat_mem.reports.explanation.Explanation`, which prints; the same one if asked again.

        Raises:
            ValueError: for a plan that was put together by hand.
        """
        return self._searched().explain(self)

    def show(self, path: str | PathLike[str] | None = None) -> Any:
        """A picture of memory over the points of the program, before and after, with the limit.

        Args:
            path: a file to write it to, such as ``"plan.png"`` or ``"plan.svg"``; None opens a window, or shows it in a notebook.

        Returns:
            The :class:`matplotlib.figure.Figure`.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
            ValueError: for a plan that was put together by hand.
        """
        return self._searched().show(self, path)

    def _searched(self) -> Any:
        if self.record is None:
            raise ValueError("this plan was not made by optimize(), or not in this process, so there is no search to explain.")
        return self.record

    def to_json(self) -> str:
        """The figures, loops, rules and source of the plan as one JSON object."""
        return to_json(self)


_NOT_PICKLED = ("function", "program", "schedule", "record")  # they hold traces, which JAX does not pickle


def _from_source(kept: dict[str, Any]) -> Plan:
    namespace = dict(kept["namespace"])
    exec(compile(kept["source"], f"<eqsat_mem {kept['name']}>", "exec"), namespace)
    return Plan(function=namespace[kept["name"]], **kept)


# --- the table --------------------------------------------------------------------------------------


def table(plan: Plan) -> str:
    """The plan as text for a terminal: what it holds and takes before and after, its loops, its rules."""
    head = [[_headline(plan)], _aligned(figures(plan)), _shares(plan)]
    sections = [*head, _loops(plan), _peak(plan), _rules(plan), _planning(plan), plan.doubts]
    return "\n".join(line for section in sections for line in section)


def _headline(plan: Plan) -> str:
    verdict = "left as written" if plan.unchanged else "rewritten"
    where, each = ("", "") if plan.mesh is None else (f" on {_mesh_text(plan)}", " on each device")
    return f"plan of {plan.name}{where}: {verdict}, peak {format_bytes(_peak_bytes(plan))} of {format_bytes(plan.limit_bytes)}{each}"


def _mesh_text(plan: Plan) -> str:
    return ", ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())


def _peak_bytes(plan: Plan) -> int:
    return plan.peak_bytes if plan.compiled_peak_bytes is None else plan.compiled_peak_bytes


def figures(plan: Plan) -> list[tuple[str, str, str]]:
    """What the plan holds and takes before and after, in rows of text; the first is a heading."""
    fixed = plan.argument_bytes + plan.output_bytes
    rows = [
        ("", "before", "after"),
        ("peak, predicted", format_bytes(plan.original_peak_bytes), format_bytes(plan.peak_bytes)),
        ("  arguments", format_bytes(plan.argument_bytes), format_bytes(plan.argument_bytes)),
        ("  outputs", format_bytes(plan.output_bytes), format_bytes(plan.output_bytes)),
        ("  temporaries", format_bytes(max(plan.original_peak_bytes - fixed, 0)), format_bytes(max(plan.peak_bytes - fixed, 0))),
    ]
    if plan.compiled_peak_bytes is not None:
        rows.append(("peak, compiled", "", format_bytes(plan.compiled_peak_bytes)))
    rows.append(("limit", "", format_bytes(plan.limit_bytes)))
    if plan.mesh is not None and not plan.unchanged:
        rows.append(("received per call", "", format_bytes(plan.received_bytes)))
    if plan.predicted_s is not None or plan.original_predicted_s is not None:
        rows.append(("time, predicted", time_text(plan.original_predicted_s), time_text(plan.predicted_s)))
    return rows


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Rows of text with the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"  {a:<{widths[0]}}   {b:>{widths[1]}}   {c:>{widths[2]}}".rstrip() for a, b, c in rows]


def _loops(plan: Plan) -> list[str]:
    return ["loops", *(f"  {loop}" for loop in plan.loops)] if plan.loops else ["no loops"]


def _shares(plan: Plan) -> list[str]:
    """How arguments and results lie on a mesh, what its devices share out, and what they exchange."""
    if plan.mesh is None:
        return []
    sides = [", ".join("as XLA likes" if spec is None else _spec_text(spec) for spec in specs) for specs in (plan.in_specs, plan.out_specs)]
    lying = f"arguments lie as {sides[0] or 'nothing'}, results as {sides[1] or 'nothing'}"
    spread = ["spread", *(f"  {index}" for index in plan.spread)] if plan.spread else ["nothing spread"]
    sent = ["collectives", *(f"  {exchange}" for exchange in plan.collectives)] if plan.collectives else ["no collectives"]
    return [lying] if plan.unchanged else [lying, *spread, *sent]


def _spec_text(spec: PartitionSpec) -> str:
    entries = ["None" if entry is None else str(entry) if isinstance(entry, tuple) else repr(entry) for entry in spec]
    return f"P({', '.join(entries)})"


def _peak(plan: Plan) -> list[str]:
    if not plan.peak_tensors:
        return []
    largest = sorted(plan.peak_tensors, key=lambda tensor: -tensor[1])
    return ["held at the peak", *tensor_lines(largest)]


def _rules(plan: Plan) -> list[str]:
    return [f"rules that fired: {', '.join(plan.rules_fired)}"] if plan.rules_fired else ["no rules fired"]


def _planning(plan: Plan) -> list[str]:
    if not plan.seconds:
        return []
    stages = ", ".join(f"{stage} {time_text(seconds)}" for stage, seconds in plan.seconds.items())
    return [f"planned in {time_text(sum(plan.seconds.values()))}: {stages}"]


def time_text(seconds: float | None) -> str:
    """Seconds for people: ``4.2 ms``; nothing for None."""
    if seconds is None:
        return ""
    if seconds >= 1:
        return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def times_as_long(ratio: float) -> str:
    """A ratio of times in words: ``takes 1.02 times as long``."""
    return f"takes {ratio:,.0f} times as long" if ratio >= 100 else f"takes {ratio:.3g} times as long"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# --- JSON -------------------------------------------------------------------------------------------


def to_json(plan: Plan) -> str:
    """The plan as a JSON object; its keys are the attributes of :class:`Plan` less callables, terms and the search."""
    record = {
        item.name: getattr(plan, item.name) for item in fields(plan) if item.name not in ("function", "program", "schedule", "record")
    }
    record["seconds"] = dict(plan.seconds)
    record["loops"] = [asdict(loop) for loop in plan.loops]
    record["mesh"] = None if plan.mesh is None else dict(plan.mesh.shape)
    for name in ("in_specs", "out_specs"):
        record[name] = [None if spec is None else list(spec) for spec in getattr(plan, name)]
    record["spread"], record["collectives"] = [asdict(index) for index in plan.spread], [asdict(sent) for sent in plan.collectives]
    record["rules_fired"], record["doubts"] = list(plan.rules_fired), list(plan.doubts)
    record["peak_tensors"] = [dict(zip(("description", "bytes", "source"), tensor, strict=True)) for tensor in plan.peak_tensors]
    return json.dumps(record, indent=2)
