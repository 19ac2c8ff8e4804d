"""Optimised functions as a user's program meets them: errors with the user's names, copies, and what is refused."""

import copy
import pickle
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from eqsat_mem import optimize
from eqsat_mem.errors import MemoryLimitError

A = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)


@optimize(memory_limit="1MiB")
def doubled(x):
    return 2 * x


def kernel(x):
    return jnp.exp(-((x[:, None] - x) ** 2)) @ x


# --- errors ----------------------------------------------------------------------------------------


def test_errors_of_tracing_name_the_function_its_file_and_its_parameter():
    def branching(parameters, scale, mode):
        return scale if parameters["w"].sum() > 0 else -scale

    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        optimize(branching, static_argnums=2)({"w": A}, 2.0, ("a", 1))
    message = str(raised.value)
    for part in ("the function branching at", "test_composition.py", "parameters['w']"):
        assert part in message


@pytest.mark.parametrize("call", ["__call__", "plan", "lower", "trace"])
def test_tracebacks_have_the_users_frames_only(call, filtered_tracebacks):
    def fails(x):
        return x if x.sum() > 0 else -x

    for function, limit, error, names in (
        (fails, "1GiB", jax.errors.TracerBoolConversionError, ["test_tracebacks_have_the_users_frames_only", "fails"]),
        (lambda x: jnp.linalg.cholesky(x @ x.T), "100KiB", MemoryLimitError, ["test_tracebacks_have_the_users_frames_only"]),
    ):
        if error is MemoryLimitError and call == "trace":
            continue  # plans nothing
        with pytest.raises(error) as caught:
            getattr(optimize(function, memory_limit=limit), call)(jnp.ones((200, 200)))
        assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)] == names


def test_results_of_no_dtype_name_the_function():
    def words(x):
        return "x"

    with pytest.raises(TypeError, match=r"function words at .*test_composition\.py"):
        optimize(words)(A)


def test_not_a_number_is_found_in_the_users_line():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        optimize(lambda x: jnp.log(x) + 1)(A)


# --- copies ----------------------------------------------------------------------------------------


def test_a_function_can_be_copied_and_pickled():
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    made = optimize(doubled.__wrapped__, memory_limit="2MiB")
    again = copy.deepcopy(made)
    assert again is not made
    assert repr(again) == repr(made)
    np.testing.assert_array_equal(again(A), 2 * A)
    loaded = pickle.loads(pickle.dumps(optimize(kernel, memory_limit="3MiB")))
    np.testing.assert_allclose(loaded(A[0]), kernel(A[0]), rtol=1e-6)


@pytest.mark.parametrize("limit", ["1GiB", "64KiB"])
def test_a_plan_can_be_copied_and_pickled(limit):
    x = np.linspace(0, 1, 500, dtype=np.float32)
    plan = optimize(kernel, memory_limit=limit).plan(x)
    assert plan.unchanged == (limit == "1GiB")
    loaded = pickle.loads(pickle.dumps(plan))
    assert (str(loaded), loaded.to_json()) == (str(plan), plan.to_json())
    np.testing.assert_allclose(loaded.function(x)[0], kernel(x), rtol=1e-5)
    with pytest.raises(ValueError, match="not in this process"):
        loaded.explain()
    assert copy.deepcopy(plan) is plan  # with its search, which explains it


# --- what is refused -------------------------------------------------------------------------------


def test_references_are_refused():
    def counted(x):
        total = jax.new_ref(x)
        total[...] += 1
        return total[...]

    outside = jax.new_ref(jnp.asarray(A))
    for function, argument in ((counted, A), (lambda x: x + outside[...], A), (lambda r: r[...], outside)):
        with pytest.raises(NotImplementedError, match="cannot use references to arrays"):
            optimize(function)(argument)


def test_symbolic_shapes_are_refused():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(NotImplementedError, match=r"not float32\[n,3\]: export it once for each shape"):
        jax.export.export(jax.jit(doubled))(jax.ShapeDtypeStruct((n, 3), np.float32))


COLLECTIVES = {
    "psum": lambda x: jax.lax.psum(x, "i"),
    "all_gather": lambda x: jax.lax.all_gather(x, "i"),
    "axis_index": lambda x: x * jax.lax.axis_index("i"),
    "ppermute": lambda x: jax.lax.ppermute(x, "i", [(0, 0)]),
    "in a branch": lambda x: jax.lax.cond(x[0, 0] > 0, lambda: x, lambda: jax.lax.ppermute(x, ("i",), [(0, 0)])),
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_shard_map_are_refused(name, check_vma):
    mesh, spec = Mesh(jax.devices()[:1], ("i",)), PartitionSpec("i")
    mapped = jax.shard_map(optimize(COLLECTIVES[name]), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    with pytest.raises(NotImplementedError, match="over the axis 'i' of a mesh"):
        jax.jit(mapped)(A)


def test_collectives_of_vmap_are_planned():
    function = jax.vmap(optimize(COLLECTIVES["psum"]), axis_name="i")
    np.testing.assert_allclose(function(A), np.broadcast_to(A.sum(0), A.shape))
