"""From a jaxpr to a program of terms over named indices."""
