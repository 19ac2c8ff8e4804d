"""The commands for rule authors: show, rules, check-rules."""

import json
import subprocess
import sys

import pytest

from eqsat_mem.__main__ import main

FILE = """
import jax
import jax.numpy as jnp

def distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)

def smoothed(x, y):
    return jnp.exp(-distances(x, y)) @ y

def swapped(x):
    return x @ x.T

def args():
    return jax.ShapeDtypeStruct((400, 3), jnp.float32), jax.ShapeDtypeStruct((500, 3), jnp.float32)

def one():
    return jax.ShapeDtypeStruct((400, 3), jnp.float32)
"""


@pytest.fixture
def place(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return str(path)


def test_show_prints_terms_over_indices_and_as_rules_see_them(place, capsys):
    assert main(["show", f"{place}:distances", "--args", f"{place}:args"]) == 0
    assert capsys.readouterr().out == (
        "%0 = input x [i, j] : float32[i j]\n"
        "%1 = input y [k, j] : float32[k j]\n"
        "%2 = sub(%0, %1) : float32[i k j]\n"
        "%3 = integer_pow(%2) y=2 : float32[i k j]\n"
        "%4 = add[j](%3) : float32[i k]\n"
        "return %4 as [i, k]\n"
        "\n"
        "as rules see it ({} are sets of indices):\n"
        "%0 = (Leaf 0) : float32[i j]\n"
        "%1 = (Leaf 1) : float32[k j]\n"
        "%2 = (Sub %0 %1) : float32[i k j]\n"
        "%3 = (IntegerPow 2 %2) : float32[i k j]\n"
        '%4 = (Fold "add" {j} %3) : float32[i k]\n'
    )


def test_show_says_which_index_is_read_under_another_name(place, capsys):
    assert main(["show", f"{place}:swapped", "--args", f"{place}:one"]) == 0
    assert "(Dot {j} %0 %1)" in capsys.readouterr().out


def test_rules_lists_soundness_origin_and_equation(capsys):
    assert main(["rules", "--only", "neg-neg"]) == 0
    assert capsys.readouterr().out.split() == ["neg-neg", "bitwise", "simplify", "simplify.egg:21", "-(-a)", "=", "a"]
    assert main(["rules", "--accuracy", "bitwise"]) == 0
    assert " reassociate " not in capsys.readouterr().out


def test_rules_of_a_function_come_with_matches_and_time(place, capsys):
    assert main(["rules", f"{place}:distances", "--args", f"{place}:args", "--without", "splitting"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[3]: line.split() for line in out.splitlines()[:-1]}
    assert int(lines["expand-distance"][0]) >= 1
    assert lines["expand-distance"][2] == "s"
    assert "slice-fold" not in lines
    assert out.splitlines()[-1].endswith("stopped: saturated")


def test_what_is_missing_is_said(place, capsys):
    assert main(["rules", f"{place}:distances"]) == 2
    assert "--args is missing" in capsys.readouterr().err
    assert main(["rules", "--without", "expand-distances"]) == 2
    assert "similar ones are 'expand-distance'" in capsys.readouterr().err


OWN = """
;; sum_k (a - b)^2 is called halved twice
;; sound:  real -- two halves
;; memory: none
(rule ((= e (Fold "add" k (Mul s s)))) ((union e (Add (Twist e) (Twist e)))) :ruleset explore :name "two-halves")
"""


def test_plans_follow_the_rules_and_operations_that_are_named(place, tmp_path, capsys):
    (tmp_path / "own.egg").write_text(OWN)
    (tmp_path / "own.py").write_text("import eqsat_mem\n\ntwist = eqsat_mem.Operation('twist', lambda x: x / 2)\n")
    plan = ["plan", f"{place}:smoothed", "--args", f"{place}:args", "--limit", "300KiB", "--json"]
    assert main(plan) == 0
    assert "two-halves" not in json.loads(capsys.readouterr().out)["rules_fired"]
    own = ["--rules", str(tmp_path / "own.egg"), "--operations", str(tmp_path / "own.py")]
    assert main([*plan, *own, "--without", "expand-distance"]) == 0
    fired = json.loads(capsys.readouterr().out)["rules_fired"]
    assert "two-halves" in fired
    assert "expand-distance" not in fired


def test_rules_of_ones_own_are_listed_last(tmp_path, capsys):
    (tmp_path / "a.egg").write_text(OWN.replace("Twist", "Abs"))
    assert main(["rules", "--rules", str(tmp_path / "a.egg")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("two-halves ")


def test_what_nobody_reads_to_its_end_is_no_error():
    with subprocess.Popen([sys.executable, "-m", "eqsat_mem", "rules"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait() == 1


def test_an_argument_that_stands_twice_has_the_name_of_each_parameter(tmp_path, capsys):
    path = tmp_path / "twice.py"
    path.write_text(FILE + "\n\ndef args_twice():\n    x = one()\n    return x, x\n")
    assert main(["show", f"{path}:distances", "--args", f"{path}:args_twice"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("%0 = input x ")
    assert lines[1].startswith("%1 = input y ")
