"""Kernels, neighbours, attention, Gaussian processes, transport and transforms, and what an expert writes for one of eight devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from benchmarks.mesh_shapes import DEVICES


def kernel_product(x: Any, y: Any, v: Any) -> Any:
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


def in_chunks(function: Callable[..., Any], size: int, *arrays: Any) -> Any:
    """A function of rows, a chunk of rows at a time."""
    size = min(size, len(arrays[0]))
    parts = [a.reshape(-1, size, *a.shape[1:]) for a in arrays]
    made = lax.map(lambda own: function(*own), tuple(parts))
    return jax.tree.map(lambda m: m.reshape(-1, *m.shape[2:]), made)


def kernel_product_by_hand(x: Any, y: Any, v: Any) -> Any:
    y, v = (lax.all_gather(a, "x", tiled=True) for a in (y, v))

    def rows(some: Any) -> Any:
        def tile(k: Any, total: Any) -> Any:
            columns, weights = (lax.dynamic_slice_in_dim(a, k * width, width) for a in (y, v))
            return total + kernel_product(some, columns, weights)

        width = min(len(y), 1024)
        return lax.fori_loop(0, len(y) // width, tile, jnp.zeros((len(some), v.shape[1]), v.dtype))

    return in_chunks(rows, 256, x)


def neighbours(x: Any, q: Any) -> Any:
    return tuple(lax.top_k(2.0 * q @ x.T - jnp.sum(x**2, -1)[None] - jnp.sum(q**2, -1)[:, None], 10))


def neighbours_by_hand(x: Any, q: Any) -> Any:
    found, places = in_chunks(lambda some: neighbours(x, some), 64, q)
    places = places + lax.axis_index("x") * len(x)
    found, places = (lax.all_gather(a, "x", axis=1, tiled=True) for a in (found, places))
    best, which = lax.top_k(found, 10)
    return best, jnp.take_along_axis(places, which, 1)


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.swapaxes(1, 2) / jnp.sqrt(q.shape[-1]), -1) @ v


def attention_by_hand(q: Any, k: Any, v: Any) -> Any:
    k, v = (lax.all_gather(a, "x", axis=1, tiled=True) for a in (k, v))
    chunks = in_chunks(lambda some: attention(some.swapaxes(0, 1), k, v).swapaxes(0, 1), 64, q.swapaxes(0, 1))
    return chunks.swapaxes(0, 1)


def with_itself(x: Any, v: Any) -> Any:
    return kernel_product(x, x, v)


def with_itself_by_hand(x: Any, v: Any) -> Any:
    return kernel_product_by_hand(x, x, v)


def of_a_share_of_keys(q: Any, k: Any, v: Any) -> Any:
    """Attention to the keys of all devices, each of which has some: a chunk of queries at a time, merged by the largest score."""

    def chunk(some: Any) -> Any:
        some = some.swapaxes(0, 1)
        scores = some @ k.swapaxes(1, 2) / jnp.sqrt(some.shape[-1])
        top = lax.pmax(jnp.max(scores, -1, keepdims=True), "x")
        weights = jnp.exp(scores - top)
        total, mean = lax.psum((jnp.sum(weights, -1, keepdims=True), weights @ v), "x")
        first = lax.axis_index("x") * (mean.shape[1] // DEVICES)
        return lax.dynamic_slice_in_dim(mean / total, first, mean.shape[1] // DEVICES, 1).swapaxes(0, 1)

    # each device has the queries whole and returns its share of them: chunks are made of a few queries of every share
    h, n, d = q.shape
    of_shares = q.reshape(h, DEVICES, n // DEVICES, d).transpose(2, 1, 0, 3)
    size = min(64, n // DEVICES)
    parts = of_shares.reshape(-1, size, DEVICES, h, d)
    made = lax.map(lambda own: chunk(own.swapaxes(0, 1).reshape(-1, h, d)), parts)
    return made.reshape(-1, h, d).swapaxes(0, 1)


def attention_gradients(q: Any, k: Any, v: Any) -> Any:
    return jax.grad(lambda *own: jnp.sum(attention(*own) ** 2), argnums=(0, 1, 2))(q, k, v)


def kernel(a: Any, b: Any, scales: Any) -> Any:
    return jnp.exp(-0.5 * jnp.sum((a[:, None] / scales - b[None] / scales) ** 2, -1))


def sparse_bound(x: Any, y: Any, z: Any, scales: Any, noise: Any) -> Any:
    """The variational bound of a sparse Gaussian process (Titsias 2009)."""
    scales, noise = jax.nn.softplus(scales), jax.nn.softplus(noise)
    root = jnp.linalg.cholesky(kernel(z, z, scales) + 1e-3 * jnp.eye(len(z)))
    a = solve_triangular(root, kernel(z, x, scales), lower=True)
    return bound_of(a @ a.T, a @ y, jnp.sum(y**2), len(x), noise)


def bound_of(products: Any, targets: Any, squares: Any, count: int, noise: Any) -> Any:
    root = jnp.linalg.cholesky(jnp.eye(len(products)) + products / noise)
    c = solve_triangular(root, targets, lower=True) / noise
    fit = -0.5 * count * jnp.log(2 * jnp.pi * noise) - 0.5 * squares / noise + 0.5 * jnp.sum(c**2)
    return fit - jnp.sum(jnp.log(jnp.diag(root))) - 0.5 * count / noise + 0.5 * jnp.trace(products) / noise


def sparse_bound_by_hand(x: Any, y: Any, z: Any, scales: Any, noise: Any) -> Any:
    scales, noise = jax.nn.softplus(scales), jax.nn.softplus(noise)
    root = jnp.linalg.cholesky(kernel(z, z, scales) + 1e-3 * jnp.eye(len(z)))
    size = min(len(x), 1000)

    def chunk(k: Any, total: Any) -> Any:
        some, targets = (lax.dynamic_slice_in_dim(own, k * size, size) for own in (x, y))
        a = solve_triangular(root, kernel(z, some, scales), lower=True)
        return jax.tree.map(jnp.add, total, (a @ a.T, a @ targets, jnp.sum(targets**2)))

    zero = (jnp.zeros((len(z), len(z))), jnp.zeros((len(z), y.shape[1])), jnp.zeros(()))
    return bound_of(*lax.psum(lax.fori_loop(0, len(x) // size, chunk, zero), "x"), DEVICES * len(x), noise)


def sparse_gradients(*own: Any) -> Any:
    return jax.value_and_grad(sparse_bound, argnums=(2, 3, 4))(*own)


def discrepancy(x: Any, y: Any) -> Any:
    """The squared maximum mean discrepancy of two samples."""

    def mean(a: Any, b: Any) -> Any:
        return jnp.mean(jnp.exp(-0.5 * jnp.sum((a[:, None] - b[None]) ** 2, -1)))

    return mean(x, x) + mean(y, y) - 2 * mean(x, y)


def discrepancy_by_hand(x: Any, y: Any) -> Any:
    every = {"x": lax.all_gather(x, "x", tiled=True), "y": lax.all_gather(y, "x", tiled=True)}

    def total(some: Any, of: Any) -> Any:
        squares = jnp.sum(of**2, -1)
        rows = in_chunks(lambda a: jnp.sum(jnp.exp(a @ of.T - 0.5 * jnp.sum(a**2, -1)[:, None] - 0.5 * squares), -1), 128, some)
        return lax.psum(jnp.sum(rows), "x") / (1.0 * DEVICES * len(some) * len(of))

    return total(x, every["x"]) + total(y, every["y"]) - 2 * total(x, every["y"])


def spectra(x: Any) -> Any:
    return jnp.fft.fft(x, axis=-1)


def transport(x: Any, y: Any) -> Any:
    """Ten steps of Sinkhorn's algorithm."""
    cost = jnp.sum((x[:, None] - y[None]) ** 2, -1)

    def turn(own: Any, _: Any) -> Any:
        f, g = own
        f = -0.1 * (jax.nn.logsumexp((g[None] - cost) / 0.1, axis=1) - jnp.log(len(y)))
        g = -0.1 * (jax.nn.logsumexp((f[:, None] - cost) / 0.1, axis=0) - jnp.log(len(x)))
        return (f, g), None

    f, g = lax.scan(turn, (jnp.zeros(len(x)), jnp.zeros(len(y))), None, length=10)[0]
    return jnp.mean(f) + jnp.mean(g)


def transport_by_hand(x: Any, y: Any) -> Any:
    """Each device has some rows and all columns: its own part of a sum over rows is merged by the largest term."""
    every, count = lax.all_gather(y, "x", tiled=True), DEVICES * len(y)

    def costs(a: Any) -> Any:
        return jnp.sum((a[:, None] - every[None]) ** 2, -1)

    def turn(own: Any, _: Any) -> Any:
        f, g = own
        f = in_chunks(lambda a: -0.1 * (jax.nn.logsumexp((g[None] - costs(a)) / 0.1, axis=1) - jnp.log(count)), 128, x)

        def chunk(k: Any, total: Any) -> Any:
            some, own_f = (lax.dynamic_slice_in_dim(u, k * size, size) for u in (x, f))
            return jnp.logaddexp(total, jax.nn.logsumexp((own_f[:, None] - costs(some)) / 0.1, axis=0))

        size = min(len(x), 128)
        part = lax.fori_loop(0, len(x) // size, chunk, jnp.full(count, -jnp.inf))
        top = lax.pmax(part, "x")
        g = -0.1 * (top + jnp.log(lax.psum(jnp.exp(part - top), "x")) - jnp.log(DEVICES * len(x)))
        return (f, g), None

    f, g = lax.scan(turn, (jnp.zeros(len(x)), jnp.zeros(count)), None, length=10)[0]
    return lax.psum(jnp.sum(f), "x") / (DEVICES * len(x)) + jnp.mean(g)


def roots(x: Any) -> Any:
    return jnp.linalg.cholesky(x @ x.swapaxes(1, 2) + len(x[0]) * jnp.eye(len(x[0])))


def means(x: Any, c: Any) -> Any:
    nearest = jnp.argmin(jnp.sum(c**2, -1)[None] - 2.0 * x @ c.T, 1)
    of = jax.nn.one_hot(nearest, len(c), dtype=x.dtype)
    return (of.T @ x) / jnp.maximum(jnp.sum(of, 0), 1.0)[:, None]


def means_by_hand(x: Any, c: Any) -> Any:
    def chunk(k: Any, total: Any) -> Any:
        some = lax.dynamic_slice_in_dim(x, k * size, size)
        nearest = jnp.argmin(jnp.sum(c**2, -1)[None] - 2.0 * some @ c.T, 1)
        of = jax.nn.one_hot(nearest, len(c), dtype=x.dtype)
        return total[0] + of.T @ some, total[1] + jnp.sum(of, 0)

    size = min(len(x), 1000)
    sums, counts = lax.fori_loop(0, len(x) // size, chunk, (jnp.zeros_like(c), jnp.zeros(len(c))))
    sums, counts = lax.psum((sums, counts), "x")
    return sums / jnp.maximum(counts, 1.0)[:, None]
