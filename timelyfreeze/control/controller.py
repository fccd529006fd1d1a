"""Runs a freezing method over training steps: when to measure, when to decide, what to freeze.

The controller alone asks for the phase, once a step, and drives a :class:`PartList`. What to freeze
follows from two of them, either of which may be missing: a planner says how much of each backward,
a policy which tensors. With both, the policy's choice is brought to the plan's ratio; with a policy
alone, its choice holds for every microbatch; with a plan alone, tensors are drawn at random. All of
it is a pure function of the step, the plan, the decision and the seed.

A rank's controller drives the stages of that rank. It talks to other ranks when a plan is solved;
when times are compared with it, every so many steps; when a policy's check is due; and in
:meth:`FreezeController.collect`, for logged metrics.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from timelyfreeze.control.collected import BatchLog, CollectedMetrics, collected
from timelyfreeze.control.masks import MaskedStages
from timelyfreeze.control.parts import LowRank, PartList
from timelyfreeze.control.plans.active_plan import ActivePlan
from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.control.state import FreezingState
from timelyfreeze.front.caching import FrontCache
from timelyfreeze.planning import FreezePlan
from timelyfreeze.records.tables import FrozenCount
from timelyfreeze.runtime import (
    ActionRecorder,
    Exchange,
    FreezingStage,
    ObservedBatch,
    OutsideClock,
)
from timelyfreeze.runtime.low_rank import Subspaces
from timelyfreeze.runtime.meters import GradientEnergy, UpdateMeter, frozen_counts
from timelyfreeze.settings import FreezeSettings, Phase, PhaseSchedule, Step

logger = logging.getLogger(__name__)


class FreezeController:
    """Applies a freezing method to the pipeline stages of one rank.

    The trainer calls, in every step::

        controller.begin_step(step)
        with controller.one_batch():      # once for each pipeline batch of the step
            schedule.step(...)
        controller.end_step()            # after the optimizer's step, gradients still there

    Where there is a ``cache``, all ranks call its ``name_batches`` before a step's first batch.
    ``step`` is the last one that was begun, here or before the run came from another pipeline.
    """

    def __init__(
        self,
        stages: Sequence[FreezingStage],
        settings: FreezeSettings,
        recorder: ActionRecorder,
        exchange: Exchange,
        planner: Planner,
        checks: PolicyRunner | None = None,
        energy: GradientEnergy | None = None,
        outside: OutsideClock | None = None,
        cache: FrontCache | None = None,
        subspaces: Subspaces | None = None,
        state: type[FreezingState] = FreezingState,
    ) -> None:
        self.planner, self.checks, self.cache = planner, checks, cache
        self.subspaces = subspaces or Subspaces((), settings.seed, (0,))
        self.masked = MaskedStages(stages, settings)
        self._recorder, self._exchange, order = recorder, exchange, planner.order
        tables = {stage: units.tensors for stage, units in self.masked.units.items()}
        self._updates = UpdateMeter(tables, order.n_microbatches, energy, self._drawn_ratio)
        self.turns = LowRank(self.subspaces, planner, exchange, recorder.clock)
        self.log = BatchLog(recorder, exchange.rank, settings.discard_batches)
        outside = outside or OutsideClock(recorder.clock)
        if self.phases.measures:
            outside.keep = lambda ms: planner.measured.outside_ms.append(ms)
            recorder.beside_actions = outside.batch
        parts = planner, checks, cache, self.turns, outside, self.log, self._updates
        self.parts = PartList(*parts)
        self.state = state(order, tuple(sorted(tables)), exchange, self.parts)
        self.step, self._batch_index = Step(), 0

    # -- what is known -----------------------------------------------------------------------------

    @property
    def phases(self) -> PhaseSchedule:
        """The phases of the run, which may have begun again."""
        return self.planner.phases

    @property
    def active_plan(self) -> ActivePlan:
        """The plan that is followed; where nothing is measured, there never is one."""
        return self.planner.active_plan

    @property
    def plan(self) -> FreezePlan | None:
        """The plan, once solved."""
        return self.active_plan.plan

    def expected_stage_ratios(self) -> dict[int, float]:
        """Return for every stage the mean planned ratio of its backwards in the current step."""
        if self.phases.measures:
            return self.active_plan.stage_ratios(self.step)
        assert self.checks is not None  # without a plan there is a policy
        return self.checks.stage_ratios(self.step)

    def expected_batch_ms(self) -> float | None:
        """Predict the time of a batch under the current step's ratios, ms; None without bounds."""
        return self.active_plan.expected_batch_ms(self.step)

    # -- the step ----------------------------------------------------------------------------------

    def begin_step(self, number: int) -> None:
        """Enter optimizer step ``number``; they count from 1."""
        self.planner.leave_elsewhere(number)
        is_off = self.active_plan.is_off(number)
        self.step = step = self.phases.at(number, self.step, is_off=is_off)
        self._batch_index = 0
        # The planner has told why freezing is off.
        if step.is_first_of_phase and step.phase is not Phase.OFF:
            last = self.phases.last_steps.get(step.lasting_phase)
            end = "the end" if last is None else f"step {last}"
            logger.info(
                "Freezing phase %s from step %d to %s", step.lasting_phase.value, number, end
            )
        self.parts.begin_step(step)

    @contextmanager
    def one_batch(self) -> Iterator[None]:
        """Run one pipeline batch of the step: set its masks, record its actions."""
        masks = self.masked.masks(self.active_plan, self.checks, self.step, self._batch_index)
        entry = self.parts.entry(self._batch_index)
        with self.masked.under(masks, entry), self._recorder.recorded_batch():
            yield
        self.parts.end_batch(self._batch_index, masks.frozen)
        start = None if entry is None or entry.start is None else entry.start.stage
        policy = {} if self.checks is None else self.checks.decision.metrics
        told: dict[str, Any] = {"entry_stage": start, "policy": policy, "pattern": masks.pattern}
        batch = ObservedBatch(self.step.number, self.step.phase, self.log.is_cold, **told)
        self.log.add(batch, self.masked.applied, masks.cut)
        self._batch_index += 1

    def end_step(self) -> None:
        """Leave the step; let the policy check, and the planner solve or compare times."""
        plan = self.plan
        self.parts.end_step(self.step, self._drain)
        if self.plan is not plan:
            self.log.begin_plan()

    def close(self) -> None:
        """End what still runs in the background; call it where the run ends, however it does."""
        self.parts.close()

    # -- metrics -----------------------------------------------------------------------------------

    def collect(self, gradient_scale: float | None = None) -> CollectedMetrics:
        """Exchange what was measured since the last call.

        Every rank must call this at the same step. Waits for the device, so call it only where
        metrics are logged. ``gradient_scale`` undoes clipping of the step's gradients, which must
        still be there; None to measure none.
        """
        self._drain()
        ranks = self._exchange.all_gather(self.parts.collect(gradient_scale))
        return collected(ranks, self.active_plan)

    def frozen_counts(self) -> list[FrozenCount]:
        """Return how often each tensor was frozen since freezing began; all ranks call this."""
        everyone = self._exchange.all_gather(self._updates.counts())
        return frozen_counts(everyone, self.active_plan.order.stage_to_rank)

    def _drawn_ratio(self, stage: int) -> float | None:
        """Return the probability that a tensor of ``stage`` is frozen, if tensors are drawn."""
        if self.checks is not None or self.step.phase not in (Phase.RAMP, Phase.STABLE):
            return None
        return self.expected_stage_ratios()[stage]

    def _drain(self) -> None:
        self.parts.read(self.log.drain())

    # -- checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of freezing (:meth:`FreezingState.save`)."""
        self._drain()
        return self.state.save()

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load of a checkpoint whose freezing state has ``keys``."""
        return self.state.wanted(keys)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on all processes, of this number or another."""
        self.state.load(state_dict)
