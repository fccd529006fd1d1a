"""Plots of a run. Needs matplotlib, unlike the rest of the library, and no torch."""
