"""Checkpoints of a run: what is finished, and a manager that survives faults and resizing."""
