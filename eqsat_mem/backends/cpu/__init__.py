"""XLA:CPU."""
