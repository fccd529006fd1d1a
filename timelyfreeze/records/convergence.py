"""Whether freezing gets to a loss sooner: kappa and p_eff of arXiv:2602.05754, Sec. 3.4, App. D.

A run with freezing needs about 1 / p_eff times the steps (Eq. 11) of kappa times the length (Eq.
12), and gets to a loss sooner where kappa / p_eff is below 1 (Eq. 13).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import numpy as np
from numpy.typing import ArrayLike

from timelyfreeze.settings import Phase

# Steps of a phase that are not counted: the first ones run cold.
SKIPPED_STEPS = 2
_FEWEST_SCATTERED = 3
# Steps on each side of a control step that it is compared with.
_BESIDE = 5
# Control steps that kappa is taken from while a run goes on.
_RECENT = 3
UNFROZEN_PHASES = (Phase.WARMUP, Phase.UPPER_BOUND)


@dataclass(frozen=True)
class PassedEnergy:
    """Gradient energy of some tensors, and the passed part."""

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
    """Return the passed part of the gradient energy of n tensors.

    A mask covers whole tensors, so the sum over elements of Eq. 27 becomes a sum over tensors. Both
    are of shape [n]: mean update probabilities over microbatches, and squared norms, NaN where
    unknown.
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
    """Return kappa by Eq. 50, from the cap r_max and two times of a batch.

    The batch is taken to shrink in proportion to the cap. A plan freezes where the schedule waits,
    and may do better or worse.
    """
    return 1.0 - max_freeze_ratio + max_freeze_ratio * frozen_ms / unfrozen_ms


def kappa_over_p_eff(kappa: float | None, p_eff: float | None) -> float | None:
    """Return the ratio of times to accuracy, Eq. 13; None where nothing learns or is known."""
    return None if kappa is None or not p_eff else kappa / p_eff


def kappa_error(before_ms: Sequence[float], after_ms: Sequence[float]) -> float | None:
    """Return the standard error of a ratio of medians, ``after_ms`` over ``before_ms``.

    None for fewer than 3 values of either.
    """
    if min(len(before_ms), len(after_ms)) < _FEWEST_SCATTERED or min(before_ms) <= 0.0:
        return None
    medians = [statistics.median(values) for values in (before_ms, after_ms)]
    errors = [error_of_median(before_ms) / medians[0], error_of_median(after_ms) / medians[1]]
    return medians[1] / medians[0] * math.hypot(*errors)


def error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of a median, from the values' distances to the median.

    For normal noise the standard deviation is 1.4826 times the median of these distances, and the
    variance of a median pi / 2 times a mean's.
    """
    median = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - median) for value in values)
    return deviation * math.sqrt(math.pi / 2.0 / len(values))


@dataclass(frozen=True, slots=True)  # there are as many as a run has steps
class TimedStep:
    """A finished optimizer step."""

    phase: Phase | None  # None without freezing
    ms: float
    n_tokens: float = 0.0
    turning_ms: float = 0.0  # of these, what subspaces took, which a run without freezing has not

    @property
    def plain_ms(self) -> float:
        """Time of the step without freezing, if nothing was frozen."""
        return self.ms - self.turning_ms if self.phase in UNFROZEN_PHASES else self.ms


class StepLog:
    """Durations of steps, by pipeline; the first steps of a phase run cold.

    A run's control steps, compared with nearby frozen steps, give kappa at any speed of the
    machine. Without them, unfrozen steps come from the first pipeline with any, others from the
    last.
    """

    def __init__(self) -> None:
        self._pipelines: list[list[TimedStep]] = [[]]
        self._controls: list[int] = []  # places of control steps in the last one
        self._n_taken: dict[Phase, int] = {}
        self._n_steps, self._n_tokens = 0, 0.0

    def begin_pipeline(self) -> None:
        """Begin another pipeline."""
        self._pipelines.append([])
        self._controls = []

    def add(self, step: TimedStep) -> None:
        """Take note of a finished step."""
        if step.phase is Phase.CONTROL:
            self._controls.append(len(self._pipelines[-1]))
        self._pipelines[-1].append(step)
        self._n_steps += 1
        self._n_tokens += step.n_tokens

    def unfrozen(self, *phases: Phase) -> list[TimedStep]:
        """Return the warm steps with nothing frozen: control steps, or those of some phases.

        Without ``phases``, of all phases without freezing.
        """
        if self.is_paired:
            return self._of(self._pipelines[-1], Phase.CONTROL)
        before = self._with_unfrozen
        return [s for p in phases or UNFROZEN_PHASES for s in self._of(before, p)[SKIPPED_STEPS:]]

    def last(self, phase: Phase | None) -> list[TimedStep]:
        """Return the warm steps of a phase in the last pipeline."""
        return self._of(self._pipelines[-1], phase)[SKIPPED_STEPS:]

    @property
    def is_paired(self) -> bool:
        """Whether there are control steps for a measured gain."""
        return bool(self.paired_kappas(1))

    def paired_kappas(self, latest: int = 0) -> list[float]:
        """Return kappa at each control step: the nearby frozen steps' median over its time.

        Of the ``latest`` control steps of the last pipeline, of all if 0. Nearby are at most 5
        steps on either side.
        """
        steps, found = self._pipelines[-1], []
        for i in self._controls[-latest:]:
            sides = reversed(steps[max(0, i - _BESIDE) : i]), steps[i + 1 : i + 1 + _BESIDE]
            frozen = [step.ms for side in sides for step in takewhile(_is_stable, side)]
            if frozen and steps[i].ms > 0.0:
                found.append(statistics.median(frozen) / steps[i].ms)
        return found

    def kappa_since(self, phase: Phase) -> float | None:
        """Return kappa of ``phase`` by the last control steps, if any.

        Else over its warm steps since the last call, if known.
        """
        if phase is Phase.STABLE and (paired := self.paired_kappas(_RECENT)):
            return statistics.median(paired)
        counted = [self._with_unfrozen] if phase in UNFROZEN_PHASES else self._pipelines
        steps = [step for pipeline in counted for step in self._of(pipeline, phase)]
        recent = steps[max(SKIPPED_STEPS, self._n_taken.get(phase, 0)) :]
        self._n_taken[phase] = len(steps)
        after_ms, before_ms = median_ms(recent), median_ms(self.unfrozen())
        return None if after_ms is None or before_ms is None else after_ms / before_ms

    def summed_up(self, *, freezes: bool, n_devices: int = 1) -> dict[str, float | None]:
        """Return a summary's fields on steps; uneven padding is no speed, so mean tokens count.

        By control steps, an unfrozen step is a frozen step's time without freezing.
        """
        before_ms, after_ms = median_ms(self.unfrozen()), median_ms(self.frozen(freezes=freezes))
        if self.is_paired and after_ms is not None:
            before_ms = after_ms / statistics.median(self.paired_kappas())

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
            "step_ms_adapters": median_ms(
                self._of(self._pipelines[0], Phase.ADAPTERS)[SKIPPED_STEPS:]
            ),
        }

    def frozen(self, *, freezes: bool) -> list[TimedStep]:
        """Return the warm steps of the stable phase; of a run without phases, all."""
        return self.last(Phase.STABLE if freezes else None)

    def kappa_error(self) -> float | None:
        """Return the standard error of kappa, from how pairs scatter, or else steps."""
        if paired := self.paired_kappas():
            return error_of_median(paired) if len(paired) >= _FEWEST_SCATTERED else None
        before, after = self.unfrozen(), self.last(Phase.STABLE)
        return kappa_error([step.plain_ms for step in before], [step.ms for step in after])

    def medians_ms(self) -> list[float | None]:
        """Return the median step of each pipeline, without first steps."""
        return [median_ms(steps[SKIPPED_STEPS:]) for steps in self._pipelines]

    @property
    def _with_unfrozen(self) -> list[TimedStep]:
        """The first pipeline with unfrozen steps."""
        return next((p for p in self._pipelines if any(map(_is_unfrozen, p))), [])

    @staticmethod
    def _of(pipeline: Sequence[TimedStep], phase: Phase | None) -> list[TimedStep]:
        return [step for step in pipeline if step.phase is phase]


def _is_stable(step: TimedStep) -> bool:
    return step.phase is Phase.STABLE


def _is_unfrozen(step: TimedStep) -> bool:
    return step.phase in UNFROZEN_PHASES


def median_ms(steps: Sequence[TimedStep]) -> float | None:
    """Return the median time of steps, without turns where none is frozen; None without steps."""
    return statistics.median(step.plain_ms for step in steps) if steps else None
