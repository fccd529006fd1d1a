"""Runs a freezing method over training steps: when to measure, when to decide, what to freeze.

The controller alone asks for the phase, once a step, and drives a list of parts. What to freeze
follows from two of them, either of which may be missing: a planner says how much of each backward,
a policy which tensors. With both, the policy's choice is brought to the plan's ratio; with a policy
alone, its choice holds for every microbatch; with a plan alone, tensors are drawn at random. All of
it is a pure function of the step, the plan, the decision and the seed.

A rank's controller drives the stages of that rank. It talks to other ranks when a plan is solved;
when times are compared with it, every so many steps; when a policy's check is due; and in
:meth:`FreezeController.collect`, for logged metrics.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from timelyfreeze.control.collected import (
    BatchLog,
    CollectedMetrics,
    RankMetrics,
    collected,
)
from timelyfreeze.control.masks import BatchMasks, units_of
from timelyfreeze.control.parts import ControlSteps, FrontAhead, LowRank, check_same_parts
from timelyfreeze.control.plans.active_plan import ActivePlan
from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.control.state import FreezingState
from timelyfreeze.front.caching import FrontCache
from timelyfreeze.planning import FreezePlan, Solution
from timelyfreeze.records.tables import FrozenCount
from timelyfreeze.runtime import (
    ActionRecorder,
    Exchange,
    FreezingStage,
    FrontRunAhead,
    ObservedBatch,
    OutsideClock,
    StepPart,
)
from timelyfreeze.runtime.low_rank import Subspaces
from timelyfreeze.runtime.meters import GradientEnergy, UpdateMeter, frozen_counts
from timelyfreeze.schedule import Action, ScheduleOrder
from timelyfreeze.settings import FreezeSettings, Phase, PhaseSchedule, Step
from timelyfreeze.timing import DurationBounds

logger = logging.getLogger(__name__)


class FreezeController:
    """Applies a freezing method to the pipeline stages of one rank.

    The trainer calls, in every step::

        controller.begin_step(step)
        with controller.one_batch():      # once for each pipeline batch of the step
            schedule.step(...)
        controller.end_step()            # after the optimizer's step, gradients still there

    Without ``checks`` tensors are drawn at random. Where there is a ``cache``, all ranks call its
    ``name_batches`` before a step's first batch.
    """

    ahead: FrontRunAhead | None = None  # which begins batches for a policy that decides alone
    on_batch: Callable[[ObservedBatch], None] | None = None  # told of each whose times are read
    # Whether the run may come from another pipeline, and plan again; set it before state is loaded.
    moves = False
    entered_phase: Phase | None = None  # of the last step that was begun, here or before a move
    # Frozen layers in front that the pipeline should be made for: the policy's choice, none in
    # warm-up. It stays while times are measured and the plan takes effect: a plan is used first.
    settled_front = 0

    def __init__(
        self,
        stages: Sequence[FreezingStage],
        order: ScheduleOrder,
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
        self.settings, self.planner, self.checks, self.cache = settings, planner, checks, cache
        self.subspaces = subspaces or Subspaces((), settings.seed, (0,))
        self._stages, self._recorder, self._exchange = tuple(stages), recorder, exchange
        self._units, self._n_microbatches = units_of(stages), order.n_microbatches
        tables = {stage: of_stage.tensors for stage, of_stage in self._units.items()}
        self._updates = UpdateMeter(tables, order.n_microbatches, energy, self._drawn_ratio)
        self.turns = LowRank(self.subspaces, planner, exchange, recorder.clock)
        self._log = BatchLog(recorder, exchange.rank)
        of_plans: list[StepPart] = []
        if self.plans:
            outside = outside or OutsideClock(recorder.clock)
            outside.keep = lambda ms: planner.measured.outside_ms.append(ms)
            recorder.beside_actions = outside.batch
            of_plans = [planner, ControlSteps(planner), self.turns, outside]
        if checks is not None:
            checks.frequency = lambda: self._updates.step_frequency
        # The order is a rule: see ``StepPart``.
        parts = [*of_plans, checks, cache, self._log, self._updates]
        self.parts = [part for part in parts if part is not None]
        self._state = state(order, tuple(sorted(tables)), exchange, self.parts)
        self.step, self._batch_index, self._batches_in_phase = Step(), 0, 0

    def run_ahead(self, front: FrontRunAhead) -> None:
        """Begin batches behind a front that works ahead, for a policy that decides alone."""
        assert self.checks is not None  # a plan has no front
        self.ahead = front
        self.parts.insert(-1, FrontAhead(front, self.checks))
        check_same_parts(self.parts, self._exchange)

    # -- what is known -----------------------------------------------------------------------------

    @property
    def phases(self) -> PhaseSchedule:
        """The phases of the run, which may have begun again."""
        return self.planner.phases

    @property
    def plans(self) -> bool:
        """Whether the method measures times and plans by them."""
        return self.phases.measures

    @property
    def active_plan(self) -> ActivePlan:
        """The plan that is followed; where nothing is measured, there never is one."""
        return self.planner.active_plan

    @property
    def order(self) -> ScheduleOrder:
        """The order that ran while monitoring; before, the declared one."""
        return self.active_plan.order

    @property
    def plan(self) -> FreezePlan | None:
        """The plan, once solved."""
        return self.active_plan.plan

    @property
    def bounds(self) -> DurationBounds | None:
        """What the plan was solved from."""
        return self.active_plan.bounds

    @property
    def unplanned(self) -> str | None:
        """Why nothing is frozen by a plan up to the current step; None where it is, or never is."""
        return self.planner.unplanned(self.step)

    @property
    def phase(self) -> Phase:
        """The phase of the current step."""
        return self.step.phase

    def planned_ratio(self, action: Action) -> float:
        """Return what to freeze of a backward now, in [0, 1]: by the plan (Eq. 9), or a policy."""
        if self.plans:
            return self.active_plan.ratio(action, self.step)
        if self.checks is None or self.phase is Phase.WARMUP:
            return 0.0
        return self.checks.frozen_ratio(action.stage)

    def expected_stage_ratios(self) -> dict[int, float]:
        """Return for every stage the mean planned ratio of its backwards in the current step."""
        sums: dict[int, list[float]] = {}
        for action in self.active_plan.dag.actions:
            if action.kind.freezable:
                sums.setdefault(action.stage, []).append(self.planned_ratio(action))
        return {stage: sum(ratios) / len(ratios) for stage, ratios in sorted(sums.items())}

    def expected_batch_ms(self) -> float | None:
        """Predict the time of a batch under the current step's ratios, ms; None without bounds."""
        return self.active_plan.expected_batch_ms(self.step)

    # -- the step ----------------------------------------------------------------------------------

    def begin_step(self, number: int) -> None:
        """Enter optimizer step ``number``; they count from 1."""
        self.planner.leave_elsewhere(number)
        is_off = self.active_plan.is_off(number)
        self.step = step = self.phases.at(number, self.entered_phase, is_off=is_off)
        self._batch_index = 0
        if step.is_first_of_phase:
            self.entered_phase, self._batches_in_phase = step.lasting_phase, 0
            if step.phase is not Phase.OFF:  # of which the planner has told, with the reason
                last = self.phases.last_steps.get(step.lasting_phase)
                end = "the end" if last is None else f"step {last}"
                logger.info(
                    "Freezing phase %s from step %d to %s", step.lasting_phase.value, number, end
                )
        for part in self.parts:
            part.begin_step(step)

    def record_tokens(self, n_tokens: Tensor) -> None:
        """As :meth:`OutputComparator.record_tokens`, of the step's next batch."""
        if self.checks is not None and self.checks.watch is not None:
            self.checks.watch.record_tokens(n_tokens)

    @contextmanager
    def one_batch(self) -> Iterator[None]:
        """Run one pipeline batch of the step: set its masks, record its actions."""
        number, dag = self._batch_index, self.active_plan.dag
        plan = self.active_plan if self.plans else None
        rules = self.settings, self._units, self._n_microbatches, plan, self.checks
        masks = BatchMasks(*rules, self.step, number)
        frozen = {stage: masks.of_stage(stage, dag) for stage in self._units}
        cut = {stage: masks.without_input_grads(stage) for stage in self._units}
        entries = [part.entry(number) for part in self.parts]
        entry = next((each for each in entries if each is not None), None)
        for stage in self._stages:
            index = stage.stage_index
            stage.freeze(frozen[index], without_input_grads=cut[index])
            if entry is not None:
                stage.enter(entry)
        try:
            with self._recorder.recorded_batch():
                yield
        finally:
            for stage in self._stages:
                stage.freeze_nothing()
        for part in self.parts:
            part.end_batch(number, frozen)
        is_cold = self._batches_in_phase < self.settings.discard_batches
        applied = {s.stage_index: s.applied_ratios for s in self._stages}
        start = None if entry is None or entry.start is None else entry.start.stage
        policy = {} if self.checks is None else self.checks.decision.metrics
        told: dict[str, Any] = {"entry_stage": start, "policy": policy, "pattern": masks.pattern}
        batch = ObservedBatch(self.step.number, self.phase, is_cold, **told)
        self._log.add(batch, applied, cut)
        self._batches_in_phase += 1
        self._batch_index += 1

    def end_step(self) -> None:
        """Leave the step; let the policy check, and the planner solve or compare times."""
        plan = self.plan
        for part in reversed(self.parts):
            if part.needs_times(self.step):
                self._drain()
            part.end_step(self.step)
        if self.plan is not plan:
            self._begin_plan()
        is_applied = self.phases.phase(self.step.number + 1) is Phase.STABLE
        if self.checks is not None and is_applied and self.phase is not Phase.RAMP:
            self.settled_front = self.checks.frozen_layers

    def _begin_plan(self) -> None:
        """Leave out what ran under another plan, and the first batches under this one."""
        self._batches_in_phase = 0
        self._log.forget_stable()

    def follow(self, solution: Solution) -> None:
        """Freeze by a plan that was made elsewhere; every rank must be given the same."""
        self.planner.follow(solution)
        self._begin_plan()

    def close(self) -> None:
        """End what still runs in the background; call it where the run ends, however it does."""
        for part in self.parts:
            part.close()

    # -- metrics -----------------------------------------------------------------------------------

    def collect(self, gradient_scale: float | None = None) -> CollectedMetrics:
        """Exchange what was measured since the last call.

        Every rank must call this at the same step. Waits for the device, so call it only where
        metrics are logged. ``gradient_scale`` undoes clipping of the step's gradients, which must
        still be there; None to measure none.
        """
        self._drain()
        found: dict[str, Any] = {}
        for part in self.parts:
            found |= part.collect(gradient_scale)
        policy = {} if self.checks is None else dict(self.checks.decision.metrics)
        ranks = self._exchange.all_gather(RankMetrics(**found))
        return collected(ranks, self.active_plan, policy)

    def frozen_counts(self) -> list[FrozenCount]:
        """Return how often each tensor was frozen since freezing began; all ranks call this."""
        everyone = self._exchange.all_gather(self._updates.counts())
        return frozen_counts(everyone, self.order.stage_to_rank)

    def _drawn_ratio(self, stage: int) -> float | None:
        """Return the probability that a tensor of ``stage`` is frozen, if tensors are drawn."""
        if self.checks is not None or self.phase not in (Phase.RAMP, Phase.STABLE):
            return None
        return self.expected_stage_ratios()[stage]

    def _drain(self) -> None:
        for batch in self._log.drain():
            for part in self.parts:
                part.read(batch)
            if self.on_batch is not None:
                self.on_batch(batch)

    # -- checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of freezing (:meth:`FreezingState.save`)."""
        self._drain()
        return self._state.save({"front": self.settled_front})

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load of a checkpoint whose freezing state has ``keys``."""
        return self._state.wanted(keys)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on all processes, of this number or another."""
        state = self._state.load(state_dict, moves=self.moves)
        if self.checks is not None:
            self.settled_front = state.get("front", self.checks.frozen_layers)
