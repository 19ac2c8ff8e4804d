"""XLA:GPU without a GPU: the memory that a program holds on a card that this machine lacks, and the kernels that it launches.

The compiler is in two wheels, ``jax-cuda13-plugin`` and ``jax-cuda13-pjrt``, which need no driver, and no toolkit either, since no
machine code is made (:mod:`eqsat_mem.backends.gpu.assembler`). Without a card there is no autotuning; on the card XLA tries Triton
kernels and cuBLAS for each product and selects the faster. A program is therefore compiled twice, with all products by Triton and with
all products by cuBLAS, and the larger of both figures counts.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eqsat_mem.backends.gpu import assembler, thunks
from eqsat_mem.backends.gpu.targets import Target
from eqsat_mem.backends.gpu.thunks import Launch
from eqsat_mem.backends.gpu.workspaces import Workspace, workspaces
from eqsat_mem.errors import DeviceCompilerError
from eqsat_mem.schedule.checks import real_jit

Options = Mapping[str, "bool | str"]

SETTINGS: Mapping[str, Options] = MappingProxyType(
    {
        "triton": MappingProxyType({"xla_gpu_enable_triton_gemm": True, "xla_gpu_cublas_fallback": False}),
        "cublas": MappingProxyType({"xla_gpu_enable_triton_gemm": False}),
    }
)
"""Compiler options that select Triton or cuBLAS for all products, also when compiling on a card."""
QUIET: Options = MappingProxyType({"xla_gpu_enable_cub_radix_sort": False})
"""The option that makes XLA sort with its own kernels, as it does without a card anyway, so that it does not warn."""
UNOPTIMISED: Options = MappingProxyType({"xla_backend_optimization_level": "0"})
"""The option that has LLVM do no more than it must: it comes after all decisions about memory."""
PLUGINS = ("cuda13", "cuda12")
OLDEST = {"cuda13": (7, 5), "cuda12": (5, 0)}
"""The oldest compute capability for which each plugin compiles: NVIDIA's documentation of CUDA 13 and 12."""
TOOLKIT = "xla_gpu_cuda_data_dir"
"""The option that names the folder of a CUDA toolkit."""
NO_ASSEMBLER = "No PTX compilation provider"
"""How XLA's message begins where there is no assembler."""
SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"

_lock = threading.RLock()


@dataclass(frozen=True)
class Compilation:
    """The outcome of compiling a program in one setting.

    Attributes:
        setting: the name of the setting in :data:`SETTINGS`.
        options: the compiler options that select it.
        arguments: bytes of the arguments.
        outputs: bytes of the outputs.
        temporaries: bytes of the temporaries.
        shared: bytes of outputs that reuse the memory of donated arguments.
        workspaces: the scratch of libraries that XLA does not report, largest first.
        launches: the kernels and copies that the program launches; None if they were not requested.
        executable: JAX's compiled program.
    """

    setting: str
    options: Options
    arguments: int
    outputs: int
    temporaries: int
    shared: int
    workspaces: tuple[Workspace, ...]
    launches: tuple[Launch, ...] | None
    executable: Any

    @property
    def held_bytes(self) -> int:
        """The bytes of arguments, outputs and temporaries, without outputs in the memory of donated arguments, plus the largest
        scratch that XLA does not report."""
        unreported = self.workspaces[0].bytes if self.workspaces else 0
        return self.arguments + self.outputs + self.temporaries - self.shared + unreported

    @cached_property
    def text(self) -> str:
        """The text of the optimised HLO."""
        return str(self.executable.as_text())


@dataclass(frozen=True)
class Checked:
    """A program compiled for a card in every setting."""

    target: Target
    settings: tuple[Compilation, ...]

    @property
    def held_bytes(self) -> int:
        """The largest number of bytes held in any setting."""
        return max(compiled.held_bytes for compiled in self.settings)


def compile_for(
    function: Callable[..., Any],
    avals: Sequence[Any],
    target: Target,
    donate: Sequence[int] = (),
    settings: Sequence[str] = tuple(SETTINGS),
    launches: bool = False,
    machine_code: bool = False,
) -> Checked:
    """Compile a function of flat arguments for a card, without running it; the machine need not have the card.

    Args:
        function: a function of one array for each of ``avals``.
        avals: objects with ``shape`` and ``dtype``, one per argument.
        target: the card.
        donate: positions of arguments whose memory outputs may reuse.
        settings: names of the settings in :data:`SETTINGS` to compile in.
        launches: whether to read the launches of the program too, which XLA writes to a temporary folder.
        machine_code: whether to make machine code too, which nothing here reads; it takes an assembler, ``ptxas``.

    Raises:
        DeviceCompilerError: if the compiler is not installed or has another version than jaxlib, or does not compile for the card.
    """
    return Checked(target, tuple(each_setting(function, avals, target, donate, settings, launches, machine_code)))


def each_setting(
    function: Callable[..., Any],
    avals: Sequence[Any],
    target: Target,
    donate: Sequence[int] = (),
    settings: Sequence[str] = tuple(SETTINGS),
    launches: bool = False,
    machine_code: bool = False,
) -> Iterator[Compilation]:
    """Compile as :func:`compile_for` does, in one setting after the other, each when it is asked for.

    Left out is a setting in which XLA finds no kernel of Triton's for a product, if there is another: a card tries kernels.
    """
    import jax

    there = jax.sharding.SingleDeviceSharding(device(target))
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there, weak_type=getattr(a, "weak_type", False)) for a in avals]
    jitted = real_jit(
        function, donate_argnums=tuple(donate), keep_unused=True, out_shardings=there
    )  # a function without arguments has no other way to name the card
    lowered = jitted.lower(*given)
    failed = 0
    for setting in settings:
        try:
            compiled = _compiled(lowered, target, setting, launches, machine_code)
        except jax.errors.JaxRuntimeError:
            failed += 1
            if failed == len(settings):
                raise
            continue
        yield compiled


def _compiled(lowered: Any, target: Target, setting: str, launches: bool, machine_code: bool) -> Compilation:
    options: Options = {**SETTINGS[setting], **({} if machine_code else _unassembled())}
    if launches:
        with tempfile.TemporaryDirectory() as folder:
            executable = _compile(lowered, {**options, "xla_dump_to": folder, "xla_dump_hlo_as_text": True})
            launched = thunks.read(Path(folder), executable.as_text())
    else:
        executable, launched = _compile(lowered, options), None
    memory = executable.memory_analysis()
    return Compilation(
        setting,
        SETTINGS[setting],
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        tuple(workspaces(executable.as_text(), target)),
        launched,
        executable,
    )


def _unassembled() -> Options:
    """The options by which XLA goes only as far as it must to settle what a program holds."""
    toolkit = assembler.toolkit()
    return {**UNOPTIMISED, **({} if toolkit is None else {TOOLKIT: toolkit})}


def _compile(lowered: Any, options: Options) -> Any:
    """Compile, leaving out options that this version of the compiler lacks."""
    import jax

    unknown: set[str] = set()
    wanted = {**options, **QUIET}
    while True:
        try:
            return lowered.compile({name: value for name, value in wanted.items() if name not in unknown})
        except jax.errors.JaxRuntimeError as error:
            if NO_ASSEMBLER in str(error):
                raise DeviceCompilerError(
                    "this program is compiled with CUDA's own tools, which are not installed: pip install nvidia-cuda-nvcc nvidia-nvvm. "
                    "Only tile kernels need them, which tiles=False leaves out, and every program where no file of the folder for "
                    f"temporary files, {tempfile.gettempdir()}, can be run."
                ) from error
            missing = next((name for name in wanted.keys() - unknown if f"No such compile option: '{name}'" in str(error)), None)
            if missing is None:
                raise
            unknown.add(missing)


_devices: dict[str, Any] = {}


def device(target: Target) -> Any:
    """Return JAX's device object of a card, for which programs can be compiled but not run.

    There is one object per description of a card. Thread-safe.

    Raises:
        DeviceCompilerError: if the compiler is not installed or has another version than jaxlib, or does not compile for the card.
    """
    description = target.description()
    with _lock:
        if description not in _devices:
            plugin = installed()
            if target.capability < OLDEST[plugin]:
                raise DeviceCompilerError(
                    f"jax-{plugin}-plugin does not compile for {target.name}, whose compute capability is {_dotted(target.capability)}: "
                    f"it needs {_dotted(OLDEST[plugin])}. jax-cuda12-plugin does."
                )
            _devices[description] = _topology(plugin, description)
        return _devices[description]


def installed() -> str:
    """Return the installed compiler, ``cuda13`` or ``cuda12``.

    Raises:
        DeviceCompilerError: if none is installed, or one of another version than jaxlib.
    """
    from jaxlib import version

    wanted = version.__version__
    for plugin in PLUGINS:
        versions = {name: _version(name) for name in (f"jax-{plugin}-plugin", f"jax-{plugin}-pjrt")}
        if any(versions.values()):
            wrong = {name: version for name, version in versions.items() if version != wanted}
            if wrong:
                named = ", ".join(f"{name} {version or 'is missing'}" for name, version in wrong.items())
                raise DeviceCompilerError(
                    f"plans for a GPU are compiled by wheels of jaxlib's version, {wanted}; {named}. "
                    f"Install them: pip install {_wheels(plugin, wanted)}"
                )
            return plugin
    raise DeviceCompilerError(
        "plans for a GPU are compiled by two wheels that are not installed: pip install 'eqsat-mem[gpu]', "
        f"or pip install {_wheels(PLUGINS[0], wanted)}"
    )


def _wheels(plugin: str, version: str) -> str:
    return f"jax-{plugin}-plugin=={version} jax-{plugin}-pjrt=={version}"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _topology(plugin: str, description: str) -> Any:
    """Return the device with a description, from JAX's CUDA plugin.

    Unless ``JAX_PLATFORMS`` excludes CUDA, the plugin looks for CUDA's libraries when it registers itself, and does not register if
    it finds none. Compiling needs none of them, so the plugin is then initialised again without this check.
    """
    import jax
    from jax.experimental import topologies

    def made() -> Any:
        return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=description).devices[0]

    with _unchecked():
        try:
            return made()
        except NotImplementedError:
            importlib.import_module(f"jax_plugins.xla_{plugin}").initialize()
        try:
            return made()
        except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
            raise DeviceCompilerError(
                f"jax-{plugin}-plugin is installed, but JAX has no CUDA compiler from it ({error}): "
                "set JAX_PLATFORMS=cpu before JAX is imported."
            ) from error


@contextmanager
def _unchecked() -> Iterator[None]:
    before = os.environ.get(SKIP_CHECK)
    os.environ[SKIP_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SKIP_CHECK]
        else:
            os.environ[SKIP_CHECK] = before
