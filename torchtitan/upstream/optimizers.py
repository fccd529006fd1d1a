"""Optimizers that upstream does not have, in its container."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import Optimizer as OptimizerConfig

SGD = "SGD"


class SgdContainer(OptimizersContainer):
    """SGD with momentum for each part, whose state can be saved before every tensor has one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum of every tensor, zero for one that was never updated.

        Torch would make up for a missing state with a step of zero gradients, which leaves weight
        decay in the momentum.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"] if group["momentum"] else ():
                    state = optimizer.state[parameter]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
        return super().state_dict()


def build_sgd(
    model_parts: list[nn.Module], config: OptimizerConfig, *args: Any, **kwargs: Any
) -> OptimizersContainer:
    """Return SGD with momentum for each part.

    Args:
        model_parts: Stages of this process.
        config: Its ``beta1`` is the momentum; ``beta2`` and ``eps`` have no meaning here.
        *args: What else upstream hands over, like ``kwargs``; not used.
        **kwargs: Likewise.
    """
    settings = {
        "lr": config.lr,
        "momentum": config.beta1,
        "weight_decay": config.weight_decay,
        "fused": config.implementation == "fused",
        "foreach": config.implementation == "foreach",
    }
    return SgdContainer(model_parts, torch.optim.SGD, settings)
