"""Errors of a configuration, found before any process group starts."""
