"""Which tokens a sampled product keeps: unequal probabilities, a fixed number, one random number.

A weight gradient is a sum over tokens, dW = sum_i dy_i x_i^T. Keeping token i with probability p_i
and dividing it by p_i leaves the mean of the sum what it was (Horvitz and Thompson). Of all p with
a given sum, p_i proportional to the size of the i-th term has the least variance when draws are
independent; where that exceeds 1 the token is kept for certain.

Notation: N tokens, k of them kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows that matrix units take at a time.
_BLOCK = 32
# Of input gradients: 3 learns as much at small ratios and less at large ones, 0 far less at all.
_LEVEL = 1.0


def n_kept(n_tokens: int, ratio: float) -> int:
    """Return k, how many of N tokens a sampling ratio leaves: (1 - ratio) N, rounded, 1 at least.

    Matrix units multiply blocks of rows; a CPU's take up to a third longer where rows are no
    multiple of 32. So that many are left out at a time if N is 1,024 or more, and fewer below:
    the ratio is off by 1/64 at most.

    Raises:
        ValueError: If ``ratio`` is not in [0, 1); without any token there is no estimate.
    """
    if not 0.0 <= ratio < 1.0:
        raise ValueError(f"the sampling ratio is {ratio}; it must be 0 or more and below 1")
    block = min(_BLOCK, 1 << max(0, (n_tokens // _BLOCK).bit_length() - 1))
    return max(1, n_tokens - block * round(ratio * n_tokens / block))


def inclusion_probabilities(sizes: Tensor, n_drawn: int) -> Tensor:
    """Return min(1, c * size) with c such that they add up to ``n_drawn``.

    Computed without waiting for the device. With s the sizes in falling order, the j largest before
    an item are certain; it is certain too if (k - j) s_j is at least the sum of s_j and all behind
    it. That holds for a first part of the items and for none behind, so counting them is enough.

    Args:
        sizes: How much each token weighs, 0 or more, shape [N].
        n_drawn: k, from 1 to N.

    Returns:
        Tensor: float64, shape [N]. Tokens of size 0 have probability 0. Where no more than k have
        another size, all of those have probability 1.
    """
    exact = sizes.double()
    ordered = exact.sort(descending=True).values
    # Sums from the back, so that small sizes are not lost in a difference of large sums.
    rest = ordered.flip(0).cumsum(0).flip(0)
    left = n_drawn - torch.arange(len(ordered), device=sizes.device, dtype=torch.float64)
    certain = (left > 0.0) & (ordered > 0.0) & (left * ordered >= rest)
    n_certain = certain.sum()
    behind = torch.cat([rest, rest.new_zeros(1)]).gather(0, n_certain.unsqueeze(0))
    factor = torch.where(behind > 0.0, (n_drawn - n_certain) / behind, torch.inf)
    return torch.where(exact > 0.0, (factor * exact).clamp(max=1.0), 0.0)


def levelled(sizes: Tensor) -> Tensor:
    """Return sizes whose probabilities differ little: each plus ``_LEVEL`` times the mean.

    A token's input gradient goes on to rows of the embedding that nothing else reaches, and an
    optimizer that divides by the size of a row's gradients, as Adam does, makes noise there as
    large as any other. So no token may be kept rarely and weighted much: with this, no factor is
    above 1 + 1 / ``_LEVEL`` times that of even draws. Tokens of size 0 stay as they are.
    """
    live = sizes > 0.0
    mean = sizes.sum() / live.sum().clamp(min=1)
    return torch.where(live, sizes + _LEVEL * mean, 0.0)


def draw_tokens(probabilities: Tensor, n_drawn: int, number: float) -> tuple[Tensor, Tensor]:
    """Draw ``n_drawn`` tokens, each with its own probability, by one random number.

    Systematic sampling: tokens lie one behind the other on a line, each as long as its probability,
    and those are kept that lie under ``number``, ``number`` + 1, and so on. Neighbours, which are
    alike in a text, are thus seldom kept together, and every sequence gets what is due to it.

    Args:
        probabilities: From :func:`inclusion_probabilities`, float64, shape [N].
        n_drawn: k, their sum.
        number: Uniform in [0, 1).

    Returns:
        tuple: Positions of the kept tokens, int64, shape [k]; and the factor 1 / p of each,
        float32, shape [k]. It is 0 for places that stay empty because fewer than k tokens have a
        probability at all.
    """
    line = probabilities.cumsum(0)
    marks = torch.arange(n_drawn, device=line.device, dtype=torch.float64) + number
    kept = torch.searchsorted(line, marks, right=True)
    is_empty = kept >= len(line)
    kept = kept.clamp(max=len(line) - 1)
    factors = torch.where(is_empty, 0.0, 1.0 / probabilities[kept])
    return kept, factors.float()


def added_variance(terms: Tensor, probabilities: Tensor) -> Tensor:
    """Return the variance that sampling adds to a sum of N terms, the sum of (1/p - 1) |term|^2.

    That is exact where tokens are kept independently of each other. Systematic draws of a text,
    whose neighbours are alike, have as a rule less.

    Args:
        terms: Sizes |dy_i| |x_i| of the terms, shape [N].
        probabilities: Shape [N]; above 0 where the term is.

    Returns:
        Tensor: float64, a scalar on the device of ``terms``.
    """
    odds = torch.where(probabilities > 0.0, 1.0 / probabilities - 1.0, 0.0)
    return (odds * terms.double().square()).sum()
