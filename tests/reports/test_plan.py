"""The printed plan and its JSON."""

import dataclasses
import json

import pytest

from eqsat_mem.reports.plan import LoopSummary, Plan

MiB = 2**20


@pytest.fixture
def plan():
    return Plan(
        name="matvec",
        source="def matvec(x, y, v): ...\n",
        function=print,
        limit_bytes=64 * MiB,
        peak_bytes=6 * MiB,
        compiled_peak_bytes=5 * MiB,
        original_peak_bytes=122_880**2 * 4 + 4 * MiB,
        argument_bytes=3 * MiB,
        output_bytes=MiB,
        predicted_s=4.5,
        original_predicted_s=33.0,
        seconds={"trace": 0.02, "saturate": 0.0015},
        loops=[
            LoopSummary("n", 122_880, 128, stacks=["out"]),
            LoopSummary("m", 10_007, 256, depth=1, accumulates=["sum of exp * v"]),
        ],
        rules_fired=["split", "reassociate-right"],
        peak_tensors=[("v", MiB // 2, None), ("exp", 2 * MiB, "kernel.py:12 (matvec)")],
    )


def test_the_table(plan):
    assert str(plan) == (
        "plan of matvec: rewritten, peak 5 MiB of 64 MiB\n"
        "                       before    after\n"
        "  peak, predicted   56.25 GiB    6 MiB\n"
        "    arguments           3 MiB    3 MiB\n"
        "    outputs             1 MiB    1 MiB\n"
        "    temporaries     56.25 GiB    2 MiB\n"
        "  peak, compiled                 5 MiB\n"
        "  limit                         64 MiB\n"
        "  time, predicted        33 s    4.5 s\n"
        "loops\n"
        "  over n: 122,880 in 960 chunks of 128; stacks out\n"
        "    over m: 10,007 in 40 chunks of 256 (the last of 23); accumulates sum of exp * v\n"
        "held at the peak\n"
        "    2 MiB  exp  at kernel.py:12 (matvec)\n"
        "  512 KiB  v\n"
        "rules that fired: split, reassociate-right\n"
        "planned in 21.5 ms: trace 20 ms, saturate 1.5 ms"
    )


def test_the_table_of_a_program_that_was_left_as_it_was(plan):
    same = dataclasses.replace(
        plan,
        unchanged=True,
        peak_bytes=plan.original_peak_bytes,
        compiled_peak_bytes=None,
        limit_bytes=2**40,
        predicted_s=None,
        original_predicted_s=None,
        seconds={},
        loops=(),
        rules_fired=(),
        peak_tensors=(),
    )
    assert str(same) == (
        "plan of matvec: left as written, peak 56.25 GiB of 1 TiB\n"
        "                       before       after\n"
        "  peak, predicted   56.25 GiB   56.25 GiB\n"
        "    arguments           3 MiB       3 MiB\n"
        "    outputs             1 MiB       1 MiB\n"
        "    temporaries     56.25 GiB   56.25 GiB\n"
        "  limit                             1 TiB\n"
        "no loops\n"
        "no rules fired"
    )


def test_the_json_has_every_attribute_that_is_data(plan):
    record = json.loads(plan.to_json())
    assert set(record) == {item.name for item in dataclasses.fields(Plan)} - {"function", "program", "schedule", "record"}
    assert record["peak_bytes"] == 6 * MiB
    assert record["loops"][1] == {
        "index": "m",
        "extent": 10_007,
        "chunk": 256,
        "depth": 1,
        "accumulates": ["sum of exp * v"],
        "stacks": [],
    }
    assert record["peak_tensors"][1] == {"description": "exp", "bytes": 2 * MiB, "source": "kernel.py:12 (matvec)"}
    assert record["source"] == plan.source


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (LoopSummary("n", 8, 8), "over n: 8 in 1 chunk of 8"),
        (LoopSummary("n", 7, 2), "over n: 7 in 4 chunks of 2 (the last of 1)"),
        (LoopSummary("n", 6, 2, 2, ["a", "b"], ["c"]), "    over n: 6 in 3 chunks of 2; accumulates a, b; stacks c"),
    ],
)
def test_a_loop_in_words(loop, text):
    assert str(loop) == text
