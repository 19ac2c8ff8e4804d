"""A difference that a check of rules found, as Python to paste: both sides as functions, the values, and what they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from eqsat_mem import ir
from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, written_out
from eqsat_mem.egraph.lowering import Allowed
from eqsat_mem.egraph.soundness.judge import Difference
from eqsat_mem.ir import Program, bits
from eqsat_mem.ir.ops.elementwise import dtype_text
from eqsat_mem.schedule.schedules import unscheduled

HEADER = """import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_enable_x64", True)
inf, nan = np.inf, np.nan
"""


def counterexample(difference: Difference) -> str:
    """Python that defines ``left`` and, where there is one, ``right``, and prints their values; nothing of this package is needed."""
    program = difference.program
    sides = {name: t for name, t in (("left", difference.left), ("right", difference.right)) if t is not None}
    if not sides:
        return f"# {difference.what}\n"
    slots = {slot: k for k, slot in enumerate(sorted({slot for t in sides.values() for slot in _slots(program, t)}))}
    names = ["abcdefghpqrstuvw"[k % 16] + "_" * (k // 16) for k in slots.values()]
    free = 0
    for t in sides.values():
        free |= program.free[t]
    with jax.enable_x64(True):
        functions = [_function(program, t, free, name, slots, names) for name, t in sides.items()]
    lines = [f"# {difference.what}", HEADER, *functions]
    if difference.args:
        lines += [f"{name} = {_array(difference.args[slot])}" for name, slot in zip(names, slots)]
        lines += [f'print("{name}:", {name}({", ".join(names)}))' for name in sides]
    return "\n".join(lines) + "\n"


def _function(program: Program, t: int, free: int, name: str, slots: dict[int, int], names: list[str]) -> str:
    """The source of one side, over the indices of both, of the arguments ``slots``."""
    side = replace(program, outputs=[ir.Output(t, tuple((i,) for i in bits(free)))], effects=[])
    given = [ir.Buffer(named, program.inputs[slot].shape, program.inputs[slot].dtype) for named, slot in zip(names, slots)]

    def read(_: Program, t: int, ids: Mapping[int, int]) -> ir.Term | None:
        term = program.terms[t]
        return ir.Input(term.dtype, slots[term.slot], term.axes) if isinstance(term, ir.Input) else None

    one, _ = side.rewritten(read, into=Program(list(program.indices), given))
    ex = Extraction(written_out(one, Allowed(), rounds_operands=False)[0])
    source = emit(unscheduled(ex, backend_in_use()), name).source
    return source[source.index("def ") :].strip() + "\n"


def _slots(program: Program, t: int) -> set[int]:
    """The arguments that a term is made of."""
    below = replace(program, outputs=[ir.Output(t, ())], effects=[]).reachable()
    return {term.slot for k in below if isinstance(term := program.terms[k], ir.Input)}


def _array(values: np.ndarray) -> str:
    """Source of an array, each number as short as it can be."""

    def text(part: Any) -> str:
        return f"[{', '.join(map(text, part))}]" if np.ndim(part) else str(part)

    if not values.size:
        return f"jnp.zeros({values.shape}, {dtype_text(values.dtype)})"
    return f"jnp.array({text(values)}, {dtype_text(values.dtype)})"
