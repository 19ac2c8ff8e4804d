"""The page of errors as a table: each row has a name, messages find their rows, and errors point to those that say more."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem import error_table
from eqsat_mem.__main__ import main
from eqsat_mem.errors import MemoryLimitError, OptionError, RuleError


def test_each_row_of_the_page_has_a_name_of_its_own():
    names = [row.name for row in error_table.rows()]
    lines = [line for line in error_table.table().read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    headings = [line for line in lines if line.startswith(("| message", "| warning"))]
    assert len(names) == len(set(names)) == len(lines) - len(headings)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


def test_a_message_finds_its_row():
    told = str(MemoryLimitError(2, 3, (), "loss"))
    assert [row.name for row in error_table.found(told)] == ["no-plan-of-fits-memory"]
    assert error_table.row_of("list index out of range") is None
    assert error_table.row_of("monoid 'top': identity has 2 values, and lift makes 1").name == "monoid-identity-has-values-and"


def test_errors_point_to_rows_that_say_more():
    with pytest.raises(OptionError) as caught:
        eqsat_mem.optimize(memory_limit="64 megs")
    assert caught.value.__notes__[0] == "more: eqsat-mem errors a-size-is-a-number"
    fast = eqsat_mem.optimize(lambda x: x + 1, memory_limit="10B")
    for call in (fast, fast.plan):
        with pytest.raises(MemoryLimitError) as caught:
            call(np.zeros(100, np.float32))
        assert caught.value.__notes__[0] == "more: eqsat-mem errors no-plan-of-fits-memory"


def test_others_do_not():
    with pytest.raises(OptionError) as caught:
        eqsat_mem.optimize(memory_limit="1MB", tune=1, verify=False)
    assert not any("eqsat-mem" in note for note in getattr(caught.value, "__notes__", ()))
    assert error_table.pointer(ValueError("no plan of f fits memory_limit = 2 B: the smallest peak found is 3 B")) == ""
    assert error_table.pointer(RuleError("file.egg:3: a quote without its partner")) == ""
    with pytest.raises(TypeError) as caught:
        eqsat_mem.optimize(lambda x: x @ x[:2], memory_limit="1MB")(jnp.zeros(3))
    assert not any("eqsat-mem" in note for note in getattr(caught.value, "__notes__", ()))


def test_options_without_their_names_are_answered_with_how_to_write_them():
    with pytest.raises(TypeError, match=re.escape("optimize takes options as keywords, as in optimize(f, memory_limit='64MiB').")):
        eqsat_mem.optimize(jnp.sin, "64MiB")


def test_the_command_prints_rows(capsys):
    assert main(["errors", "a-size-is-a-number"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("a-size-is-a-number\n  message  OptionError: memory_limit = value")
    assert "cure     one of the forms that the message shows" in shown
    assert main(["errors", "EQSAT_MEM_DEBUG"]) == 0
    assert capsys.readouterr().out.count("message  ") == 1
    assert main(["errors"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["Options, limits, arguments", "  no-plan-of-fits-memory"]
    assert main(["errors", "zebra"]) == 2
    assert "no error has the words 'zebra'" in capsys.readouterr().err


def test_the_command_line_points_to_rows(capsys):
    assert main(["show", "nowhere.x:f"]) == 2
    assert "more: eqsat-mem errors args-is-missing" not in capsys.readouterr().err
    assert main(["check-rules", "nowhere.egg"]) == 2
    assert capsys.readouterr().err.endswith("more: eqsat-mem errors the-rule-file-cannot-be\n")
