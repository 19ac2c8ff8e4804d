"""Tuning: the fastest of the plans that ran is taken and kept. Times come from the tests, and no test depends on a clock."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import eqsat_mem
from eqsat_mem import tuning
from eqsat_mem.__main__ import main
from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.ir.loop_tree import Loop, Seq
from eqsat_mem.reports.measured import MeasuredPlan, Tuning
from eqsat_mem.schedule.schedules import Schedule

ARGS = [np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed, shape in enumerate([(400, 3), (300, 3), (300,)])]
SHAPES = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARGS]
TIGHT, LOOSE = "300kB", "2MiB"


def product(x, y, v):
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


class Times:
    """A clock that runs give their seconds to, one for each program in the order of their first runs; the last is that of all others."""

    def __init__(self, *seconds):
        self.seconds, self.now, self.runs, self.arguments = seconds, 0.0, [], []

    def __call__(self):
        return self.now

    def timed(self, run, arguments):
        if run not in self.runs:
            self.runs.append(run)
        taken = self.seconds[min(self.runs.index(run), len(self.seconds) - 1)]
        self.now += taken
        self.arguments = arguments
        return taken


@pytest.fixture
def times(monkeypatch):
    """A function that sets the seconds of the programs, which do not run."""

    def given(*seconds):
        made = Times(*seconds)
        monkeypatch.setattr(tuning, "MOST", 4)
        monkeypatch.setattr(tuning, "clock", made)
        monkeypatch.setattr(tuning, "timed", made.timed)
        return made

    return given


def planned(function=product, args=SHAPES, limit=TIGHT, tune=100.0, **options):
    return eqsat_mem.optimize(function, memory_limit=limit, tune=tune, **options).plan(*args)


def test_the_fastest_of_what_ran_is_the_plan(times):
    usual = planned(tune=None)
    made = times(0.3, 0.1, 0.2)
    plan = planned()
    assert len(made.runs) > 2
    assert plan.source != usual.source
    first, second, *_ = plan.tuning.plans
    assert (first.seconds, second.seconds, second.position) == (0.1, 0.3, 0)
    assert first.program != second.program
    assert min(m.seconds for m in plan.tuning.plans) == first.seconds
    assert plan.compiled_peak_bytes <= plan.limit_bytes
    np.testing.assert_allclose(plan.function(*ARGS)[0], product(*ARGS), rtol=1e-4)
    assert f"tuned measured {len(made.runs)} plans on made-up arguments: 100 ms chosen, 300 ms, 200 ms" in str(plan)
    told = json.loads(plan.to_json())["tuning"]
    assert [m["seconds"] for m in told["plans"]] == [m.seconds for m in plan.tuning.plans]
    assert planned(tune=None).tuning is None


def test_what_predictions_choose_stays_where_it_is_fastest(times):
    usual = planned(tune=None)
    times(0.1, 0.2)
    plan = planned()
    assert plan.source == usual.source
    assert plan.tuning.plans[0].position == 0


def test_the_program_as_written_is_among_them_where_it_fits(times):
    usual = planned(limit=LOOSE, tune=None)
    assert not usual.unchanged
    times(0.3, 0.1, 0.2)
    plan = planned(limit=LOOSE)
    assert plan.unchanged
    assert plan.tuning.plans[0].program == "as written"
    assert "nothing found ran faster" in str(plan.explain())
    assert "as written" not in [m.program for m in planned(limit=TIGHT).tuning.plans]


def test_programs_that_run_differ_and_fit(times):
    made = times(0.1)
    plan = planned()
    held = [backend_in_use().checked(run).held_bytes for run in made.runs]
    assert max(held) <= plan.limit_bytes
    assert held == [m.peak_bytes for m in plan.tuning.plans]
    assert len({m.program for m in plan.tuning.plans}) == len(plan.tuning.plans) > 2


def test_times_are_medians_of_rounds_in_turns(times, monkeypatch):
    made = times(0.1, 0.1, 1.0)
    order = []

    def timed(run, arguments):
        order.append(run)
        taken = made.timed(run, arguments)
        return 5.0 if len(order) == len(made.runs) + 1 else taken  # an interruption in the first round

    monkeypatch.setattr(tuning, "timed", timed)
    plan = planned()
    chosen = plan.tuning.plans[0]
    assert chosen.seconds == 0.1
    assert chosen.runs >= tuning.LEAST_ROUNDS
    first, second = made.runs[:2]
    again = order[len(made.runs) :]
    assert again[:4] == [first, second, first, second]
    assert [m.runs for m in plan.tuning.plans if m.seconds == 1.0] == [0] * (len(made.runs) - 2)  # too far behind to run again


def test_a_budget_that_strikes_keeps_the_best_so_far(times):
    made = times(0.3, 0.1, 0.6)
    plan = planned(tune=0.8)
    assert len(made.runs) == 3
    assert plan.tuning.struck
    assert plan.tuning.plans[0].seconds == 0.1
    assert str(plan.tuning).endswith("100 ms chosen, 300 ms, 600 ms; the 800 ms for it were over then")


def test_without_time_the_plan_is_that_of_predictions(times):
    usual = planned(tune=None)
    made = times(1.0)
    plan = planned(tune=usual.predicted_s / 2)  # in which no run would end
    assert not made.runs
    assert plan.source == usual.source
    assert str(plan.tuning) == "nothing was measured: the time for it was over before the first run"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_CACHE_DIR", str(tmp_path / "plans"))
    return tmp_path / "plans"


def test_a_tuned_plan_is_kept_apart_and_not_measured_again(home, times):
    usual = planned(tune=None)
    times(0.3, 0.1, 0.2)
    first = planned()
    none = times(0.1)
    again = planned()
    assert not none.runs
    assert (again.source, again.tuning) == (first.source, first.tuning)
    assert first.source != usual.source == planned(tune=None).source
    assert again.with_search().source == first.source  # planned once more, to the same choice
    assert again.with_search().tuning == first.tuning
    assert not none.runs


def test_what_a_budget_left_unmeasured_is_not_kept(home, times):
    made = times(1.0)
    planned(tune=1e-9)
    assert not made.runs
    assert not list(home.glob("*.plan"))


def test_the_arguments_of_the_first_call_and_of_plan_are_run_with(times):
    for call in (lambda f: f(*ARGS), lambda f: f.plan(*ARGS)):
        made = times(0.1)
        call(eqsat_mem.optimize(product, memory_limit=TIGHT, tune=100.0))
        assert len(made.runs) > 1
        for given, used in zip(ARGS, made.arguments, strict=True):
            np.testing.assert_array_equal(given, used)
    plan = planned(args=[ARGS[0], *SHAPES[1:]])
    assert plan.tuning.arguments == "arguments of which some are made up"


def test_later_signatures_are_tuned_on_their_own_arguments(times):
    made = times(0.1)
    fast = eqsat_mem.optimize(product, memory_limit=TIGHT, tune=100.0)
    fast(*ARGS)
    before, other = len(made.runs), ARGS[0][:390] + 1
    for _ in range(2):
        np.testing.assert_allclose(fast(other, *ARGS[1:]), product(other, *ARGS[1:]), rtol=1e-4, atol=1e-6)
    assert len(made.runs) > before
    np.testing.assert_array_equal(made.arguments[0], other)


def test_static_keyword_and_closed_over_arguments_find_their_places(times):
    made = times(0.1)
    y = jnp.asarray(np.random.default_rng(1).standard_normal((2000, 3)), jnp.float32)  # large enough to be an argument

    def scaled(n, x, *, v):
        return n * product(x, y, v)

    v = np.ones(2000, np.float32)
    eqsat_mem.optimize(scaled, memory_limit="400kB", tune=100.0, static_argnums=0)(3, ARGS[0], v=v)
    given = {x.shape: np.asarray(x) for x in made.arguments}
    np.testing.assert_array_equal(given[2000, 3], y)
    np.testing.assert_array_equal(given[400, 3], ARGS[0])
    np.testing.assert_array_equal(given[2000,], v)


def test_made_up_arguments_are_valid():
    random = np.random.default_rng(0)
    for dtype in (np.float32, jnp.bfloat16, np.complex64, np.int32, np.uint8, np.bool_):
        made = tuning.made_up(random, jax.ShapeDtypeStruct((20, 3), dtype))
        assert (made.shape, made.dtype) == ((20, 3), dtype)
        assert 0 <= np.abs(made).min() <= np.abs(made).max() <= (1.5 if dtype == np.complex64 else 1)
        if np.dtype(dtype).kind in "iu":
            assert not made.any()  # positions in whatever they index


def test_donated_arguments_are_not_used_up(times):
    x = jnp.ones((300, 300))
    double = eqsat_mem.optimize(lambda x: jnp.sin(x @ x) * 2, memory_limit="2MiB", tune=100.0, donate_argnums=0)
    plan = double.plan(x)
    assert not x.is_deleted()
    assert plan.tuning.plans
    jax.block_until_ready(double(x))
    assert x.is_deleted()
    made = times(0.1)
    tight = eqsat_mem.optimize(lambda x: x * 2 + 1, memory_limit="400kB", tune=100.0, donate_argnums=0).plan(jnp.ones((300, 300)))
    assert not made.runs
    assert "cannot donate" in str(tight.tuning)


def with_effects(x):
    jax.debug.print("{}", x[0, 0])
    return x @ x


REASONS = {
    "effects": (with_effects, [jax.ShapeDtypeStruct((50, 50), np.float32)], {}, "the function has effects"),
    "keys": (lambda key: jax.random.normal(key, (50,)), [jax.eval_shape(lambda: jax.random.key(0))], {}, "arguments of type key<fry>[]"),
    "a mesh": (lambda x: x @ x, [jax.ShapeDtypeStruct((64, 64), np.float32)], {"mesh": AbstractMesh((4,), ("x",))}, "plans for several"),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_run_is_planned_by_prediction(name, times):
    function, args, options, reason = REASONS[name]
    made = times(0.1)
    plan = planned(function, args, "1MiB", **options)
    assert not made.runs
    assert str(plan.tuning).startswith(f"nothing was measured: {reason}")


def test_inside_of_other_transformations_arguments_are_made_up(times):
    made = times(0.1)
    fast = eqsat_mem.optimize(product, memory_limit=TIGHT, tune=100.0)
    jax.jit(lambda x, y, v: fast(x, y, v).sum())(*ARGS)
    assert made.runs
    assert not np.array_equal(made.arguments[0], ARGS[0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tune": 0}, "tune must be a number of seconds above zero, not 0"),
        ({"tune": 1.0, "verify": False}, "leave out verify=False"),
        ({"tune": 1.0, "tensor_split_size": 100}, "leave out one or the other"),
        ({"tune": 1.0, "device": "h100"}, "this plan is for h100: tune it there"),
    ],
)
def test_options_that_leave_nothing_to_measure_are_refused(options, text):
    with pytest.raises(eqsat_mem.OptionError, match=text):
        eqsat_mem.optimize(product, **options)


def test_the_variable_of_the_device_counts_too(monkeypatch):
    fast = eqsat_mem.optimize(product, memory_limit=TIGHT, tune=1.0)
    monkeypatch.setenv("EQSAT_MEM_DEVICE", "h100")
    with pytest.raises(eqsat_mem.OptionError, match="tune it there"):
        fast.plan(*SHAPES)


# --- which plans differ -------------------------------------------------------------------------------


def tree(program, chunks, seconds=1.0, peak=10, backend=None):
    """A schedule of two loops, one inside of the other."""
    inner = Loop(1, seq(7), (7,), ())
    outer = Loop(0, seq(inner), (), (7,))
    return Schedule(SimpleNamespace(program=program), backend, seq(outer), dict(zip((outer, inner), chunks)), peak, seconds)


def seq(*steps):
    return Seq(steps, frozenset(), frozenset())


def test_plans_differ_in_programs_in_loops_or_in_chunks_by_a_factor():
    one = tree("a + b", (64, 64))
    assert tuning.alike(one, tree("a + b", (128, 32), 1.1))
    assert not tuning.alike(one, tree("a + b", (256, 64), 1.1))
    assert not tuning.alike(one, tree("a + b", (64, 16), 1.1))
    assert not tuning.alike(one, tree("b + a", (64, 64), 1.1))
    assert tuning.alike(one, tree("b + a", (64, 64)))  # predicted to be the same in all that counts
    flat = Loop(0, seq(7), (), (7,))
    assert not tuning.alike(one, Schedule(one.ex, None, seq(flat), {flat: 64}, 10, 1.1))


def test_the_fastest_that_differ_come_first_and_far_slower_ones_not_at_all():
    plan = tree("a", (64, 64), 1.0)
    others = [tree("a", (64, 512), 1.3), tree("a", (32, 64), 1.1), tree("c", (64, 64), 1.2), tree("d", (64, 64), 4.5)]
    assert [s.seconds for s in tuning.different(others, plan)] == [1.2, 1.3]
    many = [tree(f"a{k}", (64, 64), 1.0 + k / 100) for k in range(20)]
    assert len(tuning.different(many, plan)) == tuning.MOST - 2


def test_what_was_measured_in_words():
    one = MeasuredPlan(program="i/64", seconds=0.012, runs=5, predicted_s=0.01, peak_bytes=100, position=3)
    told = Tuning(bound_s=60.0, plans=[one], arguments="the arguments given")
    assert str(told) == "measured 1 plan on the arguments given: 12 ms chosen"


# --- the command --------------------------------------------------------------------------------------


def test_the_command_tunes_as_plan_plans(tmp_path, times, capsys):
    path = tmp_path / "kernel.py"
    path.write_text(
        "import jax, jax.numpy as jnp\n"
        "def product(x, y, v):\n    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v\n"
        "def args():\n    return tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in [(400, 3), (300, 3), (300,)])\n"
    )
    times(0.3, 0.1)
    assert main(["tune", f"{path}:product", "--args", f"{path}:args", "--limit", TIGHT, "--seconds", "50", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["tuning"]
    assert told["bound_s"] == 50.0
    assert told["plans"][0]["seconds"] == 0.1
    assert main(["tune", f"{path}:product", "--args", f"{path}:args", "--seconds", "soon"]) == 2
    assert "--seconds must be a number of seconds above zero, not 'soon'" in capsys.readouterr().err
