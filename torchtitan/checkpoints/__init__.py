"""Checkpoints of a run: finished steps, and a manager surviving faults and resizing."""
