"""The preferences of a backend when a jaxpr is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Preferences:
    """Choices of loading that depend on the compiler target.

    Attributes:
        platform: the platform whose branch of ``lax.platform_dependent`` is loaded; None is JAX's default platform.
        short_search: the longest axis along which ``argmin`` and ``argmax`` stay one operation; along a longer one they are
            decomposed into folds, which loops can split. Rules unroll searches of up to sixteen elements.
        pairs: whether a search is decomposed into a fold of pairs of a value and its position, whose operand some compilers fuse into
            the fold; otherwise it is the extreme, and the first position at which the operand equals it.
    """

    platform: str | None = None
    short_search: int = 16
    pairs: bool = False

    @property
    def branch(self) -> str:
        """The name of the platform in ``lax.platform_dependent``."""
        return self.platform or jax.default_backend()


PLAIN = Preferences()
"""No preferences, and the default platform."""
LOADED = Preferences(short_search=2**31)
"""The choices for jaxprs that are traced from loaded programs: a search that is still one operation is not decomposed."""
