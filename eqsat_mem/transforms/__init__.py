"""Passes: rewrites of whole programs that are not rules of the e-graph."""
