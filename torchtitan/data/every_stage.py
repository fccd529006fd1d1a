"""Inputs of every pipeline stage: positions, and learned tokens.

The last stage computes logits of learned tokens alone. Their places are found on the host, where a
batch comes from, without waiting for a device.
"""

from typing import Any

from torch import Tensor, stack

from torchtitan.data.sequences import IGNORE_INDEX, LENGTHS, POSITIONS

# Names of what the model gets: places and labels of learned tokens, and how many each row has.
LEARNED, N_LEARNED = "learned", "n_learned"


class HostTensor(Tensor):
    """A tensor staying on the host, although upstream or FSDP moves its batch to a device."""

    def to(self, *args: Any, **kwargs: Any) -> "HostTensor":
        """Return this tensor unchanged."""
        return self


def learned_tokens(labels: Tensor) -> dict[str, Tensor]:
    """Return the learned tokens of a batch from its labels, int64 [B, T], on the host.

    ``learned``, int64 [B, 2, T], are places in the row and their labels, learned tokens first, in
    ascending order. ``n_learned``, int64 [B], counts them by row, and stays on the host.
    """
    if labels.device.type != "cpu":
        raise ValueError(f"labels are on {labels.device}; learned tokens are found on the host")
    is_learned = labels != IGNORE_INDEX
    places = is_learned.logical_not().byte().argsort(dim=1, stable=True)
    learned = stack([places, labels.gather(1, places)], dim=1)
    return {LEARNED: learned, N_LEARNED: is_learned.sum(dim=1).as_subclass(HostTensor)}


def to_every_stage(
    extra_inputs: dict[str, Tensor], extra_kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Move all stages' inputs out of the first pipeline stage's inputs."""
    every = (POSITIONS, LENGTHS, LEARNED, N_LEARNED)
    first = {name: value for name, value in extra_inputs.items() if name not in every}
    moved = {name: value for name, value in extra_inputs.items() if name in every}
    return first, extra_kwargs | moved
