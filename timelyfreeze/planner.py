"""Plans one run: keeps what is measured while monitoring, solves at its end, holds the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from timelyfreeze.actions import Action
from timelyfreeze.bounds import DurationBounds
from timelyfreeze.cascade import front_depths
from timelyfreeze.dag import build_dag
from timelyfreeze.exchange import Exchange
from timelyfreeze.lp import LpError
from timelyfreeze.order import ScheduleOrder
from timelyfreeze.phases import Phase, actual_freeze_ratio
from timelyfreeze.plan import FreezePlan
from timelyfreeze.planning import (
    RankTimes,
    Solution,
    solution_from_plain,
    solution_to_plain,
    solve_from_times,
)
from timelyfreeze.processors import play_batch
from timelyfreeze.recorder import PassRecord
from timelyfreeze.samples import Samples, samples_from_plain
from timelyfreeze.settings import ALL_OR_NOTHING, OFF, FreezeSettings, effective_cascade

logger = logging.getLogger(__name__)

# Returns milliseconds by sending and receiving rank.
TransferMeter = Callable[[], Mapping[tuple[int, int], float]]


class Planner:
    """What is known about times, and the plan that follows from it.

    Args:
        order: Declared order of the whole pipeline; the order that ran takes its place.
        settings: The user's choices.
        exchange: Talks to the other ranks.
        n_processors: How many of a pipeline's ranks can compute at once; None if each has a device
            of its own.
        on_solved: Called on every rank with the plan and its bounds once they exist.
        measure_transfers: Times the links between pipeline ranks, when called on all of them.
    """

    def __init__(
        self,
        order: ScheduleOrder,
        settings: FreezeSettings,
        exchange: Exchange,
        n_processors: float | None,
        on_solved: Callable[[FreezePlan, DurationBounds], None],
        measure_transfers: TransferMeter = dict,
    ) -> None:
        self.order = order
        self.dag = build_dag(order)
        self.plan: FreezePlan | None = None
        self.bounds: DurationBounds | None = None
        self.failure: str | None = None
        self._settings = settings
        self._exchange = exchange
        self._n_processors = n_processors
        self._on_solved = on_solved
        self._measure_transfers = measure_transfers
        self._samples = {Phase.UPPER_BOUND: Samples(), Phase.LOWER_BOUND: Samples()}
        self._cascade = effective_cascade(settings.first_stage, settings.cascade)
        self._fronts: Mapping[int, int] = {}

    def add(self, phase: Phase, record: PassRecord, *, is_cold: bool) -> None:
        """Take note of a pass, if it is one of the monitoring phase and there is no plan yet."""
        if phase in self._samples and self.plan is None:
            self._samples[phase].add(record, is_cold=is_cold)

    def ratio(self, action: Action, step: int) -> float:
        """Return the freeze ratio that ``action`` has at ``step``, Eq. 9 included.

        Args:
            action: A backward of the schedule.
            step: Optimizer step, from 1.

        Returns:
            float: In [0, 1]; 1 while the lower bound is measured, 0 where there is no plan.

        Raises:
            ValueError: If the plan does not know the action.
        """
        phase = self._settings.phases.phase(step)
        if phase is Phase.LOWER_BOUND:
            return 1.0
        if self.plan is None or phase in (Phase.WARMUP, Phase.UPPER_BOUND):
            return 0.0
        return actual_freeze_ratio(self.plan.ratio_of(action), step, self._settings.phases)

    def front_depths(self, step: int) -> Mapping[int, int]:
        """Return the plan's fronts at ``step`` (:mod:`timelyfreeze.cascade`), by microbatch.

        They are empty while there is no plan, and where ``freezing.cascade`` is off.
        """
        return self._fronts if self._settings.phases.ramp(step) > 0.0 else {}

    def expected_batch_ms(self, step: int) -> float | None:
        """Predict the time of a batch under the ratios of ``step``.

        Returns:
            Milliseconds, or None as long as there are no bounds.
        """
        if self.bounds is None or self.plan is None:
            return None
        if self._settings.phases.phase(step) is Phase.LOWER_BOUND:
            durations_ms = self.bounds.min_ms
        else:
            # Every ratio is the same share of the plan's, and times fall in proportion.
            share = self._settings.phases.ramp(step)
            durations_ms = (1.0 - share) * self.bounds.max_ms + share * self.plan.durations_ms
        delays_ms = self.bounds.delays_ms(self.dag)
        return play_batch(self.dag, durations_ms, self._n_processors, delays_ms)[1]

    def solve(self) -> None:
        """Gather everyone's samples, solve on rank 0, hand the same plan to all."""
        upper, lower = self._samples[Phase.UPPER_BOUND], self._samples[Phase.LOWER_BOUND]
        mine = RankTimes(
            upper.per_action(),
            lower.per_action(),
            tuple(upper.spans_ms),
            tuple(lower.spans_ms),
            self._measure_transfers(),
        )
        everyone = self._exchange.gather(mine)
        answer: dict[str, str] = {}
        if everyone is not None:
            ratio = self._settings.max_freeze_ratio
            try:
                solution = solve_from_times(
                    everyone,
                    self.order,
                    max_freeze_ratio=list(ratio) if isinstance(ratio, tuple) else ratio,
                    whole_stages=(0,) if self._settings.first_stage == ALL_OR_NOTHING else (),
                    n_processors=self._n_processors,
                    time_limit_s=self._settings.solver_time_limit_s,
                    cascade=self._cascade,
                )
                answer = solution_to_plain(solution)
            except (LpError, ValueError) as error:
                answer = {"failure": str(error)}
        answer = self._exchange.broadcast(answer)
        self._samples = {phase: Samples() for phase in self._samples}
        if "failure" in answer:
            self.failure = answer["failure"]
            return
        plan = self._adopt(solution_from_plain(answer))
        logger.info(
            "Freeze plan: batch %.1f ms unfrozen, %.1f ms planned (%+.1f%% throughput), limit "
            "%.1f ms; mean ratios %s",
            plan.unfrozen_batch_ms,
            plan.batch_ms,
            100 * plan.gain,
            plan.frozen_batch_ms,
            " ".join(f"{s}:{r:.2f}" for s, r in plan.stage_mean_ratios().items()),
        )

    def _adopt(self, solution: Solution) -> FreezePlan:
        self.order, self.dag = solution.order, solution.dag
        self.bounds, self.plan = solution.bounds, solution.plan
        if self._cascade != OFF:
            self._fronts = front_depths(self.dag, self.plan.ratios)
        self._on_solved(self.plan, self.bounds)
        return self.plan

    def plain_state(self) -> dict[str, Any]:
        """Return samples, failure and, once solved, order, bounds and plan as plain data."""
        state: dict[str, Any] = {
            "samples": {phase.value: s.to_plain() for phase, s in self._samples.items()},
            "failure": self.failure,
        }
        if self.plan is not None and self.bounds is not None:
            solution = Solution(self.order, self.dag, self.bounds, self.plan)
            state["solved"] = solution_to_plain(solution)
        return state

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`plain_state` returned.

        Raises:
            ValueError: If the plan was made for another pipeline.
        """
        self._samples = {
            phase: samples_from_plain(state["samples"][phase.value]) for phase in self._samples
        }
        self.failure = state["failure"]
        if "solved" in state:
            solution = solution_from_plain(state["solved"])
            self._check_order(solution.order)
            self._adopt(solution)

    def _check_order(self, saved: ScheduleOrder) -> None:
        """Refuse a plan that was made for another pipeline."""
        planned = {action for rank in saved.ranks for action in rank}
        declared = {action for rank in self.order.ranks for action in rank}
        if planned != declared:
            raise ValueError(
                f"the checkpoint's freeze plan was made for another pipeline: {len(planned)} "
                f"actions, of which this run has {len(planned & declared)}; resume with "
                "the same parallelism.pipeline_* keys and batch sizes, or, to measure anew, set "
                'checkpoint.exclude_from_loading = ["freezing"]'
            )
