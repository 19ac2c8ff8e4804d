r"""# Gravity between bodies

$$\ddot p_i = G \sum_j m_j \frac{p_j - p_i}{(\lVert p_j - p_i \rVert^2 + \epsilon^2)^{3/2}}$$

Each body is pulled by all others; a few steps of the leapfrog scheme move them. The forces between all pairs are never held.

    python examples/n_body.py
"""

# %%
import timeit

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

BODIES, STEPS, DT, SOFT, LIMIT = 1_500, 3, 1e-2, 0.05, "8MiB"


def acceleration(position, mass):
    """The pull on each body, with G = 1: (bodies, 3), (bodies,) -> (bodies, 3)."""
    apart = position[None] - position[:, None]
    cubed = (jnp.sum(apart**2, axis=-1) + SOFT**2) ** 1.5
    return jnp.sum(mass[:, None] * apart / cubed[..., None], axis=1)


def simulate(position, velocity, mass):
    """Positions and velocities, each of shape (bodies, 3), after some steps of leapfrog."""

    def leap(state, _):
        position, velocity = state
        velocity = velocity + 0.5 * DT * acceleration(position, mass)
        position = position + DT * velocity
        return (position, velocity + 0.5 * DT * acceleration(position, mass)), None

    return jax.lax.scan(leap, (position, velocity), None, length=STEPS)[0]


# %% [markdown]
# ## The plan

# %%
rng = np.random.default_rng(0)
position, velocity = (rng.standard_normal((BODIES, 3), dtype=np.float32) for _ in range(2))
mass = rng.uniform(0.5, 1.5, BODIES).astype(np.float32) / BODIES
fast = eqsat_mem.optimize(simulate, memory_limit=LIMIT)
plan = fast.plan(position, velocity, mass)
print(plan)

# %% [markdown]
# ## The same numbers
#
# The pull on some bodies in float64 with numpy, positions as written, and the momentum of all, which no step changes.

# %%
pull = eqsat_mem.optimize(acceleration, memory_limit=LIMIT)(position, mass)
for body in range(0, BODIES, 150):
    apart = np.float64(position) - position[body]
    right = np.sum(mass[:, None] * apart / (np.sum(apart**2, axis=1)[:, None] + SOFT**2) ** 1.5, axis=0)
    np.testing.assert_allclose(pull[body], right, rtol=1e-3, atol=1e-4)
ours, written = fast(position, velocity, mass), jax.jit(simulate)(position, velocity, mass)
print(f"largest difference of a position: {np.abs(ours[0] - written[0]).max():.1e}")
assert np.abs(ours[0] - written[0]).max() < 1e-5
drift = np.abs(mass @ np.float64(ours[1]) - mass @ np.float64(velocity)).max()
print(f"change of the total momentum: {drift:.1e}")
assert drift < 1e-5

# %% [markdown]
# ## Seconds

# %%
for name, run in {"as written": jax.jit(simulate), "planned": fast}.items():
    jax.block_until_ready(run(position, velocity, mass))
    seconds = timeit.repeat(lambda run=run: jax.block_until_ready(run(position, velocity, mass)), number=1, repeat=2)
    print(f"{name:10}  {min(seconds):.3f} s")

# %% [markdown]
# ## Memory over time

# %%
plan.show()
