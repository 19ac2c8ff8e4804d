"""Planning grows in proportion to programs: work is counted, never timed."""

import subprocess
import sys

import jax
import jax.numpy as jnp

from benchmarks.planning import elementwise, training_step, transformer
from eqsat_mem.config import Options
from eqsat_mem.costs import cpu
from eqsat_mem.extract import as_written
from eqsat_mem.loops import region
from eqsat_mem.pipeline import plan
from eqsat_mem.rules import load_rules
from eqsat_mem.saturate import saturate
from eqsat_mem.schedule import FEW_LOOPS, MOST_STEPS, _Search, _search, _tied
from eqsat_mem.trace import load


def loaded(made):
    function, args = made
    jaxpr = jax.make_jaxpr(function)(*args)
    return load(jaxpr, [f"x{k}" for k in range(len(jaxpr.in_avals))])


def test_the_e_graph_of_a_deep_network_grows_with_its_depth():
    rows = {depth: saturate(loaded(training_step(depth)), load_rules()).rows for depth in (6, 12)}
    assert rows[12] < 2.2 * rows[6]


def test_a_search_looks_at_so_many_steps_and_no_more():
    ex = as_written(saturate(loaded(transformer(20)), load_rules()))
    search = _Search(ex, 20 * 2**20, cpu(), None, None)
    _search(search)
    largest = len(region(ex).steps) * 40  # a tree with its loops' bodies: what the last evaluation may look at
    assert search.timing.walked < MOST_STEPS + largest


def test_alike_loops_get_their_chunks_together():
    ex = as_written(saturate(loaded(training_step(20)), load_rules()))
    search = _Search(ex, 60 * 2**20, cpu(), None, None)
    tree = max(search.expand(search.start(region(ex))), key=lambda s: len(s.chunks))
    assert len(tree.chunks) > FEW_LOOPS
    groups = _tied(list(tree.chunks), tree.chunks)
    assert len(groups) < len(tree.chunks) / 2
    assert sum(map(len, groups)) == len(tree.chunks)
    assert all(len({(loop.index, tree.chunks[loop]) for loop in group}) == 1 for group in groups)


def test_long_kernels_are_written_whatever_their_length():
    function, args = elementwise(700)
    jaxpr = jax.make_jaxpr(function)(*args)
    made = plan(jaxpr, Options(memory_limit="1MiB", verify=False), ["x", "y"])
    x, y = jnp.linspace(0, 1, args[0].shape[0]), jnp.linspace(1, 0, args[0].shape[0])
    assert jax.eval_shape(made.function, x, y)[0].shape == ()
    assert made.source.count("jnp.sin") + made.source.count("lax.sin") >= 700


def test_importing_the_package_loads_nothing_that_it_does_not_need():
    code = "import sys, eqsat_mem, eqsat_mem.api, eqsat_mem.pipeline; print(*sys.modules)"
    loaded_modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "egglog" not in loaded_modules  # whose package takes several times as long as its bindings
    for name in ("matplotlib", "rich", "scipy", "pandas", "IPython", "eqsat_mem.calibrate"):
        assert name not in loaded_modules, name
