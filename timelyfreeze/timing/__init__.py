"""Measured times: samples, bounds of each action, messages, shared processors, monitoring."""
