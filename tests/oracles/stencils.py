"""Random programs that read an axis at shifted positions: slices, paddings, rolls, differences, concatenations, updates at known places."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracles import stepwise
from tests.oracles.differential import Case
from tests.oracles.meshes import MESHES, check_on_devices, check_plan, plans, random_placement

Step = Callable[[random.Random, Any, int], Any]
"""A value made of another by reading one of its axes elsewhere."""


def _sliced(rng: random.Random, x: Any, axis: int) -> Any:
    n = x.shape[axis]
    start, left = rng.randrange(min(n, 4)), rng.randrange(min(n, 4))
    return jax.lax.slice_in_dim(x, start, max(n - left, start + 1), 1, axis)


def _strided(rng: random.Random, x: Any, axis: int) -> Any:
    return jax.lax.slice_in_dim(x, rng.randrange(2), None, rng.choice((2, 2, 3)), axis) if x.shape[axis] > 3 else x


def _rolled(rng: random.Random, x: Any, axis: int) -> Any:
    return jnp.roll(x, rng.choice((1, -1, 2, -3, 5, x.shape[axis] // 2 + 1, rng.randrange(40))), axis)


def _padded(rng: random.Random, x: Any, axis: int) -> Any:
    config = [(rng.randrange(3), rng.randrange(3)) if a == axis or rng.random() < 0.2 else (0, 0) for a in range(x.ndim)]
    mode = rng.choice(("constant", "edge", "wrap", "reflect")) if x.shape[axis] > 3 and min(x.shape) > 3 else "constant"
    return jnp.pad(x, config, mode=mode)


def _cut_and_padded(rng: random.Random, x: Any, axis: int) -> Any:
    config = [(rng.randrange(-2, 3), rng.randrange(-2, 3), 0) if a == axis and n > 5 else (0, 0, 0) for a, n in enumerate(x.shape)]
    return jax.lax.pad(x, jnp.asarray(0.5, x.dtype), config)


def _differences(rng: random.Random, x: Any, axis: int) -> Any:
    return jnp.diff(x, axis=axis) if x.shape[axis] > 1 else x


def _shifted(rng: random.Random, x: Any, axis: int) -> Any:
    first, rest = (jax.lax.slice_in_dim(x, a, b, 1, axis) for a, b in ((0, 1), (0, x.shape[axis] - 1)))
    return jnp.concatenate([first * 2.0, rest], axis)


def _updated(rng: random.Random, x: Any, axis: int) -> Any:
    if x.shape[axis] < 4:
        return x
    y = jnp.moveaxis(x, axis, 0)
    inside = (slice(1, -1), *((slice(1, -1),) if y.ndim > 1 and y.shape[1] > 3 and rng.random() < 0.4 else ()))
    match rng.randrange(5):
        case 0:
            y = y.at[inside].set(jnp.tanh(y[inside]))
        case 1:
            y = y.at[inside].add(0.5 * y[inside])
        case 2:
            y = y.at[0].set(0.25)
        case 3:
            y = y.at[-1].set(y[-2])
        case _:
            y = y.at[2].add(y[0])
    return jnp.moveaxis(y, 0, axis)


def _joined(rng: random.Random, x: Any, axis: int) -> Any:
    k = rng.randrange(1, max(x.shape[axis], 2))
    one, other = jnp.split(x, [k], axis)
    return jnp.concatenate([other, one * one][:: rng.choice((1, -1))], axis)


OFTEN: tuple[Step, ...] = (_sliced, _rolled, _padded, _updated)
STEPS: tuple[Step, ...] = (*OFTEN, *OFTEN, _strided, _cut_and_padded, _differences, _shifted, _joined)


def _met(rng: random.Random, x: Any, y: Any) -> Any:
    """Two values of one rank, cut to the extents that both have."""
    shape = tuple(min(n, m) for n, m in zip(x.shape, y.shape, strict=True))
    return rng.choice((jnp.add, jnp.subtract, jnp.multiply, jnp.maximum))(*(jax.lax.slice(z, [0] * z.ndim, shape) for z in (x, y)))


def _program(seed: int, x: Any, y: Any) -> Any:
    rng = random.Random(seed)
    values = [x, y]
    for _ in range(rng.randrange(2, 6)):
        value = rng.choice(values[-3:])
        axis = 0 if rng.random() < 0.75 else rng.randrange(value.ndim)
        made = rng.choice(STEPS)(rng, value, axis)
        if rng.random() < 0.4:
            made = jnp.sin(made)
        if made.size and rng.random() < 0.5:
            made = _met(rng, made, rng.choice(values))
        if made.size:
            values.append(made)
    last = values[-1]
    match rng.randrange(4):
        case 0:
            return jnp.sum(last * last), last
        case 1:
            return jnp.max(last, 0), jnp.sum(last)
        case 2:
            return jnp.cumsum(last, 0) if last.ndim == 1 else last @ jnp.swapaxes(last, 0, 1)
    return last


def stencil(seed: int) -> Case:
    """The random program of a seed, with arguments; every third is a gradient."""
    rng = random.Random(seed)
    rows = rng.choice((16, 24, 32, 48, 13, 50))
    shape = (rows, rng.choice((2, 3, 8))) if rng.random() < 0.7 else (rows,)
    values = np.random.default_rng(seed)
    args = [values.standard_normal(shape), values.standard_normal(shape)]

    def loss(x: Any, y: Any) -> Any:
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(_program(seed, x, y)))

    function = jax.grad(loss, (0, 1)) if seed % 3 == 0 else lambda x, y: _program(seed, x, y)
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*args)
    return Case(jaxpr, args, stepwise.run(jaxpr, args), ["x", "y"])


def square(seed: int) -> Case:
    """A random program of the seed that reads square arrays alike along both of their axes; every third is a gradient."""
    rows = random.Random(seed).choice((16, 24, 32))

    def program(x: Any) -> Any:
        rng = random.Random(seed)
        for _ in range(rng.randrange(1, 3)):
            step, state = rng.choice((_rolled, _rolled, _shifted, _padded, _updated, _differences)), rng.getstate()
            along = []
            for axis in (0, 1):
                rng.setstate(state)
                along.append(step(rng, x, axis))
            x = _met(rng, *along)
        return x

    args = [np.random.default_rng(seed).standard_normal((rows, rows))]
    function = jax.grad(lambda x: jnp.sum(jnp.sin(program(x)))) if seed % 3 == 0 else program
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*args)
    return Case(jaxpr, args, stepwise.run(jaxpr, args), ["x"])


def failure(seed: int, devices: bool, drawn: Callable[[int], Case] = stencil) -> str | None:
    """The error of some plan of the program of a seed on a random mesh, or None; with ``devices`` plans run on them, else as lanes."""
    axes, rng, known = MESHES[seed // 3 % len(MESHES)], random.Random(seed), drawn(seed)
    placement = random_placement(known, axes, rng, 0.0)
    lying = f"{placement.arguments} -> {placement.results}"
    for word, made in plans(known, placement, seed):
        try:
            (check_on_devices if devices else check_plan)(known, made, placement)
        except Exception as error:
            return f"seed {seed}, {word}, on {axes}: {lying}\n{type(error).__name__}: {error}\n{known.jaxpr}"
    return None


def slid(seed: int) -> Case:
    """A random chain of convolutions and pooling along an axis, or two, of the seed; every other one is a gradient."""
    rng = random.Random(seed)
    rows, channels = rng.choice((16, 32, 48, 64)), rng.choice((1, 2, 3))
    kernels = [rng.choice((1, 2, 3, 5)) for _ in range(rng.randrange(1, 4))]
    steps = [(rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3)), rng.choice(("SAME", "SAME", "causal", "VALID"))) for _ in kernels]
    pools = rng.random() < 0.4
    skips = rng.random() < 0.4

    def chain(x: Any, *weights: Any) -> Any:
        for w, (stride, dilation, padding) in zip(weights, steps, strict=True):
            reach = (w.shape[0] - 1) * dilation
            pad = [(reach, 0)] if padding == "causal" else padding
            y = jnp.tanh(jax.lax.conv_general_dilated(x, w, (stride,), pad, None, (dilation,), ("NTC", "TIO", "NTC")))
            x = x + y if skips and x.shape == y.shape else y
        if pools and x.shape[1] > 2:
            kind, start = rng.choice(((jax.lax.max, -jnp.inf), (jax.lax.add, 0.0)))
            x = jax.lax.reduce_window(x, np.dtype(x.dtype).type(start), kind, (1, 2, 1), (1, 2, 1), "VALID")
        return x

    values = np.random.default_rng(seed)
    args = [values.standard_normal((2, rows, channels)), *(values.standard_normal((k, channels, channels)) for k in kernels)]

    def loss(*args: Any) -> Any:
        return jnp.sum(jnp.sin(chain(*args)))

    function = jax.grad(loss, tuple(range(len(args)))) if seed % 2 else chain
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*args)
    return Case(jaxpr, args, stepwise.run(jaxpr, args), ["x", *(f"w{k}" for k in range(len(kernels)))])
