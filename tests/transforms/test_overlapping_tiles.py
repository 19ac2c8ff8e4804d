"""Networks of convolutions in tiles that overlap: the same numbers, whatever lies beside a tile, and a plan where nothing else fits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Block, Program, check
from eqsat_mem.passes import TILES
from eqsat_mem.transforms.overlapping_tiles import OVERLAPS, with_tiles
from eqsat_mem.transforms.tile_families import families
from tests.oracles.evaluation import results, values
from tests.tiers import tiered

NHWC = ("NHWC", "HWIO", "NHWC")


def whole(rng, *shape, most=2):
    """Whole numbers, sums of whose products are exact."""
    return rng.integers(-most, most + 1, shape).astype(np.float64)


def conv(x, w, strides=(1, 1), padding="SAME", **keywords):
    return lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=NHWC, **keywords)


def pooled(x, start, combine, size, stride, padding):
    return lax.reduce_window(x, start, combine, (1, size, size, 1), (1, stride, stride, 1), padding)


def plain(rng, c):
    k = int(rng.integers(1, 6))
    return lambda x, w: conv(x, w), whole(rng, k, int(rng.integers(1, 4)), c, c, most=1)


def strided(rng, c):
    dilation = int(rng.integers(1, 3))
    return lambda x, w: conv(x, w, (2, 1), rhs_dilation=(dilation, 1)), whole(rng, 3, 3, c, c, most=1)


def uneven(rng, c):
    low, high = (int(n) for n in rng.integers(0, 4, 2))
    return lambda x, w: conv(x, w, padding=((low, high), (1, 1))), whole(rng, 3, 3, c, c, most=1)


def transposed(rng, c):
    return lambda x, w: conv(x, w, padding=((2, 1), (1, 1)), lhs_dilation=(2, 1)), whole(rng, 3, 3, c, c, most=1)


def by_feature(rng, c):
    return lambda x, w: conv(x, w, feature_group_count=c), whole(rng, 3, 3, 1, c, most=1)


def residual(rng, c):
    return lambda x, w: x + conv(jax.nn.relu(conv(x, w)), w), whole(rng, 3, 1, c, c, most=1)


def most_of_two(rng, c):
    return lambda x, w: pooled(x + w, -np.inf, lax.max, 2, 2, "VALID"), whole(rng, c)


def most_of_three(rng, c):
    return lambda x, w: pooled(x * w, -np.inf, lax.max, 3, 2, "SAME"), whole(rng, c)


def sums_of_two(rng, c):
    return lambda x, w: pooled(x * w, 0.0, lax.add, 2, 2, "VALID"), whole(rng, c)


def repeated(rng, c):
    return lambda x, w: conv(jnp.repeat(x, 2, 1), w), whole(rng, 3, 3, c, c, most=1)


def side_by_side(rng, c):
    return lambda x, w: conv(jnp.concatenate([x, jax.nn.relu(-x)], -1), w), whole(rng, 3, 3, 2 * c, c, most=1)


def cut_and_padded(rng, c):
    low = int(rng.integers(0, 3))
    return lambda x, w: jnp.pad(x[:, low:], ((0, 0), (1, 3), (0, 0), (0, 0)), constant_values=2.0) * w, whole(rng, c)


def every_other(rng, c):
    return lambda x, w: conv(x[:, 1::2], w), whole(rng, 3, 3, c, c, most=1)


def gated(rng, c):
    def halves(x, w):
        a, b = jnp.split(conv(x, w), 2, -1)
        return jnp.where(b > 0, a, -x)

    return halves, whole(rng, 3, 3, c, 2 * c, most=1)


def centred(rng, c):
    return lambda x, w: x - jnp.max(conv(x, w), (1, 2), keepdims=True), whole(rng, 3, 3, c, c, most=1)


def along_rows(rng, c):
    return lambda x, w: jnp.sort(conv(x, w), 1), whole(rng, 3, 1, c, c, most=1)


def by_position(rng, c):
    return lambda x, w: conv(x, w) * (jnp.arange(x.shape[1]) % 3)[:, None, None], whole(rng, 3, 3, c, c, most=1)


def divided(rng, c):
    """What lies outside is no number: nothing there is more than nothing."""
    ones = np.ones((3, 3, c, c))
    return lambda x, w: x + jnp.floor(x * w / conv(jnp.abs(x) + 1, ones)), whole(rng, c)


LAYERS = [
    plain, strided, uneven, transposed, by_feature, residual, most_of_two, most_of_three, sums_of_two, repeated, side_by_side,
    cut_and_padded, every_other, gated, centred, along_rows, by_position, divided,
]  # fmt: skip


def network(layers, seed, rows=96, columns=4, batch=1, channels=2):
    """A loss of layers with its gradient, their result and the products of its features, and arguments."""
    rng = np.random.default_rng(seed)
    made = [layer(rng, channels) for layer in layers]

    def value(weights, x):
        for (layer, _), w in zip(made, weights):
            x = jax.nn.relu(layer(x, w)) - 1.0
        return x

    def loss(weights, x):
        y = value(weights, x)
        return jnp.sum(y * (1.0 + jnp.arange(y.shape[2])[:, None] % 2)), (y, jnp.einsum("bhwc,bhwd->cd", y, y))

    return jax.value_and_grad(loss, has_aux=True), ([w for _, w in made], whole(rng, batch, rows, columns, channels))


def loaded(fun, args) -> tuple[Program, list]:
    leaves, tree = jax.tree.flatten(args)
    closed = jax.make_jaxpr(lambda *leaves: fun(*jax.tree.unflatten(tree, leaves)))(*leaves)
    return load(closed, [f"x{k}" for k in range(len(leaves))]), leaves


def are_the_same(fun, args) -> list[Program]:
    """The program in tiles, each of which returns what the function does, to the last bit."""
    with jax.enable_x64(True):
        program, leaves = loaded(fun, args)
        forms = list(with_tiles(program))
        want = results(fun, *args)
        for form in forms:
            check(form)
            assert TILES.name in form.passes
        for got in values(leaves, *forms):
            for mine, theirs in zip(got, want, strict=True):
                np.testing.assert_array_equal(mine, theirs)
    return forms


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_a_layer_in_tiles_is_the_layer(layer):
    """After another one, so that windows lie in windows, and before one."""
    fun, args = network([plain, layer, plain], seed=3)
    assert are_the_same(fun, args)


@pytest.mark.parametrize("layer", tiered(LAYERS, [plain, strided, most_of_two, gated]), ids=lambda layer: layer.__name__)
def test_images_of_a_batch_in_tiles(layer):
    fun, args = network([plain, layer, plain], seed=4, batch=3, rows=66)
    assert are_the_same(fun, args)


@pytest.mark.parametrize("seed", tiered(range(60), range(12), range(12, 30)))
def test_random_networks_in_tiles(seed):
    rng = np.random.default_rng(seed)
    layers = [LAYERS[k] for k in rng.integers(0, len(LAYERS), rng.integers(2, 5))]
    fun, args = network(layers, seed, rows=int(rng.integers(150, 260)), columns=3, batch=int(rng.integers(1, 3)))
    assert are_the_same(fun, args)


def unet(weights, x):
    """Two levels, pooled and repeated, with a skip connection."""
    a, b, c, d = weights
    top = jax.nn.relu(conv(x, a))
    low = jax.nn.relu(conv(pooled(top, -jnp.inf, lax.max, 2, 2, "VALID"), b))
    up = jnp.repeat(jnp.repeat(low, 2, 1), 2, 2)
    return conv(jax.nn.relu(conv(jnp.concatenate([up, top], -1), c)), d)


def filters(channels=8):
    rng = np.random.default_rng(5)
    sizes = [(3, channels), (channels, 2 * channels), (3 * channels, channels), (channels, 1)]
    return [(rng.standard_normal((3, 3, *size)) / np.sqrt(9 * size[0])).astype(np.float32) for size in sizes]


def image(rows, columns=64):
    return np.random.default_rng(6).standard_normal((1, rows, columns, 3)).astype(np.float32)


def error(weights, x):
    return jnp.mean(unet(weights, x) ** 2)


def test_indices_of_all_resolutions_are_one_family():
    program, _ = loaded(unet, (filters(), image(128, 32)))
    rows, columns = families(program)
    assert sorted({program.indices[i].extent for i in rows.rates}) == [64, 128]
    assert {program.indices[i].extent * 128 // program.indices[rows.base].extent for i in rows.rates if rows.rates[i] == 1} == {128}
    assert sorted({program.indices[i].extent for i in columns.rates}) == [16, 32]
    assert rows.unit == columns.unit == 2


@pytest.mark.parametrize("fun", [unet, jax.value_and_grad(error)], ids=["value", "gradient"])
def test_one_image_fits_where_nothing_else_does(fun):
    args = filters(), image(512)
    held = jax.jit(fun).lower(*args).compile().memory_analysis()
    limit = held.argument_size_in_bytes + held.output_size_in_bytes + held.temp_size_in_bytes // 4
    planned = eqsat_mem.optimize(fun, memory_limit=limit)
    plan = planned.plan(*args)
    assert plan.held_bytes <= limit
    assert TILES.name in plan.rules_fired
    for mine, theirs in zip(jax.tree.leaves(planned(*args)), jax.tree.leaves(fun(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(theirs))))
    with pytest.raises(eqsat_mem.MemoryLimitError):
        eqsat_mem.optimize(fun, memory_limit=limit, without_rules=[TILES.name]).plan(*args)


@pytest.mark.parametrize("rows", [200, 199, 193])
def test_rows_that_no_window_reads_may_be_no_numbers(rows):
    """Negative padding cuts them away: the gradient of the kernel has nothing of them, and nothing times what is no number is none."""

    def loss(w, x):
        return jnp.sum(conv(jax.nn.relu(conv(x, w, (1, 1), ((1, -40), (0, 0)))), w))

    rng = np.random.default_rng(0)
    x = whole(rng, 1, rows, 4, 2)
    x[:, -35:] = np.inf
    assert are_the_same(jax.grad(loss), (whole(rng, 3, 1, 2, 2), x))


def test_tiles_are_batches_of_convolutions():
    program, _ = loaded(unet, (filters(), image(256)))
    for form in with_tiles(program):
        blocks = [form.terms[t] for t in form.reachable() if isinstance(form.terms[t], Block)]
        convolutions = [block.call for block in blocks if block.call.prim.name == "conv_general_dilated"]
        assert len(convolutions) == 4
        for call in convolutions:
            tile = call.out_axes[0][0]
            assert form.indices[tile[0]].name.startswith("tile")
            assert call.pointwise >> tile[0] & 1


def products(x):
    return jnp.tanh(x) @ x.T


def differences(x):
    return x[1:] - x[:-1]


def single(x):
    return lax.reduce_window(jnp.exp(x), 0.0, lax.add, (1, 1), (2, 1), "VALID")


@pytest.mark.parametrize("fun", [products, jnp.fft.fft, differences, single])
def test_what_has_no_wide_windows_stays(fun):
    program, _ = loaded(fun, (np.ones((64, 64), np.float32),))
    assert list(with_tiles(program)) == []


def test_windows_that_reach_all_rows_stay():
    fun, args = network([lambda rng, c: (lambda x, w: conv(x, w), whole(rng, 61, 1, c, c))] * 2, seed=0, rows=64)
    program, _ = loaded(fun, args)
    assert list(with_tiles(program)) == []


def test_tiles_across_the_windows_of_a_gradient_of_maxima():
    """Rows are too few, and columns are cut, of which windows of rows know nothing."""
    rng = np.random.default_rng(8)

    def loss(w, x):
        return jnp.sum(lax.reduce_window(conv(x, w), -np.inf, lax.max, (1, 3, 1, 1), (1, 3, 1, 1), "VALID") ** 2)

    assert are_the_same(jax.grad(loss), (whole(rng, 3, 3, 2, 2), whole(rng, 1, 3, 96, 2)))


def test_rows_at_places_of_the_same_rows_are_read_of_the_whole():
    """The result has rows, and so have the places, and each may read any row."""
    rng = np.random.default_rng(9)

    def permuted(x, w):
        y = conv(x, w)
        return conv(jnp.take_along_axis(y, jnp.abs(y).astype(int) % y.shape[1], 1), w)

    assert are_the_same(permuted, (whole(rng, 1, 96, 4, 2), whole(rng, 3, 3, 2, 2)))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_gradients_of_kernels_in_groups_are_sums_over_tiles(groups):
    """Of a kernel in groups, and of one whose result is the same in all rows."""
    rng = np.random.default_rng(11)
    kernels = whole(rng, 3, 3, 4 // groups, 4), whole(rng, 1, 1, 4, 2)

    def loss(kernels, x):
        grouped, narrow = kernels
        y = conv(jax.nn.relu(conv(x, grouped, feature_group_count=groups)), narrow)
        return jnp.sum(jnp.sum(y, (1, 2)) ** 2)

    assert are_the_same(jax.grad(loss), (kernels, whole(rng, 2, 96, 4, 4)))


def test_another_image_is_in_tiles_where_the_largest_cannot_be():
    """Sums of windows along all axes have no batch that tiles could be a part of."""
    rng = np.random.default_rng(7)
    args = whole(rng, 2, 96, 8, 4), whole(rng, 1, 96, 4, 2), whole(rng, 3, 3, 2, 2)

    def first(x):
        return lax.reduce_window(x, 0.0, lax.add, (2, 3, 3, 3), (1, 1, 1, 1), "SAME")

    def both(x, y, v):
        return first(x), conv(jax.nn.relu(conv(y, v)), v)

    alone, _ = loaded(first, args[:1])
    assert families(alone)
    assert list(with_tiles(alone)) == []
    forms = are_the_same(both, args)
    assert forms
    for form in forms:
        (tile,) = (i for i, index in enumerate(form.indices) if index.name.startswith("tile"))
        calls = [form.terms[t].call for t in form.reachable() if isinstance(form.terms[t], Block)]
        assert sum(call.prim.name == "conv_general_dilated" and call.pointwise >> tile & 1 for call in calls) == 2


def test_without_the_pass_there_are_none():
    program, _ = loaded(unet, (filters(), image(128)))
    assert len(list(with_tiles(program))) == len(OVERLAPS)
    assert list(with_tiles(program, ())) == []
