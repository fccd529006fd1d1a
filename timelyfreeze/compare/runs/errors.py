"""Standard errors of comparisons over the held-out parts that two runs share.

The parts (microbatches of the validation) are drawn again with replacement, the same ones for both
runs (paired bootstrap: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 6).
Each draw gives both curves of held-out losses anew, and a metric from them. The standard deviation
over draws is the metric's standard error. A metric that fewer than all draws have has none.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from timelyfreeze.records.held_out import HeldOutRow

# Of the standard error itself 3.5% are noise then (1 / sqrt(2 n)).
N_DRAWS = 400

Curve = Sequence[tuple[float, float]]  # seconds of training, held-out loss
Statistic = Callable[[Curve, Curve], float | str | None]


@dataclass(frozen=True)
class HeldOut:
    """The losses of all parts in each validation of a run."""

    seconds: tuple[float, ...]  # of training until each of the V validations
    targets: tuple[int, ...]  # of each of the P parts
    losses: tuple[tuple[float, ...], ...]  # [V, P], means over targets

    def curve(self, counts: np.ndarray) -> Curve:
        """Return the losses where part i was drawn ``counts[i]`` times, [P]."""
        weights = counts * np.array(self.targets)
        means = np.array(self.losses) @ weights / weights.sum()
        return list(zip(self.seconds, means.tolist(), strict=True))


def held_out(rows: Sequence[HeldOutRow], seconds: dict[int, float]) -> HeldOut | None:
    """Return what a run's table holds, by step; None without validations of equal parts."""
    by_step: dict[int, list[HeldOutRow]] = {}
    for row in rows:
        by_step.setdefault(row.step, []).append(row)
    parts = {tuple(row.targets for row in of_step) for of_step in by_step.values()}
    if len(parts) != 1 or not by_step.keys() <= seconds.keys():
        return None
    losses = tuple(tuple(row.loss for row in of_step) for of_step in by_step.values())
    return HeldOut(tuple(seconds[step] for step in by_step), parts.pop(), losses)


def paired_errors(
    own: HeldOut | None, nones: HeldOut | None, statistics_of: dict[str, Statistic]
) -> dict[str, float | None]:
    """Return the standard error of each statistic; nothing where the runs share no parts."""
    if own is None or nones is None or own.targets != nones.targets or len(own.targets) < 2:
        return {}
    n = len(own.targets)
    draws = np.random.default_rng(0).multinomial(n, [1 / n] * n, size=N_DRAWS)
    curves = [(own.curve(counts), nones.curve(counts)) for counts in draws]
    return {name: _deviation([of(*pair) for pair in curves]) for name, of in statistics_of.items()}


def _deviation(values: Sequence[float | str | None]) -> float | None:
    numbers = [value for value in values if isinstance(value, float)]
    return statistics.stdev(numbers) if len(numbers) == len(values) else None
