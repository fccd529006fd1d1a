"""How often each tensor was frozen: ``frozen_counts.csv``, Fig. 14 of arXiv:2602.05754."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from timelyfreeze.files import Count, Number, Table


@dataclass(frozen=True)
class FrozenCount:
    """What became of one tensor since freezing began.

    Attributes:
        rank: Pipeline rank that holds it.
        stage: Stage that it belongs to.
        parameter: Its name in the model.
        elements: Number of its elements.
        backwards: Backwards that could have updated it, from the first step of the ramp on; from
            the first step after warm-up, where a policy decides alone.
        times_frozen: How many of them left it out.

    Raises:
        ValueError: If that is more than there were.
    """

    rank: Count
    stage: Count
    parameter: str
    elements: Number
    backwards: Count
    times_frozen: Count

    def __post_init__(self) -> None:
        """Refuse more than all."""
        if self.times_frozen > self.backwards:
            raise ValueError(
                f"times_frozen is {self.times_frozen}; it must not be above backwards "
                f"({self.backwards})"
            )

    @property
    def frequency(self) -> float:
        """Fraction of the backwards that left the tensor out; 0 where there was none."""
        return self.times_frozen / self.backwards if self.backwards else 0.0

    @property
    def never_updated(self) -> bool:
        """Whether no backward has reached it."""
        return self.backwards > 0 and self.times_frozen == self.backwards


COUNTS = Table("frozen_counts.csv", FrozenCount)


@dataclass(frozen=True)
class NeverUpdated:
    """How much of a model has not learned since freezing began.

    Attributes:
        tensors: Fraction of the tensors.
        elements: Fraction of the elements.
    """

    tensors: float
    elements: float


def never_updated(counts: Sequence[FrozenCount]) -> NeverUpdated | None:
    """Return which fraction of a model was never updated; None if freezing has not begun."""
    if not any(count.backwards for count in counts):
        return None
    still = [count for count in counts if count.never_updated]
    return NeverUpdated(
        len(still) / len(counts),
        sum(count.elements for count in still) / sum(count.elements for count in counts),
    )
