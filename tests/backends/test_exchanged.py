"""The collectives of compiled programs are read from their text."""

import pytest

from eqsat_mem.backends.choose import backend_for
from eqsat_mem.backends.collectives import Exchanged, exchanged, exchanged_s
from eqsat_mem.ir.mesh import Devices

TEXT = """HloModule jit_f, entry_computation_layout={(f32[64]{0})->f32[64]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], f32[64])) -> (s32[], f32[64]) {
  %p = (s32[], f32[64]{0}) parameter(0)
  %x = f32[64]{0} get-tuple-element(%p), index=1
  %sent = f32[64]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %all = f32[64]{0} all-reduce(%sent), channel_id=2, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %both = (s32[], f32[64]{0}) tuple(%x, %all)
}

ENTRY %main (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  %looped = (s32[], f32[64]{0}) while(%a), condition=%add, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %begun = (bf16[64]{0}, bf16[512]{0}) all-gather-start(%a), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %out = f32[64]{0} get-tuple-element(%looped), index=1
}
"""


def test_loops_run_their_collectives_as_often_as_they_turn():
    assert exchanged(TEXT, 8) == [
        Exchanged("collective-permute", 8, 256.0, 5),
        Exchanged("all-reduce", 4, 2 * 256 * 3 / 4, 5),
        Exchanged("all-gather", 8, 512 * 2 * 7 / 8, 1),
    ]


def test_exchanges_have_the_price_of_those_of_plans():
    backend, devices = backend_for("h100"), Devices((("x", 2), ("y", 4)))
    every = exchanged(TEXT, 8)
    one = backend.exchange_s("exchange_shares", 256.0, ("x", "y"), devices)
    other = backend.exchange_s("all_reduce", 384.0, ("y",), devices)
    assert exchanged_s(every[:2], backend, devices) == pytest.approx(5 * (one + other))
