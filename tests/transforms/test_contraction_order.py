"""Long products: the order found is the best, values stay, what is shared is computed once, and rules decide whether it may be done."""

from __future__ import annotations

import itertools
import math
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.egraph.extract import original
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.frontend.load import load
from eqsat_mem.ir import Dot, Program
from eqsat_mem.transforms.contraction_order import reordered
from tests.oracles.evaluation import values
from tests.tiers import tiered

RULES = load_rules()


def multiplications(program: Program, t: int) -> float:
    term = program.terms[t]
    return float(program.extent(program.free[t] | term.over)) if isinstance(term, Dot) else 0.0


def total(program: Program) -> float:
    return sum(multiplications(program, t) for t in program.reachable())


def fewest(extents: list[int]) -> float:
    """The multiplications of the best order of a chain, by the textbook's recurrence."""
    n = len(extents) - 1
    best = {(i, i + 1): 0.0 for i in range(n)}
    for length, i in itertools.product(range(2, n + 1), range(n)):
        if i + length <= n:
            j = i + length
            best[i, j] = min(best[i, k] + best[k, j] + extents[i] * extents[k] * extents[j] for k in range(i + 1, j))
    return best[0, n]


def loaded(function, arrays):
    return original(load(jax.make_jaxpr(function)(*arrays), [f"x{k}" for k in range(len(arrays))]))


def better(function, arrays, rules=RULES):
    return reordered(loaded(function, arrays), rules, multiplications)


def chain(*matrices):
    return reduce(jnp.matmul, [m.T if k % 3 == 1 else m for k, m in enumerate(matrices)])


def matrices(extents):
    rng = np.random.default_rng(7)
    shapes = itertools.pairwise(extents)
    return [rng.standard_normal(s[::-1] if k % 3 == 1 else s).astype(np.float32) / math.sqrt(s[1]) for k, s in enumerate(shapes)]


@pytest.mark.parametrize(("length", "least"), tiered([(4, 2), (9, 2), (72, 2), (72, 1)], [(4, 2), (9, 2), (72, 2)]))
def test_a_chain_with_transposes_gets_the_best_order_at_any_length(length, least):
    extents = [int(n) for n in np.random.default_rng(length).integers(least, 12, length + 1)]
    arrays = matrices(extents)
    found = better(chain, arrays)
    assert found is not None
    assert total(found.program) <= fewest(extents) if least == 1 else total(found.program) == fewest(extents)
    ((value,),) = values(arrays, found.program)
    np.testing.assert_allclose(value, jax.jit(chain)(*arrays), rtol=1e-4, atol=1e-5)


def test_a_product_with_another_use_is_computed_once():
    def both(a, b, c, d, e, v):
        shared = a @ b @ c
        return shared @ d @ e @ v, shared

    arrays = matrices_of((30, 20), (20, 20), (20, 30), (30, 30), (30, 30), (30, 1))
    found = better(both, arrays)
    assert found is not None
    assert sum(isinstance(found.program.terms[t], Dot) for t in found.program.reachable()) == 5
    for value, want in zip(values(arrays, found.program)[0], both(*arrays), strict=True):
        np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-3)


def matrices_of(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("bij,bjk,bkl,bl->bi", [(3, 5, 6), (3, 6, 7), (3, 7, 8), (3, 8)]),
        ("ij,kj,kl,ml,m->i", [(9, 8), (7, 8), (7, 6), (5, 6), (5,)]),
        ("ab,ac,bd,cd,de->e", [(6, 5), (6, 4), (5, 7), (4, 7), (7, 3)]),
        ("ijn,jkn,kln,li->n", [(4, 5, 6), (5, 6, 6), (6, 7, 6), (7, 4)]),
    ],
)
def test_networks_keep_their_values(spec, shapes):
    def in_order(*tensors):
        names, result = spec.split("->")
        names = names.split(",")
        out, have = tensors[0], names[0]
        for k in range(1, len(tensors)):
            rest = set("".join(names[k + 1 :]) + result)
            joint = "".join(sorted({i for i in have + names[k] if i in rest}))
            out, have = jnp.einsum(f"{have},{names[k]}->{joint}", out, tensors[k]), joint
        return out

    arrays = matrices_of(*shapes)
    ex = loaded(in_order, arrays)
    found = reordered(ex, RULES, lambda program, t: float(program is ex.program))  # whatever it costs
    assert found is not None
    ((value,),) = values(arrays, found.program)
    np.testing.assert_allclose(value, np.einsum(spec, *(a.astype(np.float64) for a in arrays)), rtol=1e-4, atol=1e-4)


def test_orders_stay_where_the_pass_is_left_out_or_nothing_is_gained():
    arrays = matrices([2, 30, 30, 30, 30, 30, 1])
    assert better(chain, arrays) is not None
    assert better(chain, arrays, load_rules(without=("order-of-products",))) is None
    assert better(chain, arrays, load_rules(accuracy="bitwise")) is None
    assert better(chain, matrices([1, 30, 30, 30, 30, 30, 30])) is None


def test_a_plan_takes_the_order():
    rng = np.random.default_rng(3)
    arrays = matrices([int(n) for n in rng.integers(1, 300, 25)])
    plan = eqsat_mem.optimize(chain, memory_limit="1GiB", verify=False).plan(*arrays)
    best = better(chain, arrays)
    assert best is not None
    assert total(plan.program) <= 1.2 * total(best.program) < 0.9 * total(loaded(chain, arrays).program)
    np.testing.assert_allclose(jax.jit(plan.function)(*arrays)[0], jax.jit(chain)(*arrays), rtol=1e-3, atol=1e-4)
