"""The order of schedules: which of two is the better one."""

from __future__ import annotations

from functools import partial

from eqsat_mem.schedule.schedules import Schedule

HARDLY = 0.02
"""The share of its time by which a program has to be faster than one that holds less by this share: predictions are not closer."""
ROUGHLY = 0.3
"""The share of its time by which a program has to be faster than one that receives less from other devices: bytes are known, and seconds of
exchanges depend on what else goes on between devices, which no figure of a link tells. What is written is left for no less, either
(:data:`GAIN`)."""
GAIN = 0.7
"""A plan replaces a program that fits only if it is predicted to take at most this share of its time: predictions are not closer."""
GAIN_AT_ONCE = 0.9
"""The same for bodies of loops in which inner steps compute something at once: alone, steps of few rows take longer than predicted."""


def order(s: Schedule, limit: int) -> tuple[bool, float]:
    """The order of schedules: those that fit come first, the fastest before others; of those that do not, the smallest is first."""
    return not s.fits(limit), s.seconds if s.fits(limit) else s.peak_bytes


def better(one: Schedule, other: Schedule, limit: int) -> Schedule:
    """The first of two in their order, but where it takes hardly longer the one that receives less from other devices, or that is smaller.

    A tighter limit lets searches go on: what comes of that, and is no faster to speak of, must not hold more than what a looser one gave.
    """
    first, second = sorted((one, other), key=partial(order, limit=limit))
    if not second.fits(limit):
        return first
    if first.ex.program.shares is not None and second.seconds <= first.seconds * (1 + ROUGHLY):
        from eqsat_mem.reports.outline import received_bytes

        received, instead = received_bytes(first), received_bytes(second)
        if received != instead:
            return first if received < instead else second
    is_close = second.seconds <= first.seconds * (1 + HARDLY)
    return second if is_close and second.peak_bytes < first.peak_bytes * (1 - HARDLY) else first
