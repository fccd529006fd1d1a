"""Energies of gradients in the subspaces of frozen weights: sums, and the parts they come to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Energies:
    """Sums over linear weights; a solver's process reads them without torch."""

    inside: float = 0.0  # energy of a gradient in the subspaces
    whole: float = 0.0  # all of it
    agreed_inside: float = 0.0  # inner products of gradients of batches in a row, in the subspaces
    agreed: float = 0.0  # the same of whole gradients; 0 where nothing is known yet
    # Sums of the squares of both, and of their products; 0 in older checkpoints.
    agreed_inside_2: float = 0.0
    agreed_2: float = 0.0
    agreed_product: float = 0.0

    @staticmethod
    def total(parts: Iterable[Energies]) -> Energies:
        """Return the sums over the weights of all parts."""
        return Energies(*map(sum, zip(*map(astuple, parts), strict=True)))

    @property
    def captured(self) -> float:
        """The part of a gradient's energy that lies in the subspaces."""
        return self.inside / self.whole if self.whole > 0.0 else 0.0

    @property
    def captured_mean(self) -> float | None:
        """The same of the mean gradient, which all batches share; None where it is not known."""
        mean = self.agreed_inside / self.agreed if self.agreed > 0.0 else -1.0
        return mean if 0.0 <= mean <= 1.0 else None  # else noise of the measurement

    def mean_error(self, n_replicas: float) -> float | None:
        """Return the standard error of ``captured_mean``; None where it is not known.

        It is that of a ratio of sums, of weights that know nothing of each other; ``n_replicas``
        have told of the same weights.
        """
        mean = self.captured_mean
        if mean is None or not self.agreed_2:
            return None
        residual = self.agreed_inside_2 - 2.0 * mean * self.agreed_product + mean**2 * self.agreed_2
        return math.sqrt(max(max(1.0, n_replicas) * residual, 0.0)) / self.agreed
