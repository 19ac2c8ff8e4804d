"""Products on a GPU: what computes them, the memory that takes, and the compiler options that decide it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any

import jax

from eqsat_mem.backends import hlo
from eqsat_mem.backends.gpu import deviceless, library_scratch, measured, workspaces
from eqsat_mem.backends.gpu.options import ALWAYS, NATIVE_FUSIONS, UNTRIED
from eqsat_mem.backends.gpu.targets import Target
from eqsat_mem.schedule.checks import knows_option

LONG_TEXT = 200_000
"""Characters of a program as compiled from which on compiling it again takes seconds: guessed."""
VIEWS = frozenset({"bitcast", "get-tuple-element"})
"""Operations of HLO whose result is their operand, or a part of it."""


class Products(Enum):
    """The ways in which products are computed, and are counted.

    Attributes:
        TUNED: Triton or cuBLAS, whichever the card finds faster; the larger of both counts, with the scratch that cuBLAS has there.
        BY_TRITON: Triton. What cuBLAS would hold with little scratch counts, too: others that call the plan may compile it without
            its compiler options.
        COUNTED_BY_TRITON: Triton, and only that counts.
    """

    TUNED = "tuned"
    BY_TRITON = "by Triton"
    COUNTED_BY_TRITON = "by Triton, and counted so"

    @property
    def narrowed(self) -> Products | None:
        """The next one, which holds less; None if there is none."""
        levels = [*Products]
        place = levels.index(self) + 1
        return None if place == len(levels) else levels[place]

    @property
    def options(self) -> Mapping[str, str | bool]:
        """The compiler options of plans."""
        return ALWAYS if self is Products.TUNED else {**ALWAYS, **deviceless.SETTINGS["triton"]}

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings in which the compiler without a card is asked."""
        return ("triton",) if self is Products.COUNTED_BY_TRITON else tuple(deviceless.SETTINGS)

    def scratch_bytes(self, target: Target) -> int | None:
        """The scratch of a product by a library that counts; None where none does."""
        if self is Products.COUNTED_BY_TRITON:
            return None
        return workspaces.cublaslt(target) if self is Products.TUNED else workspaces.UNTUNED

    def most_held(self, compilations: Iterable[tuple[int, str, int]], limit: int | None, target: Target) -> int:
        """The most that any of some compilations holds, given what each holds, its text and its temporaries, or the first that is over
        the limit. A long program with products by Triton is compiled no further where it fits whatever those by cuBLAS hold; their
        scratch counts."""
        most = 0
        for k, (held, text, temporaries) in enumerate(compilations):
            most = max(most, held + self.difference(text, target, temporaries))
            if not has_products(text) or (limit is not None and most > limit):
                break
            if k == 0 and limit is not None and len(text) > LONG_TEXT and most + self.more_by_library(text, target) <= limit:
                return most + (self.scratch_bytes(target) or 0)
        return most

    def difference(self, text: str, target: Target, temporaries: int) -> int:
        """The bytes by which a program holds more, or less, with the scratch of cuBLAS that counts than with what it has; ``text`` is its
        optimised HLO, and ``temporaries`` are the bytes that it holds besides arguments and results."""
        given, counted = workspaces.cublaslt_bytes(text), self.scratch_bytes(target)
        if not given or counted is None:
            return 0
        if self is not Products.TUNED:
            return min(counted - max(given), 0)
        if (longer := counted - min(given)) <= 0:
            return 0
        more = library_scratch.more_with(text, counted, temporaries)
        return longer if more is None else more

    def more_by_library(self, text: str, target: Target) -> float:
        """The most bytes that a program whose products Triton computes holds besides, should cuBLAS compute them; ``text`` is its optimised
        HLO. What products compute on the way from their operands and to their results are arrays then, at worst all of them at once, and
        those of two bytes or less may be padded. Infinite where the text cannot be read."""
        module = hlo.from_text(text)
        if module.unread:
            return math.inf
        dots = ((own, each) for own in module.computations.values() for each in own.values() if each.op == "dot")
        return sum(_arrays(own, dot) for own, dot in dots) + (self.scratch_bytes(target) or 0)

    def untuned(self, program: Any) -> Iterator[Any]:
        """A lowered program, compiled on the card in each of the settings without trying kernels, if that is possible."""
        for setting in self.settings:
            wanted = {**NATIVE_FUSIONS, **deviceless.SETTINGS[setting], **UNTRIED}
            with suppress(jax.errors.JaxRuntimeError):
                yield program.compile({name: value for name, value in wanted.items() if knows_option(name, value)})

    def rate(self, kind: str) -> float:
        """The rate of products of a kind in shares of the libraries'."""
        return 1.0 if self is Products.TUNED else measured.BY_TRITON[kind]


def _arrays(own: Mapping[str, hlo.Instruction], dot: hlo.Instruction) -> int:
    """Bytes of the arrays that a product in a computation needs besides those that are there, at worst."""
    operands = [own[name] for name in dot.operands]
    is_narrow = any(hlo.itemsize(operand.type) <= 2 for operand in operands)
    made = sum(operand.nbytes for operand in operands if is_narrow or not _is_given(own, operand))
    return made + (dot.nbytes if is_narrow or not dot.is_root else 0)


def _is_given(own: Mapping[str, hlo.Instruction], value: hlo.Instruction) -> bool:
    while value.op in VIEWS:
        value = own[value.operands[0]]
    return value.op == "parameter"


def has_products(text: str) -> bool:
    """Whether matrices are multiplied in optimised HLO, so that other settings may hold more or less."""
    return " dot(" in text or "__cublas" in text
