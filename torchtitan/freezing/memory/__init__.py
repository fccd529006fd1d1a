"""Predicted memory of all ranks, before launch."""
