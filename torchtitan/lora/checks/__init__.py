"""Errors of a configuration with adapters."""
