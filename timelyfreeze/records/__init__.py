"""Remains of a run, as values and files: timelines, traces, losses, steps, summary."""
