"""The ``jax.jit`` that plans: what it plans, what it leaves alone, and that it is used like the real one."""

import copy
import functools
import gc
import inspect
import pickle
import re
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqsat_mem import MemoryLimitError, optimize, pipeline
from eqsat_mem.api import planning_jit as planning
from eqsat_mem.api.planning_jit import ScriptRun, planning_jit
from eqsat_mem.api.run_report import Ledger
from eqsat_mem.backends.xla import held_bytes
from eqsat_mem.errors import PlanningError

LIMIT = 2**20
ROWS = 800


def nearest(x, y, scale=1.0):
    """Holds all distances, 2.4 MiB, as written: sorting keeps them from being fused."""
    distance = jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)
    return jnp.sort(distance, axis=1)[:, :3] * scale


@pytest.fixture
def ledger(monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", str(LIMIT))
    return Ledger()


@pytest.fixture
def jit(ledger):
    return planning_jit(ScriptRun(ledger, strict=False))


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(0).standard_normal((ROWS, 3)), jnp.float32)


def outcomes(ledger):
    return [(entry.function.rpartition(".")[2], entry.outcome) for entry in ledger.entries]


class Model:
    def __init__(self, scale):
        self.scale = scale

    def predict(self, x):
        return nearest(x, x, self.scale)


def decorated(jit):
    @jit
    def f(x):
        return nearest(x, x)

    return f


def decorated_with_options(jit):
    @functools.partial(jit, static_argnames=("count",), donate_argnums=0)
    def f(x, *, count):
        return nearest(x, x)[:count]

    return functools.partial(f, count=5)


def decorator_factory(jit):
    @jit(static_argnums=0)
    def f(scale, x):
        return nearest(x, x, scale)

    return functools.partial(f, 2)


def static_by_either_name(jit):
    return functools.partial(jit(lambda x, scale: nearest(x, x, scale), static_argnames="scale"), scale=3)


def bound_method(jit):
    class Jitted(Model):
        predict = functools.partial(jit, static_argnums=0)(Model.predict)

    return Jitted(2.0).predict


def method_of_an_instance(jit):
    return jit(Model(2.0).predict)


def partial_function(jit):
    return functools.partial(jit(functools.partial(nearest, scale=0.5)), y=jnp.ones((ROWS, 3)))


def gradient(jit):
    return jit(jax.value_and_grad(lambda x: jnp.sum(nearest(x, x[: ROWS // 2]))))


def of_a_jitted_function(jit):
    return jit(jit(jit(lambda x: nearest(x, x))))


def no_shardings(jit):
    return jit(lambda x: nearest(x, x), in_shardings=None, out_shardings=None)


def closure_over_an_array(jit):
    y = np.ones((ROWS, 3), np.float32)
    return jit(lambda x: nearest(x, y))


def pytrees(jit):
    f = jit(lambda data, options: {"out": (nearest(data["x"], data["x"]), options["none"])})
    return lambda x: f({"x": x}, options={"none": None})


FORMS = (
    decorated,
    decorated_with_options,
    decorator_factory,
    static_by_either_name,
    bound_method,
    method_of_an_instance,
    partial_function,
    gradient,
    of_a_jitted_function,
    no_shardings,
    closure_over_an_array,
    pytrees,
)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_every_form_of_jit_is_planned(form, jit, ledger, x):
    expected = form(jax.jit)(x + 0)
    out = form(jit)(x + 0)
    assert jax.tree.structure(out) == jax.tree.structure(expected)
    for ours, plain in zip(jax.tree.leaves(out), jax.tree.leaves(expected)):
        np.testing.assert_allclose(ours, plain, rtol=2e-5, atol=2e-5)
    (entry,) = ledger.entries
    assert entry.outcome == "planned"
    assert entry.peak_bytes <= LIMIT < entry.original_peak_bytes


def test_derivatives_by_integers_have_no_values(jit, ledger, x):
    """The dtype of a cotangent of what cannot be varied has no numbers in it, not even zero."""

    def program(x, mask):
        _, pull = jax.vjp(lambda x, mask: jnp.where(mask, nearest(x, x), 0.0).sum(), x, mask)
        return pull(jnp.float32(1.0))

    mask = jnp.ones((1, 1), bool)
    by_x, by_mask = jit(program)(x, mask)
    assert outcomes(ledger) == [("program", "planned")]
    expected, _ = jax.jit(program)(x, mask)
    np.testing.assert_allclose(by_x, expected, rtol=1e-4, atol=1e-5)
    assert (by_mask.shape, by_mask.dtype) == ((1, 1), jax.dtypes.float0)


def test_the_compiled_program_is_within_the_limit(jit, x):
    compiled = jit(nearest).lower(x, x).compile()
    assert held_bytes(compiled) <= LIMIT < held_bytes(jax.jit(nearest).lower(x, x).compile())
    np.testing.assert_allclose(compiled(x, x), nearest(x, x), rtol=1e-5, atol=1e-5)


def test_each_signature_is_planned_once(jit, ledger, x, monkeypatch):
    calls = []
    plan = pipeline.plan
    monkeypatch.setattr(pipeline, "plan", lambda *args, **options: calls.append(1) or plan(*args, **options))
    f = jit(nearest)
    for _ in range(3):
        f(x, x)
    assert len(calls) == 1
    f(x[1:], x)
    assert len(calls) == 2
    assert [entry.arguments for entry in ledger.entries] == ["float32[800,3], float32[800,3]", "float32[799,3], float32[800,3]"]


def test_a_function_made_anew_for_each_call_is_planned_once(jit, ledger, x, monkeypatch):
    calls = []
    plan = pipeline.plan
    monkeypatch.setattr(pipeline, "plan", lambda *args, **options: calls.append(1) or plan(*args, **options))

    def f(x):
        return nearest(x, x)

    for _ in range(3):
        jit(f)(x)
    assert len(calls) == 1
    jit(f, donate_argnums=0, keep_unused=True)(x + 0)
    assert len(calls) == 2
    gone = weakref.ref(f)
    del f
    gc.collect()
    assert gone() is None


def test_equal_functions_outlive_one_another(jit, ledger, x):
    """Methods of one instance are equal, and each is an object of its own."""

    class Shifted(Model):
        def __call__(self, x):
            return x + self.scale

        def __eq__(self, other):
            return isinstance(other, Shifted)

        def __hash__(self):
            return 0

    model = Shifted(2.0)
    f = jit(model.predict)
    for _ in range(2):
        f = jit(model.predict)  # made while the one before lives
        f(x)
    other = jit(model.predict, keep_unused=True)
    del f
    gc.collect()
    assert other(x).shape == jit(model.predict)(x).shape == (ROWS, 3)
    first, second = jit(Shifted(1.0)), jit(Shifted(1.0))
    del first
    assert float(second(1.0)) == 2.0
    assert {entry.outcome for entry in ledger.entries} == {"planned", "fitting"}


def test_only_the_outermost_function_is_planned(jit, ledger, x):
    inner = jit(nearest)

    @jit
    def outer(x):
        return jax.vmap(lambda s: inner(x, x, s).sum())(jnp.ones(2)) + jax.grad(lambda s: inner(x, x, s).sum())(1.0)

    outer(x)
    assert [name for name, _ in outcomes(ledger)] == ["outer"]
    inner(x, x)
    assert [name for name, _ in outcomes(ledger)] == ["outer", "nearest"]


def test_python_runs_once_per_signature(jit, x):
    traced = []

    @jit
    def f(x):
        traced.append(1)
        return nearest(x, x)

    f(x)
    f.lower(x)
    f.eval_shape(x)
    jax.jit(f)(x)
    assert len(traced) == 1


def test_transformations_outside_of_jit_run_the_original(jit, ledger, x):
    f = jit(lambda s: jnp.sum(nearest(x, x, s)))
    assert float(jax.grad(f)(1.0)) == pytest.approx(float(jnp.sum(nearest(x, x))), rel=1e-5)
    assert jax.vmap(f)(jnp.ones(2)).shape == (2,)
    assert {(entry.outcome, entry.reason) for entry in ledger.entries} == {
        (
            "left alone",
            "part of a grad, vmap, scan, eval_shape or the like outside of jax.jit: to plan that, put jax.jit around it",
        )
    }


def test_small_programs_are_not_planned(jit, ledger, monkeypatch):
    monkeypatch.setattr(pipeline, "plan", None)  # so that it would fail
    assert float(jit(lambda x: x + 1)(1.0)) == 2.0
    (entry,) = ledger.entries
    assert (entry.outcome, entry.reason) == ("fitting", "all that it ever makes takes 8 B")


def test_programs_that_fit_run_as_written(jit, ledger, monkeypatch, x):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "6MiB")
    np.testing.assert_array_equal(jit(nearest)(x, x), jax.jit(nearest)(x, x))
    (entry,) = ledger.entries
    assert (entry.outcome, entry.reason) == ("fitting", "it holds less than the limit as written")


@pytest.mark.parametrize("name", ["in_shardings", "out_shardings"])
def test_a_mesh_of_one_device_is_that_device(name, jit, ledger, x):
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("rows",)), jax.sharding.PartitionSpec("rows"))
    np.testing.assert_allclose(jit(lambda x: nearest(x, x), **{name: sharding})(x), nearest(x, x), rtol=1e-5)
    (entry,) = ledger.entries
    assert entry.outcome == "planned"


def test_functions_with_other_shardings_are_left_alone(jit, ledger, x):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    jit(lambda x: nearest(x, x), in_shardings=sharding)(x)
    (entry,) = ledger.entries
    assert entry.outcome == "left alone"
    assert entry.reason.startswith("made with shardings that plans do not know: in_shardings must hold jax.sharding.PartitionSpec or Named")


def test_symbolic_shapes_are_left_alone(jit, ledger, x):
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jit(nearest))(*[jax.ShapeDtypeStruct((n, 3), jnp.float32)] * 2)
    assert exported.call(x[:9], x[:9]).shape == (9, 3)
    (entry,) = ledger.entries
    assert (entry.outcome, entry.reason) == ("left alone", "its shapes are symbols: plans are for numbers")


def test_references_are_left_alone(jit, ledger, x):
    @jit
    def count(calls, x):
        calls[...] = calls[...] + 1
        return nearest(x, x)

    calls = jax.new_ref(jnp.int32(0))
    count(calls, x)
    count(calls, x)
    assert int(calls[...]) == 2
    assert outcomes(ledger) == [("count", "left alone")]


def test_effects_happen_once_per_call(jit, ledger, x, capsys):
    seen = []

    def double(total):
        seen.append(1)
        return np.float32(2 * total)

    @jit
    def f(x):
        jax.debug.print("first", ordered=True)
        jax.debug.print("second", ordered=True)
        return nearest(x, x, jax.experimental.io_callback(double, jax.ShapeDtypeStruct((), jnp.float32), jnp.float32(1)))

    for _ in range(2):
        np.testing.assert_allclose(f(x), nearest(x, x, 2.0), rtol=1e-5, atol=1e-5)
    jax.effects_barrier()
    assert len(seen) == 2
    assert capsys.readouterr().out == "first\nsecond\n" * 2
    assert outcomes(ledger) == [("f", "planned")]


def test_donated_arguments_are_given_away(jit, x):
    given = x + 0
    f = jit(lambda x: x - nearest(x, x), donate_argnums=0)
    f(given)
    assert given.is_deleted()
    assert not x.is_deleted()


@pytest.mark.slow
def test_outputs_in_the_memory_of_donated_arguments_count_once(jit, ledger):
    """A state of 400 kB, and the next one: a third does not fit. As written, a step holds 80 MB."""

    def steps(state, x):
        def step(_, s):
            norm = jnp.sort(jnp.tanh(x[:, None] * s["w"]), axis=0)[:3].sum()
            return {"w": s["w"] / (1 + norm)}

        return jax.lax.fori_loop(0, 3, step, state)

    def arguments():
        return {"w": jnp.linspace(0.0, 1.0, 100_000)}, jnp.linspace(0.0, 1.0, 200)

    f = jit(steps, donate_argnums=0)
    compiled = f.lower(*arguments()).compile()
    assert held_bytes(compiled) <= LIMIT
    np.testing.assert_allclose(f(*arguments())["w"], jax.jit(steps)(*arguments())["w"], rtol=1e-5)
    jit(steps)(*arguments())
    given, kept = ledger.entries
    assert (given.outcome, given.peak_bytes) == ("planned", pytest.approx(held_bytes(compiled), rel=0.01))
    assert kept.outcome == "failed"


@pytest.mark.slow
def test_programs_that_fit_because_they_are_given_memory_run_as_written(jit, ledger):
    f = jit(lambda x: jnp.sin(x) + 1, donate_argnums=0)
    x = jnp.linspace(0.0, 1.0, 200_000)
    np.testing.assert_array_equal(f(x + 0), jnp.sin(x) + 1)
    (entry,) = ledger.entries
    assert (entry.outcome, entry.peak_bytes, entry.original_peak_bytes) == ("fitting", x.nbytes, x.nbytes)


def test_without_jit_nothing_is_planned(jit, ledger, x):
    f = jit(nearest)
    with jax.disable_jit():
        np.testing.assert_allclose(f(x[:5], x[:5]), nearest(x[:5], x[:5]))
    assert ledger.entries == []


def test_looking_for_nans_still_finds_the_operation(jit):
    f = jit(lambda x: jnp.log(-x))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        f(jnp.ones(3))


def test_planned_under_the_settings_of_the_call(jit, ledger):
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((ROWS, 3))
        out = jit(nearest)(x, x)
    assert out.dtype == np.float64
    assert outcomes(ledger) == [("nearest", "planned")]


def test_threads_plan_at_the_same_time(jit, ledger, x):
    functions = [jit(functools.partial(nearest, scale=s)) for s in (1.0, 2.0)]
    results = {}
    threads = [threading.Thread(target=lambda k=k, f=f: results.update({k: f(x, x)})) for k, f in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose(2 * results[0], results[1], rtol=1e-5)
    assert {entry.outcome for entry in ledger.entries} == {"planned"}


# --- used like the real one ---------------------------------------------------------------------------


def test_attributes_are_those_of_the_real_one(jit, x):
    def nearest(x, y):
        """A function that nothing else calls."""
        return x + y

    f, real = jit(nearest), jax.jit(nearest)
    assert isinstance(f, type(real))
    assert isinstance(f, jax.stages.Wrapped)
    assert (f.__name__, f.__doc__, f.__module__, f.__wrapped__) == (real.__name__, real.__doc__, real.__module__, nearest)
    assert inspect.signature(f) == inspect.signature(nearest)
    assert repr(f) == repr(real)
    assert weakref.ref(f)() is f
    assert [name for name in dir(real) if not hasattr(f, name)] == []
    assert f.eval_shape(x, x) == real.eval_shape(x, x)
    f(x, x)
    f(x, x)
    assert f._cache_size() == 1
    f.clear_cache()
    assert f._cache_size() == 0


def test_copies_and_pickles(jit, ledger, x, monkeypatch):
    monkeypatch.setattr(jax, "jit", jit)
    f = jit(nearest, donate_argnums=0)
    for other in (copy.copy(f), copy.deepcopy(f), pickle.loads(pickle.dumps(f))):
        assert other is not f
        assert other.__wrapped__ is nearest
        given = x + 0
        assert other(given, x).shape == (ROWS, 3)
        assert given.is_deleted()
    assert outcomes(ledger) == [("nearest", "planned")]
    assert pickle.loads(pickle.dumps(jit)) is jit


@pytest.mark.parametrize("stream", [None, object()], ids=["none", "no stream"])
def test_planning_goes_on_without_stderr(stream, jit, ledger, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "15kB")
    monkeypatch.setattr("sys.stderr", stream)
    np.testing.assert_array_equal(jit(nearest)(x, x), jax.jit(nearest)(x, x))
    (entry,) = ledger.entries
    assert entry.reason.startswith("no plan of nearest fits ")


@pytest.mark.parametrize("make", [lambda jit: jit(3), lambda jit: jit(nearest, 3), lambda jit: jit(nearest, static_argnums="x")])
def test_wrong_options_are_jaxs_errors(make, jit):
    with pytest.raises(TypeError) as expected:
        make(jax.jit)
    with pytest.raises(TypeError) as caught:
        make(jit)
    assert str(caught.value) == str(expected.value)


def wrong_arguments(f, x):
    f(x, x, x, x)


def wrong_shapes(f, x):
    f(x, x[:, 1:])


def no_array(f, x):
    f(x, "text")


@pytest.mark.usefixtures("filtered_tracebacks")
@pytest.mark.parametrize("call", [wrong_arguments, wrong_shapes, no_array], ids=lambda call: call.__name__)
def test_errors_of_the_function_are_its_own(call, jit, ledger, x):
    with pytest.raises(Exception) as expected:  # noqa: PT011  # whatever JAX raises
        call(jax.jit(nearest), x)
    with pytest.raises(type(expected.value)) as caught:
        call(jit(nearest), x)
    texts = [re.sub(r" at 0x\w+", "", str(error.value)) for error in (caught, expected)]
    assert texts[0] == texts[1]
    assert [str(frame.path) for frame in caught.traceback if frame.path.name == "planning_jit.py"] == []
    assert [entry.reason for entry in ledger.entries] == [f"it raised {type(expected.value).__name__} while JAX traced it"]


# --- where planning fails -------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    def plan(*_, **__):
        raise RuntimeError("the planner is broken")

    monkeypatch.setattr(pipeline, "plan", plan)


def test_the_original_runs_where_no_plan_fits(jit, ledger, x, monkeypatch, capsys):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "15kB")
    f = jit(nearest)
    np.testing.assert_array_equal(f(x, x), jax.jit(nearest)(x, x))
    f(x, x)
    f(x, x, 2.0)
    (first, _) = ledger.entries
    assert first.outcome == "failed"
    assert first.reason.startswith("no plan of nearest fits memory_limit = 14.65 KiB: the smallest peak found is ")
    warning = capsys.readouterr().err
    assert warning.startswith(f"eqsat-mem: warning: nearest ({first.place}) runs as written, for no plan of nearest fits ")
    assert warning.count("runs as written") == 1


def test_what_does_not_fit_is_forgotten_at_once(jit, ledger, x, monkeypatch):
    """Not when cyclic garbage is looked for next: what was planned is large, and JAX's own tests ask that programs go with their names."""
    monkeypatch.setenv("EQSAT_MEM_LIMIT", str(2 * x.nbytes))
    planned = jit(lambda x: nearest(x, x))
    gc.collect()
    gc.disable()
    try:
        program = weakref.ref(planned.trace(x).jaxpr.jaxpr)
        assert outcomes(ledger)[0][1] == "failed"
        jax.clear_caches()
        assert program() is None
    finally:
        gc.enable()


def test_small_arrays_that_a_function_closes_over_go_with_it(jit, ledger, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "8KiB")
    monkeypatch.setattr("eqsat_mem.api.planning.SMALL_BYTES", 0)
    jit(functools.partial(nearest, x[:97], x[:97]))()
    assert outcomes(ledger)[0][1] == "planned"
    jax.clear_caches()
    gc.collect()
    assert [array for array in jax.live_arrays() if array.shape == (97, 3)] == []


def test_the_original_runs_where_the_planner_breaks(broken, jit, ledger, x, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as python -W error: our warning must not become an error
        np.testing.assert_array_equal(jit(nearest)(x, x), jax.jit(nearest)(x, x))
    (entry,) = ledger.entries
    assert (entry.outcome, entry.reason) == ("failed", "RuntimeError: the planner is broken")
    assert entry.planning_s > 0
    assert "test_planning_jit.py" in entry.traceback
    assert capsys.readouterr().err.endswith(" runs as written, for RuntimeError: the planner is broken\n")


def test_strictly_a_failure_is_an_error(broken, ledger, x):
    strict = planning_jit(ScriptRun(ledger, strict=True))
    with pytest.raises(PlanningError) as caught:
        strict(nearest)(x, x)
    assert str(caught.value) == ("nearest could not be planned: RuntimeError: the planner is broken\nWithout --strict it runs as written.")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_strictly_too_small_a_limit_is_an_error(ledger, x, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "15kB")
    with pytest.raises(MemoryLimitError):
        planning_jit(ScriptRun(ledger, strict=True))(nearest)(x, x)


def test_the_place_of_a_function_is_short(monkeypatch, tmp_path, jit, ledger, x):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "neighbours_of_points.py").write_text("def f(x):\n    return x\n")
    import neighbours_of_points

    jit(neighbours_of_points.f)(x)
    assert ledger.entries[0].place == "neighbours_of_points.py:1"


def test_our_own_functions_use_the_real_jit():
    assert planning.real_jit is jax.jit


def test_functions_of_a_plan_are_none_of_the_script(jit, ledger, monkeypatch):
    """The source of a plan has ``jax.jit`` around updates of parameters."""
    monkeypatch.setattr(jax, "jit", jit)

    def step(ws, ms, x):
        def loss(ws):
            h = x
            for w in ws:
                h = h + jnp.tanh(jax.nn.softmax(h @ h.T) @ h @ w)
            return jnp.mean(h**2)

        g = jax.grad(loss)(ws)
        ms = [0.9 * m + 0.1 * d * d for m, d in zip(ms, g)]
        return [w - 1e-3 * d / (jnp.sqrt(m) + 1e-8) for w, m, d in zip(ws, ms, g)], ms

    ws = [jnp.eye(8) / (k + 1) for k in range(8)]
    args = ws, [w * w for w in ws], jnp.ones((300, 8))
    jax.jit(step)(*args)
    assert outcomes(ledger) == [("step", "planned")]
    assert "@jax.jit\n    def update" in optimize(step, memory_limit=LIMIT).plan(*args).source
