"""A module exported in one process is planned by the command and run in another, with equal values."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import eqsat_mem
from eqsat_mem import StableHLOError, from_stablehlo
from eqsat_mem.__main__ import main
from eqsat_mem.stablehlo.write import written

ROOT = Path(__file__).resolve().parent.parent.parent

EXPORT = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax import export

def smooth(x, y, v):
    distance = jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)
    return jnp.exp(-0.5 * distance) @ v, jnp.argmin(distance, axis=-1)

points, values = jax.ShapeDtypeStruct((1500, 3), jnp.float32), jax.ShapeDtypeStruct((1500,), jnp.float32)
made = export.export(jax.jit(smooth))(points, points, values)
Path("model.mlir").write_text(made.mlir_module())
Path("model.mlirbc").write_bytes(made.mlir_module_serialized)
if "--jax" in sys.argv:
    Path("model.jax").write_bytes(made.serialize())
rng = np.random.default_rng(0)
arguments = [rng.standard_normal((1500, 3), dtype=np.float32) for _ in "xy"] + [rng.standard_normal(1500, dtype=np.float32)]
np.savez("values.npz", *arguments, *jax.jit(smooth)(*arguments))
"""

RUN = """
import sys
from pathlib import Path
import jax, numpy as np

path = Path(sys.argv[1])
*arguments, want, nearest = np.load("values.npz").values()
if path.suffix == ".jax":
    got = jax.export.deserialize(bytearray(path.read_bytes())).call(*arguments)
else:  # XLA compiles the module itself
    device = jax.devices()[0]
    compiled = device.client.compile_and_load(path.read_bytes() if path.suffix == ".mlirbc" else path.read_text(), [device])
    got = [out[0] for out in compiled.execute_sharded([jax.device_put(x) for x in arguments]).disassemble_into_single_device_arrays()]
np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-4)
np.testing.assert_array_equal(got[1], nearest)
assert "eqsat_mem" not in sys.modules
"""


def process(code, *arguments, cwd):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=cwd, env=env, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "planned"), [("model.mlir", "planned.mlir"), ("model.mlirbc", "planned.mlirbc"), ("model.jax", "planned.jax")]
)
def test_a_module_is_planned_and_runs_elsewhere(given, planned, tmp_path, capsys, monkeypatch):
    if given.endswith(".jax"):
        pytest.importorskip("flatbuffers")
    process(EXPORT, *(["--jax"] if given.endswith(".jax") else []), cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["plan", given, "--limit", "2MiB", "-o", planned]) == 0
    told = capsys.readouterr()
    assert "of 2 MiB (as written" in told.out
    assert f"wrote {planned}" in told.err
    process(RUN, planned, cwd=tmp_path)


KERNEL = (
    "import jax.numpy as jnp\nimport numpy as np\n\n\ndef kernel(x, v):\n    return jnp.exp(-(x[:, None] - x) ** 2) @ v\n\n\n"
    "def make():\n    return np.zeros(1000, np.float32), np.zeros(1000, np.float32)\n"
)


def test_plans_of_python_functions_are_written_too(tmp_path, capsys):
    (tmp_path / "kernel.py").write_text(KERNEL)
    output = tmp_path / "planned.mlir"
    place = f"{tmp_path}/kernel.py"
    assert main(["plan", f"{place}:kernel", "--args", f"{place}:make", "--limit", "1MiB", "-o", str(output)]) == 0
    read = from_stablehlo(output)
    x, v = np.random.default_rng(0).standard_normal((2, 1000), dtype=np.float32)
    np.testing.assert_allclose(read(x, v), jnp.exp(-((x[:, None] - x) ** 2)) @ v, rtol=1e-4, atol=1e-4)
    assert "1000x1000" not in output.read_text()


def test_a_module_in_64_bits_with_what_is_kept_is_planned_and_written(tmp_path, capsys, monkeypatch):
    def f(x):
        return jnp.linalg.cholesky(x @ x.T + jnp.eye(8)) @ jnp.exp(x)

    with jax.enable_x64(True):
        path = tmp_path / "model.mlir"
        x = np.random.default_rng(0).standard_normal((8, 5))
        path.write_text(export.export(jax.jit(f), platforms=["cpu"])(x).mlir_module())
        want = jax.jit(f)(x)
    output = tmp_path / "planned.mlir"
    try:
        assert main(["plan", str(path), "--limit", "1MiB", "-o", str(output)]) == 0
        assert jax.config.jax_enable_x64
        np.testing.assert_allclose(from_stablehlo(output)(x), want, rtol=1e-12)
    finally:
        jax.config.update("jax_enable_x64", False)
    told = capsys.readouterr()
    assert "kept as it is: stablehlo.custom_call lapack_dpotrf_ffi at test_write.py" in told.err.replace(f"{Path(__file__).parent}/", "")
    assert "kept as" not in told.out


def test_other_commands_take_modules(tmp_path, capsys):
    path = tmp_path / "model.mlir"
    path.write_text(jax.jit(lambda x: jnp.exp(x[:, None] - x).sum(0)).lower(np.zeros(50, np.float32)).as_text())
    assert main(["show", str(path)]) == 0
    assert "exp(%" in capsys.readouterr().out
    assert main(["rules", str(path)]) == 0
    assert "iterations; stopped" in capsys.readouterr().out
    assert main(["report", str(path), "--limit", "1MiB", "-o", str(tmp_path / "page.html")]) == 0
    assert "wrote" in capsys.readouterr().out


def test_a_plan_for_a_card_is_written_for_it(tmp_path):
    x = np.zeros((4000, 3), np.float32)
    read = from_stablehlo(jax.jit(lambda x: jnp.exp(jnp.sin(x[:, None] - x).sum(-1)) @ x).lower(x).as_text())
    planned = eqsat_mem.optimize(read, memory_limit="1MiB", device="h100", tiles=False, verify=False)
    assert planned.plan(*read.args).loops
    data = written(planned, read.args, read.kwargs, tmp_path / "planned.mlir", "cuda")
    assert b"stablehlo.while" in data
    with pytest.raises(eqsat_mem.EqsatMemError, match="is for h100, and the device in use is"):
        planned(x)


def test_arguments_that_are_not_used_stay(tmp_path):
    data = written(jax.jit(lambda x, y: y + 1), (np.zeros(3), np.zeros(4)), {}, tmp_path / "f.mlir")
    assert [x.shape for x in from_stablehlo(data).args] == [(3,), (4,)]


FOREIGN = """
func.func @main(%x: tensor<600xf32>) -> tensor<600xf32> {
  %y = stablehlo.custom_call @my_call(%x) {api_version = VERSION : i32} : (tensor<600xf32>) -> tensor<600xf32>
  %i = stablehlo.broadcast_in_dim %y, dims = [0] : (tensor<600xf32>) -> tensor<600x600xf32>
  %j = stablehlo.broadcast_in_dim %y, dims = [1] : (tensor<600xf32>) -> tensor<600x600xf32>
  %d = stablehlo.subtract %i, %j : tensor<600x600xf32>
  %e = stablehlo.sine %d : tensor<600x600xf32>
  %v = stablehlo.dot_general %e, %x, contracting_dims = [1] x [0] : (tensor<600x600xf32>, tensor<600xf32>) -> tensor<600xf32>
  return %v : tensor<600xf32>
}"""


@pytest.mark.parametrize("version", ["2", "4"])
def test_functions_that_only_another_process_has_are_planned_around(version, tmp_path, capsys):
    path, output = tmp_path / "model.mlir", tmp_path / "planned.mlir"
    path.write_text(FOREIGN.replace("VERSION", version))
    assert main(["plan", str(path), "--limit", "300kB", "-o", str(output)]) == 0
    told = capsys.readouterr()
    assert "kept as it is: stablehlo.custom_call my_call at" in told.err
    assert "my_call, which the program calls, is not registered with XLA here: the peak is predicted" in " ".join(told.out.split())
    assert "@my_call" in output.read_text()
    assert "600x600" not in output.read_text()


def step(state, gradient, unused):
    return {"mean": 0.9 * state["mean"] + gradient, "weights": state["weights"] - 0.1 * gradient}, jnp.sum(gradient)


ARRAY = jax.ShapeDtypeStruct((500, 40), jnp.float32)
TAKEN = {"state": {"mean": ARRAY, "weights": ARRAY}, "gradient": ARRAY, "unused": ARRAY}


def aliased(text):
    (line,) = (line for line in text.splitlines() if "@main" in line)
    return len(re.findall(r"tf\.aliasing_output|jax\.buffer_donor", line))


def test_what_a_module_donates_is_counted_once_and_donated_by_what_is_written(tmp_path, capsys):
    path, output = tmp_path / "model.mlir", tmp_path / "planned.mlir"
    path.write_text(jax.jit(step, donate_argnums=0, keep_unused=True).lower(*TAKEN.values()).as_text())
    assert from_stablehlo(path).donation == {"donate_argnums": (0, 1), "donate_argnames": ()}
    limit = 4.5 * 500 * 40 * 4  # four arrays of arguments; six with results of their own
    assert main(["plan", str(path), "--limit", str(int(limit)), "-o", str(output)]) == 0
    assert "312.53 KiB of" in capsys.readouterr().out
    assert aliased(output.read_text()) == 2
    assert [x.shape for x in from_stablehlo(output).args] == [(500, 40)] * 4


def test_exports_donate_arguments_of_which_all_leaves_are_donated():
    donated = from_stablehlo(export.export(jax.jit(step, donate_argnums=0))(*TAKEN.values()))
    assert donated.donation == {"donate_argnums": (0,), "donate_argnames": ()}
    named = from_stablehlo(export.export(jax.jit(step, donate_argnames="state"))(**TAKEN))
    assert named.donation == {"donate_argnums": (), "donate_argnames": ("state",)}
    half = from_stablehlo(export.export(jax.jit(lambda s, g: s["mean"] + g, donate_argnums=0))(TAKEN["state"], ARRAY))
    assert half.donation == {"donate_argnums": (0,), "donate_argnames": ()}  # of what it leaves out nothing is known
    assert from_stablehlo(export.export(jax.jit(step))(*TAKEN.values())).donation == {}


def test_functions_that_donate_are_written_so(tmp_path):
    planned = eqsat_mem.optimize(step, memory_limit="1MiB", donate_argnums=0)
    data = written(planned, tuple(TAKEN.values()), {}, tmp_path / "planned.mlir")
    assert aliased(data.decode()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "model.mlir", "-o", "planned.txt"], "planned.txt ends with none of .mlir, .mlirbc, .jax: these are StableHLO as text"),
        (["plan", "model.mlir", "-o", "nowhere/planned.mlir"], "there is no folder nowhere to write planned.mlir to"),
        (["plan", "missing.mlir"], "missing.mlir cannot be read: No such file"),
        (["plan", "model.mlir", "--args", "a.py:b"], "model.mlir says itself what it is called with: leave out --args"),
        (["plan", "kernel.py:kernel"], "--args is missing: what is the function called with?"),
    ],
)
def test_mistakes_on_the_command_line_are_told(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.mlir").write_text("func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> { return %x : tensor<3xf32> }")
    (tmp_path / "kernel.py").write_text(KERNEL)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_what_jax_cannot_export_is_told(tmp_path):
    def shouting(x):
        jax.debug.print("{}", x[0])
        return x

    with pytest.raises(StableHLOError, match="the plan cannot be written as StableHLO: "):
        written(shouting, (np.zeros(3),), {}, tmp_path / "f.jax")
