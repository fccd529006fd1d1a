"""Scores of a model, with lm-eval."""
