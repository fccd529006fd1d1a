"""Runs the method over training steps: when to measure, when to solve, what to freeze in each pass.

The controller is the only place that knows the phase. Its decisions are pure functions of the step,
the plan and the seed; what it keeps is what those need and a checkpoint must hold: the samples of
the monitoring phase, then the plan.

A rank's controller drives the stages of that rank. Two moments talk to the other ranks: solving,
once, and :meth:`FreezeController.collect`, when figures are logged.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.actions import Action
from timelyfreeze.bounds import DurationBounds
from timelyfreeze.dag import build_dag
from timelyfreeze.exchange import Exchange
from timelyfreeze.lp import LpError
from timelyfreeze.order import ScheduleOrder
from timelyfreeze.passes import CollectedFigures, RankPasses, batch_times
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
from timelyfreeze.recorder import ActionRecorder, PassRecord
from timelyfreeze.samples import Samples, median_durations, samples_from_plain
from timelyfreeze.selection import (
    build_parameter_table,
    draw_all_or_nothing,
    draw_uniform,
    mask_rng,
)
from timelyfreeze.settings import ALL_OR_NOTHING, FreezeSettings
from timelyfreeze.stage import NOTHING_FROZEN, FreezingStage

logger = logging.getLogger(__name__)


class FreezeController:
    """Applies TimelyFreeze to the pipeline stages of one rank.

    The trainer calls, in every step::

        controller.begin_step(step)
        with controller.one_pass():      # once for each pipeline batch of the step
            schedule.step(...)
        controller.end_step()

    Args:
        stages: This rank's stages, recorders attached.
        order: Declared order of the whole pipeline, for the plan's graph.
        settings: The user's choices.
        recorder: The recorder attached to ``stages``.
        exchange: Talks to the other ranks.
        n_processors: How many of a pipeline's ranks can compute at once; None if each has a device
            of its own.
        on_solved: Called on every rank with the plan and its bounds once they exist, to save them.
    """

    def __init__(
        self,
        stages: Sequence[FreezingStage],
        order: ScheduleOrder,
        settings: FreezeSettings,
        recorder: ActionRecorder,
        exchange: Exchange,
        n_processors: float | None = None,
        on_solved: Callable[[FreezePlan, DurationBounds], None] = lambda plan, bounds: None,
    ) -> None:
        self.settings = settings
        self.order = order
        self.dag = build_dag(order)
        self.plan: FreezePlan | None = None
        self.bounds: DurationBounds | None = None
        self.failure: str | None = None
        self._stages = tuple(stages)
        self._tables = {
            s.stage_index: build_parameter_table(
                zip(s.parameter_names, s.parameter_sizes.tolist(), strict=True)
            )
            for s in stages
        }
        self._recorder = recorder
        self._exchange = exchange
        self._n_processors = n_processors
        self._on_solved = on_solved
        self._freezable = [a for a in self.dag.actions if a.kind.freezable]
        self._local_freezable = [a for a in self._freezable if a.stage in self._tables]
        self._samples = {Phase.UPPER_BOUND: Samples(), Phase.LOWER_BOUND: Samples()}
        self._step = 0
        self._warned = False
        self._phase: Phase | None = None
        self._passes_in_phase = 0
        self._pass_index = 0
        self._undrained: list[tuple[Phase, bool]] = []
        self._uncollected: list[tuple[Phase, PassRecord]] = []
        self._applied_sum = 0.0
        self._applied_count = 0
        self._step_applied: dict[int, list[float]] = {}

    # -- the step ----------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The phase of the current step."""
        return self.settings.phases.phase(self._step)

    @property
    def plan_missing(self) -> bool:
        """Whether the current step should freeze by a plan but there is none."""
        return self.phase in (Phase.RAMP, Phase.STABLE) and self.plan is None

    def begin_step(self, step: int) -> None:
        """Enter an optimizer step.

        Args:
            step: Number of the step, from 1.
        """
        self._step = step
        self._pass_index = 0
        self._step_applied = {s.stage_index: [] for s in self._stages}
        if self.phase is not self._phase:
            self._phase = self.phase
            self._passes_in_phase = 0
            stable = self.phase is Phase.STABLE
            until = "the end" if stable else f"step {self.settings.phases.last_step_of(self.phase)}"
            logger.info("Freezing phase %s from step %d to %s", self.phase.value, step, until)
            if self.plan_missing and self._exchange.rank == 0 and not self._warned:
                self._warned = True
                logger.warning(
                    "Nothing is frozen: step %d is past freezing.last_monitor_step (%d) and there "
                    "is no plan (%s)",
                    step,
                    self.settings.phases.last_monitor_step,
                    self.failure or "the run did not pass through the monitoring steps",
                )

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Run one pipeline batch of the step: set its masks, record its actions."""
        for stage in self._stages:
            stage.freeze(self._masks(stage.stage_index))
        try:
            with self._recorder.recorded_pass():
                yield
        finally:
            for stage in self._stages:
                stage.freeze_nothing()
        is_cold = self._passes_in_phase < self.settings.discard_passes
        self._undrained.append((self.phase, is_cold))
        self._passes_in_phase += 1
        self._pass_index += 1
        for stage in self._stages:
            self._step_applied[stage.stage_index].extend(stage.applied_shares.values())

    def end_step(self) -> None:
        """Leave the step; at the last monitoring step, solve."""
        shares = [share for per_stage in self._step_applied.values() for share in per_stage]
        self._applied_sum += sum(shares)
        self._applied_count += len(shares)
        if self.phase in self._samples:
            self._drain()
            if self._step == self.settings.phases.last_monitor_step:
                self._solve()

    # -- what to freeze ----------------------------------------------------------------------------

    def planned_ratio(self, action: Action) -> float:
        """Return the freeze ratio that ``action`` has in the current step, Eq. 9 included.

        Args:
            action: A backward of the schedule.

        Returns:
            float: In [0, 1]; 1 while the lower bound is measured, 0 where there is no plan.

        Raises:
            ValueError: If the plan does not know the action.
        """
        if self.phase is Phase.LOWER_BOUND:
            return 1.0
        if self.plan is None or self.phase in (Phase.WARMUP, Phase.UPPER_BOUND):
            return 0.0
        return actual_freeze_ratio(self.plan.ratio_of(action), self._step, self.settings.phases)

    def _masks(self, stage: int) -> Mapping[int, NDArray[np.bool_]]:
        table = self._tables[stage]
        all_or_nothing = stage == 0 and self.settings.first_stage == ALL_OR_NOTHING
        draw = draw_all_or_nothing if all_or_nothing else draw_uniform
        masks = {}
        for action in self._local_freezable:
            if action.stage != stage:
                continue
            ratio = self.planned_ratio(action)
            if ratio > 0.0:
                rng = mask_rng(
                    self.settings.seed, self._step, self._pass_index, action.microbatch, stage
                )
                masks[action.microbatch] = draw(table, ratio, rng)
        return masks or NOTHING_FROZEN

    # -- figures -----------------------------------------------------------------------------------

    def expected_stage_ratios(self) -> dict[int, float]:
        """Return for every stage the mean planned ratio of its backwards in the current step."""
        sums: dict[int, list[float]] = {}
        for action in self._freezable:
            sums.setdefault(action.stage, []).append(self.planned_ratio(action))
        return {stage: sum(ratios) / len(ratios) for stage, ratios in sorted(sums.items())}

    def expected_batch_ms(self) -> float | None:
        """Predict the time of a batch under the current step's ratios.

        Returns:
            Milliseconds, or None as long as there are no bounds.
        """
        if self.bounds is None:
            return None
        ratios = np.array(
            [self.planned_ratio(a) if a.kind.freezable else 0.0 for a in self.dag.actions]
        )
        saved_ms = ratios * (self.bounds.max_ms - self.bounds.min_ms)
        return play_batch(self.dag, self.bounds.max_ms - saved_ms, self._n_processors)[1]

    def collect(self) -> CollectedFigures:
        """Exchange what was measured since the last call.

        Every rank must call this at the same step. Waits for the device, so call it only where
        figures are logged.

        Returns:
            The figures of the whole pipeline, the same on every rank.
        """
        self._drain()
        mine = {
            "passes": [(phase.value, record.span_ms) for phase, record in self._uncollected],
            "durations": median_durations([record for _, record in self._uncollected]),
            "applied": {
                stage: sum(shares) / len(shares)
                for stage, shares in self._step_applied.items()
                if shares
            },
            "applied_total": (self._applied_sum, self._applied_count),
        }
        self._uncollected = []
        everyone = self._exchange.all_gather(mine)
        ranks = [RankPasses(tuple(entry["passes"]), entry["durations"]) for entry in everyone]
        applied: dict[int, list[float]] = {}
        for entry in everyone:
            for stage, share in entry["applied"].items():
                applied.setdefault(stage, []).append(share)
        total = sum(entry["applied_total"][0] for entry in everyone)
        count = sum(entry["applied_total"][1] for entry in everyone)
        return CollectedFigures(
            batch_ms=batch_times(self.dag, ranks),
            applied_stage_ratios={s: sum(v) / len(v) for s, v in sorted(applied.items())},
            average_freeze_ratio=total / count if count else 0.0,
        )

    # -- solving -----------------------------------------------------------------------------------

    def _drain(self) -> None:
        for (phase, is_cold), record in zip(self._undrained, self._recorder.drain(), strict=True):
            if phase in self._samples and self.plan is None:
                self._samples[phase].add(record, is_cold=is_cold)
            if not is_cold:
                self._uncollected.append((phase, record))
        self._undrained = []

    def _solve(self) -> None:
        """Gather everyone's samples, solve on rank 0, hand the same plan to all."""
        upper, lower = self._samples[Phase.UPPER_BOUND], self._samples[Phase.LOWER_BOUND]
        mine = RankTimes(
            upper.per_action(), lower.per_action(), tuple(upper.spans_ms), tuple(lower.spans_ms)
        )
        everyone = self._exchange.gather(mine)
        answer: dict[str, str] = {}
        if everyone is not None:
            ratio = self.settings.max_freeze_ratio
            try:
                solution = solve_from_times(
                    everyone,
                    self.order,
                    max_freeze_ratio=list(ratio) if isinstance(ratio, tuple) else ratio,
                    whole_stages=(0,) if self.settings.first_stage == ALL_OR_NOTHING else (),
                    n_processors=self._n_processors,
                    time_limit_s=self.settings.solver_time_limit_s,
                )
                answer = solution_to_plain(solution)
            except (LpError, ValueError) as error:
                answer = {"failure": str(error)}
        answer = self._exchange.broadcast(answer)
        self._samples = {phase: Samples() for phase in self._samples}
        if "failure" in answer:
            self.failure = answer["failure"]
            return
        self._adopt(solution_from_plain(answer))
        assert self.plan is not None
        logger.info(
            "Freeze plan: batch %.1f ms unfrozen, %.1f ms planned (%+.1f%% throughput), limit "
            "%.1f ms; mean ratios %s",
            self.plan.unfrozen_batch_ms,
            self.plan.batch_ms,
            100 * self.plan.gain,
            self.plan.frozen_batch_ms,
            " ".join(f"{s}:{r:.2f}" for s, r in self.plan.stage_mean_ratios().items()),
        )

    def _adopt(self, solution: Solution) -> None:
        self.order, self.dag = solution.order, solution.dag
        self.bounds, self.plan = solution.bounds, solution.plan
        self._freezable = [action for action in self.dag.actions if action.kind.freezable]
        self._on_solved(self.plan, self.bounds)

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

    # -- checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state under a key of this rank's own: samples differ from rank to rank.

        Returns:
            ``{"rank_<r>": text}``, the text being JSON: samples, failure, sums of the average
            freeze ratio, and, once solved, order, bounds and plan.
        """
        self._drain()
        state: dict[str, Any] = {
            "samples": {phase.value: s.to_plain() for phase, s in self._samples.items()},
            "failure": self.failure,
            "applied": [self._applied_sum, self._applied_count],
        }
        if self.plan is not None and self.bounds is not None:
            solution = Solution(self.order, self.dag, self.bounds, self.plan)
            state["solved"] = solution_to_plain(solution)
        return {f"rank_{self._exchange.rank}": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on the same rank.

        Raises:
            ValueError: If the checkpoint holds no state for this rank.
        """
        key = f"rank_{self._exchange.rank}"
        if key not in state_dict:
            raise ValueError(
                f"the checkpoint's freezing state has {sorted(state_dict)} but not {key}; it was "
                "saved with another number of ranks. To measure anew, set "
                'checkpoint.exclude_from_loading = ["freezing"]'
            )
        state = json.loads(state_dict[key])
        self._samples = {
            phase: samples_from_plain(state["samples"][phase.value]) for phase in self._samples
        }
        self.failure = state["failure"]
        self._applied_sum, self._applied_count = state["applied"]
        if "solved" in state:
            solution = solution_from_plain(state["solved"])
            self._check_order(solution.order)
            self._adopt(solution)
