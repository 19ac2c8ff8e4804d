"""A kernel product on all devices of a job of several processes, 16 MiB on each device where its matrix alone has gigabytes.

    python examples/several_processes.py

One process has all its devices; under Slurm, Open MPI, Kubernetes or Ray Train, which start the same command several times, the devices of
all are one mesh. Nothing in this file says which: `jax.distributed.initialize()` finds out.
"""

import contextlib

import jax

with contextlib.suppress(ValueError):  # nobody has started several processes
    jax.distributed.initialize()

import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eqsat_mem import optimize


def matvec(x, y, v):
    """The product of the Gaussian kernel matrix of x and y with v."""
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, P("x"))
n, d = 16_384, 3


def made(shape, seed):
    """An array in shares: each process makes those of its own devices."""
    whole = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jax.make_array_from_callback(shape, rows, lambda where: whole[where])


x, y, v = made((n, d), 0), made((n, d), 1), made((n, 1), 2)
product = optimize(matvec, memory_limit="16MiB", mesh=mesh, out_shardings=P("x"))
plan = product.plan(x, y, v)  # in every process, as all that JAX runs
result = product(x, y, v)
assert result.sharding.is_equivalent_to(rows, 2)

whole = [np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed, shape in enumerate(((n, d), (n, d), (n, 1)))]
for share in result.addressable_shards:
    some = slice(share.index[0].start or 0, (share.index[0].start or 0) + 64)
    want = matvec(whole[0][some], whole[1], whole[2])
    np.testing.assert_allclose(share.data[:64], want, rtol=1e-4, atol=1e-3)
if jax.process_index() == 0:
    print(plan)
print(f"process {jax.process_index()} of {jax.process_count()}: {len(result.addressable_shards)} of {jax.device_count()} shares are right")
