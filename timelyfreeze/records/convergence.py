"""Whether freezing gets to a loss sooner: kappa and p_eff of arXiv:2602.05754, Sec. 3.4, App. D.

A run with freezing needs about 1 / p_eff times the steps (Eq. 11), each of which takes kappa times
as long (Eq. 12). So it gets to a loss sooner where kappa / p_eff is below 1 (Eq. 13).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

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
        is_complete = self.is_complete and other.is_complete
        return PassedEnergy(self.passed + other.passed, self.total + other.total, is_complete)

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

    A mask covers whole tensors, so the sum over elements of Eq. 27 is one over tensors. Both are of
    shape [n]: mean update probabilities over microbatches, and squared norms, NaN where unknown.
    """
    frequency, energies = np.asarray(update_frequency, float), np.asarray(energy, float)
    known = np.isfinite(energies)
    return PassedEnergy(
        float(frequency[known] @ energies[known]), float(energies[known].sum()), bool(known.all())
    )


def mean_p_eff(measured: Iterable[tuple[float, float]]) -> float | None:
    """Return the mean over pairs of p_eff and energy, Eq. 28; None if there was no energy."""
    pairs = list(measured)
    total = sum(energy for _, energy in pairs)
    return sum(p * energy for p, energy in pairs) / total if total > 0.0 else None


def kappa_of_cap(max_freeze_ratio: float, frozen_ms: float, unfrozen_ms: float) -> float:
    """Return kappa as Eq. 50 estimates it from the cap r_max alone, and two times of a batch.

    It takes the batch to shrink in proportion to the cap, so it is no bound on what is planned: a
    plan freezes where the schedule waits, and may do better or worse.
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
    medians, errors = [], []  # errors over the median
    for values in (before_ms, after_ms):
        medians.append(statistics.median(values))
        deviation = 1.4826 * statistics.median(abs(value - medians[-1]) for value in values)
        errors.append(deviation * math.sqrt(math.pi / 2.0 / len(values)) / medians[-1])
    return medians[1] / medians[0] * math.hypot(*errors)


@dataclass(frozen=True, slots=True)  # there are as many as a run has steps
class TimedStep:
    """A finished optimizer step."""

    phase: Phase | None  # None without freezing
    ms: float
    n_tokens: float = 0.0
    turning_ms: float = 0.0  # of these, what subspaces took, which a run without freezing has not

    @property
    def plain_ms(self) -> float:
        """What the step would have taken without freezing, if it froze nothing."""
        return self.ms - self.turning_ms if self.phase in UNFROZEN_PHASES else self.ms


class StepLog:
    """How long steps took, by pipeline and phase; the first ones of a phase run cold.

    Unfrozen steps are those of the first pipeline that had any, others those of the last.
    """

    def __init__(self) -> None:
        self._pipelines: list[dict[Phase | None, list[TimedStep]]] = [{}]
        self._n_taken: dict[Phase, int] = {}
        self._n_steps, self._n_tokens = 0, 0.0

    def begin_pipeline(self) -> None:
        """Begin another pipeline than the one so far."""
        self._pipelines.append({})

    def add(self, step: TimedStep) -> None:
        """Take note of a finished step."""
        self._pipelines[-1].setdefault(step.phase, []).append(step)
        self._n_steps += 1
        self._n_tokens += step.n_tokens

    def unfrozen(self, *phases: Phase) -> list[TimedStep]:
        """Return the warm steps with nothing frozen, of all phases if none is given."""
        return _warm(self._with_unfrozen, phases or UNFROZEN_PHASES)

    def last(self, phase: Phase | None) -> list[TimedStep]:
        """Return the warm steps of a phase in the last pipeline."""
        return _warm(self._pipelines[-1], (phase,))

    def kappa_since(self, phase: Phase) -> float | None:
        """Return kappa over the warm steps of ``phase`` since the last call, if it is known."""
        counted = [self._with_unfrozen] if phase in UNFROZEN_PHASES else self._pipelines
        steps = [step for pipeline in counted for step in pipeline.get(phase, [])]
        recent = steps[max(SKIPPED_STEPS, self._n_taken.get(phase, 0)) :]
        self._n_taken[phase] = len(steps)
        after_ms, before_ms = median_ms(recent), median_ms(self.unfrozen())
        return None if after_ms is None or before_ms is None else after_ms / before_ms

    def summed_up(self, *, freezes: bool, n_devices: int = 1) -> dict[str, float | None]:
        """Return a summary's fields on steps; uneven padding is no speed, so mean tokens count."""
        before_ms, after_ms = median_ms(self.unfrozen()), median_ms(self.frozen(freezes=freezes))

        def speed(step_ms: float | None) -> float | None:
            if step_ms is None:
                return None
            return 1e3 * self._n_tokens / self._n_steps / step_ms / n_devices

        return {
            "tokens_per_second_unfrozen": speed(before_ms),
            "tokens_per_second": speed(after_ms),
            "step_ms_unfrozen": before_ms,
            "step_ms": after_ms,
            "step_ms_off": median_ms(self.last(Phase.OFF)),
        }

    def frozen(self, *, freezes: bool) -> list[TimedStep]:
        """Return the warm steps of the stable phase; of a run without phases, all."""
        return self.last(Phase.STABLE if freezes else None)

    def kappa_error(self) -> float | None:
        """Return the standard error of kappa, as :func:`kappa_error` has it."""
        before, after = self.unfrozen(), self.last(Phase.STABLE)
        return kappa_error([step.plain_ms for step in before], [step.ms for step in after])

    def medians_ms(self) -> list[float | None]:
        """Return the median step of each pipeline, without its first ones."""
        every = ([*chain(*pipeline.values())] for pipeline in self._pipelines)
        return [median_ms(steps[SKIPPED_STEPS:]) for steps in every]

    @property
    def _with_unfrozen(self) -> dict[Phase | None, list[TimedStep]]:
        """The first pipeline that had unfrozen steps."""
        return next((p for p in self._pipelines if not p.keys().isdisjoint(UNFROZEN_PHASES)), {})


def _warm(
    pipeline: Mapping[Phase | None, list[TimedStep]], phases: Iterable[Phase | None]
) -> list[TimedStep]:
    return [step for phase in phases for step in pipeline.get(phase, [])[SKIPPED_STEPS:]]


def median_ms(steps: Sequence[TimedStep]) -> float | None:
    """Return the median time of steps, without turns where none is frozen; None without steps."""
    return statistics.median(step.plain_ms for step in steps) if steps else None
