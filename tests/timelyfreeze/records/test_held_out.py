"""The standard error of a held-out loss, against formulas of samples."""

import itertools
import statistics
from collections.abc import Sequence

import pytest

from timelyfreeze.records.held_out import HeldOutRow, standard_error


def rows(losses: Sequence[float], targets: Sequence[int]) -> list[HeldOutRow]:
    return [HeldOutRow(4, i, *of) for i, of in enumerate(zip(targets, losses, strict=True))]


def test_parts_of_one_size_have_the_standard_error_of_a_mean() -> None:
    losses = [1.5, 2.25, 0.75, 3.0, 1.0]
    want = statistics.stdev(losses) / len(losses) ** 0.5
    assert standard_error(rows(losses, [7] * 5)) == pytest.approx(want)


def test_parts_of_unequal_sizes_count_by_their_targets() -> None:
    """The spread of the mean over all samples of 6 of the parts, which tells of large samples."""
    losses, targets = [1.0, 1.25, 1.5, 0.75, 1.75, 1.0], [30, 30, 30, 45, 40, 30]
    means = []
    for drawn in itertools.product(range(6), repeat=6):
        total = sum(targets[i] for i in drawn)
        means.append(sum(targets[i] * losses[i] for i in drawn) / total)
    found = standard_error(rows(losses, targets))
    # Samples drawn with replacement spread by sqrt((n - 1) / n) of it.
    assert found == pytest.approx(statistics.pstdev(means) * (6 / 5) ** 0.5, rel=0.05)
    alike = standard_error(rows(losses, [37] * 6))
    assert abs(found - alike) > 0.05 * alike, "or the sizes could be left out"


def test_one_part_has_no_error() -> None:
    assert standard_error(rows([1.0], [5])) is None
    assert standard_error([]) is None
