"""The backend of NVIDIA GPUs: cards by name, compilation without a card, and the memory that its libraries hold."""
