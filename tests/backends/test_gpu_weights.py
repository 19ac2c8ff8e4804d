"""Instruction counts, and how they are read from machine code."""

from __future__ import annotations

import pytest

from benchmarks.calibration.instructions import Issued, instructions, longest
from eqsat_mem.backends.gpu.targets import named
from eqsat_mem.backends.gpu.weights import COUNTS, weight
from eqsat_mem.ir.ops.elementwise import MAPS

LISTING = """
kernel:
.text.kernel:
        /*0000*/                   LDG.E R0, [R2] ;
        /*0010*/                   FSETP.GT.AND P0, PT, R0, 1, PT ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
        /*0030*/                   MUFU.RCP R1, R0 ;
        /*0040*/                   DADD R4, R4, R6 ;
        /*0050*/                   BRA `(.L_x_1) ;
.L_x_0:
        /*0060*/                   FADD R1, R0, 1 ;
.L_x_1:
        /*0070*/               @P1 BRA `(.L_x_2) ;
.L_x_3:
        /*0080*/                   STG.E [R8], R1 ;
        /*0090*/                   EXIT ;
.L_x_2:
        /*00a0*/                   MUFU.LG2 R1, R1 ;
        /*00b0*/                   BRA `(.L_x_3) ;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_4);
"""


def test_the_longest_straight_way_counts():
    assert longest(LISTING, 1) == Issued(9, 1, 1)
    assert longest(LISTING, 4) == Issued(2.25, 0.25, 0.25)
    assert len(instructions(LISTING)[0]) == 13


def test_loops_and_calls_are_no_straight_way():
    assert longest(".L_x_0:\n /*0000*/ FADD R0, R0, R1 ;\n /*0010*/ @P0 BRA `(.L_x_0) ;\n /*0020*/ EXIT ;\n", 1) is None
    assert longest(" /*0000*/ CALL.REL.NOINC `(.L_x_9) ;\n /*0010*/ EXIT ;\n", 1) is None


def test_counts_are_those_of_known_operations():
    assert set(COUNTS) <= set(MAPS)
    assert len(COUNTS) > 0.9 * len(MAPS)
    assert COUNTS["add"] == ((1, 0, 0), (1, 1, 0), (1, 0, 0))


def test_weights_are_in_additions():
    h100, l4 = named("h100"), named("l4")
    assert weight("add", 4, h100) == 1
    assert weight("exp", 4, h100) == pytest.approx(8.5, abs=1)
    assert weight("add", 8, h100) == 2
    assert weight("add", 8, l4) == 64
    assert weight("sqrt", 4, h100) == 8  # by the special-function unit, an eighth as wide
    assert weight("igamma", 4, h100) is None
