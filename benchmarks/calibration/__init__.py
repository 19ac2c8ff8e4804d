"""Scripts that make the tables of figures in the source."""
