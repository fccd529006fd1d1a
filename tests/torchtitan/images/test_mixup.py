"""Mixup by hand."""

import numpy as np
import pytest
import torch

from torchtitan.images.transforms import Mixup


def sample(value: float, label: int, share: float, row: int) -> tuple:
    inputs = {
        "input": torch.full((3, 2, 2), value),
        "rows": torch.tensor(row),
        "share": torch.tensor(share),
    }
    return inputs, torch.tensor(label)


def test_pictures_and_labels_are_mixed_with_those_before_them() -> None:
    batch = [sample(1.0, 0, 0.75, 9), sample(2.0, 2, 0.5, 4), sample(4.0, 2, 1.0, 6)]
    inputs, labels = Mixup(0.2, 4).collate(batch)
    assert set(inputs) == {"input"}
    assert inputs.rows.tolist() == [9, 4, 6]
    # 1 and a quarter of the last one's 4; half of 2 and of 1; 4 alone.
    assert inputs["input"][:, 1, 1, 0].tolist() == [1.75, 1.5, 4.0]
    assert labels.dtype == torch.float32
    assert labels.tolist() == [[0.75, 0, 0.25, 0], [0.5, 0, 0.5, 0], [0, 0, 1, 0]]


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_have_the_moments_of_the_beta_distribution(alpha: float) -> None:
    """Mean 1/2, variance 1 / (4 (2 alpha + 1))."""
    shares = np.array([float(Mixup(alpha, 2).share(3, 0, row)) for row in range(4000)])
    assert abs(shares.mean() - 0.5) < 0.025
    assert abs(shares.var() * 4 * (2 * alpha + 1) - 1) < 0.1
    assert 0 <= shares.min() < shares.max() <= 1


def test_a_share_depends_on_its_key_alone() -> None:
    mixup = Mixup(0.8, 2)
    shares = {float(mixup.share(*key)) for key in [(1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0)]}
    assert len(shares) == 4
    assert float(mixup.share(1, 2, 3)) in shares
