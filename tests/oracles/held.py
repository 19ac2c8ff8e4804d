"""Run a script and print, last, the most bytes that a function which it compiled by ``jax.jit`` holds: ``python held.py SCRIPT``."""

import functools
import runpy
import sys

import jax

from eqsat_mem.backends.xla import held_bytes

jit = jax.jit
peaks = [0]


def measured(*fun, **options):
    """``jax.jit``, also asking what each compiled program holds."""
    if not fun:
        return functools.partial(measured, **options)
    jitted = jit(*fun, **options)

    @functools.wraps(fun[0])
    def call(*args, **kwargs):
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            peaks.append(held_bytes(jitted.lower(*args, **kwargs).compile()))
        return jitted(*args, **kwargs)

    return call


jax.jit = measured
runpy.run_path(sys.argv[1], run_name="__main__")
print(max(peaks))
