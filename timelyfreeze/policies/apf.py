"""APF: freeze tensors moving to and fro without progress.

Chen et al., "Communication-Efficient Federated Learning with Adaptive Parameter Freezing", 2021, as
arXiv:2602.05754 takes it up (Sec. 2.3, Eq. 2).

The effective perturbation of an element compares its distance with its path:

    score_K = |E_K| / E_K^abs,  E_K = alpha E_{K-1} + (1 - alpha) Delta_K,
                                E_K^abs = alpha E_{K-1}^abs + (1 - alpha) |Delta_K|

with Delta_K its update since the check before. 1 is a steady drift, 0 an oscillation.

**From elements to a tensor.** Here a tensor is frozen or not, because a backward without some
elements of a tensor takes as long as one with all of them. ``reduction`` combines the elements'
    scores:

- "elements": the sum of |E_K| over the elements divided by the sum of E_K^abs, the mean of their
    scores, weighted with E^abs. Busy elements count more, and cannot be outvoted by idle elements.
    The sum of E^abs obeys the recursion of its elements, so a number per tensor takes the place of
    a second vector as large as the model.
- "share": the share of elements with a score at or below the threshold, frozen one by one in the
    original, is the tensor's probability to be frozen until the next check. So in the mean just as
    many elements are frozen. The second vector is needed. A frozen element gets no updates, keeps
    its score and is frozen for good: here too, settled elements stay settled, and the share only
    grows.
- "sums": Eq. 2 with Delta_K summed over the tensor first, |E_K| of the sum over E_K^abs. Elements
  that drift in opposite directions cancel, so a tensor may count as stable although all its
  elements drift; in return no running mean of elements is needed, and scores are small.

**Thresholds do not carry over**, but from element by element to "share". Under updates of pure
noise a single element's score scatters, so some are always below a small threshold; "elements" is
    their *mean*, and falls with the number of checks to sqrt((1 - alpha) / (1 + alpha)): 0.23 for
alpha = 0.9, 0.071 for 0.99. A lower threshold asks for updates undoing each other, more than no
    direction; the default is just above.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray

from timelyfreeze.files import Fraction, OneOf, Within
from timelyfreeze.policies.policy import (
    Check,
    Decision,
    FreezePolicy,
    Measurement,
    Metric,
    Source,
    register_policy,
)
from timelyfreeze.settings import AtLeast1, key

UNTIL_UNSTABLE = "until_unstable"
GROW_AND_HALVE = "grow_and_halve"
ELEMENTS = "elements"
SHARE = "share"
SUMS = "sums"


@register_policy("apf")
@dataclass(frozen=True)
class Apf(FreezePolicy):
    """Freeze tensors with a small effective perturbation, anywhere in the model.

    The original decides element by element, with alpha = 0.99 and a threshold of 0.05. Table 3 of
    arXiv:2602.05754 has thresholds of 0.01 (1B), 0.0001 (8B and 13B) and 0.005 (vision models), as
    for single elements: ``reduction = "share"``.
    """

    check_interval: AtLeast1 = 10
    """Steps from one check to the next."""

    threshold: Fraction = 0.25
    """T_APF: a tensor whose score is below it is frozen, in [0, 1]. With reduction "elements" the
    score of updates without any direction is sqrt((1 - alpha) / (1 + alpha)) after many checks,
    more after few."""

    alpha: Annotated[float, Within(0.0, 1.0, below=True)] = 0.9
    """Decay of the running means, in [0, 1). They remember about 1 / (1 - alpha) checks."""

    reduction: Annotated[str, OneOf(ELEMENTS, SHARE, SUMS)] = ELEMENTS
    """How a tensor is scored: "elements" (mean of its elements' scores, weighted by how far they
    went), "share" (frozen with the probability that is the share of its elements below the
    threshold; for thresholds like 0.01 or 0.0001) or "sums" (score of the tensor's summed
    update)."""

    freezing_period: Annotated[str, OneOf(UNTIL_UNSTABLE, GROW_AND_HALVE)] = UNTIL_UNSTABLE
    """How long a stable tensor stays frozen. "until_unstable": as long as its score is below the
    threshold; a tensor that gets no updates at all keeps its score, and so stays frozen.
    "grow_and_halve" (the original): for a number of checks that grows by one each time it is found
    stable and is halved when it is not; then it is trained for one interval and judged again."""

    @property
    def measurement(self) -> Measurement:
        """Sums over Delta_K, the weights' updates, and over its running mean if used."""
        if self.reduction == SUMS:
            return Measurement(Source.UPDATES, (Metric.ABS_SUM, Metric.SUM))
        if self.reduction == SHARE:
            return Measurement(Source.UPDATES, (Metric.SETTLED,), self.alpha, self.threshold)
        metrics = (Metric.ABS_SUM, Metric.MEAN_ABS_SUM)
        return Measurement(Source.UPDATES, metrics, decay=self.alpha)

    def errors(self) -> Iterator[str]:
        """Yield errors of the settings."""
        yield from super().errors()
        if self.reduction == SHARE and self.freezing_period == GROW_AND_HALVE:
            yield (
                f"{key('apf.freezing_period')} is {GROW_AND_HALVE!r}, and "
                f"{key('apf.reduction')} is {SHARE!r}, whose elements stay settled; set it to "
                f"{UNTIL_UNSTABLE!r}"
            )

    def start(self, check: Check) -> Decision:
        """Freeze nothing before there is a score."""
        nothing = np.zeros(len(check.layout.names), dtype=np.bool_)
        return Decision(nothing, metrics={"frozen_tensors": 0})

    def decide(self, before: Decision, check: Check) -> Decision:
        """Freeze stable tensors, for the length of their period."""
        memory: dict[str, list[float] | list[int]] = {}
        if self.reduction == SHARE:
            settled, sizes = check.metrics[Metric.SETTLED], check.layout.sizes
            # Nothing but seed and check, so that all ranks and a resumed run draw the same.
            dice = np.random.default_rng((check.seed, check.number)).random(len(sizes))
            stable = dice < settled / sizes
            metrics = {"settled_share": float(settled.sum() / sizes.sum())}
        else:
            scores, memory = self._scores(before, check)
            stable = scores < self.threshold
            metrics = {
                "smallest_score": float(scores.min()),
                "median_score": float(np.median(scores)),
            }
        frozen = stable
        if self.freezing_period == GROW_AND_HALVE:
            periods, left = _next_periods(
                stable,
                np.array(before.memory.get("periods", 0), dtype=np.int64),
                np.array(before.memory.get("checks_left", 0), dtype=np.int64),
            )
            memory |= {"periods": periods.tolist(), "checks_left": left.tolist()}
            frozen = left > 0
        return Decision(frozen, memory, {"frozen_tensors": int(frozen.sum()), **metrics})

    def _scores(
        self, before: Decision, check: Check
    ) -> tuple[NDArray[np.float64], dict[str, list[float] | list[int]]]:
        """Return the scores of tensors, and the running means to remember."""
        abs_means = self._mean(before.memory.get("abs_means", 0.0), check.metrics[Metric.ABS_SUM])
        if self.reduction == ELEMENTS:
            scores = _ratios(check.metrics[Metric.MEAN_ABS_SUM], abs_means)
            return scores, {"abs_means": abs_means.tolist()}
        means = self._mean(before.memory.get("means", 0.0), check.metrics[Metric.SUM])
        memory = {"abs_means": abs_means.tolist(), "means": means.tolist()}
        return _ratios(np.abs(means), abs_means), memory

    def _mean(self, mean: ArrayLike, value: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.alpha * np.array(mean, dtype=np.float64) + (1.0 - self.alpha) * value


def _ratios(way: NDArray[np.float64], path: NDArray[np.float64]) -> NDArray[np.float64]:
    """Divide the tensors' distance by their path; 0 for tensors at rest."""
    return np.divide(way, path, out=np.zeros_like(path), where=path != 0.0)


def _next_periods(
    stable: NDArray[np.bool_], periods: NDArray[np.int64], left: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengthen or halve the periods of live tensors; let the periods of frozen ones run on.

    As in the original, a tensor found unstable is frozen too, for the halved period: after as many
    unstable checks as its period has binary digits, the tensor is trained at every check again.
    ``periods``: checks of the last freezing; ``left``: checks still to come, 0 for live tensors;
    shape [n] all.
    """
    judged = left == 0
    periods = np.where(judged, np.where(stable, periods + 1, periods // 2), periods)
    return periods, np.where(judged, periods, left - 1)
