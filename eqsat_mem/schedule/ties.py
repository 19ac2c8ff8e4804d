"""Ties: how a rematerialised value is kept distinct from its first computation, with which compilers would merge it (CSE)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax.dtypes import extended, issubdtype
from jax.extend.core import primitives

from eqsat_mem.ir import Block, Call, Literal, Map, Program, Rename, Term, bits, children, is_leaf
from eqsat_mem.schedule.weights import SCATTERS


class Tie(Protocol):
    """A way to keep a rematerialised value distinct from its first computation, with which compilers would merge it (CSE)."""

    def can_tie(self, dtype: Any) -> bool:
        """Whether values of a dtype can be tied."""

    def can_wait_for(self, program: Program, late: int) -> bool:
        """Whether there are tokens of a value: bits that no compiler knows before the value is there."""

    def token(self, program: Program, late: int, add: Callable[[Term], int]) -> int:
        """Return a term that cannot be computed before ``late``.

        Args:
            program: the program.
            late: the term to wait for, for which there are tokens.
            add: appends a term to the program and returns its number.
        """

    def tied(self, program: Program, value: int, token: int, add: Callable[[Term], int]) -> int:
        """Return a term equal to ``value`` that cannot be computed before ``token``.

        Args:
            program: the program.
            value: the term to tie.
            token: a result of :meth:`token`.
            add: appends a term to the program and returns its number.
        """


class BitTie:
    """Ties by bits: the operand of a rematerialised value is combined with a zero computed from a value that is available late.

    Some compilers remove an ``optimization_barrier`` before common-subexpression elimination; they never remove operations on bits.
    """

    def can_tie(self, dtype: Any) -> bool:
        return _word(dtype) is not None

    def can_wait_for(self, program: Program, late: int) -> bool:
        return self.can_tie(program.terms[late].dtype) and computed(program, late) is not None

    def token(self, program: Program, late: int, add: Callable[[Term], int]) -> int:
        """Return a zero computed from the first element of a value: the bits set in it, at most 64, divided by 128."""
        value = computed(program, late)
        assert value is not None, "a value without tokens"
        dtype = program.terms[value].dtype
        word = np.dtype(_word(dtype))
        indices = list(bits(program.free[value]))
        if indices:
            params = {"start_indices": (0,) * len(indices), "limit_indices": (1,) * len(indices), "strides": None}
            call = Call(primitives.slice_p, params, (tuple((i,) for i in indices),), (((),) * len(indices),), (dtype,))
            value = add(Block(dtype, call, (value,), 0))
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


_VIEWS = ("pad", "slice", "split", "unstack", "rev", "reshape")
_JOINED = ("concatenate", "stack", "dynamic_update_slice", *SCATTERS)


def computed(program: Program, t: int) -> int | None:
    """Return the computed value that a value is a part or a view of; None if compilers may find its first element in something else.

    They know that the first element of a padded array is what it is padded with, and that of joined arrays an element of one of them.
    """
    term = program.terms[t]
    while isinstance(term, Rename) or (isinstance(term, Block) and term.call.prim.name in _VIEWS):
        t = children(term)[0]
        term = program.terms[t]
    return None if is_leaf(term) or (isinstance(term, Block) and term.call.prim.name in _JOINED) else t


def _word(dtype: Any) -> Any:
    """Return the unsigned integer dtype with the width of a dtype; None if a bitcast between them is not defined."""
    if issubdtype(dtype, extended) or issubdtype(dtype, np.complexfloating) or issubdtype(dtype, np.bool_):
        return None
    if (jnp.iinfo(dtype) if issubdtype(dtype, np.integer) else jnp.finfo(dtype)).bits < 8:
        return None
    return {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(np.dtype(dtype).itemsize)
