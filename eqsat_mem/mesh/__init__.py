"""Programs for several devices: what one of them runs, and what it exchanges with the others."""
