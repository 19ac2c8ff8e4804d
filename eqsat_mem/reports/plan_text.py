"""A plan as text for a terminal and as HTML for a notebook: does it fit, how was that done, and what holds the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from eqsat_mem.errors import Tensor, tensor_lines
from eqsat_mem.passes import named
from eqsat_mem.reports.exchanges import together
from eqsat_mem.units import count, format_bytes, time_text, wrapped

if TYPE_CHECKING:
    from eqsat_mem.reports.plan import LoopSummary, Plan

WIDTH = 40
"""Characters of the longest bar."""
FAR = 3
"""A limit of more than so many times the highest peak has no bar: with one, the others would be invisible."""
WIDE = 120
"""Characters of the longest line."""
TITLE = 6
MOST_LOOPS = 8
MOST_TENSORS = 5
MOST_SPECS = 6
"""Shardings beyond which equal ones are counted."""
LITTLE = 0.01
"""What is compiled beyond the predicted peak is told where it is more than this part of it."""
SHORTEST_CODE = 20
"""Characters of a line of code that are worth showing."""


def text_of(plan: Plan, width: int = WIDE) -> str:
    """The plan in about a dozen lines: the verdict, bars, loops, the largest tensors at the peak, and where to read more.

    Lines longer than ``width`` are wrapped.
    """
    sections = [
        ("", [f"{plan.name} {headline(plan)}"]),
        ("", list(_bars(plan))),
        ("mesh", list(_shares(plan))),
        ("how", list(_loops(plan))),
        ("tuned", [] if plan.tuning is None else [str(plan.tuning)]),
        ("peak", list(_peak(plan, width))),
        ("more", [_more(plan)]),
        ("note", [*filter(None, [stopped_text(plan)]), *plan.doubts]),
    ]
    return "\n".join(line for title, lines in sections for line in _titled(title, lines, width))


def stopped_text(plan: Plan) -> str:
    """A sentence on a plan whose planning was cut short; empty where it came to its end."""
    if plan.planning_bound_s is None:
        return ""
    bound = f"{time_text(plan.planning_bound_s)} (max_planning_seconds)"
    return f"planning was cut short to end within {bound}: this is the best plan found in time"


def html_of(plan: Plan) -> str:
    """The text, and the emitted source to unfold."""
    return f"<pre>{escape(text_of(plan))}</pre><details><summary>source</summary><pre>{escape(plan.source)}</pre></details>"


def headline(plan: Plan) -> str:
    """The verdict in one line: the bytes and seconds of the plan and of the program as written."""
    held, limit = format_bytes(plan.held_bytes), format_bytes(plan.limit_bytes)
    where = "" if plan.mesh is None else f" on each device of {_mesh_text(plan)}"
    if plan.unchanged:
        return f"fits as written: {held} of {limit}{where}" + _seconds(", predicted {}", plan.original_predicted_s)
    for_speed = "; more, for speed" if plan.held_bytes > plan.original_peak_bytes else ""
    written = f" (as written {format_bytes(plan.original_peak_bytes)}{for_speed})"
    times = _seconds(", predicted {}", plan.predicted_s) + _seconds(" (as written {})", plan.original_predicted_s)
    return f"fits: {held} of {limit}{where}{written}{times}"


def figures(plan: Plan) -> list[tuple[str, str, str]]:
    """The bytes and seconds of the plan, before and after, in rows of text; the first is a heading."""
    fixed = plan.argument_bytes + plan.output_bytes
    rows = [
        ("", "as written", "planned"),
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


def _seconds(text: str, seconds: float | None) -> str:
    return "" if seconds is None else text.format(time_text(seconds))


def _titled(title: str, lines: Sequence[str], width: int) -> Iterator[str]:
    """Lines with a title to the left of the first; without one they begin at the margin."""
    indent = TITLE if title else 0
    parts = (part for line in lines for part in wrapped(line, width - indent))
    for k, part in enumerate(parts):
        yield f"{title if k == 0 else '':<{indent}}{part}"


def _bars(plan: Plan) -> Iterator[str]:
    """Peaks and the limit as bars of one scale."""
    rows = [("as written", plan.held_bytes if plan.unchanged else plan.original_peak_bytes, "")]
    if not plan.unchanged:
        compiled = "" if plan.compiled_peak_bytes is None else f", compiled (predicted {format_bytes(plan.peak_bytes)})"
        rows.append(("plan", plan.held_bytes, compiled))
    rows.append(("limit", plan.limit_bytes, ""))
    highest = max(nbytes for _, nbytes, _ in rows[:-1])
    scale = max(highest, plan.limit_bytes if plan.limit_bytes <= FAR * highest else 0, 1)
    for name, nbytes, after in rows:
        bar = "#" * max(round(WIDTH * nbytes / scale), 1) if nbytes <= scale else ""
        yield f"  {name:<12}{bar:<{WIDTH}}  {format_bytes(nbytes)}{after}"


def _shares(plan: Plan) -> Iterator[str]:
    """The shardings of arguments and results on a mesh, and the values that its devices share out and exchange."""
    if plan.mesh is None or plan.unchanged:
        return
    yield f"arguments: {_lying(plan.in_specs)}; results: {_lying(plan.out_specs)}"
    yield from (f"spread  {index}" for index in plan.spread)
    yield from (f"sent    {exchange}" for exchange in together(plan.collectives))
    yield f"received per call: {format_bytes(plan.received_bytes)}"


def _mesh_text(plan: Plan) -> str:
    return ", ".join(f"{name}={size}" for name, size in plan.mesh.shape.items())


def _lying(specs: Sequence[PartitionSpec | None]) -> str:
    """The shardings of arrays, in their order; many are counted."""
    texts = [*map(_spec_text, specs)]
    if len(texts) <= MOST_SPECS:
        return ", ".join(texts) or "none"
    return ", ".join(f"{times} {text}" for text, times in Counter(texts).most_common())


def _spec_text(spec: PartitionSpec | None) -> str:
    if spec is None:
        return "as XLA likes"
    if not any(spec):
        return "whole"
    entries = ["None" if entry is None else str(entry) if isinstance(entry, tuple) else repr(entry) for entry in spec]
    return f"P({', '.join(entries)})"


def changes_of(plan: Plan) -> list[str]:
    """The passes that changed the program as a whole, in words."""
    return [known.told for known in named(plan.rules_fired) if known.told]


def _loops(plan: Plan) -> Iterator[str]:
    changes = changes_of(plan)
    yield from changes
    if not (plan.loops or changes or plan.unchanged):
        yield "no loops: other operations in another order, of which rules .explain() tells"
    groups = list(_alike(plan.loops))
    for loops in groups[:MOST_LOOPS]:
        yield from _loop(loops)
    if left := sum(map(len, groups[MOST_LOOPS:])):
        yield f"and {count(left, 'more loop')}, in .loops"
    if plan.computed_again:
        yield f"computed again rather than kept: {_and_others(plan.computed_again)}"


def _alike(loops: Sequence[LoopSummary]) -> Iterator[list[LoopSummary]]:
    """Each loop with those that follow it within the same loop along the same axis."""
    known = groupby(enumerate(loops), key=lambda pair: (pair[1].depth, pair[1].axis, pair[1].inside) if pair[1].depth else pair[0])
    return ([loop for _, loop in found] for _, found in known)


def _loop(loops: Sequence[LoopSummary]) -> Iterator[str]:
    """The work of a turn of one of several loops alike, and the largest of what is never whole."""
    largest = max(loops, key=lambda loop: loop.chunk)
    several = f", in {len(loops)} loops" if len(loops) > 1 else ""
    yield largest.turn(min(loop.chunk for loop in loops)) + several
    if never := [value for loop in loops for value in loop.never_whole]:
        yield f"{'  ' * (largest.depth + 1)}never whole: {_and_others(never)}"


def _and_others(values: Sequence[str]) -> str:
    """The first of some values, and how many others there are."""
    return values[0] + (f" and {count(len(values) - 1, 'other value')}" if len(values) > 1 else "")


def _peak(plan: Plan, width: int) -> Iterator[str]:
    fixed = [("arguments", plan.argument_bytes), ("outputs", plan.output_bytes)]
    temporaries = max(plan.peak_bytes - plan.argument_bytes - plan.output_bytes, 0)
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in [*fixed, ("temporaries", temporaries)])
    arguments = [tensor for tensor in plan.peak_tensors if tensor[0].split(" ")[1:2] == ["argument"]]
    others = sorted((tensor for tensor in plan.peak_tensors if tensor not in arguments), key=lambda tensor: -tensor[1])
    more = (plan.compiled_peak_bytes or 0) - plan.peak_bytes
    compiled = f" ({format_bytes(more)} more compiled)" if more > LITTLE * plan.peak_bytes else ""
    yield f"{format_bytes(plan.peak_bytes)} predicted{compiled}: {parts}; besides arguments:"
    total = plan.peak_bytes - sum(nbytes for _, nbytes, _ in arguments)
    for line in tensor_lines(list(_by_line(others)), total, MOST_TENSORS, other="other"):
        code, room = plan.lines.get(line.partition("  at ")[2], ""), width - TITLE - len(line) - 2
        yield f"{line}: {code if len(code) <= room else code[: room - 3] + '...'}" if code and room >= SHORTEST_CODE else line


def _by_line(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those of each line as one, with the largest of them; the largest line first. Others stay as they are."""
    lines: dict[Any, list[Tensor]] = {}
    for k, tensor in enumerate(tensors):
        lines.setdefault(k if tensor[2] is None else tensor[2], []).append(tensor)
    for of_line in sorted(lines.values(), key=lambda of_line: -sum(nbytes for _, nbytes, _ in of_line)):
        description, largest, source = max(of_line, key=lambda tensor: tensor[1])
        if len({(text, nbytes) for text, nbytes, _ in of_line}) == 1:
            yield from of_line
        else:
            every = sum(nbytes for _, nbytes, _ in of_line)
            yield f"{len(of_line)} tensors, the largest {format_bytes(largest)} {description}", every, source


def _more(plan: Plan) -> str:
    how = "kept from an earlier planning, read in" if "cache" in plan.seconds else "planned in"
    planned = f"   {how} {time_text(sum(plan.seconds.values()))}" if plan.seconds else ""
    return f".explain() why   .show() a picture   .source the program{planned}"
