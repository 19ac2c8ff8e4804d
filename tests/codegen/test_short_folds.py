"""Folds over indices of extent zero and one, whether or not the operand depends on them: emitted code and the reference agree."""

import numpy as np
import pytest

from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, as_written
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import saturate
from eqsat_mem.ir import Buffer, Dot, Fold, Index, Input, Literal, Output, Program
from eqsat_mem.ir.interpreter import evaluate
from eqsat_mem.ir.ops import MONOIDS
from eqsat_mem.schedule.schedules import unscheduled
from tests.oracles.targets import CPU

FLOATS = np.array([1.5, -np.inf, 0.0, np.inf, np.nan, -2.0], np.float32)
INTEGERS = np.array([3, -7, 0, 2**30, -1, 5], np.int32)
TRUTHS = np.array([True, False, True, True, False, False])
BITS = ("and", "or", "xor")
FOLDS = [(monoid, x) for monoid in MONOIDS for x in (FLOATS, INTEGERS, TRUTHS) if (monoid, x.dtype.kind) not in
         {*((bits, "f") for bits in BITS), ("add", "b"), ("mul", "b")}]  # fmt: skip
RULES = load_rules()


def agree(program, *args):
    """Whether a program, as it is and after saturation, gives what the reference gives, in its dtype."""
    expected = evaluate(program, args)
    for ex in (Extraction(program), as_written(saturate(program, RULES))):
        found = emit(unscheduled(ex, CPU), "program").function(*args)
        for one, other in zip(found, expected, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(one, other)


def folded(monoid, x, extent, depends):
    """A fold of an argument over an index of some extent, on which the argument depends or not."""
    program = Program([Index("i", len(x)), Index("k", extent)], [Buffer("x", x.shape, x.dtype)])
    argument = program.add(Input(x.dtype, 0, ((0,), (1,)) if depends else ((0,),)))
    program.outputs.append(Output(program.add(Fold(x.dtype, monoid, 0b10, argument)), ((0,),)))
    return program


@pytest.mark.parametrize("extent", [0, 1, 3])
@pytest.mark.parametrize(("monoid", "x"), FOLDS, ids=[f"{monoid}-{x.dtype}" for monoid, x in FOLDS])
def test_a_fold_over_an_index_on_which_its_operand_does_not_depend(monoid, x, extent):
    agree(folded(monoid, x, extent, depends=False), x)


@pytest.mark.parametrize("extent", [0, 1])
@pytest.mark.parametrize(("monoid", "x"), FOLDS, ids=[f"{monoid}-{x.dtype}" for monoid, x in FOLDS])
def test_a_fold_over_an_index_on_which_its_operand_depends(monoid, x, extent):
    wide = np.repeat(x[:, None], extent, 1)
    agree(folded(monoid, wide, extent, depends=True), wide)


@pytest.mark.parametrize("value", [2.5, np.inf])
def test_a_fold_of_a_number_over_no_positions(value):
    program = Program([Index("k", 0)])
    number = program.add(Literal.of(value, np.dtype(np.float32)))
    program.outputs = [Output(program.add(Fold(np.dtype(np.float32), monoid, 1, number)), ()) for monoid in ("add", "max", "mul")]
    agree(program)


@pytest.mark.parametrize("extent", [0, 1, 2])
def test_a_contraction_over_an_index_on_which_no_operand_depends(extent):
    f32 = np.dtype(np.float32)
    program = Program([Index("i", 3), Index("j", 2), Index("k", extent)], [Buffer("x", (3,), f32), Buffer("y", (2,), f32)])
    x, y = (program.add(Input(f32, slot, ((slot,),))) for slot in (0, 1))
    program.outputs = [Output(program.add(Dot(f32, 0b100, x, y)), ((0,), (1,)))]
    agree(program, np.array([1, np.inf, 2], f32), np.array([-1, 3], f32))
