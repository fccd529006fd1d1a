"""Cross-entropy of pictures against its definition."""

import math

import pytest
import torch

from torchtitan.settings import JobConfig
from torchtitan.vision.model import build_image_loss, image_loss, shares_of_target

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])


def by_hand(row: int, shares: list[float]) -> float:
    logits = LOGITS[row].tolist()
    norm = math.log(sum(map(math.exp, logits)))
    return sum(share * (norm - logit) for share, logit in zip(shares, logits, strict=True))


def test_classes_and_shares_of_classes() -> None:
    labels = torch.tensor([0, 1])
    expected = by_hand(0, [1, 0, 0]) + by_hand(1, [0, 1, 0])
    assert image_loss(LOGITS, labels, label_smoothing=0.0).item() == pytest.approx(expected)
    shares = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.4, 0.6]])
    expected = by_hand(0, [0.7, 0.3, 0.0]) + by_hand(1, [0.0, 0.4, 0.6])
    assert image_loss(LOGITS, shares, label_smoothing=0.0).item() == pytest.approx(expected)


def test_smoothing_spreads_labels_in_training_and_not_in_validation() -> None:
    config = JobConfig()
    config.vision.label_smoothing = 0.3
    loss = build_image_loss(config, parallel_dims=None)
    labels = torch.tensor([0, 2])
    smooth = by_hand(0, [0.8, 0.1, 0.1]) + by_hand(1, [0.1, 0.1, 0.8])
    assert loss(LOGITS, labels).item() == pytest.approx(smooth)
    with torch.no_grad():
        assert loss(LOGITS, labels).item() == pytest.approx(
            by_hand(0, [1, 0, 0]) + by_hand(1, [0, 0, 1])
        )


def test_a_row_of_shares_is_one_target() -> None:
    assert shares_of_target(torch.tensor([1, 2])) == 1
    assert shares_of_target(torch.zeros(4, 10)) == 10
    assert shares_of_target(torch.zeros(4, 128, dtype=torch.int64)) == 1, "tokens are many"
