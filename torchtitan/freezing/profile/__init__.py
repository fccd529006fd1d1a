"""Stages of a pipeline, timed alone on a device."""
