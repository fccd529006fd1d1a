"""Faults of a host, and of ranks together, found before a queue is waited for."""
