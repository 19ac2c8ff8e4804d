"""One folder per compiler target, and the modules that choose, measure and query a target."""
