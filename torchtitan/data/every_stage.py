"""What every pipeline stage gets of a batch: the places of tokens in their examples."""

from typing import Any

from torch import Tensor

from torchtitan.data.sequences import POSITIONS


def to_every_stage(
    extra_inputs: dict[str, Tensor], extra_kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Move ``positions`` from what the first pipeline stage gets to what all stages get."""
    first = dict(extra_inputs)
    every = {POSITIONS: first.pop(POSITIONS)} if POSITIONS in first else {}
    return first, extra_kwargs | every
