"""The command line, ``eqsat-mem``."""
