"""The printed plan and its JSON."""

import dataclasses
import json

import pytest

from eqsat_mem.reports.plan import LoopSummary, Plan
from eqsat_mem.reports.plan_text import text_of

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
            LoopSummary("n", 122_880, 128, stacks=["out"], axis="rows of x"),
            LoopSummary("m", 10_007, 256, depth=1, accumulates=["sum of exp * v"]),
        ],
        rules_fired=["split", "reassociate-right"],
        peak_tensors=[("v", MiB // 2, None), ("exp", 2 * MiB, "kernel.py:12 (matvec)")],
        lines={"kernel.py:12 (matvec)": "return jnp.exp(-distance) @ v"},
    )


def test_what_a_plan_prints(plan):
    assert str(plan) == (
        "matvec fits: 5 MiB of 64 MiB (as written 56.25 GiB), predicted 4.5 s (as written 33 s)\n"
        "  as written  ########################################  56.25 GiB\n"
        "  plan        #                                         5 MiB, compiled (predicted 6 MiB)\n"
        "  limit       #                                         64 MiB\n"
        "how   128 of 122,880 rows of x at a time (960 turns)\n"
        "        within, 256 of 10,007 along index m at a time (40 turns, the last of 23)\n"
        "peak  6 MiB predicted: arguments 3 MiB, outputs 1 MiB, temporaries 2 MiB; besides arguments:\n"
        "          2 MiB  exp  at kernel.py:12 (matvec): return jnp.exp(-distance) @ v\n"
        "        512 KiB  v\n"
        "        3.5 MiB  scratch of operations\n"
        "more  .explain() why   .show() a picture   .source the program   planned in 21.5 ms"
    )


def test_long_lines_are_wrapped_below_what_they_belong_to(plan):
    lines = "a_module_of_mine.py:12-345 (a_function) and another_module.py:7 (another_function)"
    never = ["f32[6,6] exp at a_module_of_mine.py:12 (a_function)"] * 3
    loops = [LoopSummary("n", 6, 2, 0, axis="rows of x of a long name indeed", never_whole=never, lines=lines)]
    told = str(dataclasses.replace(plan, loops=loops, lines={})).split("\n")
    at = next(k for k, line in enumerate(told) if line.startswith("how"))
    assert told[at].startswith("how   a_module_of_mine.py:12-345 (a_function) and another_module.py:7 (another_function): 2 of 6 rows of x")
    assert told[at + 1].startswith(" " * 10)
    assert told[at + 1].endswith("(3 turns)")
    assert told[at + 2] == " " * 8 + "never whole: f32[6,6] exp at a_module_of_mine.py:12 (a_function) and 2 other values"
    assert max(map(len, told)) <= 120
    narrow = text_of(dataclasses.replace(plan, loops=loops, lines={}), 60)
    assert max(map(len, narrow.split("\n"))) <= 60
    assert " ".join(narrow.split()) == " ".join(" ".join(told).split())


def test_long_lines_of_code_are_cut_and_left_out_where_there_is_no_room(plan):
    long = dataclasses.replace(plan, lines={"kernel.py:12 (matvec)": "x = " + 50 * "abc + "})
    cut = next(line for line in str(long).split("\n") if "exp  at" in line)
    assert len(cut) <= 120
    assert cut.endswith("...")
    assert "  exp  at kernel.py:12 (matvec)\n" in text_of(long, 60)


def test_a_plan_that_holds_more_than_the_program_as_written_says_that_it_is_for_speed(plan):
    more = dataclasses.replace(plan, original_peak_bytes=4 * MiB)
    assert "(as written 4 MiB; more, for speed)" in str(more).splitlines()[0]
    assert "for speed" not in str(plan)


def test_what_a_program_prints_that_was_left_as_it_was(plan):
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
        "matvec fits as written: 56.25 GiB of 1 TiB\n"
        "  as written  ########################################  56.25 GiB\n"
        "  limit                                                 1 TiB\n"
        "peak  56.25 GiB predicted: arguments 3 MiB, outputs 1 MiB, temporaries 56.25 GiB; besides arguments:\n"
        "        56.25 GiB  scratch of operations\n"
        "more  .explain() why   .show() a picture   .source the program"
    )


def test_long_lists_say_what_they_leave_out(plan):
    loops = [LoopSummary("n", 8, 2)] * 11
    tensors = [*((f"exp {k}", 1000, None) for k in range(8)), ("exp 7", 1000, None)]
    lines = str(dataclasses.replace(plan, loops=loops, peak_tensors=tensors, peak_bytes=9000)).splitlines()
    assert "      and 3 more loops, in .loops" in lines
    assert lines[-7] == "        1.95 KiB  2 x exp 7"
    assert lines[-2] == "        2.93 KiB  in 3 others"


def test_values_of_one_line_are_one_entry_of_the_peak(plan):
    place = "kernel.py:12 (matvec)"
    tensors = [("f32[2] exp", 2 * MiB, place), ("f32[1] sub", MiB, place), ("v", MiB // 2, None), ("w", MiB // 2, None)]
    lines = str(dataclasses.replace(plan, peak_tensors=tensors)).splitlines()
    assert lines[7:-1] == [
        "          3 MiB  2 tensors, the largest 2 MiB f32[2] exp  at kernel.py:12 (matvec): return jnp.exp(-distance) @ v",
        "        512 KiB  v",
        "        512 KiB  w",
        "          2 MiB  scratch of operations",
    ]


def test_a_plan_of_the_cache_says_so(plan):
    assert str(dataclasses.replace(plan, seconds={"cache": 0.004})).endswith("kept from an earlier planning, read in 4 ms")


def test_in_a_notebook(plan):
    assert repr(plan) == "<plan of matvec, which fits: 5 MiB of 64 MiB (as written 56.25 GiB), predicted 4.5 s (as written 33 s)>"
    html = dataclasses.replace(plan, source="x < y")._repr_html_()
    assert str(plan) in html
    assert "<pre>x &lt; y</pre>" in html


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
        "axis": "",
        "inside": "",
        "never_whole": [],
        "lines": "",
    }
    assert record["peak_tensors"][1] == {"description": "exp", "bytes": 2 * MiB, "source": "kernel.py:12 (matvec)"}
    assert record["source"] == plan.source


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        (LoopSummary("n", 8, 8), "8 of 8 along index n at a time (1 turn)"),
        (LoopSummary("n", 7, 2), "2 of 7 along index n at a time (4 turns, the last of 1)"),
        (
            LoopSummary("n", 6, 2, 2, ["a", "b"], ["c"], "axis 1 of q"),
            "    within, 2 of 6 along axis 1 of q at a time (3 turns); accumulates a, b; stacks c",
        ),
        (
            LoopSummary("n", 4, 2, 0, list("abc"), list("de")),
            "2 of 4 along index n at a time (2 turns); accumulates a, b and 1 more; stacks d, e",
        ),
        (
            LoopSummary("n", 4, 2, 0, ["a"], never_whole=list("bcde")),
            "2 of 4 along index n at a time (2 turns); never whole: b, c and 2 more",
        ),
        (
            LoopSummary("n", 4, 1, inside="scan at f.py:3 (f)", lines="f.py:4-6 (f)"),
            "in scan at f.py:3 (f), f.py:4-6 (f): 1 of 4 along index n at a time",
        ),
    ],
)
def test_a_loop_in_words(loop, text):
    assert str(loop) == text


def test_what_passes_did_is_told_before_the_loops(plan):
    rolled = dataclasses.replace(plan, rules_fired=["equal-blocks-as-loops", "a rule"])
    assert "how   equal blocks, such as layers, run as one loop\n      128 of 122,880 rows of x" in str(rolled)
    assert "how   equal blocks, such as layers, run as one loop\n" in str(dataclasses.replace(rolled, loops=()))
