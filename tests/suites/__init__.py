"""Test suites of other people's libraries, run plain and under ``eqsat-mem run``."""
