"""``optimize`` behaves as ``jax.jit`` does: arguments, transformations, control flow, caches and errors."""

from __future__ import annotations

import re
import threading
import time
import types
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import eqsat_mem
from eqsat_mem import pipeline
from eqsat_mem.api.optimize import Optimized, optimize
from eqsat_mem.errors import MemoryLimitError, OptionError
from tests.tiers import tiered


@dataclass
class PlanAsTraced:
    """A plan that runs what was traced, so that these tests are about the API and not about the planner."""

    jaxpr: object
    arg_names: tuple[str, ...]
    limit_bytes: int
    record: None = None
    unchanged: bool = False
    is_here: bool = True
    compiler_options: dict[str, str] = field(default_factory=dict)

    def function(self, *args):
        return jaxpr_as_fun(self.jaxpr)(*args)


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    """The plans made during a test."""
    made = []

    def plan(jaxpr, options, arg_names, name, donated, placement):
        assert len(arg_names) == len(jaxpr.in_avals)
        made.append(PlanAsTraced(jaxpr, tuple(arg_names), options.memory_limit))
        return made[-1]

    monkeypatch.setattr(pipeline, "plan", plan)
    return made


def kernel(x, y, v):
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


def loss(x, y, v):
    return jnp.sum(kernel(x, y, v) ** 2)


def xyv(n=7, m=5, d=3):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((n, d), (m, d), (m,)))


def same(a, b, tol=2e-5):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.weak_type == y.weak_type
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol)


# --- called like jax.jit ---------------------------------------------------------------------------


def test_decorator_with_and_without_arguments():
    @optimize
    def f(x):
        """Doc."""
        return 2 * x

    @optimize(memory_limit="1MiB")
    def g(x):
        return 2 * x

    assert f(3) == g(3) == optimize(lambda x: 2 * x, memory_limit=2**20)(3) == 6
    assert f.__name__ == "f"
    assert f.__doc__ == "Doc."
    assert isinstance(f, Optimized)
    assert repr(g) == "<optimized g, memory limit 1048576 bytes>"


@pytest.mark.parametrize(
    "args", [(2,), (2.0,), (True,), (1j,), (np.float32(2),), (np.arange(3),), (np.int8(3),), (jnp.ones(3, jnp.bfloat16),)]
)
def test_dtypes_and_weak_types_as_jit(args):
    def f(x):
        return x * 2, x + jnp.float16(1), x

    same(optimize(f)(*args), jax.jit(f)(*args))


def test_pytrees_keywords_defaults_and_none():
    def f(params, x, *rest, scale=2.0, bias=None):
        out = params["w"] @ x * scale + sum(rest)
        return {"out": out if bias is None else out + bias, "x": (x, None)}

    args = ({"w": jnp.ones((2, 3)), "b": None}, np.ones(3, np.float32), 1, 2.0)
    fast = optimize(f)
    same(fast(*args), jax.jit(f)(*args))
    same(fast(*args, scale=3, bias=jnp.ones(2)), jax.jit(f)(*args, scale=3, bias=jnp.ones(2)))
    same(fast(x=args[1], params=args[0]), jax.jit(f)(x=args[1], params=args[0]))


def test_static_arguments(plans):
    def f(x, n, mode="sin"):
        return getattr(jnp, mode)(x) ** n

    fast = optimize(f, static_argnums=1, static_argnames="mode")
    plain = jax.jit(f, static_argnums=1, static_argnames="mode")
    x = jnp.arange(3.0)
    for args, kwargs in (((x, 2), {}), ((x, 3), {}), ((x, 2), {"mode": "cos"}), ((x, 2), {})):
        same(fast(*args, **kwargs), plain(*args, **kwargs))
    assert len(plans) == 3


def test_unhashable_static_argument_is_the_error_of_jit():
    with pytest.raises(ValueError, match="Non-hashable static arguments"):
        optimize(lambda x, n: x, static_argnums=1)(1.0, [1])


def test_wrong_arguments_are_the_errors_of_jit():
    x, y, v = xyv()
    with pytest.raises(TypeError, match="v"):
        optimize(kernel)(x, y)
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        optimize(kernel)(x, y, v[:-1])
    with pytest.raises(TypeError, match=r"not a valid JAX type|as an abstract array"):
        optimize(kernel)(x, y, "v")
    with pytest.raises(jax.errors.ConcretizationTypeError):
        optimize(lambda x: 1 if x > 0 else 2)(1.0)
    with pytest.raises(TypeError, match=r"not a valid JAX type|returned"):
        optimize(lambda x: "text")(1.0)


@pytest.mark.parametrize(
    "option", [{"memory_limit": "much"}, {"memory_limit": -1}, {"accuracy": "good"}, {"max_rows": 0}, {"tensor_split_size": "1.5"}]
)
def test_options_are_checked_at_decoration(option):
    with pytest.raises(OptionError, match=next(iter(option))):
        optimize(**option)


def test_what_is_not_a_function_is_refused():
    with pytest.raises(TypeError, match="optimize expects a function"):
        optimize("1GiB")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, ": did you mean memory_limit?") for name in ("limit", "memory", "max_memory", "mem")),
        ("accurcy", ": did you mean accuracy?"),
        ("static_argnum", ": did you mean static_argnums?"),
        ("colour", "."),
    ],
)
def test_an_option_that_there_is_not_is_told_with_the_nearest_one(name, hint):
    with pytest.raises(TypeError, match=re.escape(f"optimize has no option {name}{hint}")):
        optimize(jnp.sin, **{name: 2**20})


def test_methods():
    class Model:
        def __init__(self, w):
            self.w = w

        @optimize(static_argnums=0)
        def __call__(self, x):
            return self.w * x

        @staticmethod
        @optimize
        def twice(x):
            return 2 * x

    assert Model(3.0)(2.0) == 6.0
    assert Model(3.0).twice(2.0) == 4.0


def test_closed_over_arrays_and_keys(plans):
    large, small, key = jnp.arange(5000.0), np.arange(3.0, dtype=np.float32), jax.random.key(0)

    def f(x, key2):
        return x * large.sum() + small.sum(), jax.random.normal(key, (2,)), jax.random.split(key2)

    fast = optimize(f)
    out, wanted = fast(2.0, key), jax.jit(f)(2.0, key)
    same(out[:2], wanted[:2])
    assert jnp.all(jax.random.key_data(out[2]) == jax.random.key_data(wanted[2]))
    assert plans[0].arg_names[0] == "captured_0"
    assert plans[0].arg_names[-2:] == ("x", "key2")


def test_closure_over_traced_values():
    def f(y):
        return optimize(lambda x: x * y)(3.0) + y

    for transform in (jax.jit, jax.grad, jax.jacfwd, lambda f: jax.vmap(f, axis_size=1, in_axes=None)):
        same(transform(f)(2.0), transform(lambda y: 3.0 * y + y)(2.0))


def test_donated_buffers():
    fast = optimize(lambda x, y: (x + 1, y), donate_argnums=0)
    x = jnp.arange(4.0)
    fast(x, 1.0)
    assert x.is_deleted()


def test_x64():
    with jax.enable_x64(True):
        x = np.arange(3.0)
        out = optimize(jnp.cumsum)(x)
        assert out.dtype == jnp.float64
        lowered = optimize(lambda x: jnp.sum(x) * 2.0).lower(x)
        assert optimize(lambda x: x).plan(x).jaxpr.out_avals[0].dtype == np.float64
    compiled = lowered.compile()
    with jax.enable_x64(True):
        assert compiled(x).dtype == np.float64


def test_names_of_arguments(plans):
    optimize(lambda p, *more, scale: p["w"] * more[0] * scale).plan({"w": 1.0}, 2.0, scale=3.0)
    assert plans[0].arg_names == ("p['w']", "more[0]", "scale")


def test_disable_jit_runs_the_function_itself(plans):
    with jax.disable_jit():
        assert optimize(lambda x: 2.0 if x > 1 else 3.0)(jnp.float32(2.0)) == 2.0
        assert not plans
        assert optimize(lambda x: 2 * x).plan(1.0) is plans[0]


def test_empty_outputs_and_no_arguments():
    assert optimize(lambda: ())() == ()
    assert optimize(lambda: jnp.ones(2).sum())() == 2.0
    assert optimize(lambda x: x)(jnp.zeros((0, 3))).shape == (0, 3)


# --- plans and caches ------------------------------------------------------------------------------


def test_plan_is_the_one_that_a_call_uses(plans):
    x, y, v = xyv()
    fast = optimize(kernel, memory_limit=2**20)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, y, v)]
    plan = fast.plan(*shapes)
    fast(x, y, v)
    fast(np.asarray(x), y, v=v)
    assert fast.plan(x, y, v) is plan
    assert plan.limit_bytes == 2**20
    assert len(plans) <= 2
    fast(x, y[1:], v[1:])
    assert fast.plan(x, y[1:], v[1:]) is not plan


def test_plan_runs_nothing():
    ran = []
    optimize(lambda x: jax.debug.callback(ran.append, x)).plan(1.0)
    assert not ran


def test_default_limit_is_read_at_each_call(plans, monkeypatch):
    fast = optimize(lambda x: 2 * x)
    for limit in ("1MiB", "2MiB", "1MiB"):
        monkeypatch.setenv("EQSAT_MEM_LIMIT", limit)
        fast(1.0)
    assert [plan.limit_bytes for plan in plans] == [2**20, 2**21]


def test_clear_cache(plans):
    fast = optimize(lambda x: 2 * x)
    fast(1.0), fast(1.0)
    assert len(plans) == 1
    fast.clear_cache()
    assert fast(1.0) == 2.0
    assert len(plans) == 2


def test_two_threads_make_one_plan(plans, monkeypatch):
    quick = pipeline.plan
    monkeypatch.setattr(pipeline, "plan", lambda *args, **keywords: (time.sleep(0.1), quick(*args, **keywords))[1])
    fast, out = optimize(lambda x: 2 * x), []
    threads = [threading.Thread(target=lambda: out.append(fast(1.0))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out == [2.0] * 6
    assert len(plans) == 1


def test_second_gradient_plans_nothing(plans):
    grad = jax.grad(optimize(loss))
    grad(*xyv())
    count = len(plans)
    grad(*xyv())
    assert len(plans) == count


def test_ahead_of_time():
    args = xyv()
    compiled = optimize(kernel).lower(*args).compile()
    same(compiled(*args), jax.jit(kernel)(*args))
    assert optimize(kernel).eval_shape(*args) == jax.eval_shape(kernel, *args)


def test_impossible_limit_reaches_the_caller(monkeypatch):
    def plan(jaxpr, options, arg_names, name, donated, placement):
        raise MemoryLimitError(options.memory_limit, 12, function=name)

    monkeypatch.setattr(pipeline, "plan", plan)
    fast = optimize(lambda x: 2 * x, memory_limit=1)
    for use in (fast, fast.lower, fast.plan, jax.jit(fast), jax.grad(fast)):
        with pytest.raises(MemoryLimitError, match=r"no plan of .* fits memory_limit = 1 B"):
            use(1.0)


# --- derivatives -----------------------------------------------------------------------------------

DERIVATIVES = {
    "grad": lambda f: jax.grad(f, argnums=(0, 1, 2)),
    "value_and_grad": lambda f: jax.value_and_grad(f, argnums=2),
    "jacfwd": lambda f: jax.jacfwd(f, argnums=(0, 2)),
    "jacrev": lambda f: jax.jacrev(f, argnums=(0, 2)),
    "hessian": lambda f: jax.hessian(f, argnums=(0, 2)),
    "jacfwd of jacfwd": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "jacrev of jacrev": lambda f: jax.jacrev(jax.jacrev(f)),
    "jacrev of jacfwd": lambda f: jax.jacrev(jax.jacfwd(f, argnums=2), argnums=0),
    "grad of grad of grad": lambda f: jax.grad(lambda *a: jax.grad(lambda *b: jax.grad(f)(*b).sum())(*a).sum()),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "linearize": lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
    "vmap of linearize": lambda f: lambda *a: jax.vmap(jax.linearize(f, *a)[1])(*(jnp.stack([x, 2 * x]) for x in a)),
    "transpose of vmap of linearize": lambda f: (
        lambda *a: jax.linear_transpose(jax.vmap(jax.linearize(lambda x: f(x, *a[1:]), a[0])[1]), jnp.stack([a[0], a[0]]))(jnp.ones(2))
    ),
}


@pytest.mark.parametrize(
    "name", tiered(DERIVATIVES, ["grad", "value_and_grad", "jacfwd", "jacrev", "checkpoint", "jit of grad", "linearize"])
)
def test_derivatives(name):
    args = xyv()
    transform = DERIVATIVES[name]
    same(transform(optimize(loss))(*args), jax.jit(transform(loss))(*args))


def test_jacobians_of_a_vector():
    args = xyv()
    for transform in (jax.jacfwd, jax.jacrev):
        same(transform(optimize(kernel), argnums=(0, 1))(*args), jax.jit(transform(kernel, argnums=(0, 1)))(*args))


def test_gradient_keeps_only_the_arguments(plans):
    x, y, v = xyv()
    _, pull = jax.vjp(optimize(kernel), x, y, v)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes"))
    assert kept <= x.nbytes + y.nbytes + v.nbytes
    pull(jnp.ones(7))
    assert plans[-1].arg_names == ("x", "y", "v", "ct_0")
    assert {plan.limit_bytes for plan in plans} == {plans[0].limit_bytes}


def test_gradient_with_integers_auxiliary_outputs_and_unused_arguments():
    def f(x, index, unused, key):
        y = x[index] * jnp.sin(x)
        return y.sum(), {"count": index + 1, "y": y, "noise": jax.random.normal(key)}

    args = (jnp.arange(4.0), jnp.array([3, 1, 0, 2]), jnp.ones(2), jax.random.key(0))
    same(jax.value_and_grad(optimize(f), argnums=(0, 2), has_aux=True)(*args), jax.value_and_grad(f, argnums=(0, 2), has_aux=True)(*args))
    same(jax.jit(jax.grad(lambda *a: optimize(f)(*a)[0]))(*args), jax.grad(lambda *a: f(*a)[0])(*args))


def test_integer_arguments_have_float0_cotangents():
    _, pull = jax.vjp(optimize(lambda x, n: (x * n, n)), jnp.arange(3.0), 2)
    out = pull((jnp.ones(3), np.zeros((), jax.dtypes.float0)))
    assert out[1].dtype == jax.dtypes.float0
    assert jnp.all(out[0] == 2)


def test_gradient_of_a_constant_and_of_stopped_gradients():
    for f in (lambda x: jnp.float32(3.0), lambda x: lax.stop_gradient(x) * x, lambda x: jnp.round(x)):
        same(jax.grad(optimize(f))(2.0), jax.grad(f)(2.0))


def test_custom_derivatives_inside_are_respected():
    @jax.custom_vjp
    def clipped(x):
        return x**2

    clipped.defvjp(lambda x: (x**2, x), lambda x, ct: (jnp.clip(ct, -1.0, 1.0),))
    same(jax.grad(optimize(lambda x: 5 * clipped(x)))(2.0), jax.grad(lambda x: 5 * clipped(x))(2.0))


def test_linear_transpose():
    a, x = jnp.arange(6.0).reshape(2, 3), jnp.ones(3)
    f = optimize(lambda a, x: (a @ x, 2 * x))
    same(jax.linear_transpose(lambda x: f(a, x), x)((jnp.ones(2), jnp.ones(3))), (a.sum(0) + 2,))


def test_optimize_inside_optimize():
    args = xyv()
    inner = optimize(kernel, memory_limit="1MiB")
    outer = optimize(jax.grad(lambda *a: jnp.sum(inner(*a) ** 2)))
    same(outer(*args), jax.grad(loss)(*args))


# --- batching --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_axes", [(0, None, None), (1, None, None), (None, -1, 0), (0, 1, 1), 0, ({"a": 0, "b": None}, None, None)])
@pytest.mark.parametrize("out_axes", [0, 1])
def test_vmap(in_axes, out_axes):
    def f(x, y, v):
        x = x["a"] + x["b"] if isinstance(x, dict) else x
        return kernel(x, y, v) * jnp.ones((3, 1)), jnp.outer(v, v)

    def with_axis(a, axis):
        return a if axis is None else jnp.stack([a, 2 * a], axis)

    x, y, v = xyv()
    if isinstance(in_axes, tuple) and isinstance(in_axes[0], dict):
        args = ({"a": jnp.stack([x, x]), "b": x}, y, v)
    else:
        args = tuple(with_axis(a, axis) for a, axis in zip((x, y, v), in_axes if isinstance(in_axes, tuple) else (0, 0, 0), strict=True))
    same(jax.vmap(optimize(f), in_axes, out_axes)(*args), jax.jit(jax.vmap(f, in_axes, out_axes))(*args))


@pytest.mark.parametrize(
    "transform",
    [lambda f: jax.vmap(jax.grad(f), (0, None, None)), lambda f: jax.grad(lambda *a: jax.vmap(f, (0, None, None))(*a).sum(), 1)],
)
def test_vmap_and_grad(transform):
    x, y, v = xyv()
    args = x[None] * jnp.ones((2, 1, 1)), y, v
    same(transform(optimize(loss))(*args), jax.jit(transform(loss))(*args))


def test_vmap_of_vmap_and_of_hessian():
    x, y, v = xyv()
    v2 = jnp.stack([v, 2 * v])
    same(
        jax.vmap(jax.vmap(optimize(loss), (None, None, 0)), (0, None, None))(x[:, None], y, v2),
        jax.jit(jax.vmap(jax.vmap(loss, (None, None, 0)), (0, None, None)))(x[:, None], y, v2),
    )
    batched = [jax.vmap(jax.hessian(f, 2), (None, None, 0)) for f in (optimize(loss), loss)]
    same(batched[0](x, y, v2), jax.jit(batched[1])(x, y, v2))


def test_vmap_with_a_named_axis():
    def f(x):
        return x - lax.pmean(x, "batch")

    x = jnp.arange(4.0)
    same(jax.vmap(optimize(f), axis_name="batch")(x), jax.vmap(f, axis_name="batch")(x))


# --- inside other programs -------------------------------------------------------------------------


def test_inside_jit_scan_while_cond_and_map():
    x, y, v = xyv()

    def program(step):
        def run(v):
            a, ys = lax.scan(lambda c, _: (step(x, y, c)[:5], c.sum()), v, None, length=3)
            b = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(x, y, c[1])[:5]), (0, v))[1]
            c = lax.cond(v[0] > 0, lambda: step(x, y, v), lambda: -step(x, y, v))
            return a, ys, b, c, lax.map(lambda v: step(x, y, v), jnp.stack([v, v]))

        return run

    same(jax.jit(program(optimize(kernel)))(v), jax.jit(program(kernel))(v))


def test_gradient_through_scan():
    x, y, v = xyv()

    def power(step):
        return lambda v: lax.scan(lambda c, _: (step(x, y, c)[:5], None), v, None, length=3)[0].sum()

    same(jax.jit(jax.grad(power(optimize(kernel))))(v), jax.grad(power(kernel))(v))


def test_shard_map_on_one_device():
    x, y, v = xyv()
    mesh, P = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",)), jax.sharding.PartitionSpec

    def sharded(f):
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("i"), P(), P()), out_specs=P("i")))

    same(sharded(optimize(kernel))(x, y, v), sharded(kernel)(x, y, v))
    same(jax.grad(lambda *a: sharded(optimize(kernel))(*a).sum())(x, y, v), jax.grad(lambda *a: kernel(*a).sum())(x, y, v))


def test_loops_of_a_plan_inside_shard_map(monkeypatch):
    """Accumulators start as plain zeros, whatever varies over the mesh outside."""

    def plan(jaxpr, options, arg_names, name, donated, placement):
        def function(x):
            return [lax.fori_loop(0, len(x), lambda i, acc: acc + x[i], jnp.zeros((), x.dtype))]

        return types.SimpleNamespace(record=None, is_here=True, function=function)

    monkeypatch.setattr(pipeline, "plan", plan)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    f = jax.shard_map(lambda x: optimize(jnp.sum)(x)[None], mesh=mesh, in_specs=spec, out_specs=spec)
    assert jax.jit(f)(jnp.arange(4.0)) == 6.0 == f(jnp.arange(4.0))


def test_collectives_over_a_mesh_are_refused():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    fast = jax.jit(jax.shard_map(optimize(lambda x: x - lax.pmean(x, "i")), mesh=mesh, in_specs=spec, out_specs=spec))
    with pytest.raises(NotImplementedError, match="Optimise the parts between the collectives"):
        fast(jnp.arange(4.0))


def test_unused_results_are_not_computed(plans):
    fast = optimize(lambda x, y: (x * 2, jnp.exp(y)))
    jax.grad(lambda x: jax.jit(lambda x: fast(x, 1.0)[0])(x))(1.0)
    assert all(len(plan.jaxpr.out_avals) == 1 for plan in plans)


# --- effects ---------------------------------------------------------------------------------------


def test_callbacks_happen_once_and_in_order():
    seen = []

    def f(x):
        def step(c, i):
            jax.debug.callback(lambda i: seen.append(int(i)), i, ordered=True)
            return c * x, None

        return lax.scan(step, x, jnp.arange(3))[0]

    fast = optimize(f)
    assert jax.block_until_ready(fast(2.0)) == 16.0
    jax.effects_barrier()
    assert seen == [0, 1, 2]


def test_recomputation_repeats_no_callback():
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x)
        return lax.scan(lambda c, _: (jax.debug.callback(lambda c: seen.append(float(c)), c), (c * x, None))[1], x, None, length=1)[0]

    assert jax.grad(optimize(f))(3.0) == 6.0
    jax.effects_barrier()
    assert seen == [3.0, 3.0]


def test_differentiating_through_a_callback_with_results_says_what_to_do():
    def f(x):
        return x * jax.experimental.io_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), jnp.float32))

    assert optimize(f)(3.0) == 6.0
    with pytest.raises(NotImplementedError, match=r"Use optimize\(jax.grad\(fun\)\)"):
        jax.grad(optimize(f))(3.0)


def test_strict_promotion_of_the_user_does_not_bind_emitted_programs(plans, monkeypatch):
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert optimize(lambda x: x * 2)(jnp.float32(1)) == 2
        with pytest.raises(Exception, match="no available implicit dtype promotion"):
            optimize(lambda x, n: x * n)(jnp.float32(1), jnp.int32(1))


def test_public_name():
    assert eqsat_mem.optimize is optimize
