"""The suites: where they are found, which parts of them are run, and which of their tests are excused."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatch


@dataclass(frozen=True)
class Suite:
    """A part of the tests of a library.

    Attributes:
        name: the name of the suite, and that of its checkout.
        package: the name under which the library is installed.
        repository: where it is on GitHub.
        tag: the tag of a version there.
        files: the files of tests, as patterns of paths in the checkout.
        without: files that match and are left out.
        environment: variables that its tests are run with.
        reported: names of other packages that the tests need.
    """

    name: str
    package: str
    repository: str
    tag: str
    files: tuple[str, ...]
    without: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


SUITES = (
    Suite(
        "jax",
        "jax",
        "jax-ml/jax",
        "jax-v{}",
        tuple(
            f"tests/{name}_test.py"
            for name in ("api", "lax_control_flow", "linalg", "random", "random_lax", "mutable_array", "custom_api", "nn", "aot")
        ),
        environment={"JAX_NUM_GENERATED_CASES": "5", "JAX_SKIP_SLOW_TESTS": "1"},
        needs=("absl-py", "scipy"),
    ),
    Suite("optax", "optax", "google-deepmind/optax", "v{}", ("optax/**/*_test.py",), needs=("chex", "scikit-learn")),
    Suite(
        "equinox",
        "equinox",
        "patrick-kidger/equinox",
        "v{}",
        ("tests/test_*.py",),
        without=("tests/test_onnx.py", "tests/test_pmap.py", "tests/test_sharding.py"),
        needs=("beartype",),
    ),
    Suite("flax", "flax", "google/flax", "v{}", ("tests/nnx/**/*_test.py", "tests/linen/linen_*_test.py", "tests/core/*_test.py")),
    Suite("lineax", "lineax", "patrick-kidger/lineax", "v{}", ("tests/test_*.py",), needs=("beartype",)),
    Suite("diffrax", "diffrax", "patrick-kidger/diffrax", "v{}", ("test/test_*.py",), needs=("beartype", "optax")),
    Suite("optimistix", "optimistix", "patrick-kidger/optimistix", "v{}", ("tests/test_*.py",), needs=("beartype", "pytest-benchmark")),
    Suite("numpyro", "numpyro", "pyro-ppl/numpyro", "{}", ("test/test_*.py", "test/infer/test_*.py", "test/ops/test_*.py")),
    Suite("ott", "ott-jax", "ott-jax/ott", "{}", ("tests/**/*_test.py",), needs=("matplotlib", "optax")),
)

COUNTS = "it counts compilations, and a plan is compiled to learn what XLA reserves for it"
FRAMES = "it counts the frames between a call and the function, and planning has some, which JAX filters from tracebacks"
PRUNED = "it asks a private attribute which arguments were pruned, and a planned function is one operation that takes all of them"

EXCUSED: dict[str, str] = {
    "jax:tests/api_test.py::JitTest::test_jit_compile_with_compiler_options_multiple": COUNTS,
    "jax:tests/api_test.py::JitTest::test_jit_lower_no_pruning": PRUNED,
    "jax:tests/api_test.py::TracebackTest::test_jit_traceback": FRAMES,
    "equinox:tests/test_noinline.py::test_complicated": COUNTS,
}
"""Tests that may fail under ``run`` only, as patterns of ``suite:file::test``, each with the reason."""


def excuse(test: str) -> str:
    """The reason for which a test, ``suite:file::test``, may fail under ``run``; empty if it may not."""
    return next((reason for pattern, reason in EXCUSED.items() if fnmatch(test, pattern)), "")
