"""Cuts of a model into stages with even time, parameters or memory."""
