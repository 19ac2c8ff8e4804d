"""Programs of JAX, lowered and read again, compute the same bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import eqsat_mem
from eqsat_mem import StableHLOError, from_stablehlo
from tests.oracles.programs import sample
from tests.tiers import tiered

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 8), dtype=np.float32)
ROW = X[0]
I = np.array([1, 5, -1, 3], np.int32)  # noqa: E741
IMAGES = RNG.standard_normal((2, 9, 9, 3), dtype=np.float32)
KERNEL = RNG.standard_normal((3, 3, 3, 4), dtype=np.float32)
SQUARE = (X @ X.T + 10 * np.eye(6)).astype(np.float32)
GROUPED = KERNEL[:, :, :1, :3]


def conv(x, k, **options):
    return lax.conv_general_dilated(x, k, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def both(a, b):
    return a[0] + b[0], jnp.maximum(a[1], b[1])


PROGRAMS = {
    "elementwise": (lambda x: [f(x) for f in (jnp.exp, jnp.tanh, jnp.floor, lax.logistic, jnp.sign, jnp.isfinite, jnp.cbrt, jnp.tan)], X),
    "chlo": (lambda x: [f(x / 9) for f in (lax.erf, lax.erfc, lax.lgamma, lax.digamma, jnp.sinh, jnp.arccos, lax.bessel_i1e,
        lax.erf_inv)], X),
    "binary": (lambda x: (x**2.5, jnp.arctan2(x, 2 - x), x % 0.7, jnp.nextafter(x, 0.0), jnp.hypot(x, 1)), abs(X)),
    "integers": (lambda i: (i // 2, i % 3, i << 2, i >> 1, lax.shift_right_logical(i, 1), lax.population_count(i), ~i, lax.clz(i)), I),
    "booleans": (lambda x: (jnp.any(x > 0, 0), jnp.all(x > -1, 1), (x > 0) ^ (x < 1), lax.reduce_xor(x > 0, (0,))), X),
    "complex": (lambda x: (jnp.fft.fft(x), jnp.abs(x + 1j), jnp.conj(x * 1j).imag, jnp.asarray([1 + 2j, 3]) * x[0, 0]), X),
    "narrow": (lambda x: (x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16), jnp.asarray([1.5, np.nan], jnp.bfloat16),
        x.astype(jnp.int4)), X),
    "float8": (lambda x: (x.astype(jnp.float8_e4m3fn).astype(jnp.float32), lax.reduce_precision(x, 5, 3)), X),
    "bits": (lambda x: (lax.bitcast_convert_type(x, jnp.int32), lax.bitcast_convert_type(x, jnp.uint8)), X),
    "layout": (lambda x: (x.T, x.reshape(4, 12), x[::-1], jnp.pad(x, ((1, 2), (0, 3))), x[1:5:2], jnp.stack([x, x]), lax.pad(x,
        0.0, [(-1, 2, 1), (0, 0, 0)])), X),
    "constants": (lambda x: (jnp.arange(20), jnp.eye(7), x + np.arange(8), np.arange(4000.0, dtype=np.float32) * x[0, 0]), X),
    "reductions": (lambda x: (x.sum(), x.prod(0), x.max(1), x.min((0, 1)), jnp.mean(x, 1), jnp.var(x)), X),
    "positions": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argmax(x), jnp.argmin(x.astype(jnp.int32), 1)), X),
    "own reduction": (lambda x: lax.reduce((x, x), (0.0, -np.inf), both, (1,)), X),
    "cumulative": (lambda x: (jnp.cumsum(x, 0), jnp.cumprod(x, 1), lax.cummax(x, 1, reverse=True), lax.cummin(x),
        lax.cumlogsumexp(x)), X),
    "windows": (lambda x: (pool(x), lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 1, 1), "SAME")), IMAGES),
    "gradient of pooling": (jax.grad(lambda x: jnp.sum(pool(x) ** 2)), IMAGES),
    "sorts": (lambda x: (jnp.sort(x, 0), jnp.argsort(x), lax.sort((x, -x), num_keys=2), lax.sort((x, x), num_keys=1), lax.top_k(x,
        3)), X),
    "sorts of integers": (lambda i: (jnp.sort(i), jnp.argsort(i), jnp.unique(i, size=3)), I),
    "products": (lambda x: (x @ x.T, jnp.einsum("ij,ik->jk", x, x), jnp.einsum("ij,ij->i", x, x), jnp.dot(x, x.T,
        precision="highest")), X),
    "wide product": (lambda x: jnp.dot(x.astype(jnp.int8), x.T.astype(jnp.int8), preferred_element_type=jnp.int32), X),
    "convolution": (lambda x, k: conv(x, k, window_strides=(2, 1), padding="SAME", rhs_dilation=(1, 2)), IMAGES, KERNEL),
    "grouped convolution": (lambda x, k: conv(x, k, window_strides=(1, 1), padding="VALID", feature_group_count=3), IMAGES, GROUPED),
    "gradient of a convolution": (jax.grad(lambda k, x: jnp.sum(conv(x, k, window_strides=(2, 2), padding="SAME") ** 2)), KERNEL, IMAGES),
    "gathers": (lambda x, i: (x[i], x[:, i], x[i, i], jnp.take_along_axis(x, jnp.argsort(x), 1), x.at[i].get(mode="fill"), x[i % 6,
        2:]), X, I),
    "batched gather": (lambda x, i: jax.vmap(lambda r, k: r[k])(x[:4], i % 8), X, I),
    "scatters": (lambda x, i: (x.at[i].set(1), x.at[i].add(2.0), x.at[i, i].max(0), x.at[i].mul(3), x.at[i].min(0, mode="drop")), X, I),
    "batched scatter": (lambda x, i: jax.vmap(lambda r, k: r.at[k].add(1))(x[:4], i % 8), X, I),
    "segments": (lambda x, i: jax.ops.segment_sum(x[:4], i % 3, 3), X, I),
    "dynamic slices": (lambda x, i: (lax.dynamic_slice(x, (i[0], i[2]), (3, 2)), lax.dynamic_update_slice(x, x[:2] * 2, (i[1],
        i[2]))), X, I),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X),
    "switch": (lambda x, i: [lax.switch(k, [jnp.sin, jnp.cos, jnp.tanh], x) for k in i], X, I),
    "while": (lambda x: lax.while_loop(lambda c: jnp.sum(c[0]) > 1.3, lambda c: (c[0] / 2, c[1] + 1), (jnp.abs(x), 0)), X),
    "nested loops": (lambda x: lax.fori_loop(0, 3, lambda i, c: lax.while_loop(lambda d: d.sum() > i, lambda d: d / 2, c + i),
        abs(x)), X),
    "scan": (lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), (jnp.sum(c), r)), x[0], x), X),
    "reverse scan": (lambda x: lax.scan(lambda c, r: (c * r, c), x[0], x, reverse=True), X),
    "scan of scans": (lambda x: lax.scan(lambda c, r: (c, lax.scan(lambda d, s: (d + s, d * s), c, r)), 1.0, x), X),
    "gradient of a scan": (jax.value_and_grad(lambda x: jnp.sum(lax.scan(lambda c, r: (jnp.tanh(c + r), c), x[0], x)[1])), X),
    "counted": (lambda x: lax.fori_loop(2, 5, lambda i, c: c.at[i].set(c[i - 1] * 2 + i), x), X),
    "counters that wrap": (lambda x: lax.fori_loop(np.int8(0), np.int8(100), lambda i, c: (c[0] + np.uint32(0x9E3779B9), c[1] + np.int8(3),
        c[2] * 1.01), (np.uint32(7), np.int8(7), x)), X),
    "map": (lambda x: lax.map(lambda r: jnp.sort(r)[:3], x, batch_size=4), X),
    "associative scan": (lambda x: lax.associative_scan(jnp.multiply, x), X),
    "random": (lambda s: [f(jax.random.key(s), (5,)) for f in (jax.random.normal, jax.random.uniform, jax.random.gumbel,
        jax.random.bits)], 3),
    "hardware random": (lambda s: lax.rng_bit_generator(jnp.asarray([s, 1, 2, 3], jnp.uint32), (4,),
        algorithm=lax.RandomAlgorithm.RNG_PHILOX), np.uint32(3)),
    "checkpoint": (jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda y: jnp.sin(jnp.cos(y)))(x))), X),
    "attention": (lambda x: jax.nn.softmax(jnp.where(jnp.tri(6) > 0, x @ x.T, -jnp.inf)) @ x, X),
    "solve": (lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True, trans=1), SQUARE, X),
    "batched solve": (lambda a, b: lax.linalg.triangular_solve(jnp.stack([a, a]), jnp.stack([b, b]).mT, lower=True,
        transpose_a=True), SQUARE, X),
}  # fmt: skip
QUICK = ["elementwise", "constants", "positions", "cumulative", "gathers", "scatters", "cond", "while", "scan", "attention", "random"]


def values(f, *args):
    return jax.tree.leaves(jax.jit(f)(*args))


def same(got, want):
    got, want = list(map(np.asarray, got)), list(map(np.asarray, want))
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in want]
    for x, y in zip(got, want, strict=True):
        exact = x.dtype.kind in "biufc"  # NumPy compares no NaNs of other dtypes
        np.testing.assert_array_equal(x if exact else x.astype(np.float32), y if exact else y.astype(np.float32))


@pytest.mark.filterwarnings("ignore")  # casts that lose something, as they are meant to
@pytest.mark.parametrize("name", tiered(PROGRAMS, QUICK))
def test_programs_read_again_have_the_same_values(name):
    f, *args = PROGRAMS[name]
    read = from_stablehlo(jax.jit(f).lower(*args).as_text())
    assert read.kept == ()
    same(values(read, *args), values(f, *args))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("block", range(6))
def test_random_programs_read_again_have_the_same_values(block):
    with jax.enable_x64(True):
        for seed in range(5 * block, 5 * (block + 1)):
            drawn = sample(seed)
            f, args = drawn.function(), drawn.values()
            try:
                want = values(f, *args)
            except (NotImplementedError, TypeError):
                continue  # a dtype that JAX traces and does not run
            read = from_stablehlo(jax.jit(f, keep_unused=True).lower(*args).as_text())
            assert all(kept.startswith("stablehlo.custom_call lapack_") for kept in read.kept), drawn.source
            again = from_stablehlo(jax.jit(read, keep_unused=True).lower(*args).as_text())
            same(values(again, *args), want)


# --- what comes back as JAX wrote it -----------------------------------------------------------------


def names(f, *args):
    """The primitives of a function that was lowered and read again."""
    return {eqn.primitive.name for eqn in from_stablehlo(jax.jit(f).lower(*args).as_text()).jaxpr.eqns}


def test_loops_that_count_are_scans_with_slices_and_results_stacked():
    def f(x):
        return lax.scan(lambda c, r: (c + r, jnp.sum(c * r)), x[0], x, reverse=True)

    (scan,) = (e for e in from_stablehlo(jax.jit(f).lower(X).as_text()).jaxpr.eqns if e.primitive.name == "scan")
    assert (scan.params["length"], scan.params["reverse"]) == (6, True)
    assert [v.aval.shape for v in scan.invars] == [(8,), (6, 8)]
    assert [v.aval.shape for v in scan.outvars] == [(8,), (6,)]


def test_a_loop_that_writes_where_it_reads_keeps_its_array():
    def f(x):
        return lax.fori_loop(0, 6, lambda i, c: lax.dynamic_update_slice_in_dim(c, lax.dynamic_slice_in_dim(c, i, 1) + c[:1], i, 0), x)

    read = from_stablehlo(jax.jit(f).lower(X).as_text())
    same(values(read, X), values(f, X))


def test_a_loop_of_no_turns_leaves_its_values():
    def f(x):
        return lax.scan(lambda c, r: (c + r, c), jnp.ones(8), x[:0])

    same(values(from_stablehlo(jax.jit(f).lower(X).as_text()), X), values(f, X))


def test_gradients_go_through_what_was_read():
    def f(x):
        return jnp.sum(lax.scan(lambda c, r: (jnp.tanh(c + r), jnp.max(c)), x[0], x)[1])

    read = from_stablehlo(jax.jit(f).lower(X).as_text())
    np.testing.assert_allclose(jax.grad(read)(X), jax.grad(f)(X), rtol=1e-6)


def test_lowered_operations_are_found_again():
    assert "argmax" in names(lambda x: jnp.argmax(x, 1), X)
    assert "cumsum" in names(lambda x: jnp.cumsum(x, 1), X)
    assert "top_k" in names(lambda x: lax.top_k(x, 3), X)
    assert "cond" in names(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)


# --- where modules come from -------------------------------------------------------------------------


def kernel(params, x, *, scale):
    return {"out": jnp.exp(-scale * (x[:, None] - params["y"][None]) ** 2) @ params["w"][0]}


KERNEL_ARGS = ({"y": ROW, "w": [ROW]}, X[:, 0])


def called(f):
    return jax.tree.leaves(jax.jit(f)(*KERNEL_ARGS, scale=np.float32(0.5)))


def exported(**options):
    return export.export(jax.jit(kernel), **options)(*KERNEL_ARGS, scale=np.float32(0.5))


def test_an_export_keeps_its_pytrees_and_names():
    read = from_stablehlo(exported())
    assert read.__name__ == "kernel"
    assert str(read.__signature__) == "(params, x, /, *, scale)"
    same(called(read), called(kernel))
    assert set(jax.eval_shape(read, *KERNEL_ARGS, scale=np.float32(0.5))) == {"out"}
    assert jax.tree.map(lambda x: x.shape, read.args) == ({"y": (8,), "w": [(8,)]}, (6,))


def test_an_export_for_several_platforms_is_read_for_the_one_in_use():
    read = from_stablehlo(exported(platforms=["cuda", "cpu"]))
    assert read.platform == "cpu"
    assert len(read.jaxpr.in_avals) == 4
    same(called(read), called(kernel))


def test_arguments_that_an_export_does_not_use_are_taken():
    made = export.export(jax.jit(lambda x, unused, y: x * y))(X, I, X)
    read = from_stablehlo(made)
    assert len(jax.tree.leaves(read.args)) == 3
    same([read(X, I, X)], [X * X])


def test_random_keys_are_taken_and_returned():
    made = export.export(jax.jit(lambda keys: keys[::-1]))(jax.random.wrap_key_data(np.arange(6, dtype=np.uint32).reshape(3, 2)))
    keys = jax.random.wrap_key_data(np.arange(6, dtype=np.uint32).reshape(3, 2))
    read = from_stablehlo(made)
    assert read.args == (jax.ShapeDtypeStruct((3,), keys.dtype),)
    same([jax.random.key_data(read(keys))], [jax.random.key_data(keys)[::-1]])


def test_bytecode_and_files_are_read(tmp_path):
    made = export.export(jax.jit(lambda x: jnp.sum(x, 0)))(X)
    text = tmp_path / "model.mlir"
    text.write_text(made.mlir_module())
    for module in (made.mlir_module_serialized, made.mlir_module(), text):
        same([from_stablehlo(module)(X)], [jnp.sum(X, 0)])


def test_files_of_jax_export_are_read(tmp_path):
    pytest.importorskip("flatbuffers")
    path = tmp_path / "model.jax"
    path.write_bytes(exported().serialize())
    same(called(from_stablehlo(path)), called(kernel))


# --- 64 bits -----------------------------------------------------------------------------------------


WIDE_INSIDE = """
func.func @main(%x: tensor<100x100xui32>) -> tensor<100xui32> {
  %zero = stablehlo.constant dense<0> : tensor<ui64>
  %half = stablehlo.constant dense<32> : tensor<100xui64>
  %wide = stablehlo.convert %x : (tensor<100x100xui32>) -> tensor<100x100xui64>
  %sum = stablehlo.reduce(%wide init: %zero) applies stablehlo.add across dimensions = [1]
    : (tensor<100x100xui64>, tensor<ui64>) -> tensor<100xui64>
  %high = stablehlo.shift_right_logical %sum, %half : tensor<100xui64>
  %low = stablehlo.convert %high : (tensor<100xui64>) -> tensor<100xui32>
  return %low : tensor<100xui32>
}"""


def test_64_bits_inside_need_no_option():
    read = from_stablehlo(WIDE_INSIDE)
    assert read.is_wide
    assert not jax.config.jax_enable_x64
    x = np.full((100, 100), 2**32 - 1, np.uint32)
    for f in (read, jax.jit(read), eqsat_mem.optimize(read, memory_limit="64KiB"), eqsat_mem.optimize(read, memory_limit="1MiB")):
        same([f(x)], [np.full(100, 99, np.uint32)])


def test_64_bits_outside_need_the_option():
    with jax.enable_x64(True):
        text = jax.jit(lambda x: x * 2).lower(np.arange(3.0)).as_text()
        same([from_stablehlo(text)(np.arange(3.0))], [np.arange(3.0) * 2])
    with pytest.raises(
        TypeError, match=r"arg0 of shape \(3,\) and dtype float64, not \(3,\) and float32. JAX has 64 bits where jax_enable_x64 is on"
    ):
        from_stablehlo(text)(np.arange(3.0))


# --- lines -------------------------------------------------------------------------------------------


def test_errors_and_tables_name_the_lines_of_the_exported_program():
    made = export.export(jax.jit(kernel))(*KERNEL_ARGS, scale=np.float32(0.5))
    plan = eqsat_mem.optimize(from_stablehlo(made), memory_limit="1MiB").plan(*KERNEL_ARGS, scale=np.float32(0.5))
    lines = {source for _, _, source in plan.peak_tensors if source}
    assert lines
    assert all("test_read.py:" in line and "(kernel)" in line for line in lines)


def test_a_module_without_lines_has_its_own(tmp_path):
    path = tmp_path / "model.mlir"
    path.write_text(jax.jit(lambda x, y: jnp.exp(x[:, None] * y) @ y).lower(ROW, ROW).as_text())
    plan = eqsat_mem.optimize(from_stablehlo(path), memory_limit="1MiB").plan(ROW, ROW)
    assert {source.partition(":")[0] for _, _, source in plan.peak_tensors if source} == {"model.mlir"}


def test_a_path_may_be_text(tmp_path):
    file = tmp_path / "double.mlir"
    file.write_text(
        "func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {\n  %y = stablehlo.add %x, %x : tensor<3xf32>\n  return %y : tensor<3xf32>\n}"
    )
    assert from_stablehlo(str(file))(jnp.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(StableHLOError, match=r"none\.jax cannot be read: No such file or directory"):
        from_stablehlo("none.jax")


# --- what cannot be read -----------------------------------------------------------------------------


def one(line):
    """A module with a line."""
    return f"func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {{\n  {line}\n  return %x : tensor<3xf32>\n}}\n"


OTHER = "func.func private @f(%x: tensor<3xf32>) -> tensor<3xf32> { return %x : tensor<3xf32> }"
UNREADABLE = [
    ("func.func @main() { nothing }", "module is not a module of StableHLO: module:1:21"),
    ("module {}", "module has no function main, and 0 functions that could be meant"),
    ("func.func @a() { return }\nfunc.func @b() { return }", "module has no function main, and 2 functions"),
    ("func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> { return %x : tensor<?xf32> }",
     "module cannot be read: its function takes or returns a value of type tensor<.*>, whose shape is not made of numbers: export"),
    ("module attributes {mhlo.num_partitions = 8 : i32} { func.func @main() { return } }",
     "module is for several devices: export the function for one"),
    (one("%t = stablehlo.create_token : !stablehlo.token"),
     r"stablehlo.create_token at module:2 \(main\) cannot be read: a value of type !stablehlo.token, which is no array"),
    (one("%y = stablehlo.custom_call @shout(%x) {has_side_effect = true} : (tensor<3xf32>) -> tensor<3xf32>"),
     r"stablehlo.custom_call shout at module:2 \(main\) cannot be read: it has a side effect, which a plan cannot keep in its place"),
    (one("%y = stablehlo.custom_call @run(%x) {called_computations = [@f]} : (tensor<3xf32>) -> tensor<3xf32>") + OTHER,
     r"stablehlo.custom_call run at module:2 \(main\) cannot be read: it calls a function of the module"),
    (b"\x00\x01\x02", "module is neither StableHLO, as text or bytecode, nor a file of jax.export|files of jax.export need the package"),
    (b"ML\xefR broken", "module is not a module of StableHLO"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), UNREADABLE)
def test_what_cannot_be_read_is_told_with_its_place(text, message):
    with pytest.raises(StableHLOError, match=message):
        from_stablehlo(text)


def test_a_file_that_is_missing_is_told(tmp_path):
    with pytest.raises(StableHLOError, match=r"model\.mlir cannot be read: No such file"):
        from_stablehlo(tmp_path / "model.mlir")


def test_arguments_of_another_shape_or_structure_are_told():
    read = from_stablehlo(exported())
    with pytest.raises(TypeError, match=r"kernel takes x of shape \(6,\) and dtype float32, not \(3,\) and float32"):
        read(KERNEL_ARGS[0], ROW[:3], scale=np.float32(0.5))
    with pytest.raises(TypeError, match="kernel takes arguments of the structure"):
        read((ROW, ROW), X[:, 0], scale=np.float32(0.5))
