"""StableHLO modules: read as JAX functions, and written from them."""
