"""What a run leaves behind, as values and files: timelines, traces, losses, steps, summary."""
