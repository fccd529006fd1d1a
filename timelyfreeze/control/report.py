"""Results of freezing so far, in a few numbers and in words."""

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from timelyfreeze.control.collected import CollectedMetrics
from timelyfreeze.control.controller import FreezeController
from timelyfreeze.front.caching import CacheUse
from timelyfreeze.settings import Phase
from timelyfreeze.timing import within

# Of each phase as many of the last batches count.
_KEPT = 256


@dataclass(frozen=True)
class FreezeReport:
    """Measurements and plan of a run up to now, the same on every rank."""

    step: int  # the last step that was begun
    phase: Phase  # its phase
    # median time of the last batches of each phase that has been measured
    batch_ms: Mapping[Phase, float]
    unfrozen_batch_ms: float | None  # what the plan predicts without freezing; None without a plan
    planned_batch_ms: float | None  # what it predicts with its ratios
    # what it predicts with everything frozen: the upper bound of the gain
    frozen_batch_ms: float | None
    planned_ratios: Mapping[int, float]  # mean planned freeze ratio of each stage's backwards
    # mean frozen fraction of each stage's backwards, in the last step collected
    applied_ratios: Mapping[int, float]
    average_freeze_ratio: float  # mean frozen fraction since the run began
    without: str | None  # why nothing is frozen by a plan, where that is so
    # median time of the last batches of the stable phase at the speed that the machine had when the
    # plan's actions were timed, by their forwards; None without such batches
    stable_as_timed_ms: float | None = None
    # what the run had of the cache of a frozen front; None without one
    cache: CacheUse | None = None
    # 9 of 10 batches take between 1 / this and this times a prediction; None where too few batches
    # were timed, or without a plan
    interval_factor: float | None = None
    predicts_for: str | None = None  # what ranks predictions are for, in words; None without a plan

    @property
    def measured_unfrozen_ms(self) -> float | None:
        """Median time of a batch without freezing; None if not measured."""
        best_first = (Phase.CONTROL, Phase.UPPER_BOUND, Phase.WARMUP)
        return next((self.batch_ms[p] for p in best_first if p in self.batch_ms), None)

    @property
    def measured_frozen_ms(self) -> float | None:
        """Median time of a batch of the stable phase; None before."""
        return self.batch_ms.get(Phase.STABLE)

    def __str__(self) -> str:
        """Return the report as text, a line per subject."""
        lines = [f"TimelyFreeze, step {self.step}, phase {self.phase.value}"]
        lines.append(
            f"batch measured   {_ms(self.measured_unfrozen_ms)} without freezing, "
            f"{_ms(self.measured_frozen_ms)} with{self._gain()}"
        )
        if self.planned_batch_ms is not None:
            lines.append(
                f"batch predicted  {_ms(self.unfrozen_batch_ms)} without freezing, "
                f"{_ms(self.planned_batch_ms)} with; {_ms(self.frozen_batch_ms)} with everything "
                "frozen"
            )
            lines += self._error(self.planned_batch_ms)
            lines.append(f"it holds for     {self.predicts_for}; {within(self.interval_factor)}")
            lines.append(f"planned ratios   {_ratios(self.planned_ratios)}")
        if self.applied_ratios:
            lines.append(f"applied ratios   {_ratios(self.applied_ratios)}")
        measuring = "" if self.planned_batch_ms is None else ", steps that measure included"
        lines.append(
            f"average ratio    {self.average_freeze_ratio:.2f} since the run began{measuring}"
        )
        if (cache := self.cache) is not None:
            saved = "" if cache.saved_ms is None else f", about {cache.saved_ms:,.0f} ms saved"
            lines.append(
                f"activation cache {cache.entered} of {cache.batches} batches began behind the "
                f"frozen front; {cache.spent_ms:,.0f} ms spent{saved}"
            )
        if self.without is not None:
            lines.append(f"nothing is frozen by a plan: {self.without}")
        return "\n".join(lines)

    def _error(self, planned_ms: float) -> list[str]:
        measured_ms, as_timed_ms = self.measured_frozen_ms, self.stable_as_timed_ms
        if measured_ms is None or as_timed_ms is None:
            return []
        return [
            f"it missed by     {measured_ms / planned_ms - 1.0:+.1%}; "
            f"{as_timed_ms / planned_ms - 1.0:+.1%} "
            "at the speed of the machine when actions were timed"
        ]

    def _gain(self) -> str:
        before, after = self.measured_unfrozen_ms, self.measured_frozen_ms
        if before is None or after is None or after <= 0.0:
            return ""
        return f" ({100 * (before / after - 1.0):+.1f}% throughput)"


class Reporter:
    """Collects the data of a report, before they become too many."""

    def __init__(self, controller: FreezeController) -> None:
        self._controller = controller
        self._batch_ms: dict[Phase, deque[float]] = {}
        self._as_timed_ms: deque[float] = deque(maxlen=_KEPT)

    def collect(self) -> CollectedMetrics:
        """Exchange measurements since the last time; a collective call of all ranks."""
        metrics = self._controller.collect()
        for phase, times_ms in metrics.batch_ms.items():
            self._batch_ms.setdefault(phase, deque(maxlen=_KEPT)).extend(times_ms)
        if metrics.drift:
            stable_ms = metrics.batch_ms.get(Phase.STABLE, ())
            self._as_timed_ms.extend(time_ms / metrics.drift for time_ms in stable_ms)
        return metrics

    def report(self, step: int) -> FreezeReport:
        """Return the report after the last begun step; a collective call of all ranks."""
        controller, metrics = self._controller, self.collect()
        plan, bounds = controller.plan, controller.active_plan.bounds
        return FreezeReport(
            step=step,
            phase=controller.step.phase,
            batch_ms={
                phase: statistics.median(times_ms)
                for phase, times_ms in self._batch_ms.items()
                if times_ms
            },
            unfrozen_batch_ms=None if plan is None else plan.unfrozen_batch_ms,
            planned_batch_ms=None if plan is None else plan.batch_ms,
            frozen_batch_ms=None if plan is None else plan.frozen_batch_ms,
            planned_ratios={} if plan is None else plan.stage_mean_ratios(),
            applied_ratios=metrics.applied_stage_ratios,
            average_freeze_ratio=metrics.average_freeze_ratio,
            without=controller.planner.unplanned(controller.step),
            stable_as_timed_ms=statistics.median(self._as_timed_ms) if self._as_timed_ms else None,
            cache=metrics.cache,
            interval_factor=None if bounds is None else bounds.interval_factor,
            predicts_for=None if plan is None else controller.active_plan.predicts_for,
        )


def _ms(time_ms: float | None) -> str:
    return "not measured" if time_ms is None else f"{time_ms:.1f} ms"


def _ratios(ratios: Mapping[int, float]) -> str:
    return " ".join(f"{stage}:{ratio:.2f}" for stage, ratio in ratios.items())
