"""Indices and values in the terms of a JAX user: arguments with their axes, shapes and dtypes."""

from __future__ import annotations

import linecache
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax

from eqsat_mem.ir import Block, Input, Map, Program, Rename, Take, bits, is_leaf, itemsize
from eqsat_mem.ir.jaxprs import stacked_by
from eqsat_mem.ir.loop_tree import Loop, Seq, made
from eqsat_mem.schedule.schedules import Schedule

AXES = {1: ("elements of {}",), 2: ("rows of {}", "columns of {}")}
"""How the axes of an argument are called, by how many it has; of more than two they are numbered from 0."""


CUT = frozenset({"slice", "slice_at", "shift_to", "dynamic_slice", "rev", "pad"})
"""Operations whose results have the axes of their first operand, or parts of them."""
MOST_SPANS = 2
"""Functions whose lines are told of a loop."""
_NAMES = {"dot_general": "dot", "reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "select_n": "where", "integer_pow": "power"}
"""What primitives of a scan's body are called."""
KINDS = {
    "gather_shares": "all_gather",
    "sum_to_shares": "psum_scatter",
    "exchange_shares": "all_to_all",
    "neighbouring_rows": "ppermute",
    "merge_top_k": "all_gather",
    "merge_top_k_in_rounds": "ppermute",
}
"""The functions of ``jax.lax`` that send what each collective does."""


def axis_names(program: Program) -> dict[int, str]:
    """The axes that indices run over: ``rows of x``, ``axis 1 of q``; none of an index that no argument or result has or is cut from one.

    The first argument with an axis of its own for an index gives the name, else the first of whose axis it is a part; then results do.
    """
    read = sorted(((term.slot, term.axes) for term in program.terms if isinstance(term, Input)), key=lambda pair: pair[0])
    arguments = [(program.inputs[slot].name, axes) for slot, axes in read]
    several = len(program.outputs) > 1
    results = [(f"result {k}" if several else "the result", output.axes) for k, output in enumerate(program.outputs)]
    found: dict[int, str] = {}
    for arrays in (arguments, results):
        places = [(name, axes, position) for name, axes in arrays for position in range(len(axes))]
        for name, axes, position in places:
            if len(axes[position]) == 1:
                found.setdefault(axes[position][0], _axis(name, axes, position))
        for name, axes, position in places:
            for i in axes[position]:
                found.setdefault(i, "part of " + _axis(name, axes, position))
    return with_inherited(program, found)


def with_inherited(program: Program, names: Mapping[int, str]) -> dict[int, str]:
    """Names of indices, with those of indices that stand for the same axis of a value, or for a part of it."""
    found = dict(names)
    for term in program.terms:
        if isinstance(term, Rename):
            alike: Iterable[tuple[int, int]] = term.pairs
        elif isinstance(term, Block) and str(term.call.prim.name) in CUT:
            axes = zip(term.call.in_axes[0], term.call.out_axes[term.out])
            alike = [(whole[0], part[0]) for whole, part in axes if len(whole) == len(part) == 1]
        else:
            continue
        for before, after in alike:
            if before in found:
                found.setdefault(after, found[before])
    return found


def names_in_body(program: Program, names: Mapping[int, str], block: Block, body: Program) -> dict[int, str]:
    """The names of a body's indices: those that its operands have in the program around it.

    Bodies take the last operands of their loop or branch, of what is scanned over a step.
    """
    found: dict[int, str] = {}
    first = len(block.call.in_axes) - len(body.inputs)
    for term in body.terms:
        if isinstance(term, Input):
            outer = block.call.in_axes[first + term.slot]
            for inside, around in zip(reversed(term.axes), reversed(outer)):
                if len(inside) == len(around) == 1 and body.indices[inside[0]].extent == program.indices[around[0]].extent:
                    found.update({inside[0]: names[around[0]]} if around[0] in names else {})
    return with_inherited(body, found)


def loop_name(program: Program, names: Mapping[int, str], seq: Seq, loop: Loop) -> str:
    """The axis that a loop of a tree runs over: of an argument or result, else of the largest value that it cuts."""
    if loop.index in names:
        return names[loop.index]
    cut = pieces(program, seq, loop) or loop.stacks
    if not cut:
        return f"index {program.indices[loop.index].name}"
    axes = [(i,) for i in bits(program.free[cut[0]])]
    of = array_type([program.indices[i].extent for (i,) in axes], program.terms[cut[0]].dtype)
    return _axis(of, axes, axes.index((loop.index,)))


def pieces(program: Program, seq: Seq, loop: Loop) -> list[int]:
    """The values that a loop of a tree computes in chunks and that are nowhere whole along its index, the largest first."""
    never = computed(loop).difference(loop.stacks, _computed(seq, loop.index))
    cut = [t for t in never if program.free[t] >> loop.index & 1 and not is_leaf(program.terms[t])]
    return largest_first(program, cut)


def largest_first(program: Program, terms: Iterable[int]) -> list[int]:
    """Terms by their bytes where they are whole."""
    return sorted(terms, key=lambda t: (-whole_bytes(program, t), t))


def computed(loop: Loop) -> set[int]:
    """The values that a loop of a tree computes, in loops within it too."""
    return set(_computed(loop.body, None))


def _computed(seq: Seq, apart_from: int | None) -> Iterator[int]:
    """The values that a region computes, but not those of which loops over an index hold chunks."""
    for step in seq.steps:
        if isinstance(step, Seq):
            yield from _computed(step, apart_from)
        else:
            yield from made(step)
            if isinstance(step, Loop) and step.index != apart_from:
                yield from _computed(step.body, apart_from)


def whole_bytes(program: Program, t: int) -> int:
    """The bytes of a value that is whole."""
    return math.prod(program.indices[i].extent for i in bits(program.free[t])) * itemsize(program.terms[t].dtype)


def _axis(name: str, axes: Sequence[Sequence[int]], position: int) -> str:
    words = AXES.get(len(axes))
    return f"axis {position} of {name}" if words is None else words[position].format(name)


def array_type(shape: Sequence[int], dtype: object) -> str:
    """A shape and dtype as JAX prints them: ``f32[8,512]``."""
    return str(jax.core.ShapedArray(tuple(shape), dtype).str_short(short_dtypes=True))


def operation(program: Program, t: int) -> str:
    """The name of what computes a value: ``exp``, ``dot``, ``top_k``, ``argument q``."""
    term = program.terms[t]
    match term:
        case Input():
            return f"argument {program.inputs[term.slot].name}"
        case Block():
            inside = stacked_by(term.call.prim, term.call.params, term.out)
            if term.call.prim.name == "concatenate" and all(_is_argument(program, a) for a in term.args):
                return "copies of arguments, side by side"
            name = KINDS.get(term.call.prim.name, str(term.call.prim.name))
            return f"{_NAMES.get(inside[-1].primitive.name, inside[-1].primitive.name)}, kept by {name}" if inside else name
        case Map():
            return term.op
        case Rename():
            return "transpose"
        case Take():
            return "rows taken"
    return str(getattr(term, "monoid", None) or type(term).__name__.lower())


def _is_argument(program: Program, t: int) -> bool:
    """Whether a value is an argument, perhaps of another shape."""
    term = program.terms[program.source_of(t)]
    if isinstance(term, Block) and term.call.prim.name == "reshape":
        return _is_argument(program, term.args[0])
    return isinstance(term, Input)


def place_of(program: Program, t: int) -> str | None:
    """The user's line that a value comes from, and whether in the backward pass of a gradient."""
    source = program.source.get(t)
    return None if source is None else f"{source}{', backward' if source.backward else ''}"


def at_place(program: Program, t: int) -> str:
    """The line of a value as the end of a phrase; empty without one."""
    place = place_of(program, t)
    return f" at {place}" if place else ""


def bodies_of(program: Program, t: int) -> list[Schedule]:
    """The plans of the bodies of a loop or branch of the user's, as far as these were planned; none of other terms."""
    term = program.terms[t]
    return [body for body in term.call.bodies if body is not None] if isinstance(term, Block) else []


def of_a_step(loop: str) -> str:
    """The words for what a loop or branch of the user's holds that runs as written: no more is known of it than its bytes."""
    return f"what a {'branch' if loop == 'cond' else 'step'} holds"


def told(program: Program, t: int) -> str:
    """A value in words, with its line."""
    return describe(program, t) + at_place(program, t)


def spans(program: Program, terms: Iterable[int]) -> str:
    """The user's lines that terms come from, by functions, those with the most bytes first; empty where none is known.

    ``model.py:33-36 (loss) and layers.py:8 (norm), forward and backward``
    """
    known = {t: source for t in terms if (source := program.source.get(t)) is not None}
    functions: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for t, source in known.items():
        functions[source.file, source.function].append(t)
    most = sorted(functions.values(), key=lambda ts: -sum(whole_bytes(program, t) for t in ts))
    told = [min((known[t] for t in ts), key=lambda s: s.line).to(max(known[t].line for t in ts)) for ts in most[:MOST_SPANS]]
    more = [f"{len(most) - MOST_SPANS} more"] if len(most) > MOST_SPANS else []
    passes = {source.backward for source in known.values()}
    return " and ".join([*told, *more]) + {1: ", backward" if True in passes else "", 2: ", forward and backward"}.get(len(passes), "")


def lines_of(program: Program) -> dict[str, str]:
    """The user's lines by the places that :func:`place_of` gives, as far as they can be read."""
    own = {t: source for t, source in program.source.items() if source.blocks == 1}
    found = {place_of(program, t): linecache.getline(source.file, source.line).strip() for t, source in own.items()}
    return {place: line for place, line in found.items() if place and line}


def describe(program: Program, t: int, extents: Sequence[int] | None = None) -> str:
    """A value by its shape, dtype and operation: ``f32[8,512,64] exp``; inside a loop with the ``extents`` of a chunk."""
    sizes = [index.extent for index in program.indices] if extents is None else extents
    return f"{array_type([sizes[i] for i in bits(program.free[t])], program.terms[t].dtype)} {operation(program, t)}"
