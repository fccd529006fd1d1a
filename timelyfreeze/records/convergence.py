"""Whether freezing gets to a loss sooner: kappa and p_eff of arXiv:2602.05754, Sec. 3.4, App. D.

A run with freezing needs about 1 / p_eff times the steps (Eq. 11), each of which takes kappa times
as long (Eq. 12). So it gets to a loss sooner where kappa / p_eff is below 1 (Eq. 13).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from timelyfreeze.settings import Phase

# Steps of a phase that are not counted: the first ones run cold.
SKIPPED_STEPS = 2
_FEWEST_SCATTERED = 3
UNFROZEN_PHASES = (Phase.WARMUP, Phase.UPPER_BOUND)


@dataclass(frozen=True)
class PassedEnergy:
    """Gradient energy of some tensors, and how much of it is let through."""

    passed: float  # sum of update probability times squared gradient, the numerator of Eq. 27
    total: float  # sum of squared gradients, its denominator
    is_complete: bool = True  # whether the energy of every tensor is known

    def __add__(self, other: PassedEnergy) -> PassedEnergy:
        """Return both together."""
        return PassedEnergy(
            self.passed + other.passed,
            self.total + other.total,
            self.is_complete and other.is_complete,
        )

    def keeping(self, captured: float) -> PassedEnergy:
        """Return the same where frozen tensors keep a part of theirs, in [0, 1]."""
        return replace(self, passed=self.passed + captured * (self.total - self.passed))

    @property
    def p_eff(self) -> float | None:
        """The effective update probability, Eq. 27; 1 without a gradient, None where unknown."""
        if not self.is_complete:
            return None
        return self.passed / self.total if self.total > 0.0 else 1.0


def passed_energy(update_frequency: ArrayLike, energy: ArrayLike) -> PassedEnergy:
    """Return what of the gradient energy of n tensors is let through.

    A mask covers whole tensors, so the sum over elements of Eq. 27 is one over tensors.

    Args:
        update_frequency: Mean update probability of each tensor over microbatches, shape [n].
        energy: Squared norm of its gradient, shape [n]; NaN where it is not known.
    """
    frequency, energies = np.asarray(update_frequency, float), np.asarray(energy, float)
    known = np.isfinite(energies)
    return PassedEnergy(
        float(frequency[known] @ energies[known]), float(energies[known].sum()), bool(known.all())
    )


def mean_p_eff(measured: Iterable[tuple[float, float]]) -> float | None:
    """Return the average effective update probability, Eq. 28; None if there was no energy.

    Args:
        measured: p_eff and total gradient energy of each moment it was measured at.
    """
    pairs = list(measured)
    total = sum(energy for _, energy in pairs)
    return sum(p * energy for p, energy in pairs) / total if total > 0.0 else None


def kappa_of_cap(max_freeze_ratio: float, frozen_ms: float, unfrozen_ms: float) -> float:
    """Return kappa as Eq. 50 estimates it from the cap alone, without a plan.

    It takes the batch to shrink in proportion to the cap, so it is no bound on what is planned: a
    plan freezes where the schedule waits, and may do better or worse.

    Args:
        max_freeze_ratio: The cap r_max, in [0, 1].
        frozen_ms: Batch with everything frozen, P_min, milliseconds.
        unfrozen_ms: Batch with nothing frozen, P_max, above 0.
    """
    return 1.0 - max_freeze_ratio + max_freeze_ratio * frozen_ms / unfrozen_ms


def kappa_over_p_eff(kappa: float | None, p_eff: float | None) -> float | None:
    """Return the ratio of times to accuracy, Eq. 13; None where nothing learns or is known."""
    return None if kappa is None or not p_eff else kappa / p_eff


def kappa_error(before_ms: Sequence[float], after_ms: Sequence[float]) -> float | None:
    """Return the standard error of a ratio of medians, ``after_ms`` over ``before_ms``.

    It follows from how far values lie from their median: for normal noise the standard deviation is
    1.4826 times the median of these distances, and the variance of a median pi / 2 times that of a
    mean. None for fewer than 3 values of either.
    """
    if min(len(before_ms), len(after_ms)) < _FEWEST_SCATTERED or min(before_ms) <= 0.0:
        return None
    before, after = (_median_error(values) for values in (before_ms, after_ms))
    ratio = statistics.median(after_ms) / statistics.median(before_ms)
    return ratio * math.hypot(before, after)


def _median_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of positive values, over the median."""
    median = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - median) for value in values)
    return deviation * math.sqrt(math.pi / 2.0 / len(values)) / median


class StepRatio:
    """Follows kappa: how long steps take, over how long they took with nothing frozen."""

    def __init__(self) -> None:
        self._by_phase: dict[Phase | None, list[float]] = {}
        self._n_taken: dict[Phase | None, int] = {}
        self._knows_unfrozen = False

    def begin_pipeline(self) -> None:
        """Compare steps to come, of another pipeline, with the unfrozen ones so far."""
        self._knows_unfrozen = any(self._by_phase.get(phase) for phase in UNFROZEN_PHASES)

    def add(self, phase: Phase | None, step_ms: float) -> None:
        """Take note of a finished step."""
        if self._knows_unfrozen and phase in UNFROZEN_PHASES:
            return
        self._by_phase.setdefault(phase, []).append(step_ms)

    def take(self, phase: Phase) -> float | None:
        """Return kappa over the warm steps of ``phase`` since the last call for it.

        Returns:
            Their median over that of all warm unfrozen steps so far; None if there is none of one
            of the two, as in a run that was resumed after monitoring.
        """
        steps = self._by_phase.get(phase, [])
        recent = steps[max(SKIPPED_STEPS, self._n_taken.get(phase, 0)) :]
        self._n_taken[phase] = len(steps)
        unfrozen = [ms for each in UNFROZEN_PHASES for ms in self._warm(each)]
        if not recent or not unfrozen:
            return None
        return statistics.median(recent) / statistics.median(unfrozen)

    def _warm(self, phase: Phase) -> Sequence[float]:
        return self._by_phase.get(phase, [])[SKIPPED_STEPS:]
