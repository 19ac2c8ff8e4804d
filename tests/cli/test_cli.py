"""The command line: what it prints, and what it says of mistakes in a user's file."""

import json
import subprocess
import sys

import pytest

from eqsat_mem import Plan, __version__
from eqsat_mem.__main__ import main
from eqsat_mem.cli import demo

KERNEL = """
import jax
import jax.numpy as jnp


def matvec(x, y, v):
    distance = jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)
    return jnp.exp(-0.5 * distance) @ v


def make_args():
    points = jax.ShapeDtypeStruct((2048, 3), jnp.float32)
    return points, points, jax.ShapeDtypeStruct((2048, 1), jnp.float32)


def make_keywords():
    return dict(zip("xyv", make_args()))


def two_arguments():
    return make_args()[:2]


def wrong_shapes():
    x, y, v = make_args()
    return x, y, jax.ShapeDtypeStruct((5, 1), jnp.float32)


def raises():
    raise RuntimeError("no data today")


def listed():
    return list(two_arguments())


number = 3
"""


@pytest.fixture
def kernel(tmp_path):
    """The path of a file of a user's."""
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    return str(path)


def error_of(capsys, *argv):
    """The message of a command that a user's mistake ends, without where to read more."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.startswith("eqsat-mem: ")
    return captured.err.removeprefix("eqsat-mem: ").partition("\nmore: ")[0].rstrip("\n")


def test_a_plan_as_text(kernel, capsys):
    assert main(["plan", f"{kernel}:matvec", "--args", f"{kernel}:make_args", "--limit", "2MiB"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("matvec fits: ")
    assert "of 2 MiB" in out
    assert "fori_loop" in out


def test_a_bound_on_planning(kernel, capsys):
    command = ["plan", f"{kernel}:matvec", "--args", f"{kernel}:make_args", "--limit", "2MiB", "--max-planning-seconds"]
    assert main([*command, "600"]) == 0
    assert "planning was cut short" not in capsys.readouterr().out
    assert "Planning was cut short to end within 1e-06 s" in error_of(capsys, *command, "1e-6")
    assert error_of(capsys, *command, "0").startswith("--max-planning-seconds must be a number of seconds above zero, not")


def test_a_plan_as_json(kernel, capsys):
    assert main(["plan", f"{kernel}:matvec", "--args", f"{kernel}:make_keywords", "--limit", "2 MB", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["limit_bytes"] == 2_000_000
    assert record["peak_bytes"] <= 2_000_000 < record["original_peak_bytes"]
    assert record["loops"]


def test_a_plan_for_a_mesh_that_is_not_here(kernel, capsys):
    command = ["plan", f"{kernel}:matvec", "--args", f"{kernel}:make_args", "--limit", "1MiB", "--mesh", "data=4,model=2", "--json"]
    assert main(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["mesh"] == {"data": 4, "model": 2}
    assert record["spread"]


@pytest.mark.parametrize(
    ("text", "words"), [("8", "a mesh is written x=8"), ("x=0", "a mesh is written x=8"), ("x=2,x=4", "different names")]
)
def test_a_mesh_that_means_nothing(text, words, kernel, capsys):
    assert words in error_of(capsys, "plan", f"{kernel}:matvec", "--args", f"{kernel}:make_args", "--mesh", text)


def test_a_decorated_function_has_its_own_limit(tmp_path, capsys):
    path = tmp_path / "decorated.py"
    path.write_text("import eqsat_mem\n" + KERNEL.replace("def matvec", '@eqsat_mem.optimize(memory_limit="3MiB")\ndef matvec'))
    command = ["plan", f"{path}:matvec", "--args", f"{path}:make_args", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["limit_bytes"] == 3 * 2**20
    assert main([*command, "--limit", "2MiB"]) == 0
    assert json.loads(capsys.readouterr().out)["limit_bytes"] == 2 * 2**20


def test_no_plan_fits(kernel, capsys):
    message = error_of(capsys, "plan", f"{kernel}:matvec", "--args", f"{kernel}:make_args", "--limit", "1KiB")
    assert message.startswith("no plan of matvec fits memory_limit = 1 KiB: the smallest peak found is ")


def test_a_limit_that_means_nothing(kernel, capsys):
    message = error_of(capsys, "plan", f"{kernel}:matvec", "--args", f"{kernel}:make_args", "--limit", "lots")
    assert message.startswith("memory_limit = 'lots' is not a number with a unit.")


@pytest.mark.parametrize("place", ["kernel.py", "matvec", ":matvec", "kernel.py:", "kernel.py:a b", "a b:f"])
def test_a_place_of_another_form(place, kernel, capsys):
    assert error_of(capsys, "plan", place, "--args", f"{kernel}:make_args") == (
        f"{place!r} names no function: write FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION."
    )


def test_no_such_file(kernel, capsys):
    assert error_of(capsys, "plan", "nowhere.py:f", "--args", f"{kernel}:make_args") == "there is no file nowhere.py."


def test_no_such_function(kernel, capsys):
    message = error_of(capsys, "plan", f"{kernel}:matvex", "--args", f"{kernel}:make_args")
    assert (
        message
        == f"{kernel} has no function 'matvex'; it has listed, make_args, make_keywords, matvec, raises, two_arguments, wrong_shapes."
    )


def test_a_name_that_is_no_function(kernel, capsys):
    message = error_of(capsys, "plan", f"{kernel}:number", "--args", f"{kernel}:make_args")
    assert message == f"'number' in {kernel} is of type int, not a function."


def test_arguments_that_raise(kernel, capsys):
    message = error_of(capsys, "plan", f"{kernel}:matvec", "--args", f"{kernel}:raises")
    assert message == f"{kernel}:raises raised, line 30: RuntimeError: no data today"


def test_a_function_that_raises(kernel, capsys):
    message = error_of(capsys, "plan", f"{kernel}:matvec", "--args", f"{kernel}:wrong_shapes")
    assert message.startswith(f"{kernel}:matvec raised while JAX traced it, line 8: TypeError: ")


def test_arguments_that_do_not_match(kernel, capsys):
    message = error_of(capsys, "plan", f"{kernel}:matvec", "--args", f"{kernel}:two_arguments")
    assert message.startswith(f"{kernel}:matvec raised while JAX traced it: TypeError: ")
    assert "missing 1 required positional argument: 'v'" in message


def test_a_list_of_arguments_is_one_argument(kernel, capsys):
    message = error_of(capsys, "plan", f"{kernel}:matvec", "--args", f"{kernel}:listed")
    assert message.startswith(f"{kernel}:matvec raised while JAX traced it (of one argument, a list of 2: return a tuple for several)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nimport no_such_module_anywhere\n", "line 2: ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("def f(:\n", "line 1: SyntaxError: "),
        ("import sys\n\nsys.exit('usage')\n", "line 3: SystemExit: usage"),
    ],
)
def test_a_file_that_does_not_load(text, message, tmp_path, kernel, capsys):
    path = tmp_path / "broken.py"
    path.write_text(text)
    error = error_of(capsys, "plan", f"{path}:f", "--args", f"{kernel}:make_args")
    assert error.startswith(f"{path} raised while it loaded, {message}")


def test_a_file_may_import_its_neighbour(tmp_path, kernel, capsys):
    (tmp_path / "neighbour_of_the_kernel.py").write_text("from kernel import matvec\n")
    main_file = tmp_path / "uses_neighbour.py"
    main_file.write_text("from neighbour_of_the_kernel import matvec\n")
    assert main(["plan", f"{main_file}:matvec", "--args", f"{kernel}:make_args", "--limit", "1GiB"]) == 0
    assert capsys.readouterr().out.startswith("matvec fits: ")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A package of a user's in the working directory, whose modules import each other."""
    package = tmp_path / "project_of_a_user"
    (package / "models").mkdir(parents=True)
    for folder in (package, package / "models"):
        (folder / "__init__.py").write_text("")
    (package / "models" / "kernel.py").write_text(KERNEL)
    (package / "train.py").write_text("from .models.kernel import make_args, matvec\n\nclass Model:\n    step = staticmethod(matvec)\n")
    (package / "broken.py").write_text("x = 1\nfrom .models import nothing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[name]


@pytest.mark.parametrize("place", ["project_of_a_user.train", "project_of_a_user/train.py"])
@pytest.mark.parametrize("function", ["matvec", "Model.step"])
def test_a_function_of_a_package(place, function, project, capsys):
    assert main(["plan", f"{place}:{function}", "--args", f"{place}:make_args", "--limit", "1GiB"]) == 0
    assert capsys.readouterr().out.startswith("matvec fits: ")


def test_no_such_module(project, kernel, capsys):
    for name in ("project_of_a_user.trainer", "no_such_project.train"):
        message = error_of(capsys, "plan", f"{name}:step", "--args", f"{kernel}:make_args")
        assert message == f"there is no module {name} here or among installed packages."


def test_a_module_that_does_not_load(project, kernel, capsys):
    message = error_of(capsys, "plan", "project_of_a_user.broken:f", "--args", f"{kernel}:make_args")
    assert message.startswith("project_of_a_user.broken raised while it loaded, line 2: ImportError: cannot import name 'nothing'")


def test_what_argparse_finds_ends_with_the_same_status(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan"])
    assert caught.value.code == 2
    assert "PLACE:FUNCTION" in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"eqsat-mem {__version__}\n"


def test_a_small_demonstration(capsys):
    assert main(["demo", "--points", "3000", "--limit", "2MiB"]) == 0
    captured = capsys.readouterr()
    for expected in ("def matvec(x", "peak before", "peak held", "largest error", "fori_loop"):
        assert expected in captured.out
    assert "planning ...\nplanning: " in captured.err


def test_a_demonstration_with_wrong_values_fails(monkeypatch, capsys):
    monkeypatch.setattr(demo, "TOLERANCE", 0.0)
    assert main(["demo", "--points", "300", "--limit", "1MiB"]) == 1
    assert "MORE THAN 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import eqsat_mem", ["jax", "numpy", "egglog"]),
        ("from eqsat_mem import optimize", ["matplotlib", "scipy", "IPython", "ipywidgets"]),
    ],
)
def test_importing_costs_little(statement, absent):
    code = f"import sys; {statement}; print([name for name in {absent} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.slow
def test_a_plan_with_its_reasons(kernel, capsys):
    command = ["plan", f"{kernel}:matvec", "--args", f"{kernel}:make_args", "--limit", "2MiB", "--explain"]
    assert main(command) == 0
    out = capsys.readouterr().out
    parts = ("matvec fits: ", "why this plan of matvec\nrules without which it is not reached", "import jax")
    assert sorted(parts, key=out.index) == list(parts)
    assert main([*command, "--only", "splitting", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["why"]["name"] == record["name"] == "matvec"


def test_an_unknown_option_is_answered_with_the_nearest_one(capsys):
    for line, near in (
        (["plan", "kernel.py:f", "--limits", "1MB"], "--limit"),
        (["run", "--max-planing-second", "3", "train.py"], "--max-planning-seconds"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(line)
        assert ended.value.code == 2
        assert f"did you mean {near}?" in capsys.readouterr().err


def test_an_unknown_command_is_answered_with_the_nearest_one(capsys):
    for command, answer in (("repot", "did you mean report?"), ("xyz", "there are plan, tune, report,")):
        with pytest.raises(SystemExit) as ended:
            main([command, "kernel.py:f"])
        assert ended.value.code == 2
        assert answer in capsys.readouterr().err


def test_both_names_of_the_limit_will_do(kernel, capsys):
    assert main(["plan", f"{kernel}:matvec", "--args", f"{kernel}:make_args", "--memory-limit", "1MB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limit_bytes"] == 10**6


def test_a_plan_is_written_to_a_file_that_optimize_takes(kernel, tmp_path, capsys):
    place = ["plan", f"{kernel}:matvec", "--args", f"{kernel}:make_args", "--limit", "1MB"]
    assert main([*place, "-o", str(tmp_path / "kernel.plan")]) == 0
    assert "wrote" in capsys.readouterr().err
    plan = Plan.load(tmp_path / "kernel.plan")
    assert (plan.name, plan.limit_bytes) == ("matvec", 10**6)
    assert main([*place, "-o", str(tmp_path / "kernel.txt")]) == 2
    assert ".plan" in capsys.readouterr().err
