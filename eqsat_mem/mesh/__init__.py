"""Programs for several devices: the program that each of them runs, and the values that it exchanges with the others."""
