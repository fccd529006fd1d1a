"""How often each tensor was frozen: ``frozen_counts.csv``, Fig. 14 of arXiv:2602.05754."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from timelyfreeze.files import MOST, Rules, read_table, write_table

COUNTS_FILE = "frozen_counts.csv"
_RULES: Rules = {
    "rank": (0, MOST),
    "stage": (0, MOST),
    "elements": (1, MOST),
    "backwards": (0, MOST),
    "times_frozen": (0, MOST),
}


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
    """

    rank: int
    stage: int
    parameter: str
    elements: int
    backwards: int
    times_frozen: int

    @property
    def frequency(self) -> float:
        """Fraction of the backwards that left the tensor out; 0 where there was none."""
        return self.times_frozen / self.backwards if self.backwards else 0.0

    @property
    def never_updated(self) -> bool:
        """Whether no backward has reached it."""
        return self.backwards > 0 and self.times_frozen == self.backwards


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


def write_counts(run_folder: Path, counts: Iterable[FrozenCount]) -> None:
    """Write the counts of a run."""
    write_table(run_folder / COUNTS_FILE, FrozenCount, counts)


def read_counts(run_folder: Path) -> list[FrozenCount]:
    """Read the counts of a run.

    Raises:
        OSError: If there are none.
        ValueError: If the file cannot be understood.
    """
    path = run_folder / COUNTS_FILE
    counts = read_table(path, FrozenCount, _RULES)
    for line, count in enumerate(counts, start=2):
        if count.times_frozen > count.backwards:
            raise ValueError(
                f"{path}, line {line}: times_frozen is {count.times_frozen}; it must not be above "
                f"backwards ({count.backwards})"
            )
    return counts
