"""Equality saturation with egglog: rule files, encoding, saturation, extraction."""
