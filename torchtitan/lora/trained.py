"""How many parameters a run trains, where others are frozen for good."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from timelyfreeze.runtime import Exchange


def count_trained(parts: Sequence[nn.Module], n_copies: int) -> dict[str, int]:
    """Return ``parameters`` and ``parameters_trained`` of the whole model; nothing if all are.

    Where parts of the model are frozen for good, they are so on every rank, and all come here.

    Args:
        parts: Stages of this process.
        n_copies: How many processes hold each stage, or a share of its tensors.
    """
    every = [parameter for part in parts for parameter in part.parameters()]
    trained = sum(parameter.numel() for parameter in every if parameter.requires_grad)
    held = sum(parameter.numel() for parameter in every)
    if trained == held:
        return {}
    rows = Exchange().all_gather((trained, held))
    return {
        "parameters": sum(held for _, held in rows) // n_copies,
        "parameters_trained": sum(trained for trained, _ in rows) // n_copies,
    }
