"""Losses and accuracies by hand."""

import math

import torch

from torchtitan.images.validation import Scores, scores_of

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
    assert (scores.top1, scores.top5, scores.pictures) == (1, 2, 4)
    scores = scores_of(LOGITS, torch.tensor([4, 1, 5, 6]))  # fifth, first, fifth, sixth
    assert (scores.top1, scores.top5, scores.pictures) == (1, 3, 4)


def test_of_few_classes_each_is_among_the_first_five() -> None:
    scores = scores_of(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([0, 0]))
    assert (scores.top1, scores.top5) == (1, 2)


def test_the_loss_is_a_sum_of_cross_entropies() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]])  # shares 1/4 and 3/4, 1/2 each
    scores = scores_of(logits, torch.tensor([0, 1]))
    assert math.isclose(scores.loss, math.log(4) + math.log(2), rel_tol=1e-6)


def test_scores_add_up() -> None:
    assert Scores(1.0, 2.0, 3.0, 4.0) + Scores(0.5, 1.0, 1.0, 2.0) == Scores(1.5, 3.0, 4.0, 6.0)
