"""The texts of errors."""

import pickle

import eqsat_mem
from eqsat_mem.errors import EqsatMemError, MemoryLimitError, RuleError, UserFileError

MiB = 2**20


def test_a_limit_that_no_plan_fits():
    error = MemoryLimitError(
        64 * MiB,
        96 * MiB + 1,
        [("v float32[n]", 3 * MiB, None), ("exp float32[n, m]", 80 * MiB, "kernel.py:12 (matvec)")],
        "matvec",
        4 * MiB,
    )
    assert str(error) == (
        "no plan of matvec fits memory_limit = 64 MiB: the smallest peak found is 96 MiB.\n"
        "It holds at that peak:\n"
        "  80 MiB  exp float32[n, m]  at kernel.py:12 (matvec)\n"
        "   3 MiB  v float32[n]\n"
        "  13 MiB  scratch of operations\n"
        "A tensor is made in chunks only along an axis that every operation from its making to its use treats slice by slice or folds; "
        "arguments, outputs and what an operation needs whole stay whole.\n"
        "Raise memory_limit (or EQSAT_MEM_LIMIT) to 96.01 MiB, or make these tensors smaller (fewer rows, a narrower dtype), "
        "or let those lines work on one slice at a time."
    )
    assert (error.limit_bytes, error.smallest_bytes) == (64 * MiB, 96 * MiB + 1)
    assert [nbytes for _, nbytes, _ in error.tensors] == [80 * MiB, 3 * MiB]


def test_arguments_and_outputs_alone_are_over_the_limit():
    assert str(MemoryLimitError(2 * MiB, 5 * MiB, (), "f", 4 * MiB)) == (
        "no plan of f fits memory_limit = 2 MiB: the smallest peak found is 5 MiB.\n"
        "Arguments and outputs count towards the limit and stay whole: they alone take 4 MiB, "
        "and every plan needs some temporaries besides.\n"
        "Raise memory_limit (or EQSAT_MEM_LIMIT) to 5 MiB, or pass and return less at a time (fewer rows, a narrower dtype)."
    )


def test_outputs_in_the_memory_of_donated_arguments_are_told():
    lines = str(MemoryLimitError(2 * MiB, 5 * MiB, [("w", 6 * MiB, None)], "f", 4 * MiB, shared_bytes=MiB)).splitlines()
    assert lines[3] == "Of this, outputs of 1 MiB take the memory of donated arguments: both count once."


def test_options_that_keep_tensors_whole_are_named_where_that_helps():
    advice = 'accuracy = "bitwise" computes contractions and floating-point sums in one piece: "reassociate" allows chunks of them.'
    assert str(MemoryLimitError(2 * MiB, 5 * MiB, (), "f", MiB, [advice])).splitlines()[2] == advice
    assert advice not in str(MemoryLimitError(2 * MiB, 5 * MiB, (), "f", 4 * MiB, [advice]))


def test_sizes_that_round_to_the_same_text_are_shown_in_bytes():
    first = str(MemoryLimitError(64 * MiB, 64 * MiB + 8)).splitlines()[0]
    assert first == "no plan of the program fits memory_limit = 67108864 B: the smallest peak found is 67108872 B."


def test_the_error_crosses_processes():
    error = MemoryLimitError(2, 3, [("x", 2, None)], "f", 1, ["restricted"], 7)
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert "restricted" in str(copy)
    assert copy.tensors == error.tensors
    assert copy.shared_bytes == 7


def test_every_error_is_one_of_the_package():
    for kind in (MemoryLimitError, RuleError, UserFileError, eqsat_mem.OptionError):
        assert issubclass(kind, EqsatMemError)
    assert eqsat_mem.MemoryLimitError is MemoryLimitError
