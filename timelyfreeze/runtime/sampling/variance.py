"""Measures what sampling tokens would add to the gradients of a stage, while they are exact."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from timelyfreeze.planning import MEASURED_RATIOS, VarianceCurve
from timelyfreeze.runtime.sampling.draw import added_variance, inclusion_probabilities, n_kept


class VarianceMeter:
    """Adds up, on the device, for each linear layer of a stage, what draws would add and |dW|^2.

    Of weight gradients alone: the noise of sampled input gradients grows from layer to layer on its
    way down, and cannot be told where it is made.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._sizes: dict[int, int] = {}

    def add(self, layer: int, terms: Tensor, dw: Tensor) -> None:
        """Take note of one exact backward of a layer.

        Args:
            layer: Its number.
            terms: Sizes |dy_i| |x_i| of the tokens' parts of its weight gradient, shape [N].
            dw: The gradient.
        """
        n = len(terms)
        added = [
            added_variance(terms, inclusion_probabilities(terms, n_kept(n, ratio)))
            for ratio in MEASURED_RATIOS
        ]
        row = torch.stack([*added, dw.float().square().sum().double()])
        self._sums[layer] = self._sums[layer] + row if layer in self._sums else row
        self._sizes[layer] = dw.numel()

    def curve(self) -> VarianceCurve | None:
        """Return V, the mean over layers by their parameters; None without measurements.

        Waits for the device. A layer whose gradient is 0 has nothing that could be disturbed.
        """
        sums = {layer: row.cpu().numpy() for layer, row in self._sums.items()}
        live = [layer for layer, row in sums.items() if row[-1] > 0.0]
        if not live:
            return None
        ratios = [sums[layer][:-1] / sums[layer][-1] for layer in live]
        weights = [self._sizes[layer] for layer in live]
        return tuple(np.average(ratios, axis=0, weights=weights).tolist())
