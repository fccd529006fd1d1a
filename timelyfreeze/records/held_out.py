"""The held-out loss of each part of a validation, and the standard error of their mean.

A part is a microbatch of the validation. Two runs that validate on the same rows have the same
parts, so that their difference has an error of its own (:mod:`timelyfreeze.compare.runs.errors`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from timelyfreeze.files import AnyFloat, Count, Number, Table


@dataclass(frozen=True)
class HeldOutRow:
    """One part of a validation."""

    step: Count  # optimizer step after which the validation was made
    part: Count  # place of the part in the validation, from 0
    targets: Number  # target tokens of the part, or its pictures
    loss: AnyFloat  # mean loss over its targets


HELD_OUT = Table("held_out.csv", HeldOutRow)


def standard_error(rows: Sequence[HeldOutRow]) -> float | None:
    """Return the standard error of the mean loss over all targets; None of fewer than two parts.

    The mean is a ratio of two sums over parts. Its error, with weights w_i = targets of part i,
    W their sum, n parts: sqrt(n / (n - 1) * sum (w_i (loss_i - mean))^2) / W (Cochran, Sampling
    Techniques, 1977, section 6.4).
    """
    n, total = len(rows), sum(row.targets for row in rows)
    if n < 2:
        return None
    mean = math.fsum(row.targets * row.loss for row in rows) / total
    squares = math.fsum((row.targets * (row.loss - mean)) ** 2 for row in rows)
    return math.sqrt(n / (n - 1) * squares) / total
