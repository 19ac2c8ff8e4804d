"""The lines of a user's program that terms come from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

EMITTED = "<eqsat_mem {}>"
"""The file that tracebacks name for the source of a plan, by the name of its function."""


def is_emitted(function: Any) -> bool:
    """Whether a function is one of the source of a plan."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(EMITTED.partition("{")[0])


@dataclass(frozen=True)
class Source:
    """The user's line that a term comes from, and (``library``) the line of an installed package that was called there.

    ``backward`` says that it belongs to the gradient of that line; ``callers`` are the file, line and function of each call that led
    there, the innermost first. Of a loop over equal ``blocks``, it is the line where the first begins. Lines are equal whatever these are.
    """

    file: str
    line: int
    function: str
    library: str = ""
    backward: bool = field(default=False, compare=False)
    callers: tuple[tuple[str, int, str], ...] = field(default=(), compare=False, repr=False)
    blocks: int = field(default=1, compare=False)

    def __str__(self) -> str:
        return self.to(self.line)

    def to(self, last: int) -> str:
        """The lines from this one to the ``last``: ``model.py:33-36 (LM.__call__)``."""
        lines = f"{self.line}" if last == self.line else f"{self.line}-{last}"
        return f"{_shown_file(self.file)}:{lines} ({self._where()})"

    def _where(self) -> str:
        called = f", in {self.library}" if self.library else ""
        return f"{self.function}{called}" + (f", {self.blocks} equal blocks" if self.blocks > 1 else "")


def _shown_file(file: str) -> str:
    """The name of a file without its folders; of a notebook's cell its number."""
    notebook = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    known = getattr(getattr(notebook, "compile", None), "_filename_map", {}).get(file)
    return file.rsplit("/", 1)[-1] if known is None else f"In[{known}]"
