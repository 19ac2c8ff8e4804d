"""The events of planning, for listeners: debugging output, progress, explanations.

Stages call :func:`tell`; with nobody listening that costs next to nothing. Listeners belong to the thread that plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, eq=False)
class Event:
    """Something that happened during planning. Listeners read its attributes and never change them."""


@dataclass(frozen=True, eq=False)
class Began(Event):
    """Planning of a function began; bodies of loops and branches are planned inside the planning around them."""

    name: str
    limit_bytes: int


@dataclass(frozen=True, eq=False)
class Ended(Event):
    """Planning ended, with a plan or (None) without."""

    name: str
    plan: Any


@dataclass(frozen=True, eq=False)
class StageBegan(Event):
    """A stage of the pipeline began."""

    stage: str


@dataclass(frozen=True, eq=False)
class StageEnded(Event):
    """A stage of the pipeline ended."""

    stage: str
    seconds: float


@dataclass(frozen=True, eq=False)
class Loaded(Event):
    """A jaxpr was loaded as a program of terms."""

    program: Any


@dataclass(frozen=True, eq=False)
class Stepped(Event):
    """One step of a ruleset, and how often each rule matched in it; or (ruleset ``pass``) how many candidates each pass has changed."""

    ruleset: str
    matches: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class Settled(Event):
    """A ruleset came to rest, or was stopped, with so many rows in the e-graph."""

    ruleset: str
    rows: int


@dataclass(frozen=True, eq=False)
class Saturated(Event):
    """The e-graph was read."""

    view: Any


@dataclass(frozen=True, eq=False)
class Extracted(Event):
    """A program was extracted, at a price in seconds per byte; None: it is the program as written."""

    extraction: Any
    price: float | None


@dataclass(frozen=True, eq=False)
class Tried(Event):
    """The search gave a loop tree its chunk sizes."""

    schedule: Any


@dataclass(frozen=True, eq=False)
class Kept(Event):
    """The loop trees that the search keeps after a round, best first."""

    schedules: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Scheduled(Event):
    """The best schedule of one extraction."""

    schedule: Any
    limit_bytes: int


@dataclass(frozen=True, eq=False)
class Searched(Event):
    """One form of a program was searched: its best schedule, and the e-graph that its extractions came from."""

    schedule: Any
    view: Any


@dataclass(frozen=True, eq=False)
class Compiled(Event):
    """XLA compiled a program: the bytes that it holds, and those that it was predicted to hold."""

    held_bytes: int
    predicted_bytes: int
    limit_bytes: int


@dataclass(frozen=True, eq=False)
class Explaining(Event):
    """A plan is being explained, after so many searches."""

    searches: int


Listener = Callable[[Event], None]
_LISTENERS: ContextVar[tuple[Listener, ...]] = ContextVar("eqsat_mem_listeners", default=())


def tell(event: Event) -> None:
    """Pass an event to everyone who listens in this thread."""
    for listener in _LISTENERS.get():
        listener(event)


@contextmanager
def listening(*listeners: Listener) -> Iterator[None]:
    """Inside, ``listeners`` are told of every event, besides those that listen already.

    >>> heard = []
    >>> with listening(heard.append):
    ...     tell(Settled("simplify", 3))
    >>> heard[0].rows
    3
    """
    token = _LISTENERS.set((*_LISTENERS.get(), *listeners))
    try:
        yield
    finally:
        _LISTENERS.reset(token)


@dataclass
class Nesting:
    """Tells a listener the events of the planning that it listens to from those of the bodies planned inside it."""

    depth: int = 0

    def is_inside(self, event: Event) -> bool:
        """Whether an event, one of all in turn, belongs to the planning of a body.

        >>> nesting = Nesting()
        >>> [nesting.is_inside(event) for event in (Began("body", 1), Settled("simplify", 3), Ended("body", None), Settled("simplify", 3))]
        [True, True, True, False]
        """
        was_inside = self.depth > 0
        self.depth += isinstance(event, Began)
        self.depth -= isinstance(event, Ended)
        return was_inside or self.depth > 0


def anyone_listens() -> bool:
    """Whether planning is being watched already, as inside a plan that is."""
    return bool(_LISTENERS.get())


@dataclass
class Clock:
    """Seconds by stage, each without those of stages inside it, so that they add up; whoever listens hears of each.

    >>> clock = Clock()
    >>> with clock("trace"):
    ...     pass
    >>> list(clock.seconds)
    ['trace']
    """

    seconds: dict[str, float] = field(default_factory=dict)
    now: Callable[[], float] = time.perf_counter
    _inside: list[float] = field(default_factory=list)
    """Seconds that stages inside each of the stages that run have taken."""

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        tell(StageBegan(stage))
        start = self.now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            elapsed = self.now() - start
            own = elapsed - self._inside.pop()
            if self._inside:
                self._inside[-1] += elapsed
            self.seconds[stage] = self.seconds.get(stage, 0.0) + own
            tell(StageEnded(stage, own))
