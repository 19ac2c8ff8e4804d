"""Ways of using ``jax.jit`` that other people's test suites have and that planning must not be noticed by."""

import gc
import logging
import re
import sys
import textwrap
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import test_util
from jax.extend.core import Primitive

from eqsat_mem import pipeline
from eqsat_mem.api import subjects
from eqsat_mem.api.function import Function
from eqsat_mem.api.planning import ScriptRun
from eqsat_mem.api.planning_jit import planning_jit
from eqsat_mem.api.primitive import planned_p
from eqsat_mem.api.run_report import Ledger

LIMITS = {"fitting": "64MiB", "planned": "1MiB", "failed": "1B"}
ROWS = 800


def nearest(x):
    """Holds all distances, 2.4 MiB, as written: sorting keeps them from being fused."""
    return jnp.sort((x[:, None] - x[None]) ** 2, axis=1)[:, 1]


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def jit(ledger, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "1MiB")
    return planning_jit(ScriptRun(ledger, strict=False))


@pytest.fixture
def x():
    return jnp.linspace(0.0, 1.0, ROWS) ** 2


def outcomes(ledger):
    return [(entry.outcome, entry.reason) for entry in ledger.entries]


ALONE = ("left alone", "it uses references to arrays (jax.new_ref), which it may change")


@pytest.mark.parametrize("outcome", LIMITS)
def test_options_for_the_compiler(outcome, jit, ledger, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", LIMITS[outcome])
    f = jit(nearest, compiler_options={"xla_cpu_enable_fast_math": False})
    np.testing.assert_allclose(f(x), nearest(x), rtol=1e-6)
    np.testing.assert_allclose(f.lower(x).compile()(x), nearest(x), rtol=1e-6)
    assert [entry.outcome for entry in ledger.entries] == [outcome]


def test_wrong_options_for_the_compiler_are_errors_of_the_compiler(jit, x):
    with pytest.raises(Exception) as expected:  # noqa: PT011  # whatever JAX raises
        jax.jit(nearest, compiler_options={"no_such_option": 1})(x)
    for limit in LIMITS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EQSAT_MEM_LIMIT", limit)
            with pytest.raises(type(expected.value)) as caught:
                jit(lambda x: nearest(x) + 1, compiler_options={"no_such_option": 1})(x)
        assert str(caught.value) == str(expected.value)


def made_inside(x):
    total = jax.new_ref(x)
    total[...] += nearest(x)
    return total[...]


def made_in_a_loop(x):
    def step(value, shift):
        total = jax.new_ref(value)
        total[...] += nearest(value + shift)
        return total[...], None

    return jax.lax.scan(step, x, jnp.arange(2.0))[0]


def added_to_in_a_loop(x):
    total = jax.new_ref(x)

    def step(carry, shift):
        total[...] += nearest(x + shift)
        return carry, None

    jax.lax.scan(step, 0.0, jnp.arange(2.0))
    return total[...]


def in_a_branch(x):
    return jax.lax.cond(x.sum() > 0, made_inside, lambda x: x, x)


def batched(x):
    return jax.vmap(made_inside)(jnp.stack([x, x + 1]))


def in_a_jitted_function(x):
    return jax.jit(made_inside)(x)


@pytest.mark.parametrize("limit", LIMITS.values())
@pytest.mark.parametrize(
    "fun", [made_inside, made_in_a_loop, added_to_in_a_loop, in_a_branch, batched, in_a_jitted_function], ids=lambda f: f.__name__
)
def test_references_made_inside_are_left_alone(fun, limit, jit, ledger, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", limit)
    np.testing.assert_array_equal(jit(fun)(x), jax.jit(fun)(x))
    assert outcomes(ledger) == [ALONE]


def test_references_closed_over_are_left_alone(jit, ledger, x):
    total = jax.new_ref(x)

    @jit
    def add():
        total[...] += nearest(total[...])

    add()
    np.testing.assert_allclose(total[...], x + nearest(x), rtol=1e-6)
    assert outcomes(ledger) == [ALONE]


class Incomparable:
    """Has a hash, and no way to compare."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        raise NotImplementedError("cannot be compared")


@pytest.mark.parametrize("before", [1, "name"], ids=["of equal hash", "of another"])
def test_static_arguments_that_cannot_be_compared(before, jit, x):
    for make in (jax.jit, jit):
        f = make(lambda x, how: x + 1, static_argnums=1)
        f(x, before)
        with pytest.raises(ValueError, match=r"comparable using __eq__|simple equality semantics"):
            [f(x, Incomparable()) for _ in range(2)]


def test_static_arguments_that_cannot_be_hashed(jit, x):
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        jit(lambda x, how: x, static_argnums=1)(x, {})


def test_trees_that_cannot_be_flattened(jit, x):
    messages = []
    for make in (jax.jit, jit):
        with pytest.raises(ValueError, match="keys") as caught:
            make(lambda tree: x)({1: x, "b": x})
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


class Unreferable:
    __slots__ = ()

    def __call__(self, x):
        return x + 1


def test_callables_that_cannot_be_referred_to_weakly_fail_when_called(jit, x):
    told = []
    for make in (jax.jit, jit):
        f = make(Unreferable())
        with pytest.raises(TypeError) as caught:
            f(x)
        told.append((str(caught.value), f._cache_size()))
    assert told[0] == told[1]


def test_states_of_jitted_functions(jit):
    real, ours = (make(nearest).__getstate__() for make in (jax.jit, jit))
    assert real.keys() == ours.keys()
    assert real["function_name"] == ours["function_name"] == "nearest"


def misses(jit, fun, *calls):
    """What JAX says of cache misses."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("jax._src.interpreters.partial_eval")
    logger.addHandler(handler)
    try:
        with jax.explain_cache_misses(True):
            f = jit(fun)
            for args in calls:
                f(*args)
    finally:
        logger.removeHandler(handler)
    return told


@pytest.mark.parametrize("limit", LIMITS.values())
def test_explained_cache_misses_are_those_of_the_user(limit, jit, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", limit)
    first, second = misses(jit, lambda x: jnp.sort(nearest(x)), (x,), (x,), (x[1:],))
    assert first.startswith("TRACING CACHE MISS at ")
    assert "never seen function" in first
    assert f"test_other_peoples_scripts.py:{misses.__code__.co_firstlineno + 11}" in first.splitlines()[0]
    assert "all previously seen cache keys differ" in second


def test_tracing_is_counted_once(jit, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "64MiB")

    def f(x):
        return jax.lax.sin(x)

    with test_util.count_jit_tracing_cache_miss() as count:
        jax.eval_shape(f, x)
        jit(f)(x)
        jit(f)(x)
    assert count() == 1


def test_what_fits_is_traced_lowered_and_compiled_as_without_us(jit, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "64MiB")

    def f(x, y=2):
        return {"a": nearest(x) * y}

    plain, ours = jax.jit(f).trace(x), jit(f).trace(x)
    assert str(plain.jaxpr) == str(ours.jaxpr)
    assert plain.lower().as_text() == ours.lower().as_text()
    assert plain.out_tree == ours.out_tree


@pytest.mark.parametrize("limit", LIMITS.values())
def test_escaped_tracers_are_errors_of_the_script(limit, jit, ledger, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", limit)
    kept = []

    @jit
    def first(x):
        kept.append(x)
        return x

    first(x)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        jit(lambda x: nearest(x) + kept[0])(x)
    assert outcomes(ledger)[-1] == ("left alone", "it uses a value of a function whose tracing has ended")


def test_a_plan_that_jax_cannot_lower_is_not_used(jit, ledger, x, monkeypatch, capsys):
    """Whatever may go wrong only there."""

    def broken(*_, **__):
        raise RuntimeError("cannot be lowered")

    monkeypatch.setattr(Function, "evaluate", broken)
    f = jit(nearest)
    np.testing.assert_array_equal(f(x), jax.jit(nearest)(x))
    assert outcomes(ledger) == [("failed", "RuntimeError: cannot be lowered")]
    assert "runs as written" in capsys.readouterr().err
    monkeypatch.undo()
    assert [eqn for eqn in f.trace(x).jaxpr.eqns if eqn.primitive is planned_p] == []


@pytest.mark.parametrize("limit", ["1MiB", "1B"])
def test_what_jax_cannot_compile_is_an_error_of_the_script(limit, jit, ledger, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", limit)
    unknown = Primitive("unknown")
    unknown.def_abstract_eval(lambda x: x)
    with pytest.raises(NotImplementedError, match="primitive 'unknown' not found"):
        jit(lambda x: unknown.bind(nearest(x)))(x)
    assert outcomes(ledger) == [("left alone", "JAX raised NotImplementedError when it was to be compiled")]


@jax.tree_util.register_pytree_node_class
class Cloud:
    """A class whose ``__init__``, which unflattening calls, asks for what arrays and tracers have."""

    def __init__(self, points):
        self.points = points[:, None] if points.ndim == 1 else points

    def tree_flatten(self):
        return (self.points,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_classes_that_hold_nothing_but_arrays(jit, ledger, x):
    np.testing.assert_array_equal(jit(lambda cloud: nearest(cloud.points[:, 0]))(Cloud(x)), jax.jit(nearest)(x))
    reason = "a class of its arguments cannot hold descriptions of arrays: unflattening raised AttributeError"
    assert outcomes(ledger) == [("left alone", reason)]


@pytest.mark.parametrize("limit", ["64MiB", "1B"])
def test_what_is_not_planned_is_not_kept(limit, jit, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", limit)

    @jit
    def f(x):
        return nearest(x) + 1

    f(x)
    traced = weakref.ref(f.trace(x).jaxpr.jaxpr)
    assert traced() is not None
    jax.clear_caches()
    gc.collect()
    assert traced() is None


def test_programs_of_a_few_kilobytes_are_left_alone(jit, ledger, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "1kB")
    monkeypatch.setattr(pipeline, "plan", None)  # so that it would fail
    np.testing.assert_array_equal(jit(nearest)(x[:20]), jax.jit(nearest)(x[:20]))
    ((outcome, reason),) = outcomes(ledger)
    assert outcome == "left alone"
    assert re.fullmatch(r"all that it ever makes takes [\d.]+ KiB, too little for a plan", reason)


def test_settings_decide_what_is_planned(jit, ledger):
    """A Python number is an array of another dtype under another setting."""
    f = jit(lambda s: nearest(jnp.full(ROWS, s)))
    f(1.0)
    with jax.enable_x64(True):
        assert f(1.0).dtype == np.float64
    assert [entry.arguments for entry in ledger.entries] == ["float32[]", "float64[]"]


# --- names in the report -------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A module of an installed library that compiles the functions of users within one of its own."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "compiling.py").write_text(
        textwrap.dedent("""\
        def compiled(jit, fun):
            def call(args):
                return fun(*args)
            made = jit(call)
            return lambda *args: made(args)
        """)
    )
    monkeypatch.setattr(subjects, "INSTALLED", (*subjects.INSTALLED, f"{tmp_path}/installed/"))
    monkeypatch.syspath_prepend(tmp_path / "installed")
    import compiling

    yield compiling
    del sys.modules["compiling"]


def test_functions_within_one_of_a_library_are_told_apart(library, jit, ledger, x, monkeypatch, capsys):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "1kB")

    def first(x):
        return nearest(x)

    def second(x):
        return nearest(x) + 1

    library.compiled(jit, first)(x)
    library.compiled(jit, second)(x)
    name = "test_functions_within_one_of_a_library_are_told_apart"
    assert [entry.function for entry in ledger.entries] == [f"{name}.first", f"{name}.second"]
    here = "tests/api/test_other_peoples_scripts.py"
    places = [f"{here}:{f.__code__.co_firstlineno}" for f in (first, second)]
    assert [entry.place for entry in ledger.entries] == places
    assert capsys.readouterr().err.count("runs as written") == 2


def test_functions_of_a_library_itself_have_its_names(library, jit, ledger, monkeypatch):
    library.compiled(jit, jnp.sort)(jnp.ones(3))
    (entry,) = ledger.entries
    assert (entry.function, entry.place) == ("compiled.call", "compiling.py:2")
