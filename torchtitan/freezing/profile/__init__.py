"""Each stage of a pipeline timed alone on one device."""
