"""Results of a loop that are the same for all rows of its batch, such as counts of steps: a loop of their own computes them.

Chunks of rows have no use for them, and the loop without them runs in chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from eqsat_mem.ir import Const, Input, Program, children
from eqsat_mem.ir.inside import Inside, Subfunction
from eqsat_mem.ir.interpreter import evaluate


@dataclass(frozen=True)
class SameResults:
    """A loop that computes some results of another.

    Attributes:
        prim, params: the loop.
        operands: for each of its operands, which operand of the other loop it is.
        results: for each of its results, which result of the other loop it is.
    """

    prim: Any
    params: dict[str, Any]
    operands: Sequence[int]
    results: Sequence[int]


def same_results(inside: Inside, params: dict[str, Any], wanted: Collection[int], rows: int) -> SameResults | None:
    """The loop that computes the ``wanted`` results of a loop alone; None where they need an index of ``rows``, a bit mask, or more.

    A choice has no such loop: what its branches return for all rows is chosen with the rest.
    """
    if inside.chooses:
        return None
    results, slots = _needed(inside, wanted)
    program = inside.program
    if any(program.free[t] & rows or isinstance(program.terms[t], Const) for t in _reached(program, results)):
        return None
    body = inside.restricted(Subfunction("", slots, [k for k in results if k != inside.goes_on]))
    goes_on = None if inside.goes_on is None else inside.restricted(Subfunction("", slots, [inside.goes_on]))
    carried = [k for k in results if k < inside.carries]
    first = sum(k < inside.consts for k in slots)

    def run(*operands: Any) -> Any:
        consts, carry, stepped = operands[:first], operands[first : first + len(carried)], operands[first + len(carried) :]
        if goes_on is not None:
            return lax.while_loop(lambda c: evaluate(goes_on, [*consts, *c])[0], lambda c: evaluate(body, [*consts, *c]), list(carry))

        def step(c: Any, x: Any) -> tuple[list[Any], list[Any]]:
            made = evaluate(body, [*consts, *c, *x])
            return made[: len(carried)], made[len(carried) :]

        last, stacked = lax.scan(step, list(carry), list(stepped), params["length"], params["reverse"])
        return [*last, *stacked]

    given = [program.inputs[k] for k in slots]
    length = [(params["length"],) if inside.is_stepped(k) else () for k in slots]
    jaxpr = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct((*n, *b.shape), b.dtype) for n, b in zip(length, given, strict=True))).jaxpr
    if len(jaxpr.eqns) != 1 or any(isinstance(v, Literal) or v not in jaxpr.invars for v in jaxpr.eqns[0].invars):
        return None
    (eqn,) = jaxpr.eqns
    operands = [slots[jaxpr.invars.index(v)] for v in eqn.invars]
    return SameResults(eqn.primitive, eqn.params, operands, [k for k in results if k != inside.goes_on])


def _needed(inside: Inside, wanted: Collection[int]) -> tuple[list[int], list[int]]:
    """The results that have to be computed for the wanted ones, in order, and the operands that these read."""
    program, first = inside.program, inside.consts
    results = {*wanted} if inside.goes_on is None else {*wanted, inside.goes_on}
    while True:
        read = {term.slot for t in _reached(program, results) if isinstance(term := program.terms[t], Input)}
        carried = {k - first for k in read if first <= k < first + inside.carries}
        if carried <= results:
            kept = {first + k for k in results if k < inside.carries}
            return sorted(results), sorted(read | kept)
        results |= carried


def _reached(program: Program, results: Iterable[int]) -> set[int]:
    """The terms that some results need."""
    seen, stack = set[int](), [program.outputs[k].term for k in results]
    while stack:
        t = stack.pop()
        if t not in seen:
            seen.add(t)
            stack.extend(children(program.terms[t]))
    return seen
