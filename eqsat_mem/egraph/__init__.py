"""Equality saturation with egglog: rule files, encoding of programs, saturation, extraction."""
