"""Consequences of a frozen front: stored outputs, and freed ranks."""
