"""Inputs of every stage, of a batch, worked out by hand."""

import pytest
import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from torchtitan.data.sequences import HostTensor, learned_tokens, to_every_stage

LABELS = torch.tensor([[-100, 7, -100, 9, 4], [-100] * 5, [3, -100, -100, -100, 0]])


def test_positions_go_to_every_stage() -> None:
    places, lengths = torch.zeros(1), torch.ones(1, dtype=torch.int32)
    extra = {"positions": places, "lengths": lengths, "image": torch.ones(1)}
    inputs, kwargs = to_every_stage(extra, {"attention_masks": None})
    assert inputs == {"image": extra["image"]}
    assert kwargs == {"attention_masks": None, "positions": places, "lengths": lengths}
    assert to_every_stage({}, {"x": 1}) == ({}, {"x": 1})


def test_learned_tokens_come_first_in_their_order() -> None:
    found = learned_tokens(LABELS)
    assert found["n_learned"].tolist() == [3, 0, 2]
    assert found["learned"].shape == (3, 2, 5)
    assert found["learned"][0, :, :3].tolist() == [[1, 3, 4], [7, 9, 4]]
    assert found["learned"][2, :, :2].tolist() == [[0, 4], [3, 0]]
    first, every = to_every_stage(found, {})
    assert not first
    assert every == found


def test_counts_stay_on_the_host_and_are_split_like_the_batch() -> None:
    counts = learned_tokens(LABELS)["n_learned"]
    assert counts.to("meta") is counts.to("meta", non_blocking=True) is counts
    _, split = split_args_kwargs_into_chunks((), {"n_learned": counts}, 3)
    parts = [part["n_learned"] for part in split]
    assert [part.tolist() for part in parts] == [[3], [0], [2]]
    assert all(isinstance(part, HostTensor) for part in parts)
    with pytest.raises(ValueError, match="labels are on meta"):
        learned_tokens(LABELS.to("meta"))
