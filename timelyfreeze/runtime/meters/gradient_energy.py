"""Squared gradient norms of a rank's tensors, for the fraction of them that freezing lets through.

Measured where metrics are logged, from the gradients of that step, which costs one more read of
them. What was frozen in the step is made up for: a tensor that n of M backwards have reached has
about n / M of its gradient, so its norm counts M / n times. That is exact where microbatches agree.
Where they do not, the sum of a few is longer than its part, so the energy of tensors that are
frozen often comes out too large, and p_eff too small rather than too large. A tensor that no
backward of the step has reached keeps the energy that it had. Each measurement counts as much as
all before it together, which halves what chance does to one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.runtime.meters.tally import Count
from timelyfreeze.runtime.shards import local_gradient, sum_over_shards


class GradientEnergy:
    """Keeps the squared gradient norm of each tensor of a rank.

    Args:
        parameters: The tensors of each stage, in the order of its masks.

    Attributes:
        energy: By stage, float64, shape [n]; NaN until a tensor was first measured.
    """

    def __init__(self, parameters: Mapping[int, Sequence[Tensor]]) -> None:
        self._parameters = parameters
        self.energy: dict[int, NDArray[np.float64]] = {
            stage: np.full(len(tensors), np.nan) for stage, tensors in parameters.items()
        }

    @property
    def is_complete(self) -> bool:
        """Whether every tensor was measured."""
        return not any(np.isnan(energy).any() for energy in self.energy.values())

    def measure(self, step: Mapping[int, Count], scale: float = 1.0) -> None:
        """Measure the gradients that there are; every rank must call this together.

        Args:
            step: What was frozen while they were made, by stage.
            scale: What gradients have to be multiplied with to undo clipping.
        """
        tensors = [p for stage in self._parameters.values() for p in stage]
        squares = iter(_squared_norms(tensors))
        for stage, of_stage in self._parameters.items():
            measured = np.array([next(squares) for _ in of_stage]) * scale**2
            reach = step[stage].update_frequency
            live = reach > 0.0
            measured[live] /= reach[live] ** 2
            before = self.energy[stage]
            fresh = np.where(np.isnan(before), measured, (before + measured) / 2)
            self.energy[stage] = np.where(live, fresh, before)

    def plain_state(self) -> dict[str, Any]:
        """Return the energies as plain data, by stage; None for what is not known."""
        return {
            str(stage): [None if np.isnan(e) else e for e in energy.tolist()]
            for stage, energy in self.energy.items()
        }

    def load_plain_state(self, plain: Mapping[str, Sequence[float | None]]) -> None:
        """Restore what :meth:`plain_state` returned."""
        for stage in self.energy:
            self.energy[stage] = np.array(
                [np.nan if e is None else e for e in plain[str(stage)]], dtype=np.float64
            )


def _squared_norms(parameters: Sequence[Tensor]) -> list[float]:
    """Return the squared norm of each whole tensor's gradient, 0 where there is none."""
    if not parameters:
        return []
    squares = torch.zeros(len(parameters), 1, device=parameters[0].device)
    rows = [i for i, p in enumerate(parameters) if p.grad is not None]
    if rows:
        gradients = [local_gradient(parameters[i]) for i in rows]
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        squares[rows] = torch.stack(norms).square().unsqueeze(1)
    sum_over_shards(parameters, squares)
    numbers: list[float] = squares.squeeze(1).double().cpu().tolist()
    return numbers
