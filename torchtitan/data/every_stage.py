"""What every pipeline stage gets of a batch: the places of tokens in their examples."""

from typing import Any

from torch import Tensor

from torchtitan.data.sequences import LENGTHS, POSITIONS


def to_every_stage(
    extra_inputs: dict[str, Tensor], extra_kwargs: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Move what tells of documents from what the first pipeline stage gets to what all get."""
    first = dict(extra_inputs)
    every = {name: first.pop(name) for name in (POSITIONS, LENGTHS) if name in first}
    return first, extra_kwargs | every
