"""``optimize``, and how it composes with JAX's transformations."""
