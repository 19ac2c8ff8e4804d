"""What a backend prefers to be given when a jaxpr is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Lowering:
    """Choices of loading that depend on the compiler target.

    Attributes:
        platform: the platform whose branch of ``lax.platform_dependent`` is loaded; None is the default one.
        short_search: ``argmin`` and ``argmax`` along an axis of at most so many elements stay one operation; along a longer
            one they are decomposed into folds, which loops can split. Rules unroll searches
            of up to sixteen.
        pairs: whether searches are folds of pairs of a value and its place, which some compilers compute with their operand inside;
            else they are the extreme, and the first place where the operand equals it.
    """

    platform: str | None = None
    short_search: int = 16
    pairs: bool = False

    @property
    def branch(self) -> str:
        """The platform by its name in ``lax.platform_dependent``."""
        return self.platform or jax.default_backend()


PLAIN = Lowering()
"""No preferences, and the default platform."""
LOADED = Lowering(short_search=2**31)
"""For jaxprs that are traced from loaded programs: a search that is still one operation stays one."""
