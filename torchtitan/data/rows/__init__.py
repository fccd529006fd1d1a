"""Rows of files and of the hub: which kinds there are, and what they say."""
