"""Sparse Gaussian process regression with GPJax: the collapsed bound, fitted by L-BFGS."""

import gpjax as gpx
import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)

key_x, key_noise = jax.random.split(jax.random.key(0))
x = jax.random.uniform(key_x, (10_000, 2), minval=-2.0, maxval=2.0)
y = jnp.sin(4 * x[:, :1]) + jnp.cos(2 * x[:, 1:]) + 0.1 * jax.random.normal(key_noise, (10_000, 1))
data = gpx.Dataset(X=x, y=y)

prior = gpx.gps.Prior(mean_function=gpx.mean_functions.Constant(), kernel=gpx.kernels.Matern32())
model = prior * gpx.likelihoods.Gaussian()
family = gpx.variational_families.CollapsedVariationalGaussian(model=model, inducing_inputs=x[:50])


def objective(family, data):
    return -gpx.objectives.collapsed_elbo(family, data)


fitted, history = gpx.fit_scipy(model=family, objective=objective, train_data=data, max_iters=5, verbose=False)
print(history[0])
print(history[-1])
