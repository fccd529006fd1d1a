"""Backward products from a sample of the tokens, whose mean over draws is the exact product."""

from timelyfreeze.sampling.draw import (
    added_variance,
    draw_tokens,
    inclusion_probabilities,
    levelled,
    n_kept,
)
from timelyfreeze.sampling.linear import TokenSample, TokenSampler

__all__ = [
    "TokenSample", "TokenSampler", "added_variance", "draw_tokens", "inclusion_probabilities",
    "levelled", "n_kept",
]  # fmt: skip
