"""``eqsat-mem run``: scripts run as under python, with a report; and one that fits only with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from eqsat_mem.__main__ import main
from eqsat_mem.api.run_report import Entry, Ledger

ROOT = Path(__file__).resolve().parent.parent.parent

NEIGHBOURS = """\
import jax
import jax.numpy as jnp

@jax.jit
def nearest(queries, points):
    distance = jnp.sum((queries[:, None] - points[None]) ** 2, axis=-1)
    return jax.lax.top_k(-distance, 10)[1]

queries, points = jax.random.normal(jax.random.key(0), (2, 4000, 3))
print(nearest(queries, points).sum())
"""
"""A program of ten lines as a new user writes it; it holds all 16 million distances."""

MEASURED = """
from eqsat_mem.backends.xla import held_bytes
print(held_bytes(nearest.lower(queries, points).compile()))
"""


def python(*args, cwd, **environment):
    """The completed process of a Python command."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_TRACEBACK_FILTERING": "auto", **environment}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, check=False)


def run(*args, cwd, **environment):
    """The same through ``eqsat-mem run``; and what it says of itself, taken from stderr."""
    process = python("-m", "eqsat_mem", "run", *args, cwd=cwd, **environment)
    head, mark, said = process.stderr.partition("eqsat-mem: ")
    process.stderr = head
    return process, mark + said


@pytest.fixture
def folder(tmp_path):
    """A folder of small scripts that do not need JAX."""
    for name, text in SCRIPTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


SCRIPTS = {
    "facts.py": "import sys\nfor k in ('__name__', '__file__', '__package__', '__spec__'): print(k, globals()[k])\n"
    "print(sys.argv, sys.path[0], sys.modules['__main__'].__dict__ is globals(), type(__loader__).__name__)\n",
    "fails.py": "def f():\n    raise ValueError('no')\n\ntry:\n    f()\nexcept ValueError as error:\n    raise KeyError(1) from error\n",
    "exits.py": "import sys\nsys.exit(int(sys.argv[1]))\n",
    "says.py": "raise SystemExit('usage')\n",
    "interrupted.py": "raise KeyboardInterrupt\n",
    "broken.py": "x = = 1\n",
    "hooked.py": "import sys\nsys.excepthook = lambda kind, value, trace: print('hook', kind, trace.tb_lineno)\n1 / 0\n",
    "late.py": "import atexit\nx = 3\natexit.register(lambda: print(x, __import__('__main__').x))\n",
    "latin.py": "# -*- coding: latin-1 -*-\nprint(ascii('\u00e9'))\n",
    "package/__init__.py": "print(__name__)\n",
    "package/__main__.py": "import sys\nfrom .other import facts\n"
    "print(facts, __name__, __package__, __spec__.name, sys.argv, sys.path[0])\n",
    "package/other.py": "facts = __name__\n",
    "archive/__main__.py": "import sys\nprint(__name__, __package__, sys.argv, sys.path[0])\n",
}

COMMANDS = [
    ["facts.py"],
    ["facts.py", "a", "--report", "b", "--", "-m", "--strict"],
    ["./archive/../facts.py"],
    ["fails.py"],
    ["exits.py", "0"],
    ["exits.py", "7"],
    ["says.py"],
    ["interrupted.py"],
    ["broken.py"],
    ["hooked.py"],
    ["late.py"],
    ["latin.py"],
    ["-m", "package", "x", "-m"],
    ["-m", "package.other"],
    ["-m", "exits", "3"],
    ["archive", "x"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_scripts_run_as_under_python(command, folder):
    plain = python(*command, cwd=folder)
    ours, said = run("--memory-limit", "1GiB", *command, cwd=folder)
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    script = command[1] if command[0] == "-m" else command[0]
    assert said == ("" if command == ["broken.py"] else f"eqsat-mem: {script} did not import jax: there was nothing to plan.\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["nowhere.py"], "cannot open the script nowhere.py: No such file or directory."),
        (["package"], "package/__main__.py"),
        (["-m", "nowhere"], "there is no module 'nowhere' to run, or it is a package without __main__."),
        (["-m", "nowhere.at.all"], "there is no module 'nowhere.at.all' to run: No module named 'nowhere'."),
        (["--memory-limit", "lots", "facts.py"], "--memory-limit = 'lots' is not a number with a unit."),
        (["--max-planning-seconds", "soon", "facts.py"], "--max-planning-seconds must be a number of seconds above zero, not 'soon'."),
        (["--report", "no/where", "facts.py"], "--report no/where: No such file or directory."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_on_the_command_line(command, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(jax, "jit", jax.jit)
    (tmp_path / "facts.py").write_text("")
    (tmp_path / "package").mkdir()
    if command == ["package"]:
        message = "package has no __main__.py to run."
    assert main(["run", *command]) == 2
    assert capsys.readouterr().err.startswith(f"eqsat-mem: {message}")


def test_a_limit_in_the_environment_is_checked_first(tmp_path):
    ours, said = run("facts.py", cwd=tmp_path, EQSAT_MEM_LIMIT="lots")
    assert ours.returncode == 2
    assert said.startswith("eqsat-mem: EQSAT_MEM_LIMIT = 'lots' is not a number with a unit.")


def test_a_bound_on_planning_reaches_the_script_through_the_environment(tmp_path):
    (tmp_path / "says.py").write_text("import os\nprint(os.environ['EQSAT_MEM_MAX_PLANNING_SECONDS'])\n")
    assert run("--max-planning-seconds", "7.5", "says.py", cwd=tmp_path)[0].stdout == "7.5\n"
    ours, said = run("says.py", cwd=tmp_path, EQSAT_MEM_MAX_PLANNING_SECONDS="0")
    assert ours.returncode == 2
    assert said.startswith("eqsat-mem: EQSAT_MEM_MAX_PLANNING_SECONDS must be a number of seconds above zero, not")


@pytest.mark.slow
def test_ten_lines_over_the_limit_without_us_and_within_it_with_us(tmp_path):
    limit = 8 * 2**20
    (tmp_path / "nearest.py").write_text(NEIGHBOURS + MEASURED)
    assert len(NEIGHBOURS.splitlines()) == 10
    plain = python("nearest.py", cwd=tmp_path)
    ours, said = run("--memory-limit", "8MiB", "--report", "report.json", "nearest.py", cwd=tmp_path)
    assert plain.returncode == ours.returncode == 0, plain.stderr + ours.stderr
    (total, held), (our_total, our_held) = plain.stdout.split(), ours.stdout.split()
    assert int(held) > limit >= int(our_held)
    assert int(our_total) == pytest.approx(int(total), rel=1e-3)  # points at equal distances may change places
    first, row = said.splitlines()
    assert first == "eqsat-mem: nearest.py: 1 planned"
    assert row.split()[:3] == ["planned", "nearest", "nearest.py:4"]
    record = json.loads((tmp_path / "report.json").read_text())
    (entry,) = record["functions"]
    assert (record["script"], record["jitted_functions"], entry["limit_bytes"]) == ("nearest.py", 1, limit)
    assert entry["peak_bytes"] <= limit < entry["original_peak_bytes"]
    assert entry["arguments"] == "float32[4000,3], float32[4000,3]"


USES = {
    "unjitted.py": "import jax.numpy as jnp\nprint(jnp.ones(3).sum())\n",
    "uncalled.py": "import jax\nf = jax.jit(lambda x: x)\n",
    "library.py": "from jax import jit\n\n@jit\ndef f(x):\n    return x + 1\n",
    "imports.py": "import os\nos.environ['JAX_ENABLE_X64'] = '1'\nimport library\nprint(library.f(1.0).dtype)\n",
    "two_devices.py": "import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
    "import jax, numpy as np\nfrom jax.sharding import NamedSharding, PartitionSpec as P\n"
    "x = jax.device_put(np.ones(4), NamedSharding(jax.sharding.Mesh(jax.devices(), ('a',)), P('a')))\nprint(jax.jit(lambda x: 2 * x)(x))\n",
    "package/__init__.py": "import jax\n\n@jax.jit\ndef f(x):\n    return x + 1\n",
    "package/__main__.py": "from . import f\nprint(f(1))\n",
    "raises.py": "import jax\n\ndef inner(x):\n    raise ValueError('mine')\n\n@jax.jit\ndef f(x):\n    return inner(x)\n\nf(1)\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("unjitted.py", " compiled nothing with jax.jit, so nothing was planned: put jax.jit around what should fit the limit.\n"),
        ("uncalled.py", " compiled none of the functions that it made with jax.jit, so nothing was planned.\n"),
        ("imports.py", ": 1 fitting\n"),
        ("-m package", ": 1 fitting\n"),
        ("two_devices.py", ": 1 fitting\n"),
        ("raises.py", ": 1 left alone\n  left alone  f  raises.py:6  it raised ValueError while JAX traced it\n"),
    ],
)
def test_scripts_that_use_jax(script, said, tmp_path):
    for name, text in USES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    plain = python(*script.split(), cwd=tmp_path)
    ours, ours_said = run(*script.split(), cwd=tmp_path, EQSAT_MEM_LIMIT="1GiB")
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert ours_said == f"eqsat-mem: {script.removeprefix('-m ')}{said}"


@pytest.mark.slow
def test_scripts_that_have_closed_stderr_still_run(tmp_path):
    (tmp_path / "closed.py").write_text("import sys\nsys.stderr.close()\n" + NEIGHBOURS)
    ours, said = run("--memory-limit", "100kB", "--report", "report.json", "closed.py", cwd=tmp_path)
    assert (ours.returncode, said) == (0, "")
    assert ours.stdout == python("closed.py", cwd=tmp_path).stdout
    assert json.loads((tmp_path / "report.json").read_text())["functions"][0]["outcome"] == "failed"


def test_a_fork_that_ends_reports_nothing(tmp_path):
    (tmp_path / "forks.py").write_text("import os, sys\nif os.fork():\n    os.wait()\nsys.exit(3)\n")
    ours, said = run("forks.py", cwd=tmp_path)
    assert ours.returncode == 3
    assert said == "eqsat-mem: forks.py did not import jax: there was nothing to plan.\n"


@pytest.mark.slow
def test_strict_scripts_stop(tmp_path):
    (tmp_path / "nearest.py").write_text(NEIGHBOURS)
    command = ["--memory-limit", "100kB", "--report", "report.json", "nearest.py"]
    ours, said = run("--strict", *command, cwd=tmp_path)
    assert ours.returncode == 1
    assert ours.stdout == ""
    assert "eqsat_mem.errors.MemoryLimitError: no plan of nearest fits memory_limit = 97.66 KiB" in ours.stderr
    assert said.startswith("eqsat-mem: nearest.py: 1 failed\n")
    assert json.loads((tmp_path / "report.json").read_text())["functions"][0]["outcome"] == "failed"


# --- the ledger ---------------------------------------------------------------------------------------


def test_a_long_table_is_cut():
    ledger = Ledger()
    for k in range(30):
        ledger.add(Entry(function=f"f{k}", place="a.py:1", outcome="left alone", reason="why\nnot"))
    ledger.add(Entry(function="g", place="a.py:2", outcome="fitting"))
    lines = ledger.table("a.py").splitlines()
    assert lines[0] == "a.py: 30 left alone, 1 fitting"
    assert lines[1] == "  left alone  f0   a.py:1  why"
    assert lines[-1] == "  and 10 more, which --report lists"
    assert len(json.loads(ledger.to_json("a.py"))["functions"]) == 31


def test_what_was_planned_stands_first():
    ledger = Ledger()
    assert ledger.add(Entry(function="f", place="a.py:1", outcome="failed", reason="no"))
    assert not ledger.add(Entry(function="f", place="a.py:1", outcome="failed", reason="no", arguments="float32[3]"))
    sizes = {"limit_bytes": 2**20, "original_peak_bytes": 2**21, "peak_bytes": 2**19}
    ledger.add(Entry(function="g", place="a.py:2", outcome="planned", **sizes))
    assert ledger.table("a.py").splitlines()[:2] == [
        "a.py: 1 planned, 2 failed",
        "  planned  g  a.py:2  2 MiB as written, 512 KiB planned, limit 1 MiB",
    ]


def test_a_plan_may_hold_more_for_speed():
    ledger = Ledger()
    ledger.add(Entry(function="f", place="a.py:1", outcome="planned", limit_bytes=2**22, original_peak_bytes=2**20, peak_bytes=2**21))
    assert ledger.table("a.py").splitlines()[1] == "  planned  f  a.py:1  1 MiB as written, 2 MiB planned for speed, limit 4 MiB"
