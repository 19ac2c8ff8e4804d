"""Python's search for cyclic garbage, put off while much is made and nothing thrown away."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """No cyclic garbage is looked for meanwhile.

    Planning leaves hardly any, and keeps so many objects that looking takes a fifth of it, as it does of importing the package.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
