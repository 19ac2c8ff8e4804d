"""The stand-in for CUDA's assembler, with which programs are compiled that nobody runs."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from eqsat_mem.backends.gpu import assembler, deviceless
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.products import Products
from eqsat_mem.errors import DeviceCompilerError
from tests.backends.test_gpu_deviceless import H100, compiler, f32


@pytest.fixture
def anew(monkeypatch):
    """As if nobody had asked for a stand-in yet."""
    monkeypatch.setattr(assembler, "_made", [])


def test_the_stand_in_says_its_version_and_writes_a_file(tmp_path):
    program = Path(assembler.toolkit(), "bin", "ptxas")
    told = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    assert told.strip() == assembler.VERSION
    made = tmp_path / "kernel.cubin"
    subprocess.run([program, tmp_path / "kernel.ptx", "-o", made, "-arch=sm_90a"], check=True)
    assert made.exists()


def test_there_is_one_stand_in_until_it_is_removed(anew):
    first = assembler.toolkit()
    assert assembler.toolkit() == first
    shutil.rmtree(first)
    second = assembler.toolkit()
    assert second != first
    assert Path(second, assembler.LIBRARY).exists()


def test_there_is_none_where_no_program_can_be_run(anew, monkeypatch):
    def refused(*args, **options):
        raise PermissionError

    monkeypatch.setattr(subprocess, "run", refused)
    assert assembler.toolkit() is None
    assert deviceless.TOOLKIT not in deviceless._unassembled()


def test_programs_that_need_an_assembler_say_so():
    class Lowered:
        def compile(self, options):
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: No PTX compilation provider is available. Neither ptxas/nvlink")

    with pytest.raises(DeviceCompilerError, match="pip install nvidia-cuda-nvcc nvidia-nvvm"):
        deviceless._compile(Lowered(), {})


def kernel_product(x, y, v):
    return jnp.exp(x @ y.T) @ v


ARRAYS = f32(4096, 32), f32(4096, 32), f32(4096, 8)


@compiler
def test_xla_runs_the_stand_in(anew, monkeypatch, tmp_path):
    monkeypatch.setattr(assembler, "PROGRAM", assembler.PROGRAM.replace("while [", f"echo called >> {tmp_path / 'calls'}\nwhile [", 1))
    deviceless.compile_for(kernel_product, ARRAYS, H100, settings=["triton"])
    assert "called" in (tmp_path / "calls").read_text()


@compiler
@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas")
def test_programs_hold_the_same_with_machine_code():
    for function, avals in ((kernel_product, ARRAYS), (lambda x: jnp.linalg.cholesky(jnp.exp(x)).sum(1), [f32(512, 512)])):
        looked_at, whole = (deviceless.compile_for(function, avals, H100, machine_code=made) for made in (False, True))
        assert [c.held_bytes for c in looked_at.settings] == [c.held_bytes for c in whole.settings]
        assert looked_at.settings[0].text == whole.settings[0].text


@compiler
def test_programs_without_products_are_compiled_in_one_setting(monkeypatch):
    counted, compiled = [], deviceless._compiled

    def counting(*args):
        counted.append(args[2])
        return compiled(*args)

    monkeypatch.setattr(deviceless, "_compiled", counting)
    own = replace(GpuBackend.of(H100), products=Products.BY_TRITON)
    own.check(lambda x: jnp.exp(x).sum(1), [f32(100, 100)])
    assert counted == ["triton"]
    whole = own.check(kernel_product, ARRAYS).held_bytes
    assert counted == ["triton", "triton", "cublas"]
    own.check(kernel_product, ARRAYS, limit=whole // 2)
    assert counted[3:] == ["triton"]
