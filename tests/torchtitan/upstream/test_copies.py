"""Batches come to the device without a wait."""

import inspect

import pytest
import torch
from torch import Tensor
from torchtitan.train import Trainer

from torchtitan.upstream.fixes import copy_without_wait


def test_copies_from_pinned_memory_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, pageable = torch.arange(3), torch.arange(4)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: len(self) == 3)
    asked = []
    monkeypatch.setattr(
        Tensor, "to", lambda self, *args, **kwargs: asked.append((self.tolist(), args, kwargs))
    )
    copy_without_wait([pinned, pageable])
    for tensor in (pinned, pageable):
        tensor.to("cuda")
    assert asked == [
        ([0, 1, 2], ("cuda",), {"non_blocking": True}),
        ([0, 1, 2, 3], ("cuda",), {}),
    ]


def test_upstream_still_waits_for_copies() -> None:
    source = inspect.getsource(Trainer.train_step)
    assert "labels = labels.to(self.device)" in source
    assert "input_dict[k] = v.to(self.device)" in source
    assert "non_blocking" not in source
