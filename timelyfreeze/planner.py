"""Plans one run: when times are kept, when they are solved from, and which plan is in force."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from timelyfreeze.actions import Action
from timelyfreeze.bounds import DurationBounds, bounds_from_json, bounds_to_json
from timelyfreeze.cascade import front_depths
from timelyfreeze.dag import build_dag
from timelyfreeze.exchange import Exchange
from timelyfreeze.monitoring import Monitoring, Pattern
from timelyfreeze.order import ScheduleOrder
from timelyfreeze.passes import RankPasses, slowest_durations
from timelyfreeze.phases import Phase, actual_freeze_ratio
from timelyfreeze.plan import FreezePlan, plan_from_ratios
from timelyfreeze.plan_call import PlanCall, automatic_delay, is_quick
from timelyfreeze.planning import (
    RankTimes,
    Solution,
    SolverChoices,
    check_same_pipeline,
    solution_from_plain,
    solution_to_plain,
    solve_from_bounds,
    solve_from_times,
)
from timelyfreeze.processors import play_batch
from timelyfreeze.recorder import PassRecord
from timelyfreeze.remeasure import Group, drifts, forward_slowness, moved_bounds
from timelyfreeze.replanning import (
    Replanning,
    described,
    drift_from_plain,
    drift_text,
    drift_to_plain,
)
from timelyfreeze.samples import Samples
from timelyfreeze.settings import ALL_OR_NOTHING, OFF, PLAN, FreezeSettings, effective_cascade

logger = logging.getLogger(__name__)

# A plan that is solved anew freezes as little as it can. It need not be the faster one: fronts
# (timelyfreeze.cascade) may come about by chance, unplanned. Less than this does not matter.
_LEAST_IMPROVEMENT = 1e-3

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
        on_solved: Called on every rank with the plan and its bounds whenever there are new ones.
        measure_transfers: Times the links between pipeline ranks, when called on all of them.

    Attributes:
        order: The order that ran while monitoring; before, the declared one.
        dag: The graph of it.
        plan: The plan in force, once solved.
        bounds: What it was made from.
        failure: Why there is no plan, if solving failed.
        switched_off: Since when and why nothing is frozen although there is a plan.
        choices: What plans are solved under.
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
        self._measured: DurationBounds | None = None  # before anything moved
        self.failure: str | None = None
        self.switched_off: str | None = None
        self._last_followed_step: int | None = None
        self._settings = settings
        self._exchange = exchange
        self._n_processors = n_processors
        self._on_solved = on_solved
        self._measure_transfers = measure_transfers
        self._cascade = effective_cascade(settings.first_stage, settings.cascade)
        self.choices = SolverChoices(
            max_freeze_ratio=settings.max_freeze_ratio,
            whole_stages=(0,) if settings.first_stage == ALL_OR_NOTHING else (),
            n_processors=n_processors,
            time_limit_s=settings.solver_time_limit_s,
            cascade=self._cascade,
        )
        self._fronts: Mapping[int, int] = {}
        self._monitoring = Monitoring()
        self._transfers_ms: Mapping[tuple[int, int], float] = {}
        self._replanning = Replanning(settings, exchange, n_processors)
        self._call: PlanCall | None = None
        # Drift and due step of a plan that is being solved anew.
        self._again: tuple[Mapping[Group, float], int] | None = None

    # -- the step ----------------------------------------------------------------------------------

    def add(self, phase: Phase, pattern: Pattern | None, record: PassRecord, *, cold: bool) -> None:
        """Take note of a pass.

        Args:
            phase: What its step was for.
            pattern: What it froze, if it was a pass of monitoring.
            record: What the recorder saw.
            cold: Whether it is one of the first passes after a change of phase.
        """
        if pattern is not None and self.plan is None:
            self._monitoring.add(pattern, record, is_cold=cold)
        if phase is Phase.STABLE and self.plan is not None:
            self._replanning.add(record, is_cold=cold)

    def begin_step(self, step: int) -> None:
        """Begin again the solving that a checkpoint interrupted; every rank must call this."""
        if self._call is not None:
            return
        last = self._settings.phases.last_monitor_step
        if self._again is not None:
            drift, due_step = self._again
            self._solve_again(drift, max(due_step, step))
        elif step > last and self._has_times_alone:
            self._solve_first(max(last + self._delay, step))

    def needs_times(self, step: int) -> bool:
        """Return whether the end of ``step`` needs all passes that are recorded.

        Those under a plan that another one follows must not be taken for the other's.
        """
        is_last = self._call is not None and step >= self._call.due_step
        return is_last or self._settings.phases.phase(step).monitors or self._remeasures(step)

    def end_step(self, step: int) -> None:
        """Solve, take what was solved, or compare times; every rank must call this."""
        if step == self._settings.phases.last_monitor_step:
            self._transfers_ms = self._measure_transfers()
            self._solve_first(step + self._delay)
        if self._call is not None:
            if step >= self._call.due_step:
                self._take(step)
        elif self._remeasures(step) and self._replanning.has_enough:
            self._remeasure(step)

    @property
    def is_solving(self) -> bool:
        """Whether the first plan is in the making."""
        return self._call is not None and self.plan is None

    def is_off(self, step: int) -> bool:
        """Return whether freezing is switched off in ``step``."""
        return self._last_followed_step is not None and step > self._last_followed_step

    def close(self) -> None:
        """End what still runs in the background."""
        if self._call is not None:
            self._call.cancel()

    # -- what the plan says ------------------------------------------------------------------------

    def ratio(self, action: Action, step: int) -> float:
        """Return the freeze ratio that ``action`` has at ``step``, Eq. 9 included.

        Args:
            action: A backward of the schedule.
            step: Optimizer step, from 1.

        Returns:
            float: In [0, 1]; 1 while the lower bound is measured, 0.5 in mixed monitoring as the
            mean over opposite passes, 0 where there is no plan or freezing is switched off.

        Raises:
            ValueError: If the plan does not know the action.
        """
        phase = self._settings.phases.phase(step)
        if phase.monitors:
            return {Phase.LOWER_BOUND: 1.0, Phase.MIXED: 0.5}.get(phase, 0.0)
        if self.plan is None or self.is_off(step) or phase is Phase.WARMUP:
            return 0.0
        return actual_freeze_ratio(self.plan.ratio_of(action), step, self._settings.phases)

    def front_depths(self, step: int) -> Mapping[int, int]:
        """Return the plan's fronts at ``step`` (:mod:`timelyfreeze.cascade`), by microbatch.

        They are empty while no plan is followed, and where ``freezing.cascade`` is off.
        """
        is_followed = self._settings.phases.ramp(step) > 0.0 and not self.is_off(step)
        return self._fronts if is_followed else {}

    def expected_batch_ms(self, step: int) -> float | None:
        """Predict the time of a batch under the ratios of ``step``.

        Returns:
            Milliseconds, or None as long as there are no bounds, and in mixed monitoring, where one
            batch is not like another.
        """
        phase = self._settings.phases.phase(step)
        if self.bounds is None or self.plan is None or phase is Phase.MIXED:
            return None
        if phase is Phase.LOWER_BOUND:
            durations_ms = self.bounds.min_ms
        else:
            # Every ratio is the same share of the plan's, and times fall in proportion.
            share = 0.0 if self.is_off(step) else self._settings.phases.ramp(step)
            durations_ms = (1.0 - share) * self.bounds.max_ms + share * self.plan.durations_ms
        delays_ms = self.bounds.delays_ms(self.dag)
        return play_batch(self.dag, durations_ms, self._n_processors, delays_ms)[1]

    def slowness(self, ranks: Sequence[RankPasses]) -> float | None:
        """Return how much longer forwards take than in the bounds; None without a plan.

        Args:
            ranks: Stable passes of every process.
        """
        if self.plan is None or self.bounds is None:
            return None
        observed_ms = slowest_durations(ranks)
        return forward_slowness(drifts(self.dag, self.bounds, self.plan.durations_ms, observed_ms))

    # -- solving -----------------------------------------------------------------------------------

    @property
    def _delay(self) -> int:
        """Steps from the beginning of solving to the plan."""
        phases, delay = self._settings.phases, self._settings.solver_delay_steps
        if delay is not None:
            return delay
        n_ramp_steps = phases.last_ramp_step - phases.last_monitor_step
        return automatic_delay(len(self.dag.actions), n_ramp_steps, branches=self._branches)

    @property
    def _branches(self) -> bool:
        return self._cascade == PLAN

    @property
    def _has_times_alone(self) -> bool:
        """Whether times have been measured of which nothing has become yet."""
        return self.plan is None and self.failure is None and not self._monitoring.is_empty

    def _solve_first(self, due_step: int) -> None:
        """Gather everyone's times; rank 0 solves."""
        mine = RankTimes(self._monitoring.times(), self._transfers_ms)
        everyone = self._exchange.gather(mine)
        self._begin(due_step, solve_from_times, {"ranks": everyone, "declared": self.order})

    def _solve_again(self, drift: Mapping[Group, float], due_step: int) -> None:
        assert self.bounds is not None  # only a plan that is in force is solved anew
        self._again = (drift, due_step)
        bounds = moved_bounds(self.dag, self.bounds, drift)
        self._begin(due_step, solve_from_bounds, {"order": self.order, "bounds": bounds})

    def _begin(
        self, due_step: int, solve: Callable[..., Solution], arguments: Mapping[str, Any]
    ) -> None:
        if self._delay > 0:
            logger.info("Solving meanwhile: the plan is due at the end of step %d", due_step)
        mine = {**arguments, "choices": self.choices} if self._exchange.rank == 0 else None
        patience_s = self._settings.solver_time_limit_s
        # A process can be ended when its time is up, whatever it is doing; others wait no longer.
        apart = self._delay > 0 or not is_quick(len(self.dag.actions), branches=self._branches)
        self._call = PlanCall(self._exchange, due_step, apart, solve, mine, patience_s)

    def _take(self, step: int) -> None:
        """Take the plan that was solved, or the reason why there is none, on all ranks."""
        assert self._call is not None  # the caller saw to it
        answer = self._call.take()
        self._call = None
        again, self._again = self._again, None
        self._monitoring.clear()
        if isinstance(answer, str):
            self._without(answer, is_first=again is None)
            return
        if self.plan is None or again is None:
            plan = self._adopt(answer)
            logger.info("Freeze plan: %s", described(plan))
        else:
            self._measured = self._measured or self.bounds
            former = self._under(answer.bounds, self.plan)
            stays = former.batch_ms < (1.0 - _LEAST_IMPROVEMENT) * answer.plan.batch_ms
            plan = self._adopt(replace(answer, plan=former) if stays else answer)
            logger.info(
                "Times have moved (%s); the plan solved for them: %s; the former one with them: "
                "%s; %s",
                drift_text(again[0]),
                described(answer.plan),
                described(former),
                "the former one stays" if stays else "the new one takes its place",
            )
        self._replanning.forget()
        if plan.gain < self._settings.least_gain:
            gain = f"{100 * plan.gain:+.1f}%"
            least = f"freezing.least_gain ({self._settings.least_gain:g})"
            self._switch_off(step, f"the plan promises {gain}, under {least}")

    def _under(self, bounds: DurationBounds, plan: FreezePlan) -> FreezePlan:
        """Return what a plan comes to where actions take other times than it was made for."""
        return plan_from_ratios(
            self.dag,
            bounds,
            plan.ratios,
            n_processors=self._n_processors,
            uses_fronts=self._cascade != OFF,
        )

    def _without(self, reason: str, *, is_first: bool) -> None:
        if is_first:
            self.failure = reason
        elif self._exchange.rank == 0:
            logger.warning(
                "Times have moved, but solving again brought no plan (%s); the one in force stays",
                reason,
            )

    def _adopt(self, solution: Solution) -> FreezePlan:
        self.order, self.dag = solution.order, solution.dag
        self.bounds, self.plan = solution.bounds, solution.plan
        if self._cascade != OFF:
            self._fronts = front_depths(self.dag, self.plan.ratios)
        self._on_solved(self.plan, self.bounds)
        return self.plan

    def follow(self, solution: Solution) -> None:
        """Put a plan in force that was made elsewhere; every rank must be given the same.

        Raises:
            ValueError: If it was made for another pipeline.
        """
        check_same_pipeline(solution.order, self.order)
        self._adopt(solution)
        self._replanning.forget()

    # -- the stable phase --------------------------------------------------------------------------

    def _remeasures(self, step: int) -> bool:
        is_followed = self.plan is not None and self.switched_off is None and self._call is None
        return is_followed and self._replanning.looks_at(step)

    def _remeasure(self, step: int) -> None:
        """Compare times with the plan's; solve anew or switch off where they ask for it."""
        assert self.plan is not None  # the caller saw to it
        assert self.bounds is not None
        measured = self._measured or self.bounds
        found = self._replanning.measure(self.dag, measured, self.bounds, self.plan)
        if found is None:
            return  # times that cannot be say nothing of the plan
        reason = self._replanning.why_not(found)
        if reason is not None:
            self._switch_off(step, reason)
        elif self._replanning.has_moved(found):
            self._solve_again(found.drift, step + self._delay)
            if self._delay == 0:
                self._take(step)

    def _switch_off(self, step: int, reason: str) -> None:
        self._last_followed_step = step
        self.switched_off = f"from step {step + 1} on: {reason}"
        logger.info("Freezing is switched off %s", self.switched_off)

    # -- checkpoint --------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """Return times, what became of solving and, once solved, order, bounds and plan."""
        state: dict[str, Any] = {
            "samples": {
                **self._monitoring.to_plain(),
                Phase.STABLE.value: self._replanning.to_plain(),
            },
            "transfers_ms": [[*link, ms] for link, ms in self._transfers_ms.items()],
            "failure": self.failure,
            "switched_off": self.switched_off,
            "last_followed_step": self._last_followed_step,
            "low_gains": self._replanning.n_low,
            "again": None,
        }
        if self._again is not None:
            drift, due_step = self._again
            state["again"] = {"drift": drift_to_plain(drift), "due_step": due_step}
        if self.plan is not None and self.bounds is not None:
            solution = Solution(self.order, self.dag, self.bounds, self.plan)
            state["solved"] = solution_to_plain(solution)
        if self._measured is not None:
            state["measured"] = bounds_to_json(self.dag, self._measured)
        return state

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`plain_state` returned, in this version or before plans were remade.

        Raises:
            ValueError: If the plan was made for another pipeline.
        """
        self.close()
        self._call = None
        samples = state["samples"]
        self._monitoring.load_plain(samples)
        stable = samples.get(Phase.STABLE.value, Samples().to_plain())
        self._replanning.load_plain(stable, state.get("low_gains", 0))
        self._transfers_ms = {(a, b): ms for a, b, ms in state.get("transfers_ms", ())}
        self.failure = state["failure"]
        self.switched_off = state.get("switched_off")
        self._last_followed_step = state.get("last_followed_step")
        again = state.get("again")
        self._again = again and (drift_from_plain(again["drift"]), again["due_step"])
        if "solved" in state:
            solution = solution_from_plain(state["solved"])
            check_same_pipeline(solution.order, self.order)
            self._adopt(solution)
        if "measured" in state:
            self._measured = bounds_from_json(self.dag, state["measured"])
