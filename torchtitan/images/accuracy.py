"""How often a class is among those that a model holds for likeliest."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional


class Scores(NamedTuple):
    """Sums over pictures.

    Attributes:
        loss: Of cross-entropies, without label smoothing.
        top1: How many have their class first.
        top5: How many have it among the first five.
        pictures: How many there are.
    """

    loss: float = 0.0
    top1: float = 0.0
    top5: float = 0.0
    pictures: float = 0.0

    def __add__(self, other: object) -> Scores:
        """Return the sums over both."""
        assert isinstance(other, Scores)
        return Scores(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def scores_of(logits: Tensor, labels: Tensor) -> Scores:
    """Return the scores of a batch; with fewer than six classes each is among the first five.

    Args:
        logits: [B, C].
        labels: int64 [B], in [0, C).
    """
    logits = logits.float()
    hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    loss = functional.cross_entropy(logits, labels, reduction="sum")
    return Scores(float(loss), float(hits[:, 0].sum()), float(hits.sum()), float(len(labels)))
