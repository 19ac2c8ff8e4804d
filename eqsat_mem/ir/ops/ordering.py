"""Blocks along one axis: searches, sorts and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from eqsat_mem.ir.ops.blocks import BlockOp, Group, Params, Selection, Shapes, Text, Weight, all_but, unchanged
from eqsat_mem.ir.ops.elementwise import dtype_text
from eqsat_mem.ir.ops.top_k import block_length, first_place, merge_top_k, top_k_by_blocks


def _along(name: str) -> Text:
    """Source of a running reduction."""
    return lambda p, a, s: f"lax.{name}({a[0]}, axis={p['axis']}{', reverse=True' if p['reverse'] else ''})"


def _running(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([params["axis"]], len(ins[0]))


def _search(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """The searched axis is gone from the result."""
    stay = [a for a in range(len(ins[0])) if a not in params["axes"]]
    return [(("in", 0, a), ("out", 0, b)) for b, a in enumerate(stay)]


def _search_text(name: str) -> Text:
    return lambda p, a, s: f"lax.{name}({a[0]}, {int(p['axes'][0])}, {dtype_text(p['index_dtype'])})" if len(p["axes"]) == 1 else None


def _written_out(comparison: str) -> Callable[[Params, Sequence[str]], str]:
    return lambda p, elements: f"first_place(({', '.join(elements)},), lax.{comparison}, {dtype_text(p['index_dtype'])})"


SHORT_SEARCH = 32
"""Elements of an axis that XLA:CPU searches for many positions of the others at once; a longer axis it searches one element at a time."""


def _search_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    length = math.prod(ins[0][a] for a in params["axes"])
    return math.prod(ins[0]) * (12.0 if length <= SHORT_SEARCH else 400.0)


def _extremes(ins: Shapes, outs: Shapes, params: Params) -> float:
    """The values found, which XLA computes with their places."""
    return float(math.prod(outs[0]))


def _sort(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([params["dimension"]], len(ins[0]), operands=range(len(ins)), results=range(len(outs)))


def _sort_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    operands = ", ".join(args) + ("," if len(args) == 1 else "")
    options = "" if params["is_stable"] else ", is_stable=False"
    options += "" if params["num_keys"] == 1 else f", num_keys={params['num_keys']}"
    return f"lax.sort(({operands}), dimension={params['dimension']}{options})"


def _top_k(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    return all_but([params["axis"]], len(ins[0]), results=(0, 1))


SELECTION, REPLACEMENT, GATHERED = 107.0, 2500.0, 250.0
"""What a search for the largest takes on XLA:CPU, in additions (measured): per element, per element that joins the largest so far, and per
element that is gathered before it."""


def _top_k_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    if params["axis"] not in (-1, len(ins[0]) - 1):
        return f"lax.top_k({args[0]}, {params['k']}, axis={params['axis']})"
    return f"top_k_by_blocks({args[0]}, {params['k']})"


def _top_k_block(ins: Shapes, params: Params) -> int | None:
    last = params["axis"] in (-1, len(ins[0]) - 1)
    return block_length(ins[0][-1], params["k"]) if last else None


def _top_k_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    n, k, block = ins[0][params["axis"]], params["k"], _top_k_block(ins, params)
    rows = math.prod(ins[0]) / max(n, 1)
    if block is None:
        return rows * _selection(n, k)
    candidates = k * block + n % block
    return rows * (16.0 * n + _selection(n // block, k) + GATHERED * candidates + _selection(candidates, k))


def _selection(n: int, k: int) -> float:
    """One row: in random order, element ``i`` is among the ``k`` largest so far with probability ``k / i``."""
    return SELECTION * n + REPLACEMENT * k * (1 + math.log(max(n / max(k, 1), 1)))


def _merged_top_k(params: Params, rank: int, picked: Sequence[str], more: Sequence[str], start: str) -> str:
    axis = params["axis"] % rank
    return f"merge_top_k({', '.join([*picked, *more])}, {start}, {axis})"


_TOP_K = Selection(lambda params, rank: params["axis"] % rank, lambda params: params["k"], _merged_top_k)


def _approx_top_k(ins: Shapes, outs: Shapes, params: Params) -> list[Group]:
    """Which elements an approximate search finds may depend on the whole operand."""
    return []


def _approx_top_k_text(params: Params, args: Sequence[str], ins: Shapes) -> str:
    keywords = "".join(f", {k}={v!r}" for k, v in params.items() if k != "is_max_k")
    return f"lax.approx_{'max' if params['is_max_k'] else 'min'}_k({args[0]}{keywords})"


def _per_element(cost: float) -> Weight:
    return lambda ins, outs, params: cost * math.prod(ins[0])


def _sort_weight(ins: Shapes, outs: Shapes, params: Params) -> float:
    length = ins[0][params["dimension"]]
    return 1000.0 * sum(map(math.prod, ins)) * max(1.0, math.log2(max(length, 1)))


def _search_row(name: str, order: str) -> BlockOp:
    """A search for the first place of the element that is in ``order`` with all others."""
    return BlockOp(
        name,
        _search,
        unchanged,
        _search_weight,
        _search_text(name),
        helpers=(first_place,),
        fuses=True,
        scratch=_extremes,
        written_out=_written_out(order),
    )


ORDERING = [
    *(BlockOp(name, _running, unchanged, _per_element(180), _along(name)) for name in ("cumsum", "cumprod", "cummax", "cummin")),
    BlockOp("cumlogsumexp", _running, unchanged, _per_element(40), _along("cumlogsumexp")),
    *map(_search_row, ("argmax", "argmin"), ("ge", "le")),
    BlockOp("sort", _sort, unchanged, _sort_weight, _sort_text),
    BlockOp(
        "top_k",
        _top_k,
        unchanged,
        _top_k_weight,
        _top_k_text,
        helpers=(block_length, top_k_by_blocks, merge_top_k),
        rereads=True,
        selection=_TOP_K,
    ),
    BlockOp("approx_top_k", _approx_top_k, unchanged, _per_element(SELECTION), _approx_top_k_text),
]
