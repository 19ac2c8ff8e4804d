"""A bound on the seconds of planning, which every loop that may last asks whether time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Deadline:
    """The end of the time for planning.

    Nothing is interrupted: loops that may last ask :meth:`passed`, and end with the best that they have. A step that has begun, such as one
    of egglog or a compilation by XLA, is finished.

    Attributes:
        seconds: the time for planning, from now on.
        clock: what gives the time in seconds; tests give their own.
        whole: the deadline of which this is a part.
        struck: whether a loop has ended because time was up, for this deadline or for a part of it.

    >>> from itertools import count
    >>> deadline = Deadline(2, clock=count().__next__)
    >>> [deadline.passed() for _ in range(3)], deadline.struck
    ([False, True, True], True)
    """

    seconds: float = math.inf
    clock: Callable[[], float] = time.monotonic
    whole: Deadline | None = None
    struck: bool = False
    end: float = field(init=False)

    def __post_init__(self) -> None:
        self.end = math.inf if self.seconds == math.inf else self.clock() + self.seconds

    def passed(self) -> bool:
        """Whether time is up. Who asks ends what it does if it is."""
        if self.end == math.inf or self.clock() < self.end:
            return False
        deadline: Deadline | None = self
        while deadline is not None:
            deadline.struck, deadline = True, deadline.whole
        return True

    def part(self, share: float) -> Deadline:
        """A deadline for a stage, which may take a share of the time that is left, so that later stages have theirs."""
        left = math.inf if self.end == math.inf else max(self.end - self.clock(), 0.0)
        return Deadline(left * share, self.clock, self)

    def again(self) -> Deadline:
        """A deadline of the same length that begins now."""
        return Deadline(self.seconds, self.clock)


NEVER = Deadline()
"""No bound."""
