"""Blocks along one axis: searches, sorts, selections and cumulative reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Selection, Shapes, Text, all_but
from eqsat_mem.ir.ops.elementwise import dtype_text
from eqsat_mem.ir.ops.top_k import first_place, merge_top_k, running_top_k


def _along(name: str) -> Text:
    """Return the text of a cumulative reduction."""
    return lambda p, a, s: f"lax.{name}({a[0]}, axis={p['axis']}{', reverse=True' if p['reverse'] else ''})"


def _running(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([params["axis"]], len(ins[0]))


def _search(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each axis that is not searched; the result lacks the searched axis."""
    stay = [a for a in range(len(ins[0])) if a not in params["axes"]]
    return [(("in", 0, a), ("out", 0, b)) for b, a in enumerate(stay)]


def _search_text(name: str) -> Text:
    return lambda p, a, s: f"lax.{name}({a[0]}, {int(p['axes'][0])}, {dtype_text(p['index_dtype'])})" if len(p["axes"]) == 1 else None


def _written_out(comparison: str) -> Callable[[Params, Sequence[str]], str]:
    return lambda p, elements: f"first_place(({', '.join(elements)},), lax.{comparison}, {dtype_text(p['index_dtype'])})"


def _sort(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([params["dimension"]], len(ins[0]), operands=range(len(ins)), results=range(len(outs)))


def _sort_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    operands = ", ".join(args) + ("," if len(args) == 1 else "")
    options = "" if params["is_stable"] else ", is_stable=False"
    options += "" if params["num_keys"] == 1 else f", num_keys={params['num_keys']}"
    return f"lax.sort(({operands}), dimension={params['dimension']}{options})"


def _top_k(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([params["axis"]], len(ins[0]), results=(0, 1))


def _top_k_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    axis = "" if params["axis"] in (-1, len(ins[0]) - 1) else f", axis={params['axis']}"
    return f"lax.top_k({args[0]}, {params['k']}{axis})"


def _merged_top_k(params: Params, rank: int, picked: Sequence[str], more: Sequence[str], start: str) -> str:
    axis = params["axis"] % rank
    return f"merge_top_k({', '.join([*picked, *more])}, {start}, {axis})"


_TOP_K = Selection(
    lambda params, rank: params["axis"] % rank, lambda params: params["k"], _merged_top_k, lambda params: f"running_top_k({params['k']})"
)


def _approx_top_k(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Return a group for each axis that is not searched, as ``vmap`` of it has them: how far a search goes depends on extents along the
    searched axis and on the number of axes."""
    return all_but([params["reduction_dimension"] % len(ins[0])], len(ins[0]), results=(0, 1))


def _approx_top_k_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    keywords = "".join(f", {k}={v!r}" for k, v in params.items() if k != "is_max_k")
    return f"lax.approx_{'max' if params['is_max_k'] else 'min'}_k({args[0]}{keywords})"


def _search_row(name: str, order: str) -> BlockOp:
    """Return the row of a search for the first element whose comparison ``order`` holds with all others."""
    return BlockOp(
        name,
        _search,
        text=_search_text(name),
        helpers=(first_place,),
        written_out=_written_out(order),
    )


ORDERING = [
    *(BlockOp(name, _running, text=_along(name)) for name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")),
    *map(_search_row, ("argmax", "argmin"), ("ge", "le")),
    BlockOp("sort", _sort, text=_sort_text),
    BlockOp("top_k", _top_k, text=_top_k_text, helpers=(merge_top_k, running_top_k), selection=_TOP_K),
    BlockOp("approx_top_k", _approx_top_k, text=_approx_top_k_text),
]
