"""How a value computed again is kept apart from the first computation, with which compilers would merge it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from jax.dtypes import extended, issubdtype
from jax.extend.core import primitives

from eqsat_mem.ir import Block, Call, Literal, Map, Program, Term, bits


class Tie(Protocol):
    """How a value computed again is kept apart from the first computation, with which compilers would merge it."""

    def can_tie(self, dtype: Any) -> bool:
        """Whether values of a dtype can be tied."""

    def token(self, program: Program, late: int, add: Callable[[Term], int]) -> int:
        """A term that exists only after ``late`` does; ``add`` appends terms to the program."""

    def tied(self, program: Program, value: int, token: int, add: Callable[[Term], int]) -> int:
        """A term equal to ``value`` that does not exist before ``token``."""


class BitTie:
    """Ties by bits: a value computed again is combined with a zero that is made from a value that exists late.

    An ``optimization_barrier`` is dropped by some compilers before they merge equal computations; bits are never.
    """

    def can_tie(self, dtype: Any) -> bool:
        return _word(dtype) is not None

    def token(self, program: Program, late: int, add: Callable[[Term], int]) -> int:
        """Zero, made from the first element of a value: no number has 128 bits that are set."""
        dtype = program.terms[late].dtype
        word = np.dtype(_word(dtype))
        indices = list(bits(program.free[late]))
        value = late
        if indices:
            params = {"start_indices": (0,) * len(indices), "limit_indices": (1,) * len(indices), "strides": None}
            call = Call(primitives.slice_p, params, (tuple((i,) for i in indices),), (((),) * len(indices),), (dtype,))
            value = add(Block(dtype, call, (late,), 0))
        if word != dtype:
            value = add(Map(word, "bitcast_convert_type", (value,), (("new_dtype", word),)))
        value = add(Map(word, "population_count", (value,)))
        return add(Map(word, "shift_right_logical", (value, program.add(Literal.of(7, word)))))

    def tied(self, program: Program, value: int, token: int, add: Callable[[Term], int]) -> int:
        dtype = program.terms[value].dtype
        word = np.dtype(_word(dtype))
        if program.terms[token].dtype != word:
            token = add(Map(word, "convert_element_type", (token,), (("new_dtype", word),)))
        bitwise = value if word == dtype else add(Map(word, "bitcast_convert_type", (value,), (("new_dtype", word),)))
        bitwise = add(Map(word, "or", (bitwise, token)))
        return bitwise if word == dtype else add(Map(dtype, "bitcast_convert_type", (bitwise,), (("new_dtype", dtype),)))


def _word(dtype: Any) -> Any:
    """The unsigned integers that have the bits of a dtype, None where a conversion of bits is not defined."""
    if issubdtype(dtype, extended) or issubdtype(dtype, np.complexfloating) or issubdtype(dtype, np.bool_):
        return None
    return {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(np.dtype(dtype).itemsize)
