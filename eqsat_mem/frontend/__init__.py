"""The frontend: translate a jaxpr to a program of terms over named indices."""
