"""One folder or file per compiler target, and how to measure and ask one."""
