"""What a change meter should find: definitions applied to one element after the other, float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from timelyfreeze.policies.policy import Figure

EVERY = tuple(Figure)
DECAY = 0.75
Figures = dict[Figure, list[float]]


def oracle(changes: Sequence[Sequence[Tensor]], decay: float = DECAY) -> list[Figures]:
    """Figures at each check K from Delta_K of every tensor, by the definitions in ``Figure``."""
    means = [[0.0] * change.numel() for change in changes[0]]
    before = [[0.0] * change.numel() for change in changes[0]]
    at_checks = []
    for check in changes:
        row: Figures = {figure: [] for figure in Figure}
        for i, change in enumerate(check):
            delta = change.double().flatten().tolist()
            means[i] = [decay * e + (1.0 - decay) * d for e, d in zip(means[i], delta, strict=True)]
            moved = [d - b for d, b in zip(delta, before[i], strict=True)]
            row[Figure.SQUARE_SUM].append(math.fsum(d * d for d in delta))
            row[Figure.ABS_SUM].append(math.fsum(map(abs, delta)))
            row[Figure.SUM].append(math.fsum(delta))
            row[Figure.MEAN_ABS_SUM].append(math.fsum(map(abs, means[i])))
            row[Figure.DIFFERENCE_SQUARE_SUM].append(math.fsum(m * m for m in moved))
            before[i] = delta
        at_checks.append(row)
    return at_checks


def assert_close(got: Figures, wanted: Figures, rel: float = 2e-6) -> None:
    for figure in got:
        # A sum may cancel to any small number; it is as exact as its terms are.
        terms = wanted[Figure.ABS_SUM if figure is Figure.SUM else figure]
        for number, right, size in zip(got[figure], wanted[figure], terms, strict=True):
            assert abs(number - right) <= rel * size + 1e-12, figure
