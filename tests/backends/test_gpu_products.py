"""Products on a GPU that no library needs to compute, and those that none may."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqsat_mem
from eqsat_mem import verification
from eqsat_mem.backends.cpu.backend import CpuBackend
from eqsat_mem.backends.gpu import deviceless
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.products import Products
from eqsat_mem.egraph.extract import original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Dot, Fold
from eqsat_mem.schedule.search import straight
from tests.backends.test_gpu_deviceless import H100, compiler, f32

OWN = GpuBackend.of(H100)


def planned(function, limit, *avals, verify=False, **options):
    return eqsat_mem.optimize(function, memory_limit=limit, device="h100", verify=verify, **options).plan(*avals)


def test_products_of_few_results_are_sums_where_there_is_no_room_for_a_library():
    plan = planned(lambda a, b, c: (a @ b) @ c, "2MiB", f32(20_000, 2), f32(2, 20_000), f32(20_000, 2))
    assert "dot-of-few-results" in plan.rules_fired
    assert not plan.loops
    assert not [term for term in plan.program.terms if isinstance(term, Dot)]
    assert any(isinstance(term, Fold) for term in plan.program.terms)
    assert "dot-of-few-results" in CpuBackend.needless_rules


def squared(a):
    return jnp.tanh(a @ a).sum(1)


@compiler
def test_products_are_by_triton_alone_where_a_library_does_not_fit():
    """With the scratch that it has on the card, and then without it."""
    fixed = 4 * 1024**2
    for spare, products in ((72, Products.TUNED), (9, Products.BY_TRITON), (5, Products.COUNTED_BY_TRITON)):
        limit = fixed + spare * 2**20
        plan = eqsat_mem.optimize(squared, memory_limit=limit, device="h100", accuracy="bitwise").plan(f32(1024, 1024))
        assert plan.schedule.backend.products is products
        assert plan.compiler_options == ({} if plan.unchanged else products.options)
        assert plan.peak_bytes <= limit
        settings = deviceless.compile_for(plan.function, [f32(1024, 1024)], H100).settings
        assert [c.held_bytes <= limit for c in settings] == [True, products is not Products.COUNTED_BY_TRITON]
        assert plan.compiled_peak_bytes <= limit


@compiler
def test_products_are_by_triton_alone_where_what_fits_otherwise_would_take_for_ever():
    def information(x, w, u):  # of each parameter with each other, summed over examples
        hidden = jnp.tanh(x @ w)
        slopes = jnp.concatenate([(x[:, :, None] * (u * (1 - hidden**2))[:, None]).reshape(len(x), -1), hidden], 1)
        return slopes.T @ slopes

    limit = 5 * 2**20
    avals = f32(3000, 20), f32(20, 30), f32(30)
    plan = eqsat_mem.optimize(information, memory_limit=limit, device="h100").plan(*avals)
    assert plan.predicted_s < verification.HOPELESS * plan.original_predicted_s
    assert plan.compiler_options == Products.COUNTED_BY_TRITON.options
    assert plan.compiled_peak_bytes <= limit


def attention(q, k, v):
    return jax.nn.softmax(q @ k.T / 8.0, -1) @ v


def both_ways(a, b):
    """Two products of what is computed on the way, each in another order of axes."""
    c = jnp.tanh(a) * b
    return c @ c.T, jnp.exp(-c).T @ jnp.sin(c)


def of_heads(a, b):
    """Operands that are computed, and then read in another shape."""
    return jnp.tanh(a).reshape(64, 16, 1024).transpose(1, 0, 2) @ jnp.sin(b).reshape(16, 1024, 96)


bf16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
OF_PRODUCTS = {
    of_heads: [f32(1024, 1024), f32(16384, 96)],
    lambda a, b: (a @ b, jnp.exp(a @ b)): [bf16((1001, 803)), bf16((803, 901))],
    squared: [f32(1024, 1024)],
    attention: [f32(2048, 64)] * 3,
    both_ways: [f32(1500, 700)] * 2,
    lambda q, k, v: jax.grad(lambda *args: jnp.sum(attention(*args) ** 2), (0, 1, 2))(q, k, v): [f32(2048, 64)] * 3,
}


@compiler
@pytest.mark.parametrize("function", OF_PRODUCTS)
def test_products_by_a_library_hold_no_more_than_those_by_triton_and_all_that_these_compute_inside(function):
    triton, cublas = deviceless.compile_for(function, OF_PRODUCTS[function], H100).settings
    more = Products.TUNED.more_by_library(triton.text, H100)
    assert cublas.held_bytes + Products.TUNED.difference(cublas.text, H100, cublas.temporaries) <= triton.held_bytes + more < math.inf


def test_products_of_a_text_that_cannot_be_read_may_hold_anything():
    assert Products.TUNED.more_by_library("HloModule m\n\nENTRY e {\n  no instruction\n}\n", H100) == math.inf


def test_room_is_used_where_that_saves_turns():
    def product(x, y, v):
        return jnp.exp(-0.5 * distances(x, y)) @ v

    (loop,) = planned(product, 100_000_000, f32(10**6, 1), f32(10**6, 1), f32(10**6, 1), tiles=False).loops
    assert loop.turns <= 200


@compiler
def test_products_are_by_triton_at_once_where_that_promises_more_speed(monkeypatch):
    """The scratch of a library would take half of the room: nothing is compiled with it that is not faster then."""

    def loss(q, k, v, t):
        s = jnp.where(jnp.tril(jnp.ones((512, 512), bool)), jnp.einsum("bihd,bjhd->bhij", q, k), -1e9)
        return ((jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v) - t) ** 2).mean()

    asked = []
    check = GpuBackend.check
    monkeypatch.setattr(GpuBackend, "check", lambda self, *args, **kwargs: asked.append(self.products) or check(self, *args, **kwargs))
    plan = eqsat_mem.optimize(jax.value_and_grad(loss, (0, 1, 2)), memory_limit="78MiB", device="h100").plan(*[f32(8, 512, 8, 32)] * 4)
    assert plan.schedule.backend.products is Products.BY_TRITON
    assert plan.compiled_peak_bytes <= 78 * 2**20
    assert asked == [Products.BY_TRITON]


def one_after_the_other(x, w, v):
    return jnp.exp(x @ w) @ v


@compiler
@pytest.mark.parametrize("rows", [512, 1536, 4096])
def test_scratch_of_two_products_keeps_values_between_them_apart(rows):
    """Both arrays lie beside the scratch of cuBLAS where they are smaller than it: one is there with that of each product."""
    avals = f32(rows, 64), f32(64, 1024), f32(1024, 32)
    held = deviceless.compile_for(one_after_the_other, avals, H100).held_bytes
    assert peak(GpuBackend.of(H100).without_tiles().narrowed(), one_after_the_other, *avals) == pytest.approx(held, rel=0.001)


def in_steps(x, w, v):
    return lax.map(lambda rows: one_after_the_other(rows, w, v), x)


def carried(x, w, v):
    return lax.scan(lambda c, rows: (c + jnp.sin(jnp.tanh((rows + c) @ w) @ v), None), x[0], x)[0]


@compiler
@pytest.mark.parametrize(("function", "rows", "width"), [(in_steps, 512, 32), (carried, 512, 64), (in_steps, 2048, 32)])
def test_scratch_keeps_values_apart_in_loops_of_the_author(function, rows, width):
    avals = f32(8, rows, 64), f32(64, 1024), f32(1024, width)
    held = deviceless.compile_for(function, avals, H100).held_bytes
    assert planned(function, "60MiB", *avals).original_peak_bytes == pytest.approx(held, rel=0.02)


@compiler
def test_long_programs_that_fit_whatever_computes_their_products_are_compiled_once(monkeypatch):
    avals, compilations = OF_PRODUCTS[both_ways], []
    compiled = deviceless._compiled
    monkeypatch.setattr(deviceless, "_compiled", lambda lowered, *rest: compilations.append(rest) or compiled(lowered, *rest))
    exact = OWN.check(both_ways, avals, limit=2**30)
    assert len(compilations) == 2
    monkeypatch.setattr("eqsat_mem.backends.gpu.products.LONG_TEXT", 0)
    assert exact.held_bytes - 2**20 <= OWN.check(both_ways, avals, limit=2**30).held_bytes <= exact.held_bytes + OWN.library_bytes
    assert len(compilations) == 3
    assert OWN.check(both_ways, avals, limit=exact.held_bytes) == exact  # it may not fit
    assert OWN.check(both_ways, avals) == exact
    assert len(compilations) == 7


def test_without_a_compiler_nothing_is_promised_of_triton_alone():
    with pytest.raises(eqsat_mem.MemoryLimitError):
        eqsat_mem.optimize(squared, memory_limit="9MiB", device="h100", accuracy="bitwise", verify=False).plan(f32(1024, 1024))


def distances(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def peak(backend, function, *avals):
    program = load(jax.make_jaxpr(function)(*avals), [f"x{k}" for k in range(len(avals))], backend.preferences)
    rules = load_rules(only=("splitting",), without=backend.needless_rules)
    return straight(backend.as_emitted(original(program, rules)), backend.without_tiles()).peak_bytes


def test_a_cautious_backend_holds_what_several_folds_read():
    def both(x, y):
        d = jnp.exp(x[:, None] * y[None])
        return d.sum(1), d.max(0)

    bold, cautious = (peak(backend, both, f32(5000), f32(5000)) for backend in (OWN, OWN.cautious()))
    assert bold < 4 * 5000**2 <= cautious


def test_the_last_cautious_backend_holds_what_folds_by_columns_read():
    def columns(x, y):
        return jnp.exp(x[:, None] * y[None]).sum(0)

    first, last = (peak(backend, columns, f32(5000), f32(5000)) for backend in (OWN.cautious(), OWN.cautious().cautious()))
    assert first < 4 * 5000**2 <= last
    assert OWN.cautious().cautious().cautious() is None


SHARED = [
    (lambda d: jnp.exp(-d), 3, False),
    (lambda d: jnp.exp(-d), 4, True),
    (jnp.sqrt, 4, False),
    (jnp.sqrt, 6, True),
    (jax.nn.softplus, 1, True),
]


@pytest.mark.parametrize(("of", "dimensions", "written"), SHARED)
def test_what_two_folds_read_is_written_out_where_it_takes_long_to_compute(of, dimensions, written):
    def both(x, y):
        d = of(distances(x, y))
        return d.min(1), d.max(0)

    assert (peak(OWN, both, *[f32(8192, dimensions)] * 2) > 4 * 8192**2) == written


@compiler
@pytest.mark.parametrize(("of", "dimensions", "written"), SHARED)
def test_xla_writes_out_the_same(of, dimensions, written):
    def both(x, y):
        d = of(distances(x, y))
        return d.sum(1), d.sum(0)

    (compiled,) = deviceless.compile_for(both, [f32(8192, dimensions)] * 2, H100, settings=["triton"]).settings
    assert (compiled.temporaries > 4 * 8192**2) == written


def deviations(x, target):
    """Of distances from a matrix of the same size: two arrays that one fold reads."""
    return jnp.sum((jnp.sqrt(distances(x, x) + 1e-9) - target) ** 2)


@compiler
@pytest.mark.parametrize(("dimensions", "written"), [(2, True), (3, False), (4, True), (5, False), (7, False), (8, True)])
def test_xla_writes_out_short_folds_over_a_power_of_two(dimensions, written):
    (compiled,) = deviceless.compile_for(deviations, [f32(2000, dimensions), f32(2000, 2000)], H100, settings=["triton"]).settings
    assert (compiled.temporaries > 4 * 2000**2) == written


@compiler
@pytest.mark.parametrize("dimensions", [2, 4, 8, 16])
def test_plans_write_such_folds_element_by_element(dimensions):
    avals = f32(2000, dimensions), f32(2000, 2000)
    plan = planned(deviations, 4 * 2000**2 + 2**20, *avals, verify=True)
    assert plan.compiled_peak_bytes <= 4 * 2000**2 + 2**20
    assert not plan.loops
    assert plan.predicted_s < 1.2 * plan.original_predicted_s


def written_out(function, *avals):
    """The number of folds that plans write out element by element."""
    program = load(jax.make_jaxpr(function)(*avals), [f"x{k}" for k in range(len(avals))], OWN.preferences)
    return sum(map(bool, OWN.as_emitted(original(program, load_rules(only=("splitting",)))).unrolls.values()))


def rows_of_a_product(x, w):
    return jax.nn.logsumexp(x @ w, 1)


def channels(x, y):
    return jnp.sum(jnp.abs(x * jnp.roll(y, 3, 0)), 1)


def spread(x, y):
    return jnp.max(jnp.sqrt(distances(x, y)) - jnp.sum(y * y, 1))


@pytest.mark.parametrize(
    ("function", "shapes", "count"),
    [
        (lambda x: jax.nn.log_softmax(x, 1), [(5000, 16)], 0),
        (rows_of_a_product, [(5000, 40), (40, 8)], 0),
        (channels, [(5000, 16), (5000, 16)], 0),
        (distances, [(5000, 4), (300, 4)], 1),
        (spread, [(5000, 2), (300, 2)], 1),
    ],
)
def test_folds_of_an_array_with_all_their_elements_are_not_written_out(function, shapes, count):
    """Rows of a matrix have a kernel of their own, whose result is smaller than what is there anyway."""
    assert written_out(function, *(f32(*shape) for shape in shapes)) == count


def nearest_of_columns(x, y):
    return distances(x, y).min(0)


COLUMNS = [(2_500, 2_500, 4, True), (600, 300, 3, True), (2_500, 6_000, 2, True), (2_500, 9_000, 4, True), (2_500, 13_000, 4, False)]


@pytest.mark.parametrize(("n", "m", "dimensions", "written"), COLUMNS)
def test_short_folds_are_written_out_for_a_fold_of_few_columns(n, m, dimensions, written):
    assert (peak(OWN, nearest_of_columns, f32(n, dimensions), f32(m, dimensions)) > 4 * n * m) == written


@compiler
@pytest.mark.parametrize(("n", "m", "dimensions", "written"), COLUMNS)
def test_xla_writes_out_the_same_short_folds(n, m, dimensions, written):
    (compiled,) = deviceless.compile_for(nearest_of_columns, [f32(n, dimensions), f32(m, dimensions)], H100, settings=["triton"]).settings
    assert (compiled.temporaries >= 4 * n * m) == written


def test_a_fold_whose_result_is_computed_with_holds_what_it_would_hold_alone():
    def counts(x, radii):
        return (distances(x, x)[:, :, None] <= radii).sum((0, 1))

    alone, divided = (peak(OWN, f, f32(4000, 2), f32(16)) for f in (counts, lambda *a: counts(*a) / (4000 * 3999)))
    assert divided >= alone - 4096 > 4 * 4000**2


@compiler
@pytest.mark.parametrize("function", [
    lambda x, y: jnp.sqrt(distances(x, y)).min(0).mean() + jnp.sqrt(distances(x, y)).min(1).mean(),
    lambda x, y: (distances(x, x)[:, :, None] <= jnp.linspace(0.01, 0.25, 16)).sum((0, 1)) / (2500 * 2499),
])  # fmt: skip
def test_distances_folded_along_columns_fit(function):
    plan = planned(function, "3.5MiB", f32(2500, 3), f32(2500, 3), verify=True)
    assert plan.compiled_peak_bytes <= 3.5 * 2**20 < 4 * 2500**2
