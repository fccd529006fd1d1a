"""Runs a freezing method over training steps: when to measure, when to decide, what to freeze.

The controller is the only place that knows the phase. What to freeze follows from two parts that it
drives, either of which may be missing: a planner says how much of each backward, a policy which
tensors. With both, the policy's choice is brought to the plan's ratio; with a policy alone, its
choice holds for every microbatch; with a plan alone, tensors are drawn at random. All of it is a
pure function of the step, the plan, the decision and the seed.

A rank's controller drives the stages of that rank. It talks to other ranks when a plan is solved;
when times are compared with it, every so many steps; when a policy's check is due; and in
:meth:`FreezeController.collect`, for logged metrics.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from timelyfreeze.control.collected import (
    BatchLog,
    CollectedMetrics,
    ObservedBatch,
    RankMetrics,
    collected,
)
from timelyfreeze.control.masks import BatchMasks, units_of
from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.control.ranks import choose_rank
from timelyfreeze.control.state import FreezingState
from timelyfreeze.front.caching import FrontCache
from timelyfreeze.planning import FreezePlan, Solution
from timelyfreeze.records.convergence import UNFROZEN_PHASES
from timelyfreeze.records.tables import FrozenCount
from timelyfreeze.runtime import (
    ActionRecorder,
    Exchange,
    FreezingStage,
    FrontRunAhead,
    OutsideClock,
)
from timelyfreeze.runtime.low_rank import Subspaces
from timelyfreeze.runtime.meters import GradientEnergy, UpdateMeter, frozen_counts
from timelyfreeze.schedule import Action, ScheduleOrder
from timelyfreeze.settings import IDLE_PHASES, FreezeSettings, Phase, PhaseSchedule, Step, key
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

    ahead: FrontRunAhead | None = None  # set it for a policy that decides alone and has no cache
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
        new_planner: Callable[..., Planner],
        checks: PolicyRunner | None = None,
        energy: GradientEnergy | None = None,
        outside: OutsideClock | None = None,
        cache: FrontCache | None = None,
        subspaces: Subspaces | None = None,
        state: type[FreezingState] = FreezingState,
    ) -> None:
        self._new_planner = new_planner
        self.checks, self.cache = checks, cache
        self.subspaces = subspaces or Subspaces((), settings.seed, (0,))
        self._turning: tuple[Any, Any] | None = None  # marks of this step
        self._stages = tuple(stages)
        units = units_of(stages)
        tables = {stage: of_stage.tensors for stage, of_stage in units.items()}
        self._units, self._n_microbatches = units, order.n_microbatches
        self._recorder = recorder
        self._outside = outside or OutsideClock(recorder.clock)
        recorder.beside_actions = self._outside.batch
        self._exchange = exchange
        self._updates = UpdateMeter(tables, order.n_microbatches, energy)
        self._log = BatchLog(recorder, exchange.rank)
        held = tuple(sorted(tables))
        self._state = state(order, held, exchange, None, checks, self._updates, self.subspaces)
        self.step = Step()
        self._batch_index = self._batches_in_phase = 0
        self.settings = settings
        self._begin_phases(settings.phases)

    def _begin_phases(self, phases: PhaseSchedule) -> None:
        """Run in ``phases``, with nothing measured yet."""
        self.phases = phases
        self.planner = self._new_planner(settings=self.settings, phases=phases)
        self.active_plan = self.planner.active_plan  # where nothing is measured, never a plan
        self._state.planner = self.planner if self.plans else None
        plan = self.active_plan if self.plans else None
        self._masks = partial(
            BatchMasks, self.settings, self._units, self._n_microbatches, plan, self.checks
        )
        self._has_warned = False

    # -- what is known -----------------------------------------------------------------------------

    @property
    def plans(self) -> bool:
        """Whether the method measures times and plans by them."""
        return self.phases.measures

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
        if not self.plans or self.plan is not None:
            return self.active_plan.switched_off
        last = self.phases.last_monitor_step
        if self.step.number < last:
            name = key("last_monitor_step")
            return f"a plan is made after step {last} ({name}), and this is {self.step.number}"
        if self.planner.is_solving:
            return "it is still being solved"
        return self.planner.failure or "the run did not pass through the monitoring steps"

    def turning_ms(self) -> float:
        """Return what subspaces took of the current step, in phases that freeze nothing; waits."""
        if self._turning is None:
            return 0.0
        self._recorder.clock.wait(self._turning[1])
        return self._recorder.clock.elapsed_ms(*self._turning)

    @property
    def phase(self) -> Phase:
        """The phase of the current step."""
        return self.step.phase

    @property
    def plan_missing(self) -> bool:
        """Whether the current step should freeze by a plan but there is none, nor will be."""
        is_due = self.plans and self.phase in (Phase.RAMP, Phase.STABLE)
        return is_due and self.plan is None and not self.planner.is_solving

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

    def begin_step(self, step: int) -> None:
        """Enter optimizer step ``step``; they count from 1."""
        phases = self.phases
        if self._state.elsewhere is not None:  # the plan of another pipeline is left behind
            self._state.elsewhere = None
            if step - 1 > phases.last_warmup_step:
                phases = phases.restarted(step - 1, phases.learning_steps(step - 1))
                self._begin_phases(phases)
        is_off = self.active_plan.is_off(step)
        self.step, self._batch_index = phases.at(step, self.entered_phase, is_off=is_off), 0
        self._log.begin_step()
        self.planner.begin_step(step)
        lasting = self.step.lasting_phase
        if self.step.is_first_of_phase:
            self.entered_phase, self._batches_in_phase = lasting, 0
            if lasting is not Phase.OFF:  # of which the planner has told, with the reason
                is_last = lasting is Phase.STABLE
                end = "the end" if is_last else f"step {phases.last_steps[lasting]}"
                logger.info("Freezing phase %s from step %d to %s", lasting.value, step, end)
        if self.plan_missing and self._exchange.rank == 0 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Nothing is frozen: step %d is past %s (%d) and there is no plan (%s)",
                step,
                key("last_monitor_step"),
                phases.last_monitor_step,
                self.unplanned,
            )
        # Where everything is frozen, an optimizer has less to do than usual.
        if self.phase in (Phase.UPPER_BOUND, Phase.MIXED):
            self._outside.begin_step()
        self._updates.begin_step(step, lasting)
        self.subspaces.begin_step(self.step)
        self._turning = None
        if self.checks is None:
            return
        if self.phase is not Phase.OFF:
            self.checks.begin_step(self.step)
        is_idle = self.phase in IDLE_PHASES
        if self.cache is not None:
            self.cache.begin_step(None if is_idle else self.checks.decision.frozen)
        if self.ahead is not None:
            self.ahead.begin_step(0 if is_idle else self.checks.first_live_stage)

    def record_tokens(self, n_tokens: Tensor) -> None:
        """As :meth:`OutputComparator.record_tokens`, of the step's next batch."""
        if self.checks is not None and self.checks.watch is not None:
            self.checks.watch.record_tokens(n_tokens)

    @contextmanager
    def one_batch(self) -> Iterator[None]:
        """Run one pipeline batch of the step: set its masks, record its actions."""
        masks = self._masks(self.step, self._batch_index)
        dag = self.active_plan.dag
        frozen = {stage: masks.of_stage(stage, dag) for stage in self._units}
        cut = {stage: masks.without_input_grads(stage) for stage in self._units}
        for each in self._stages:
            index = each.stage_index
            each.freeze(frozen[index], without_input_grads=cut[index])
        front = self.cache or self.ahead
        entry = None if front is None else front.entry(self._batch_index)
        if entry is not None:
            for stage in self._stages:
                stage.enter(entry)
        try:
            with self._outside.batch(), self._recorder.recorded_batch():
                yield
        finally:
            for stage in self._stages:
                stage.freeze_nothing()
        # It takes time, and so not while times are measured, unless there was no warm-up.
        measures = self.subspaces.prepares or (
            self.phase is Phase.UPPER_BOUND and not self.subspaces.knows_energies
        )
        is_first, began = self._batch_index == 0, self._recorder.clock.mark()
        if self.plans and measures and is_first:
            self.planner.measured.energies = self.subspaces.energies()
        self.subspaces.end_batch(self._batch_index)
        if self.subspaces.layers and self.phase in UNFROZEN_PHASES and is_first:
            self._turning = began, self._recorder.clock.mark()
        self._updates.add_batch(frozen)
        self._log.add_masks(frozen)
        is_cold = self._batches_in_phase < self.settings.discard_batches
        applied = {s.stage_index: s.applied_ratios for s in self._stages}
        start = None if entry is None or entry.start is None else entry.start.stage
        policy = {} if self.checks is None else self.checks.decision.metrics
        batch = ObservedBatch(
            self.step.number,
            self.phase,
            is_cold,
            entry_stage=start,
            policy=policy,
            pattern=masks.pattern,
        )
        self._log.add(batch, applied, cut)
        self._batches_in_phase += 1
        self._batch_index += 1

    def end_step(self) -> None:
        """Leave the step; let the policy check, and the planner solve or compare times."""
        self._updates.end_step()
        if self.cache is not None:
            self.cache.end_step(self._drain)
        if self.checks is not None and self.phase is not Phase.OFF:
            self.checks.end_step(self._updates.step_frequency)
        if self.plans:
            outside_ms = self._outside.end_step()
            if outside_ms is not None and self._batch_index > 0:
                self.planner.measured.outside_ms.append(outside_ms / self._batch_index)
            if self.planner.needs_times(self.step):
                self._drain()
            if self.step.after_warmup == 0:
                choose_rank(self.subspaces, self._exchange)
                self.planner.measured.energies = self.subspaces.measured[self.subspaces.rank]
            plan = self.plan
            self.planner.end_step(self.step.number)
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
        watch = None if self.checks is None else self.checks.watch
        for part in (self.planner, watch, self.cache):
            if part is not None:
                part.close()

    # -- metrics -----------------------------------------------------------------------------------

    def collect(self, gradient_scale: float | None = None) -> CollectedMetrics:
        """Exchange what was measured since the last call.

        Every rank must call this at the same step. Waits for the device, so call it only where
        metrics are logged. ``gradient_scale`` undoes clipping of the step's gradients, which must
        still be there; None to measure none.
        """
        self._drain()
        checks = self.checks
        mine = RankMetrics(
            self._log.take(),
            None if checks is None else (checks.take_ms_per_step(), checks.n_bytes),
            self._updates.take(gradient_scale, self._drawn_ratio),
            None if self.cache is None else self.cache.use(),
        )
        policy = {} if checks is None else dict(checks.decision.metrics)
        return collected(self._exchange.all_gather(mine), self.active_plan, policy)

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
        for batch in self._log.read():
            self.planner.add(batch.phase, batch.pattern, batch.record, cold=batch.is_cold)
            if self.cache is not None:
                self.cache.add_times(batch.record.durations_ms)
            if self.on_batch is not None:
                self.on_batch(batch)

    # -- checkpoint --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of freezing (:meth:`FreezingState.save`)."""
        self._drain()
        phases = self.phases
        kept: dict[str, Any] = {"front": self.settled_front}
        if phases.n_learned:
            kept["restarted"] = [phases.last_warmup_step, phases.n_learned]
        return self._state.save(kept)

    def state_to_load(self, keys: Collection[str]) -> dict[str, Any]:
        """Return what to load of a checkpoint whose freezing state has ``keys``."""
        return self._state.wanted(keys)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on all processes, of this number or another."""
        state = self._state.read(state_dict, moves=self.moves)
        if "restarted" in state:
            self._begin_phases(self.phases.restarted(*state["restarted"]))
        self._state.restore(state, state_dict)
        if self.checks is not None:
            self.settled_front = state.get("front", self.checks.frozen_layers)
