"""Rows of files and of the hub: their kinds, and their content."""
