"""From measurements to the plan of a run: solved, compared with times, solved again."""
