"""Small programs in JAX that between them make every shipped rule fire: sample programs for those who write rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular

from eqsat_mem.egraph.rule_files import RuleSet
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.takes import with_takes
from eqsat_mem.ir import Program
from eqsat_mem.ir.ops import Monoid

Array = Any


def normal(*shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape) for shape in shapes)


def sq(x: Array, y: Array) -> Any:
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def kernel_vector(x: Array, y: Array, v: Array) -> Any:
    return jnp.exp(-0.5 * sq(x, y)) @ v


def kernels(x: Array, y: Array, variance: Array, width: Array) -> Any:
    d = sq(x, y)
    scales = variance * d, sq(y, x) * variance, d / width, d / 2.0, lax.mul(d, np.float64(0.25)), -d
    return jnp.exp(-d), *(jnp.cos(s) for s in scales)


def symmetrised(x: Array) -> Any:
    first, second = x[:, None], x[None]
    least, most, unequal = (f(first, second).sum(-1) for f in (jnp.minimum, jnp.maximum, lambda a, b: jnp.abs(a - b)))
    k = jnp.exp(-sq(x, x)) + x @ x.T + jnp.eye(len(x), dtype=x.dtype)
    return (k + k.T) / 2, 0.5 * (least + least.T), (most * unequal + (most * unequal).T) * 0.5, jnp.outer(x[:, 0], x[:, 0]).T


def by_square(x: Array, y: Array) -> Any:
    return jnp.sum(jnp.square(x[:, None] - y[None]), -1)


def by_product(x: Array, y: Array) -> Any:
    s = y[None] - x[:, None]
    return jnp.sum(s * s, -1)


def by_power(x: Array, y: Array) -> Any:
    return jnp.sum(lax.pow(x[:, None] - y[None], 2.0), -1)


def by_einsum(x: Array, y: Array) -> Any:
    s = x[:, None] - y[None]
    return jnp.einsum("nmd,nmd->nm", s, s)


def by_norm(x: Array, y: Array) -> Any:
    return jnp.linalg.norm(x[:, None] - y[None], axis=-1) ** 2


def of_sum(x: Array, y: Array) -> Any:
    return jnp.sum((x[:, None] + y[None]) ** 2, -1)


def scaled(x: Array, y: Array, w: Array) -> Any:
    return jnp.sum((w * (x[:, None] - y[None])) ** 2, -1)


def scaled_right(x: Array, y: Array, w: Array) -> Any:
    return jnp.sum(((x[:, None] - y[None]) * w) ** 2, -1)


def divided(x: Array, y: Array, w: Array) -> Any:
    return jnp.sum(((x[:, None] - y[None]) / w) ** 2, -1)


def weighted(x: Array, y: Array, w: Array) -> Any:
    return jnp.sum(w * (x[:, None] - y[None]) ** 2, -1)


def weighted_inside(x: Array, y: Array, w: Array) -> Any:
    s = x[:, None] - y[None]
    return jnp.sum((w * s) * s, -1)


def widths_of_centres(x: Array, y: Array, w: Array) -> Any:
    """Gaussians' logarithms: each centre has widths of its own."""
    s = x[:, None] - y[None]
    a, b = s**2 / w, jnp.log(w)
    sums = jnp.sum(a + b, -1), jnp.sum(b + a, -1), jnp.sum(a - b, -1), jnp.sum(b - a, -1)
    return *sums, jnp.sum((s / w) ** 2, -1), jnp.sum((w * s) ** 2, -1)


def widths_of_points(x: Array, y: Array, v: Array) -> Any:
    """The same where each point has."""
    s = x[:, None] - y[None]
    return jnp.sum(s**2 / v[:, None], -1), jnp.sum((s / v[:, None]) ** 2, -1)


def shares_over_widths(g: Array, x: Array, w: Array) -> Any:
    return jnp.sum(g[:, :, None] / w * x[:, None], 0)


def batched(x: Array, y: Array) -> Any:
    return jnp.sum((x[:, :, None] - y[:, None]) ** 2, -1)


def nested_reduce(x: Array, y: Array, v: Array) -> Any:
    return jnp.exp(jnp.sum(0.2 * (x[None] - y[:, None]), -1)) @ v


def outer_sum(x: Array, y: Array) -> Any:
    return jnp.sum(x[:, None] + y[None], -1), jnp.sum(x[:, None] - y[None], -1)


def weighted_outer_sum(g: Array, x: Array, y: Array) -> Any:
    return jnp.einsum("nm,nmd->nd", g, x[:, None] + y[None])


def forces(x: Array, y: Array, v: Array, w: Array) -> Any:
    return jax.grad(lambda x: w @ (jnp.exp(-sq(x, y)) @ v) + jnp.sum(v * jnp.exp(-sq(x, y))))(x)


def gradient(x: Array, y: Array, v: Array) -> Any:
    return jax.grad(lambda x, y: jnp.sum(kernel_vector(x, y, v) ** 2), argnums=(0, 1))(x, y)


def to_itself(x: Array, w: Array) -> Any:
    return jnp.sum(((x[:, None] - x[None]) / w) ** 2, -1), jnp.sum(w * (x[:, None] - x[None]) ** 2, -1)


def root_gradient(x: Array, y: Array) -> Any:
    return jax.grad(lambda x: jnp.sum(jnp.sqrt(sq(x, y) + 1e-3)))(x)


def lengthscale_gradient(x: Array, v: Array, w: Array) -> Any:
    return jax.grad(lambda w: jnp.sum((jnp.exp(-sq(x / w, x / w)) @ v) ** 2))(w)


def chain(a: Array, b: Array, c: Array) -> Any:
    return (a @ b) @ c


def chain_with_transposes(a: Array, b: Array, c: Array, v: Array) -> Any:
    return ((a @ b.T) @ c.T) @ v


def chain_with_batch(a: Array, b: Array, c: Array) -> Any:
    return jnp.einsum("bij,bjk->bik", jnp.einsum("bij,bjk->bik", a, b), c)


def sums(a: Array, b: Array) -> Any:
    return jnp.sum(a @ b), jnp.sum(jnp.sum(jnp.tanh(a), 0)), jnp.sum(-a, 1), a @ -b


def quotients(a: Array, b: Array, v: Array) -> Any:
    return (a / b[:, None]) @ v, jnp.sum(a / b[:, None], 1), (-jnp.tanh(a)) @ v


def distances_by_hand(x: Array, y: Array) -> Any:
    """Squared distances as users expand them, in several orders and with the sign of a kernel's exponent."""
    squares = jnp.sum(x * x, -1)[:, None] + jnp.sum(y * y, -1)
    norms = jnp.einsum("ik,ik->i", x, x)[:, None], jnp.einsum("jk,jk->j", y, y)
    return squares - 2.0 * (x @ y.T), (x @ y.T) * 2.0 - squares, (norms[0] - 2.0 * (x @ y.T)) + norms[1]


def self_product(a: Array, b: Array) -> Any:
    e = jnp.exp(a @ b.T)
    return e.T @ e


def plus_noise(x: Array, v: Array) -> Any:
    return (jnp.exp(-sq(x, x)) + 0.1 * jnp.eye(len(x))) @ v


def noise_plus(x: Array, v: Array) -> Any:
    return (jnp.eye(len(x)) / 3.0 + jnp.exp(-sq(x, x))) @ v, (jnp.exp(-sq(x, x)) - jnp.eye(len(x))) @ v, v.T @ (-jnp.eye(len(x)))


def powers(x: Array, y: Array) -> Any:
    d = 0.3 * sq(x, y) + 0.1
    return [d**p for p in (0.5, -0.5, 1.5, -1.5, 2.5, -2.5)]


def diagonal_scale(x: Array, v: Array) -> Any:
    eye = jnp.eye(len(x), dtype=x.dtype)
    return eye @ x, (eye * x[:, 0]) @ x, x.T @ (eye * v), jnp.sum(x @ x.T + eye, 0)


def trace_of_product(a: Array, b: Array) -> Any:
    return jnp.trace(a @ b), jnp.trace(a @ b + 2.0 * jnp.eye(len(a))), jnp.trace(jnp.tanh(a @ b))


def trace_of_covariance(x: Array) -> Any:
    return jnp.trace(jnp.exp(-sq(x, x)))


def trace_of_oblong(a: Array, b: Array) -> Any:
    return jnp.trace(jnp.einsum("ij,kl->ki", b, a)), jnp.sum(jnp.where(jnp.arange(3)[:, None] == jnp.arange(5), 2.0, 0.0), 0)


def ones_and_columns_of_eye(a: Array, b: Array) -> Any:
    return jnp.sum(jnp.eye(len(b)) @ b) * a, 1.0 - jnp.tanh(a), jnp.sum(jnp.eye(len(b)), 0)


def diagonal_both(a: Array) -> Any:
    mask = jnp.eye(len(a), dtype=bool)
    rows = jnp.sum(jnp.where(mask, jnp.where(mask, a @ a, 0.0), 0.0), 0)
    return rows, jnp.sum(jnp.where(mask, jnp.where(mask.T, a @ a, 0.0), 0.0), 1)


def centred_trace(x: Array, y: Array) -> Any:
    """Dependence of two samples: kernel matrices, each multiplied by a centring matrix."""
    centring = jnp.eye(len(x)) - 1 / len(x)
    return jnp.trace(jnp.exp(-sq(x, x)) @ centring @ jnp.exp(-sq(y, y)) @ centring)


def weighted_outer_products(a: Array, b: Array, w: Array) -> Any:
    return jnp.sum(a[:, :, None] * b[:, None, :] * w[:, None, None], 0)


def folds(a: Array) -> Any:
    return jnp.max(a, 1), jnp.argmax(a, 0), jnp.prod(a, 0), jnp.sum(jnp.arange(12).reshape(3, 4), 0), jnp.all(a > 0)


def mixed(a: Array, b: Array) -> Any:
    return jnp.dot(a.astype(np.float32), b.astype(np.float32), preferred_element_type=np.float64)


def identities(a: Array) -> Any:
    return jnp.negative(-a), 1.0 * a, a * 1.0, a / 1.0, jnp.sqrt(jnp.abs(a)) * jnp.sqrt(jnp.abs(a)), jnp.sqrt(jnp.exp(a)) ** 2


def selection(a: Array) -> Any:
    return lax.top_k(a, 2)


def choices(a: Array) -> Any:
    """Masks that are taken twice."""
    return jnp.where(a > 0, jnp.where(a > 0, a * a, a + 1), -a), jnp.where(a > 1, -a, jnp.where(a > 1, a * a, a + 1))


def extremes(a: Array) -> Any:
    """A place, and sums of what stands at an extreme."""
    return jnp.argmax(a, axis=1), jnp.sum(jnp.where(jnp.min(a, axis=1, keepdims=True) == a, 3.0 * a, 0.0), axis=1)


def own_fold(a: Array) -> Any:
    return TOTAL(a)


def clamped_root(a: Array) -> Any:
    return jnp.sqrt(jnp.maximum(a, 0.0)) ** 2, jnp.sqrt(jnp.sum(a * a)) ** 2


def attention(q: Array, k: Array, v: Array) -> Any:
    return jax.nn.softmax(q @ k.T / 2.0, axis=-1) @ v


def attention_gradient(q: Array, k: Array, v: Array) -> Any:
    return jax.grad(lambda *a: jnp.sum(attention(*a) ** 2), argnums=(0, 1, 2))(q, k, v)


def masked_sums(s: Array, v: Array) -> Any:
    """Sums of exponentials less their maximum, where a mask holds, and where it does not."""
    keep = s > 0
    e = jnp.exp(s - jnp.max(s, axis=1, keepdims=True))
    return jnp.where(keep, e, 0.0) @ v, jnp.where(keep, 0.0, e) @ v


def wider_sums(s: Array, v: Array) -> Any:
    """Sums in more digits than their terms have."""
    low = s.astype(np.float32)
    return jnp.exp(low - jnp.max(low, axis=1, keepdims=True)).astype(v.dtype) @ v


def by_log_partition(s: Array, v: Array) -> Any:
    """A softmax by its logarithm: ``logsumexp``, and a sum written by hand."""
    top = jnp.max(s, axis=1)
    level = top + jnp.log(jnp.sum(jnp.exp(s - top[:, None]), axis=1))
    other = jax.nn.logsumexp(s, axis=1, keepdims=True)
    again = jnp.log(jnp.sum(jnp.exp(s - top[:, None]), axis=1)) + top
    signed = top + jnp.log(jnp.abs(jnp.sum(jnp.exp(s - top[:, None]), axis=1)))
    return jnp.exp(s - level[:, None]) @ v, jnp.exp(s - other) @ v, jnp.exp(s - again[:, None]) @ v, jnp.exp(s - signed[:, None]) @ v


def moments(s: Array) -> Any:
    """Mean and variance, of rows and of everything."""
    return jnp.mean(s, axis=1), jnp.var(s, axis=1), jnp.std(s * s)


def bound(x: Array, y: Array, z: Array, scale: Array, noise: Array) -> Any:
    kuu = jnp.exp(-0.5 * sq(z / scale, z / scale)) + 1e-4 * jnp.eye(len(z))
    kuf = jnp.exp(-0.5 * sq(z / scale, x / scale))
    low = jnp.linalg.cholesky(kuu)
    a = solve_triangular(low, kuf, lower=True) / jnp.sqrt(noise)
    b = jnp.eye(len(z)) + a @ a.T
    low_b = jnp.linalg.cholesky(b)
    c = solve_triangular(low_b, a @ y, lower=True) / jnp.sqrt(noise)
    return -jnp.sum(jnp.log(jnp.diag(low_b))) - 0.5 * jnp.sum(y**2) / noise + 0.5 * jnp.sum(c**2) + 0.5 * jnp.sum(a**2)


def bound_gradient(x: Array, y: Array, z: Array, scale: Array, noise: Array) -> Any:
    return jax.value_and_grad(bound, argnums=(2, 3, 4))(x, y, z, scale, noise)


def rows_of_computed(x: Array, y: Array) -> Any:
    """Rows, slices and slices of slices of an elementwise value, a fold and a contraction, which are read as takes."""
    places, below = jnp.array([2, 0, 2]), jnp.arange(5)[:, None] > jnp.arange(4)
    return jnp.where(below, sq(x, y), 0.0)[places], (x @ y.T)[1:], jnp.max(x[:, None] - y, -1)[0], sq(x, y)[1:, :2][:3]


def prefix_sums(q: Array, k: Array, v: Array) -> Any:
    place, products = jnp.arange(len(k)), k[:, :, None] * v[:, None]
    to, before = ((compare(place[:, None], place)).astype(k.dtype) for compare in (jnp.less_equal, jnp.less))
    both = [jnp.einsum("sde,st->tde", products, triangle) for triangle in (to, before)]
    sums = [own + jnp.sum(products, 0) for own in both]
    return tuple(jnp.einsum("td,tde->te", q, s) for s in (*sums, both[0] - products, jnp.sum(products, 0) + both[1]))


TOTAL = Monoid("total", 0, lambda a, b: a + b)
XY = [(5, 3), (4, 3)]
BOUND = [(6, 2), (6, 1), (3, 2)]

SHAPES: list[tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = [
    (kernel_vector, [*XY, (4, 2)]), (by_square, XY), (by_product, XY), (by_power, XY), (by_einsum, XY), (by_norm, XY), (of_sum, XY),
    (scaled, [*XY, (3,)]), (scaled_right, [*XY, (3,)]), (weighted, [*XY, (3,)]), (weighted_inside, [*XY, (3,)]),
    (batched, [(2, 5, 3), (2, 4, 3)]), (nested_reduce, [(5, 3), (4, 3), (5, 2)]), (outer_sum, XY),
    (weighted_outer_sum, [(5, 4), *XY]),
    (forces, [*XY, (4,), (5,)]), (gradient, [*XY, (4, 2)]), (root_gradient, [(4, 5), (3, 5)]),
    (chain, [(5, 4), (4, 6), (6, 2)]), (chain_with_transposes, [(5, 2), (4, 2), (3, 4), (3, 1)]),
    (chain_with_batch, [(2, 3, 4), (2, 4, 5), (2, 5, 2)]), (sums, [(3, 4), (4, 5)]), (self_product, [(6, 2), (4, 2)]),
    (distances_by_hand, XY),
    (plus_noise, [(5, 2), (5, 1)]),
    (powers, XY), (noise_plus, [(5, 2), (5, 1)]), (diagonal_scale, [(4, 2), (4,)]), (trace_of_product, [(4, 4), (4, 4)]),
    (trace_of_covariance, [(4, 2)]),
    (diagonal_both, [(4, 4)]), (centred_trace, [(4, 2), (4, 3)]), (weighted_outer_products, [(3, 4), (3, 5), (3,)]),
    (trace_of_oblong, [(3, 2), (5, 5)]), (ones_and_columns_of_eye, [(4,), (5,)]),
    (folds, [(3, 4)]), (mixed, [(3, 4), (4, 2)]), (identities, [(3, 4)]), (clamped_root, [(3, 4)]), (selection, [(3, 40)]),
    (choices, [(3, 4)]), (extremes, [(3, 40)]),
    (masked_sums, [(3, 4), (4, 2)]), (wider_sums, [(3, 4), (4, 2)]), (by_log_partition, [(3, 4), (4, 2)]), (own_fold, [(3, 4)]),
    (moments, [(3, 4)]), (symmetrised, [(4, 3)]), (rows_of_computed, XY),
    (attention, [(5, 3), (4, 3), (4, 2)]), (attention_gradient, [(5, 3), (4, 3), (4, 2)]),
    (prefix_sums, [(5, 3), (5, 3), (5, 2)]),
]  # fmt: skip
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {fun.__name__: (fun, normal(*shapes)) for fun, shapes in SHAPES}
"""By name: a function and its arguments."""
PROGRAMS |= {
    "kernels": (kernels, (*normal(*XY), np.float64(0.3), np.array([0.5, 1.5, 2.0, 2.5]))),
    "divided": (divided, (*normal(*XY), np.array([0.5, 1.5, 2.0]))),
    "widths_of_centres": (widths_of_centres, (*normal(*XY), 1.5 + np.tanh(normal(*XY)[1]))),
    "widths_of_points": (widths_of_points, (*normal(*XY), 1.5 + np.tanh(normal(*XY)[0]))),
    "shares_over_widths": (shares_over_widths, (*normal((5, 4), (5, 3)), *(1.5 + np.tanh(a) for a in normal((4, 3))))),
    "to_itself": (to_itself, (*normal((5, 3)), np.array([0.5, 1.5, 2.0]))),
    "quotients": (quotients, (*normal((3, 4)), np.array([0.5, 1.5, 2.0]), *normal((4, 2)))),
    "lengthscale_gradient": (lengthscale_gradient, (*normal((4, 2), (4, 1)), np.array([0.7, 1.3]))),
    "bound": (bound, (*normal(*BOUND), np.array([1.5, 0.8]), np.float64(0.1))),
    "bound_gradient": (bound_gradient, (*normal(*BOUND), np.array([1.5, 0.8]), np.float64(0.1))),
    "extent_one": (kernel_vector, normal((1, 3), (4, 3), (4, 1))),
    "extent_one_inside": (kernel_vector, normal((3, 1), (1, 1), (1, 2))),
    "sums_extent_one": (sums, normal((1, 4), (4, 1))),
}


def fired(rules: RuleSet) -> set[str]:
    """The rules that match something in one of the programs."""
    limits = Limits(max_rows=5_000, max_iterations=5, max_seconds=10.0, large_elements=0)
    found: set[str] = set()
    with jax.enable_x64(True):
        for fun, args in PROGRAMS.values():
            found |= set(saturate(program_of(fun, *args), rules, limits).matches)
    return found


def program_of(fun: Callable[..., Any], *args: Any) -> Program:
    """A function as a program, with takes in place of gathers and slices of computed values."""
    program = load(jax.make_jaxpr(fun)(*args), [f"a{k}" for k in range(len(args))])
    return with_takes(program) or program
