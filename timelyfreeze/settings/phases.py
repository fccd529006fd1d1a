"""Phases of a run: measuring and freezing steps, and the applied part of the plan.

Implements arXiv:2602.05754, Sec. 3.1, Eq. 9 and Algorithm 1, pure in the optimizer step t, from 1.
The boundaries are T_w, T_m and T_f: the last step of warm-up, of monitoring and of the ramp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from timelyfreeze.settings.names import key

HALVES = "halves"
MIXED = "mixed"
MONITORING_WAYS = (HALVES, MIXED)


class Phase(Enum):
    """Purpose of a step; the phases follow each other in this order.

    Monitoring is either the two halves or mixed. A control step stands among those of the stable
    phase and freezes nothing, for times at the same speed of the machine. No schedule leads to OFF:
    a run gets there when freezing turns out not to pay; nor to ADAPTERS, which a run may begin
    with: adapters alone learn.
    """

    ADAPTERS = "adapters"
    WARMUP = "warmup"
    UPPER_BOUND = "upper_bound"
    LOWER_BOUND = "lower_bound"
    MIXED = "mixed"
    RAMP = "ramp"
    STABLE = "stable"
    CONTROL = "control"
    OFF = "off"

    @property
    def monitors(self) -> bool:
        """Whether actions are timed to plan by them."""
        return self in (Phase.UPPER_BOUND, Phase.LOWER_BOUND, Phase.MIXED)


# So many batches, one after the other, have a pattern of mixed monitoring and its opposite.
PASSES_FOR_BOTH = 3

# What freezes, or would if it paid.
FREEZING_PHASES = (Phase.RAMP, Phase.STABLE, Phase.OFF)
# What freezes nothing, though it does not measure.
IDLE_PHASES = (Phase.WARMUP, Phase.CONTROL, Phase.OFF)


@dataclass(frozen=True)
class Step:
    """An optimizer step and what its phase says of it; by default, before the first."""

    number: int = 0  # from 1
    phase: Phase = Phase.WARMUP
    is_first_of_phase: bool = False  # a control step is one of the stable phase
    learning_steps: int = 0  # steps after warm-up that changed weights, up to and with this one
    changes_weights: bool = True  # not where everything is frozen to be timed
    after_warmup: int = 0  # how many steps after the last of the warm-up; below 0 before it
    ramp: float = 0.0  # fraction of the plan that applies
    precedes_stable: bool = False  # whether the next step is one of the stable phase, no control

    @property
    def lasting_phase(self) -> Phase:
        """The phase that goes on: a control step is one of the stable phase."""
        return Phase.STABLE if self.phase is Phase.CONTROL else self.phase


@dataclass(frozen=True)
class PhaseSchedule:
    """The three boundaries of a run, and its way of monitoring.

    Algorithm 1 prints the dividing step as T_m / 2, which with the boundaries of the paper's Table
    3 would come before the end of warm-up. Here it is halfway between T_w and T_m, rounded down,
    for at least one step per half.

    Mixed monitoring has no halves: all batches measure both bounds.

    Where nothing is measured and no plan is made, the three are equal (:meth:`unplanned`): warm-up
    is followed by the stable phase.

    Attributes:
        last_warmup_step: T_w >= 0. Up to here nothing is measured or frozen.
        last_monitor_step: T_m >= T_w + 2, of mixed monitoring 3. Nothing is frozen until the
            halfway step (upper bound), then everything (lower bound). The plan is made at the end
            of this step.
        last_ramp_step: T_f > T_m, because Eq. 9 divides by T_f - T_m. From here on the plan applies
            in full.
        monitoring: A word of ``MONITORING_WAYS``.
        n_learned: Steps up to T_w counting as steps after warm-up: above 0 after a restart of
            phases.
        control_every: Number of steps after the ramp per control step, placed in the middle, rarely
            met by logging. 0 for none.
    """

    last_warmup_step: int
    last_monitor_step: int
    last_ramp_step: int
    monitoring: str = HALVES
    n_learned: int = 0
    control_every: int = 0

    def __post_init__(self) -> None:
        """Refuse boundaries with an empty phase."""
        if self.monitoring not in MONITORING_WAYS:
            raise ValueError(
                f"{key('monitoring')} is {self.monitoring!r}; known: {', '.join(MONITORING_WAYS)}"
            )
        warmup, monitor = key("last_warmup_step"), key("last_monitor_step")
        if self.last_warmup_step < 0:
            raise ValueError(f"{warmup} is {self.last_warmup_step}; it must be 0 or more")
        if not self.measures and self.last_ramp_step == self.last_monitor_step:
            return
        least = PASSES_FOR_BOTH if self.monitoring == MIXED else 2
        if self.last_monitor_step < self.last_warmup_step + least:
            raise ValueError(
                f"{monitor} is {self.last_monitor_step}; it must be at least {least} above "
                f"{warmup} ({self.last_warmup_step}), to measure both bounds"
            )
        if self.last_ramp_step <= self.last_monitor_step:
            raise ValueError(
                f"{key('last_ramp_step')} is {self.last_ramp_step}; it must be above {monitor} "
                f"({self.last_monitor_step})"
            )

    @staticmethod
    def unplanned(last_warmup_step: int) -> PhaseSchedule:
        """Return the phases of a method without a plan: warm-up up to T_w >= 0, then stable."""
        return PhaseSchedule(last_warmup_step, last_warmup_step, last_warmup_step)

    def restarted(self, step: int, n_learned: int) -> PhaseSchedule:
        """Return phases of the same length, with monitoring after ``step``.

        ``step`` is the new T_w, ``n_learned`` the ``learning_steps`` up to there.
        """
        later = step - self.last_warmup_step
        return replace(
            self,
            last_warmup_step=step,
            last_monitor_step=self.last_monitor_step + later,
            last_ramp_step=self.last_ramp_step + later,
            n_learned=n_learned,
        )

    @property
    def measures(self) -> bool:
        """Whether there are monitoring steps."""
        return self.last_monitor_step != self.last_warmup_step

    @property
    def last_upper_bound_step(self) -> int:
        """Last step of the upper-bound half of monitoring, if halved."""
        return (self.last_warmup_step + self.last_monitor_step) // 2

    @property
    def measured_batches(self) -> tuple[int, str]:
        """Number of batches allowed without times, at a batch per step, and the rule in words."""
        first, last, half = (
            self.last_warmup_step,
            self.last_monitor_step,
            self.last_upper_bound_step,
        )
        if self.monitoring == MIXED:
            rule = f"leave {PASSES_FOR_BOTH} of the {last - first} batches of mixed monitoring"
            return last - first - PASSES_FOR_BOTH, rule
        n_batches = min(half - first, last - half)
        return n_batches - 1, f"be below the {n_batches} batches of each half of monitoring"

    @property
    def last_steps(self) -> dict[Phase, int]:
        """Last step of all phases with an end; an empty phase ends with its predecessor."""
        last_upper, last_lower = self.last_upper_bound_step, self.last_monitor_step
        if self.monitoring == MIXED:
            last_upper = last_lower = self.last_warmup_step
        return {
            Phase.WARMUP: self.last_warmup_step,
            Phase.UPPER_BOUND: last_upper,
            Phase.LOWER_BOUND: last_lower,
            Phase.MIXED: self.last_monitor_step,
            Phase.RAMP: self.last_ramp_step,
        }

    def phase(self, step: int) -> Phase:
        """Phase of optimizer step ``step``."""
        if step < 1:
            raise ValueError(f"the step is {step}; optimizer steps count from 1")
        ending = self.last_steps.items()
        every, n_stable = self.control_every, step - self.last_ramp_step
        is_control = every > 0 and n_stable % every == every // 3 + 1
        stable = Phase.CONTROL if is_control else Phase.STABLE
        return next((phase for phase, last in ending if step <= last), stable)

    def at(self, step: int, former: Step = Step(), *, is_off: bool = False) -> Step:
        """Return optimizer step ``step``, which comes after ``former``.

        Freezing may be switched off in it.
        """
        found = Step(
            number=step,
            phase=Phase.OFF if is_off else self.phase(step),
            learning_steps=self.learning_steps(step),
            changes_weights=self.phase(step) is not Phase.LOWER_BOUND,
            after_warmup=step - self.last_warmup_step,
            ramp=0.0 if is_off else self.ramp(step),
            precedes_stable=self.phase(step + 1) is Phase.STABLE,
        )
        is_first = former.number == 0 or found.lasting_phase is not former.lasting_phase
        return replace(found, is_first_of_phase=is_first)

    def ramp(self, step: int) -> float:
        """Applied fraction of the plan at ``step``: Eq. 9 without the factor r_i.

        min(1, (t - T_m) / (T_f - T_m)); 0 in control steps and up to T_m, before any plan. The
        lower-bound half of monitoring freezes everything by its phase.
        """
        if step <= self.last_monitor_step or self.phase(step) is Phase.CONTROL:
            return 0.0
        if step >= self.last_ramp_step:
            return 1.0
        return (step - self.last_monitor_step) / (self.last_ramp_step - self.last_monitor_step)

    def learning_steps(self, step: int) -> int:
        """Count the steps after warm-up, up to and with ``step``, with changes of weights.

        Steps of a lower-bound half change none, with every tensor frozen.
        """
        learned = self.n_learned + max(0, step - self.last_warmup_step)
        if self.monitoring == MIXED:
            return learned
        all_frozen = min(step, self.last_monitor_step) - self.last_upper_bound_step
        return learned - max(0, all_frozen)
