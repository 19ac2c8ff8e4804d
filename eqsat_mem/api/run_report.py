"""The report of ``eqsat-mem run``: the outcome for each compiled function of a script, as a table and as JSON."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from eqsat_mem.units import aligned, format_bytes

Outcome = Literal["planned", "failed", "left alone", "fitting"]
"""A plan runs; planning failed and the original runs; the function is not one that can be planned; the original fits."""

ROWS = 20
"""The most rows that the table shows."""


def say(text: str) -> None:
    """Write a message to stderr, amid the output of a script; write nothing if the script has closed or replaced stderr."""
    with suppress(AttributeError, ValueError, OSError):
        sys.stderr.write(f"eqsat-mem: {text}\n")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The outcome for one function, called with arguments of certain shapes and dtypes.

    Attributes:
        function: the qualified name of the function.
        place: its file and line.
        outcome: whether the plan or the original runs.
        reason: why the original runs; empty if the plan runs.
        arguments: the shapes and dtypes of its array arguments.
        limit_bytes: the memory limit for its peak, in bytes.
        original_peak_bytes: the predicted peak of the function as written, in bytes.
        peak_bytes: the peak of the program that runs, from the compiled program, in bytes.
        planning_s: seconds that planning took.
        traceback: the traceback of an error that stopped the planner, or empty.
    """

    function: str
    place: str
    outcome: Outcome
    reason: str = ""
    arguments: str = ""
    limit_bytes: int | None = None
    original_peak_bytes: int | None = None
    peak_bytes: int | None = None
    planning_s: float | None = None
    traceback: str = ""


class Ledger:
    """The entries of one process in order of arrival, without duplicates. Thread-safe."""

    def __init__(self) -> None:
        self.functions = 0
        """The number of functions made with ``jax.jit``."""
        self._entries: dict[Entry, Entry] = {}
        self._lock = threading.Lock()

    def made(self) -> None:
        """Count a function made with ``jax.jit``."""
        with self._lock:
            self.functions += 1

    def add(self, entry: Entry) -> bool:
        """Add an entry, and return whether it is the first one of its function with its outcome."""
        subject = entry.function, entry.place, entry.outcome
        with self._lock:
            known = any(subject == (other.function, other.place, other.outcome) for other in self._entries.values())
            self._entries[replace(entry, planning_s=None)] = entry
            return not known

    @property
    def entries(self) -> list[Entry]:
        """The entries so far."""
        with self._lock:
            return list(self._entries.values())

    def to_json(self, script: str) -> str:
        """Return one JSON object; each entry in it is an object whose keys are the attributes of :class:`Entry`."""
        record = {"script": script, "jitted_functions": self.functions, "functions": [asdict(entry) for entry in self.entries]}
        return json.dumps(record, indent=2)

    def table(self, script: str) -> str:
        """Return a line that counts the outcomes, and a line for each function whose outcome is not ``fitting``."""
        entries = self.entries
        if not entries:
            return f"{script} {self._nothing()}"
        count = Counter(entry.outcome for entry in entries)
        summary = ", ".join(f"{count[outcome]} {outcome}" for outcome in get_args(Outcome) if count[outcome])
        order = get_args(Outcome)
        shown = sorted((e for e in entries if e.outcome != "fitting"), key=lambda e: order.index(e.outcome))
        lines = [f"{script}: {summary}", *(f"  {row}" for row in aligned([_row(entry) for entry in shown[:ROWS]]))]
        if len(shown) > ROWS:
            lines.append(f"  and {len(shown) - ROWS} more, which --report lists")
        return "\n".join(lines)

    def _nothing(self) -> str:
        if "jax" not in sys.modules:
            return "did not import jax: there was nothing to plan."
        if not self.functions:
            return "compiled nothing with jax.jit, so nothing was planned: put jax.jit around what should fit the limit."
        return "compiled none of the functions that it made with jax.jit, so nothing was planned."


def _row(entry: Entry) -> tuple[str, str, str, str]:
    if entry.outcome == "planned":
        before, after, limit = (format_bytes(n or 0) for n in (entry.original_peak_bytes, entry.peak_bytes, entry.limit_bytes))
        text = f"{before} as written, {after} planned, limit {limit}"
    else:
        text = entry.reason.split("\n", 1)[0]
    return entry.outcome, entry.function, entry.place, text
