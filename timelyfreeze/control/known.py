"""What is known of a run's phases and plan, for whoever reports them."""

from __future__ import annotations

from timelyfreeze.control.plans.plan_in_force import PlanInForce
from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.control.policy_checks import PolicyChecks
from timelyfreeze.planning import FreezePlan, SolverChoices
from timelyfreeze.schedule import Action, PipelineDag, ScheduleOrder
from timelyfreeze.settings import FreezeSettings, Phase, key
from timelyfreeze.timing import DurationBounds

NOT_MEASURED = "the run did not pass through the monitoring steps"


class KnownPlan:
    """The questions that a controller answers without changing anything.

    Attributes:
        settings: The user's choices.
        checks: Keeps the policy's decision up to date; None to draw at random.
    """

    settings: FreezeSettings
    checks: PolicyChecks | None
    _planner: Planner | None
    _in_force: PlanInForce
    _step: int

    @property
    def plans(self) -> bool:
        """Whether the method measures times and plans by them."""
        return self._planner is not None

    @property
    def order(self) -> ScheduleOrder:
        """The order that ran while monitoring; before, the declared one."""
        return self._in_force.order

    @property
    def dag(self) -> PipelineDag:
        """The graph of ``order``."""
        return self._in_force.dag

    @property
    def plan(self) -> FreezePlan | None:
        """The plan, once solved."""
        return self._in_force.plan

    @property
    def bounds(self) -> DurationBounds | None:
        """What the plan was solved from."""
        return self._in_force.bounds

    @property
    def predicts_for(self) -> str:
        """What ranks predictions are for, in words."""
        return self._in_force.predicts_for

    @property
    def solver_choices(self) -> SolverChoices | None:
        """What plans are solved under; None if the method does not plan."""
        return None if self._planner is None else self._planner.choices

    @property
    def failure(self) -> str | None:
        """Why there is no plan, if solving failed."""
        return None if self._planner is None else self._planner.failure

    @property
    def unplanned(self) -> str | None:
        """Why nothing is frozen by a plan up to the current step; None where it is, or never is."""
        if self._planner is None or self.plan is not None:
            return self.switched_off
        last = self.settings.phases.last_monitor_step
        if self._step < last:
            return f"a plan is made after step {last} ({key('monitor')}), and this is {self._step}"
        passed = "it is still being solved" if self._planner.is_solving else NOT_MEASURED
        return self.failure or passed

    @property
    def phase(self) -> Phase:
        """The phase of the current step."""
        if self._in_force.is_off(self._step):
            return Phase.OFF
        return self.settings.phases.phase(self._step)

    @property
    def switched_off(self) -> str | None:
        """Since when and why nothing is frozen although there is a plan; None while it is."""
        return self._in_force.switched_off

    @property
    def plan_missing(self) -> bool:
        """Whether the current step should freeze by a plan but there is none, nor will be."""
        if self._planner is None or self._planner.is_solving:
            return False
        return self.phase in (Phase.RAMP, Phase.STABLE) and self.plan is None

    def planned_ratio(self, action: Action) -> float:
        """Return the fraction in [0, 1] of a backward's parameters to freeze in the current step.

        It follows from the plan and Eq. 9, or is what a policy chose that decides alone.

        Raises:
            ValueError: If the plan does not know the action.
        """
        if self.plans:
            return self._in_force.ratio(action, self._step)
        if self.checks is None or self.phase is Phase.WARMUP:
            return 0.0
        return self.checks.frozen_ratio(action.stage)

    def expected_stage_ratios(self) -> dict[int, float]:
        """Return for every stage the mean planned ratio of its backwards in the current step."""
        sums: dict[int, list[float]] = {}
        for action in self.dag.actions:
            if action.kind.freezable:
                sums.setdefault(action.stage, []).append(self.planned_ratio(action))
        return {stage: sum(ratios) / len(ratios) for stage, ratios in sorted(sums.items())}

    def expected_batch_ms(self) -> float | None:
        """Predict the time of a batch under the current step's ratios, ms; None without bounds."""
        return self._in_force.expected_batch_ms(self._step)
