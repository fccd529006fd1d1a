"""The phases of a run put to work: when to measure, when to plan, what to freeze now."""
