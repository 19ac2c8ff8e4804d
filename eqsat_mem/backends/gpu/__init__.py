"""NVIDIA GPUs: cards by name, compiling for one that is not there, and what its libraries hold."""
