"""Backward products from a sample of the tokens, whose mean over draws is the exact product."""

from timelyfreeze.runtime.sampling.draw import (
    added_variance,
    draw_tokens,
    inclusion_probabilities,
    levelled,
    n_kept,
)
from timelyfreeze.runtime.sampling.linear import TokenSample, TokenSampler
from timelyfreeze.runtime.sampling.variance import VarianceMeter

__all__ = [
    "TokenSample", "TokenSampler", "VarianceMeter", "added_variance", "draw_tokens",
    "inclusion_probabilities", "levelled", "n_kept",
]  # fmt: skip
