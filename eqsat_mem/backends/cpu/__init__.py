"""The backend of XLA:CPU."""
