"""From what a run measures to the plan it freezes by: solved, compared with times, solved again."""
