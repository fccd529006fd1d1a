"""Losses and accuracies by hand."""

import math

import torch

from torchtitan.images.validation import scores_of

LOGITS = torch.tensor(
    [
        [9.0, 5, 4, 3, 2, 1, 0],
        [5.0, 9, 4, 3, 2, 1, 0],
        [1.0, 9, 5, 4, 3, 2, 0],
        [0.0, 9, 5, 4, 3, 2, 1],
    ]
)


def test_top_1_and_top_5_count_places() -> None:
    """Class 0 comes first, second, sixth and last."""
    scores = scores_of(LOGITS, torch.zeros(4, dtype=torch.int64))
    assert scores[1:].tolist() == [1, 2, 4]
    scores = scores_of(LOGITS, torch.tensor([4, 1, 5, 6]))  # fifth, first, fifth, sixth
    assert scores[1:].tolist() == [1, 3, 4]


def test_of_few_classes_each_is_among_the_first_five() -> None:
    scores = scores_of(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([0, 0]))
    assert scores[1:3].tolist() == [1, 2]


def test_the_loss_is_a_sum_of_cross_entropies() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])  # shares 1/4 and 3/4, 1/2 each
    scores = scores_of(logits, torch.tensor([0, 1]))
    assert math.isclose(scores[0], math.log(4) + math.log(2), rel_tol=1e-6)
