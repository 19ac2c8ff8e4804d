"""Loops, branches and calls: one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from eqsat_mem.stablehlo import counted
from eqsat_mem.stablehlo.operation import Op, Row
from eqsat_mem.stablehlo.solves import SOLVES
from eqsat_mem.stablehlo.values import Unreadable, word


def while_(op: Op, *start: Any) -> Any:
    """A loop, which carries the values that its body changes; one that counts to a known number is a scan."""
    runs, body = op.regions
    given, returned = op.arguments(1), op.returned(1)
    changed = [k for k, (before, after) in enumerate(zip(given, returned, strict=True)) if before != after]

    def everything(carry: Sequence[Any]) -> list[Any]:
        """All values of the loop: those that it changes, and the others."""
        values = list(start)
        for k, value in zip(changed, carry, strict=True):
            values[k] = value
        return values

    def turn(carry: Sequence[Any]) -> tuple[Any, ...]:
        values = body(*everything(carry))
        return tuple(values[k] for k in changed)

    first = tuple(start[k] for k in changed)
    turns = _turns(op, start)
    if turns is None:
        return everything(lax.while_loop(lambda carry: runs(*everything(carry))[0], turn, first))
    return everything(counted.run(lambda *carry: turn(carry), first, turns))


def _turns(op: Op, start: Sequence[Any]) -> int | None:
    """The number of turns of a loop whose condition compares a counter with a number; None where only running it tells."""
    (goes_on,) = op.returned(0)
    compared = goes_on.owner
    if getattr(compared, "name", "") != "stablehlo.compare":
        return None
    counters, (left, right) = list(op.arguments(0)), compared.operands
    stop = op.known(right)
    if left not in counters or stop is None or word(compared.attributes["comparison_direction"]) != "LT":
        return None
    k = counters.index(left)
    counter, grown = op.arguments(1)[k], op.returned(1)[k].owner
    if getattr(grown, "name", "") != "stablehlo.add" or counter not in grown.operands:
        return None
    step = op.known(next((x for x in grown.operands if x != counter), None))
    if step is None or int(step) <= 0 or not isinstance(start[k], np.ndarray | np.generic) or start[k].dtype.kind not in "iu":
        return None
    return max(0, -(-(int(stop) - int(start[k])) // int(step)))


def case(op: Op, index: Any) -> Any:
    """One of several; the last where the index is none of theirs."""
    branches, last = op.regions, len(op.regions) - 1
    if isinstance(index, np.ndarray | np.generic):
        return branches[int(index) if 0 <= int(index) <= last else last]()
    made = op.operation.operands[0].owner
    if last == 1 and getattr(made, "name", "") == "stablehlo.convert" and str(made.operands[0].type.element_type) == "i1":
        return _either(op.value_of(made.operands[0]), branches[1], branches[0])
    index = lax.select(lax.lt(index, np.int32(0)), np.int32(last), index)
    return list(lax.switch(index, [lambda branch=branch: tuple(branch()) for branch in branches]))


def if_(op: Op, which: Any) -> Any:
    return _either(which, *op.regions)


def _either(which: Any, yes: Callable[..., Any], no: Callable[..., Any]) -> list[Any]:
    if isinstance(which, np.ndarray | np.generic):
        return list(yes() if which else no())
    return list(lax.cond(which, lambda: tuple(yes()), lambda: tuple(no())))


def call(op: Op, *operands: Any) -> Any:
    return op.reader.call(op.symbol("callee"), operands)


def composite(op: Op, *operands: Any) -> Any:
    """An operation of CHLO, where that is its name; else the function that it decomposes into."""
    row = op.reader.rows.get(op.value("name"))
    if row is None:
        return op.reader.call(op.symbol("decomposition"), operands)
    return row(op.with_attributes("composite_attributes"), *operands)


_TARGETS: dict[str, Row] = {
    **SOLVES,
    "Sharding": lambda op, x: x,
    "SPMDFullToShardShape": lambda op, x: x,
    "SPMDShardToFullShape": lambda op, x: x,
}
"""Calls of functions outside of the module that JAX has words for; on one device, those for several say nothing."""


def custom_call(op: Op, *operands: Any) -> Any:
    target = op.value("call_target_name")
    if target not in _TARGETS:
        raise Unreadable(f"a call of {target}")
    return _TARGETS[target](op, *operands)


def barrier(op: Op, *operands: Any) -> Any:
    return list(lax.optimization_barrier(operands))


CONTROL: dict[str, Row] = {
    "func.call": call,
    "sdy.sharding_constraint": lambda op, x: x,
    "stablehlo.case": case,
    "stablehlo.composite": composite,
    "stablehlo.custom_call": custom_call,
    "stablehlo.if": if_,
    "stablehlo.optimization_barrier": barrier,
    "stablehlo.while": while_,
}
