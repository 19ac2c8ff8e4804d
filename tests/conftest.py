"""Options of the tests, and what several of them set."""

import gc
import math
import os
import re
from functools import partial

os.environ["EQSAT_MEM_PROFILES"] = "none"  # plans do not depend on what somebody calibrated here
os.environ["EQSAT_MEM_MAX_PLANNING_SECONDS"] = "3600"  # nor on how busy the machine is
os.environ["EQSAT_MEM_CACHE_DIR"] = "none"  # nor on what was planned before
os.environ.setdefault("EQSAT_MEM_DEBUG", "0")  # no line of progress among what commands write
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # where the compiler for GPUs is installed, JAX complains of the GPU that is not there
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")  # which takes longer than what some tests try in vain

import jax
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir

gc.set_threshold(50_000, 50, 100)  # a twentieth of the time of tests is that of looking through what JAX and hypothesis keep


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="write the golden files of tests/codegen/golden anew")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What is thorough is slow, too. The tests that take minutes come first: at the end one worker would run them alone."""
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker("slow")
    items.sort(key=lambda item: item.path.name not in ("test_several_devices.py", "test_several_processes.py", "test_site.py"))


class Compilation:
    """How the programs of tests are compiled: in a quarter of the time, with kernels that are slower.

    XLA emits kernels as it did before its fusion emitters, which take most of the time of a small program, and LLVM hardly optimises,
    nor at all where no array is large. What is held does not depend on either: kernels are cut and memory is assigned before. Nor do
    bits: LLVM selects instructions by graphs of them, as it does where it optimises, since its quick selection (FastISel) contracts the
    same sum in one kernel and not in another. Scripts that tests start are compiled as everybody's.
    """

    quick = True
    own = (("xla_cpu_use_fusion_emitters", False), ("xla_cpu_parallel_codegen_split_count", 1))
    slow_selection = "--xla_backend_extra_options=-fast-isel=0"
    large = 2**18
    """Elements of arrays for which kernels that are not optimised would run for longer than they are compiled."""

    @classmethod
    def options(cls, options_of, *args, **kwargs):
        """The options that ``options_of`` returns, for quick compilation."""
        options = options_of(*args, **kwargs)
        if cls.quick:
            debug_options = options.executable_build_options.debug_options
            debug_options.xla_backend_optimization_level = 1
            debug_options.xla_llvm_disable_expensive_passes = True
            if jax.__version_info__ < (0, 11):  # later ones have no other emitters
                options.env_option_overrides = [*options.env_option_overrides, *cls.own]
        return options

    @classmethod
    def compiled(cls, compile_and_load, backend, module, devices, options, callbacks):
        """What ``compile_and_load`` returns, optimised where that is worth it."""
        if cls.quick and backend.platform == "cpu" and cls.is_small(module):
            options.executable_build_options.debug_options.xla_backend_optimization_level = 0
        return compile_and_load(backend, module, devices, options, callbacks)

    @classmethod
    def is_small(cls, module):
        """Whether a module has no large array."""
        text = module.operation.get_asm(enable_debug_info=False, large_elements_limit=16)
        shapes = set(re.findall(r"tensor<((?:\d+x)+)", text))
        return all(math.prod(map(int, shape.split("x")[:-1])) < cls.large for shape in shapes)

    @classmethod
    def select_slowly(cls):
        """XLA reads its flags once, here; processes that tests start get none of them."""
        flags = os.environ.get("XLA_FLAGS")
        os.environ["XLA_FLAGS"] = f"{flags or ''} {cls.slow_selection}"
        xla_client.CompileOptions()
        del os.environ["XLA_FLAGS"]
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags


compiler.get_compile_options = partial(Compilation.options, compiler.get_compile_options)
if jax.__version_info__ < (0, 11):  # emitters of later ones take as long without LLVM's optimisations
    Compilation.select_slowly()
    compiler.backend_compile_and_load = partial(Compilation.compiled, compiler.backend_compile_and_load)


class Contexts:
    """What programs are lowered in: a context of MLIR for hundreds of them, where JAX makes one for each, a tenth of the time of tests.

    A context keeps every type and constant that was made in it, so it is left after some. What is lowered while another module is being
    built has one of its own: JAX copies modules before it compiles them, and a copy would land in the one that is being built.
    """

    most = 500

    def __init__(self, make):
        self._make, self._context, self._made = make, None, 0

    def context(self):
        """The context in which the next program is lowered."""
        try:
            ir.InsertionPoint.current  # noqa: B018 (raises where no module is being built)
        except ValueError:
            if self._made % self.most == 0:
                self._context = self._make()
            self._made += 1
            return self._context
        return self._make()


mlir.make_ir_context = Contexts(mlir.make_ir_context).context


@pytest.fixture
def compiled_as_everybodys(monkeypatch):
    """Programs are compiled as those of users are."""
    monkeypatch.setattr(Compilation, "quick", False)


@pytest.fixture
def filtered_tracebacks():
    """Tracebacks as users see them; for the other tests the filter is off."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)
