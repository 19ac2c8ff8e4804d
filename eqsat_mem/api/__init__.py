"""``optimize`` and its place among JAX's transformations."""
