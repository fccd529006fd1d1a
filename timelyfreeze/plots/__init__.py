"""Plots of a run. Needs matplotlib, which the rest of the library does not, and no torch."""
