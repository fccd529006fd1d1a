"""Phases of a run: which step measures, which step freezes, and how much of the plan applies.

Implements arXiv:2602.05754, Sec. 3.1, Eq. 9 and Algorithm 1, pure in the optimizer step t, which
counts from 1. The boundaries are T_w, T_m and T_f: the last step of warm-up, of monitoring and of
the ramp.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What a step is for; the phases follow each other in this order."""

    WARMUP = "warmup"
    UPPER_BOUND = "upper_bound"
    LOWER_BOUND = "lower_bound"
    RAMP = "ramp"
    STABLE = "stable"


@dataclass(frozen=True)
class PhaseSchedule:
    """The three boundaries of a run, and the step that divides monitoring.

    Algorithm 1 prints the dividing step as T_m / 2, which with the boundaries of the paper's own
    Table 3 would come before the end of warm-up. Here it is halfway between T_w and T_m, rounded
    down, so that each half has at least one step.

    Where nothing is measured and no plan is made, the three are equal (:meth:`unplanned`): warm-up
    is followed by the stable phase.

    Attributes:
        last_warmup_step: T_w >= 0. Up to here nothing is measured or frozen.
        last_monitor_step: T_m >= T_w + 2. Until the halfway step nothing is frozen (upper bound),
            afterwards everything is (lower bound). The plan is made at the end of this step.
        last_ramp_step: T_f > T_m, because Eq. 9 divides by T_f - T_m. From here on the plan
            applies in full.

    Raises:
        ValueError: If a boundary breaks its rule.
    """

    last_warmup_step: int
    last_monitor_step: int
    last_ramp_step: int

    def __post_init__(self) -> None:
        """Refuse boundaries that leave a phase without steps."""
        if self.last_warmup_step < 0:
            raise ValueError(
                f"freezing.last_warmup_step is {self.last_warmup_step}; it must not be negative"
            )
        if not self.measures and self.last_ramp_step == self.last_monitor_step:
            return
        if self.last_monitor_step < self.last_warmup_step + 2:
            raise ValueError(
                f"freezing.last_monitor_step is {self.last_monitor_step}; it must be at least 2 "
                f"above freezing.last_warmup_step ({self.last_warmup_step}), one step for each "
                "bound"
            )
        if self.last_ramp_step <= self.last_monitor_step:
            raise ValueError(
                f"freezing.last_ramp_step is {self.last_ramp_step}; it must be above "
                f"freezing.last_monitor_step ({self.last_monitor_step})"
            )

    @staticmethod
    def unplanned(last_warmup_step: int) -> PhaseSchedule:
        """Return the phases of a method that makes no plan: warm-up, then stable.

        Args:
            last_warmup_step: T_w.

        Raises:
            ValueError: If it is negative.
        """
        return PhaseSchedule(last_warmup_step, last_warmup_step, last_warmup_step)

    @property
    def measures(self) -> bool:
        """Whether there are monitoring steps."""
        return self.last_monitor_step != self.last_warmup_step

    @property
    def last_upper_bound_step(self) -> int:
        """Last step of the upper-bound half of monitoring."""
        return (self.last_warmup_step + self.last_monitor_step) // 2

    def last_step_of(self, phase: Phase) -> int:
        """Last step of ``phase``.

        Args:
            phase: Any phase but STABLE.

        Returns:
            int: The step, counted from 1; 0 for a warm-up without steps.

        Raises:
            ValueError: For STABLE, which lasts as long as the run does.
        """
        if phase is Phase.STABLE:
            raise ValueError("phase 'stable' has no last step; it lasts until the run ends")
        return {
            Phase.WARMUP: self.last_warmup_step,
            Phase.UPPER_BOUND: self.last_upper_bound_step,
            Phase.LOWER_BOUND: self.last_monitor_step,
            Phase.RAMP: self.last_ramp_step,
        }[phase]

    def phase(self, step: int) -> Phase:
        """Phase of optimizer step ``step``.

        Args:
            step: Optimizer step t, from 1.

        Returns:
            Phase: The phase the step belongs to.

        Raises:
            ValueError: If ``step`` is below 1.
        """
        _check_step(step)
        for phase in (Phase.WARMUP, Phase.UPPER_BOUND, Phase.LOWER_BOUND, Phase.RAMP):
            if step <= self.last_step_of(phase):
                return phase
        return Phase.STABLE

    def ramp(self, step: int) -> float:
        """Share of the plan that applies at ``step``: Eq. 9 without the factor r_i.

        Args:
            step: Optimizer step t, from 1.

        Returns:
            float: min(1, (t - T_m) / (T_f - T_m)), and 0 up to T_m, when there is no plan yet.

        Raises:
            ValueError: If ``step`` is below 1.
        """
        _check_step(step)
        if step <= self.last_monitor_step:
            return 0.0
        if step >= self.last_ramp_step:
            return 1.0
        return (step - self.last_monitor_step) / (self.last_ramp_step - self.last_monitor_step)

    def learning_steps(self, step: int) -> int:
        """Count the steps after warm-up, up to and with ``step``, that change weights.

        All do but those of the lower-bound half, in which every tensor is frozen.

        Args:
            step: Optimizer step t, from 1.

        Returns:
            int: 0 up to T_w.

        Raises:
            ValueError: If ``step`` is below 1.
        """
        _check_step(step)
        all_frozen = min(step, self.last_monitor_step) - self.last_upper_bound_step
        return max(0, step - self.last_warmup_step) - max(0, all_frozen)


def actual_freeze_ratio(ratio: float, step: int, phases: PhaseSchedule) -> float:
    """Actual freeze ratio AFR of an action at a step, Eq. 9.

    It speaks of planned freezing only, so it is 0 up to T_m; that the lower-bound half of
    monitoring freezes everything follows from the phase, not from a plan.

    Args:
        ratio: Expected freeze ratio r_i of the action, in [0, 1].
        step: Optimizer step t, from 1.
        phases: Boundaries of the run.

    Returns:
        float: min(r_i, r_i (t - T_m) / (T_f - T_m)) after T_m, else 0.

    Raises:
        ValueError: If ``ratio`` is not in [0, 1] or ``step`` is below 1.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"the expected freeze ratio is {ratio}; it must lie in [0, 1]")
    return ratio * phases.ramp(step)


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"the step is {step}; optimizer steps count from 1")
