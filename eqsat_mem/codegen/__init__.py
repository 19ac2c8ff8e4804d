"""Code generation: emit a schedule as JAX source."""
