"""What a change meter should find: definitions applied to one element after the other, float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from timelyfreeze.policies.policy import Metric

EVERY = tuple(Metric)
DECAY = 0.75
THRESHOLD = 0.3
Metrics = dict[Metric, list[float]]


def oracle(
    changes: Sequence[Sequence[Tensor]], decay: float = DECAY, *, settles: bool = False
) -> list[Metrics]:
    """Metrics at each check K from Delta_K of every tensor, by the definitions in ``Metric``.

    With ``settles`` the means of an element that has settled stay, as ``Metric.SETTLED`` has it.
    """
    means = [[0.0] * change.numel() for change in changes[0]]
    means_abs = [[0.0] * change.numel() for change in changes[0]]
    before = [[0.0] * change.numel() for change in changes[0]]
    at_checks = []
    for check in changes:
        row: Metrics = {metric: [] for metric in Metric}
        for i, change in enumerate(check):
            delta = change.double().flatten().tolist()
            for k, d in enumerate(delta):
                e, a = means[i][k], means_abs[i][k]
                if settles and at_checks and abs(e) <= THRESHOLD * a:
                    continue
                means[i][k] = decay * e + (1.0 - decay) * d
                means_abs[i][k] = decay * a + (1.0 - decay) * abs(d)
            pairs = zip(means[i], means_abs[i], strict=True)
            row[Metric.SETTLED].append(sum(abs(e) <= THRESHOLD * a for e, a in pairs))
            moved = [d - b for d, b in zip(delta, before[i], strict=True)]
            row[Metric.SQUARE_SUM].append(math.fsum(d * d for d in delta))
            row[Metric.ABS_SUM].append(math.fsum(map(abs, delta)))
            row[Metric.SUM].append(math.fsum(delta))
            row[Metric.MEAN_ABS_SUM].append(math.fsum(map(abs, means[i])))
            row[Metric.DIFFERENCE_SQUARE_SUM].append(math.fsum(m * m for m in moved))
            before[i] = delta
        at_checks.append(row)
    return at_checks


def assert_close(got: Metrics, wanted: Metrics, rel: float = 2e-6) -> None:
    for metric in got:
        # A sum may cancel to any small number; it is as exact as its terms are.
        terms = wanted[Metric.ABS_SUM if metric is Metric.SUM else metric]
        for number, right, size in zip(got[metric], wanted[metric], terms, strict=True):
            assert abs(number - right) <= rel * size + 1e-12, metric
