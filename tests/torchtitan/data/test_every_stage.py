"""What every stage of a pipeline gets of a batch."""

import torch

from torchtitan.data.every_stage import to_every_stage


def test_positions_go_to_every_stage() -> None:
    places, lengths = torch.zeros(1), torch.ones(1, dtype=torch.int32)
    extra = {"positions": places, "lengths": lengths, "image": torch.ones(1)}
    inputs, kwargs = to_every_stage(extra, {"attention_masks": None})
    assert inputs == {"image": extra["image"]}
    assert kwargs == {"attention_masks": None, "positions": places, "lengths": lengths}
    assert to_every_stage({}, {"x": 1}) == ({}, {"x": 1})
