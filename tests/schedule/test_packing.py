"""Values in one block of memory."""

import math
import random

from eqsat_mem.schedule.packing import Placed, added_by_scratch, packed_bytes


def test_values_that_are_there_together_lie_apart():
    assert packed_bytes([Placed(3, 0, 1), Placed(5, 1, 2), Placed(2, 2, 2)]) == 8
    assert packed_bytes([Placed(3, 0, 0), Placed(5, 1, 1)]) == 5
    assert packed_bytes([]) == packed_bytes([Placed(0, 0, 9)]) == 0


def test_a_large_value_that_comes_and_goes_keeps_others_apart():
    workspace = [Placed(4, 0, 0), Placed(4, 2, 2)]
    assert packed_bytes([*workspace, Placed(2, 0, 1), Placed(2, 1, 2)]) == 8  # though 6 are there at most
    assert packed_bytes([*workspace, Placed(4, 0, 1), Placed(4, 1, 2)]) == 8  # which come first, being there for longer


def test_the_smallest_gap_is_taken():
    around = [Placed(n, 0, last) for n, last in ((9, 0), (8, 5), (4, 0), (3, 5))]
    assert packed_bytes([*around, Placed(2, 1, 1), Placed(1, 1, 1)]) == 24


def test_a_block_holds_no_less_than_what_is_there_and_no_more_than_all():
    draw = random.Random(0)
    for _ in range(200):
        values = [
            Placed(draw.randrange(1, 50), (first := draw.randrange(10)), first + draw.randrange(4)) for _ in range(draw.randrange(1, 12))
        ]
        most = max(sum(v.nbytes for v in values if v.first <= moment <= v.last) for moment in range(14))
        assert most <= packed_bytes(values) <= sum(v.nbytes for v in values)


def test_scratch_lengthens_a_block_where_values_cannot_lie_in_its_place():
    workspace = [Placed(4, 0, 0), Placed(4, 2, 2)]
    assert added_by_scratch([Placed(2, 0, 1), Placed(2, 1, 2)], workspace) == 4
    assert added_by_scratch([Placed(4, 0, 1), Placed(6, 1, 2)], workspace[:1]) == 0  # it lies where the larger one comes later
    assert added_by_scratch([Placed(4, 0, 1), Placed(4, 1, 2)], []) == 0
    assert added_by_scratch([Placed(4, 0, 1), Placed(9, 3, math.inf)], workspace) == 4  # the value lies in the output
