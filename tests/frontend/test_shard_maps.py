"""``jax.shard_map`` as operations on all shares at once, on a mesh that is not here; ``tests/mesh`` has values on devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.whole_maps import whole_map
from tests.oracles.evaluation import values

S = P("x")
MESH = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
SHARES = X.reshape(4, 2, 4)


def traced(body, out=S, **options):
    return jax.make_jaxpr(jax.shard_map(body, mesh=MESH, in_specs=S, out_specs=out, **options))(X)


MEANINGS = {
    "psum": (lambda a: a - lax.psum(a, "x"), S, SHARES - SHARES.sum(0)),
    "the same everywhere": (lambda a: lax.pmax(a, "x"), P(), SHARES.max(0)),
    "all_gather": (lambda a: a + lax.all_gather(a, "x").mean(0), S, SHARES + SHARES.mean(0)),
    "psum_scatter": (lambda a: lax.psum_scatter(a, "x", scatter_dimension=1), S, SHARES.sum(0).T),
    "all_to_all": (lambda a: lax.all_to_all(a, "x", 1, 1), S, SHARES.transpose(2, 1, 0)),
    "ppermute": (lambda a: lax.ppermute(a, "x", [(0, 1), (3, 0)]), S, SHARES[[3, 0, 0, 0]] * np.array([1, 1, 0, 0])[:, None, None]),
    "axis_index": (lambda a: a * lax.axis_index("x"), S, SHARES * np.arange(4)[:, None, None]),
}


@pytest.mark.parametrize(("body", "out", "want"), MEANINGS.values(), ids=MEANINGS)
def test_collectives_are_operations_on_all_shares(body, out, want):
    closed = traced(body, out)
    program = load(closed, ["x"])
    assert not any(name in str(program) for name in ("shard_map", "psum", "all_gather", "all_to_all", "ppermute"))
    ((got,),) = values([X], program)
    np.testing.assert_allclose(got, want.reshape(got.shape), rtol=1e-6, atol=1e-6)
    assert whole_map(closed) == ""


def test_folds_over_a_named_axis_of_a_batch_are_folds():
    closed = jax.make_jaxpr(jax.vmap(lambda a: a - lax.psum(a, "rows") + lax.pmax(a, "rows"), axis_name="rows"))(X)
    program = load(closed, ["x"])
    assert "psum" not in str(program)
    ((got,),) = values([X], program)
    np.testing.assert_allclose(got, X - X.sum(0) + X.max(0), rtol=1e-6, atol=1e-6)


WHOLE = {
    "psum with axis_index_groups": lambda a: lax.psum(a, "x", axis_index_groups=[[0, 1], [2, 3]]),
    "debug_callback": lambda a: (jax.debug.callback(lambda total: None, a.sum()), a)[1],
    "random_": lambda a: a + jax.random.uniform(jax.random.key(0, impl="rbg"), a.shape),
}


@pytest.mark.parametrize(("reason", "body"), WHOLE.items(), ids=WHOLE)
def test_what_has_no_meaning_for_all_shares_stays(reason, body):
    closed = traced(body, check_vma=False)
    assert "shard_map" in str(load(closed, ["x"]))
    inside = jax.make_jaxpr(lambda x: lax.scan(lambda y, _: (jnp.sin(jax.core.eval_jaxpr(closed.jaxpr, (), y)[0]), None), x, None, 2))(X)
    for program in (closed, inside):
        assert f"its body has what cannot be planned, {reason}" in whole_map(program)
