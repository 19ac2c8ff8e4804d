"""What devices send each other is measured, on devices."""

from __future__ import annotations

import jax
import pytest

from eqsat_mem.backends import links
from eqsat_mem.ir.ops.collectives import EXCHANGES, SENT_BY


def test_every_collective_is_measured_of_two_devices_up_to_all():
    told = []
    link = links.measure(jax.local_devices()[:3], told.append, sizes=(2**10, 2**14), shortest_s=1e-5)
    assert [(kind, count) for kind, count, _ in link.points] == [(kind, count) for count in (2, 3) for kind in links.KINDS]
    assert len(told) == len(link.points)
    assert {kind for kind, _, _ in link.points} == EXCHANGES - SENT_BY.keys()
    for _, _, points in link.points:
        assert [received for received, _ in points] == [2**10, 2**14]
        assert all(seconds > 0 for _, seconds in points)
    assert link.latency_s > 0
    assert link.rate == max(received / seconds for _, _, points in link.points for received, seconds in points)


@pytest.mark.parametrize("kind", links.KINDS)
def test_a_device_receives_the_bytes_that_a_point_names(kind):
    from eqsat_mem.ir.ops.collectives import received_bytes

    _, shape_for = links.KINDS[kind]
    for devices in (2, 5, 8):
        shape = shape_for(2**16, devices)
        operand = 4
        for n in shape:
            operand *= n
        made = operand * devices if kind == "gather_shares" else operand
        assert received_bytes(kind, {"devices": devices}, operand, made) == pytest.approx(4 * 2**16, rel=1e-3)
