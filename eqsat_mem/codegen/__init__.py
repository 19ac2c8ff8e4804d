"""A schedule as JAX source."""
