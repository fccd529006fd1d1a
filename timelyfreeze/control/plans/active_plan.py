"""The plan that a run follows: what it says of each step, until another one takes its place."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from timelyfreeze.planning import (
    FreezePlan,
    Solution,
    check_same_pipeline,
    plan_from_ratios,
    skip_depths,
    solution_from_plain,
    solution_to_plain,
)
from timelyfreeze.schedule import Action, PipelineDag, ScheduleOrder, build_dag
from timelyfreeze.settings import FreezeSettings, Phase, Step
from timelyfreeze.timing import DurationBounds, holds_for, simulate_batch, within

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ActivePlan:
    """What is followed: nothing at first, then a plan, perhaps others, perhaps nothing again."""

    order: ScheduleOrder  # the order that ran while monitoring; before, the declared one
    settings: FreezeSettings  # the user's choices
    n_processors: float | None  # ranks that compute at once; None if each has its own device
    on_solved: Callable[[FreezePlan, DurationBounds], None]  # told each plan and its bounds

    def __post_init__(self) -> None:
        """Begin without a plan."""
        self.dag: PipelineDag = build_dag(self.order)  # the graph of the order
        self.plan: FreezePlan | None = None  # the plan, once there is one
        self.bounds: DurationBounds | None = None  # what it was made from
        # since when and why nothing is frozen although there is a plan
        self.switched_off: str | None = None
        self._last_followed_step: int | None = None
        self._skip_depths: Mapping[int, int] = {}

    # -- which -------------------------------------------------------------------------------------

    def adopt(self, solution: Solution) -> FreezePlan:
        """Follow a plan from now on that was solved for this pipeline, the same on every rank."""
        self.order, self.dag = solution.order, solution.dag
        self.bounds, self.plan = solution.bounds, solution.plan
        if self.settings.skips_input_grads:
            self._skip_depths = skip_depths(self.dag, self.plan.ratios)
        self.on_solved(self.plan, self.bounds)
        return self.plan

    def switch_off(self, step: int, reason: str) -> None:
        """Follow nothing after ``step``, and tell ``reason``."""
        self._last_followed_step = step
        self.switched_off = f"from step {step + 1} on: {reason}"
        logger.info("Freezing is switched off %s", self.switched_off)

    def is_off(self, step: int) -> bool:
        """Return whether freezing is switched off in ``step``."""
        return self._last_followed_step is not None and step > self._last_followed_step

    # -- what it says ------------------------------------------------------------------------------

    @property
    def predicts_for(self) -> str:
        """What ranks predictions are for, in words."""
        return holds_for(self.order.n_ranks, self.n_processors)

    @property
    def certainty(self) -> str:
        """How far batches lie from predictions, and what ranks these are for, in words."""
        factor = None if self.bounds is None else self.bounds.interval_factor
        return f"{within(factor)}, for {self.predicts_for}"

    def ratio(self, action: Action, step: Step) -> float:
        """Return the freeze ratio in [0, 1] that a backward has at ``step``, Eq. 9 included.

        It is 1 while the lower bound is measured, 0.5 in mixed monitoring as the mean over opposite
        batches, and 0 where there is no plan or freezing is switched off.
        """
        if step.phase.monitors:
            return {Phase.LOWER_BOUND: 1.0, Phase.MIXED: 0.5}.get(step.phase, 0.0)
        return 0.0 if self.plan is None else self.plan.ratio_of(action) * step.ramp

    def stage_ratios(self, step: Step) -> dict[int, float]:
        """Return the mean ratio of each stage's backwards at ``step``."""
        ratios: dict[int, list[float]] = {}
        for action in self.dag.actions:
            if action.kind.freezable:
                ratios.setdefault(action.stage, []).append(self.ratio(action, step))
        return {stage: sum(of_stage) / len(of_stage) for stage, of_stage in sorted(ratios.items())}

    def skip_depths(self, step: Step) -> Mapping[int, int]:
        """Return the plan's skip depths at ``step`` (``skipped_grads``), by microbatch.

        They are empty while no plan is followed, and where ``skip_input_grads`` is off.
        """
        return self._skip_depths if step.ramp > 0.0 else {}

    def expected_batch_ms(self, step: Step) -> float | None:
        """Predict the time of a batch under the ratios of ``step``, milliseconds.

        None without bounds, and in mixed monitoring, where one batch is not like another.
        """
        if self.bounds is None or self.plan is None or step.phase is Phase.MIXED:
            return None
        if step.phase is Phase.LOWER_BOUND:
            durations_ms = self.bounds.min_ms
        else:
            # Every ratio is the same fraction of the plan's, and times fall in proportion.
            low, high = self.plan.durations_ms, self.bounds.max_ms
            durations_ms = (1.0 - step.ramp) * high + step.ramp * low
        delays_ms = self.bounds.delays_ms(self.dag)
        return simulate_batch(self.dag, durations_ms, self.n_processors, delays_ms)[1]

    def under(self, bounds: DurationBounds) -> FreezePlan:
        """Return what the plan comes to with other times than it was made for."""
        assert self.plan is not None  # the caller saw to it
        plan = plan_from_ratios(
            self.dag,
            bounds,
            self.plan.ratios,
            n_processors=self.n_processors,
            skips_grads=self.settings.skips_input_grads,
        )
        return replace(plan, steps_factor=self.plan.steps_factor)

    # -- checkpoint --------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """Return what became of freezing, and once solved order, bounds and plan."""
        state: dict[str, Any] = {
            "switched_off": self.switched_off,
            "last_followed_step": self._last_followed_step,
        }
        if self.plan is not None and self.bounds is not None:
            solution = Solution(self.order, self.dag, self.bounds, self.plan)
            state["solved"] = solution_to_plain(solution)
        return state

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`plain_state` returned."""
        self.switched_off = state["switched_off"]
        self._last_followed_step = state["last_followed_step"]
        if "solved" in state:
            solution = solution_from_plain(state["solved"])
            check_same_pipeline(solution.order, self.order)
            self.adopt(solution)
