"""Scores of a model: lm-eval's own command line, started for a run or a Hugging Face folder."""
