"""Plans one run: when times are kept, when a plan is solved from them, and when again."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from timelyfreeze.control.plans.active_plan import ActivePlan
from timelyfreeze.control.plans.measurements import Measured
from timelyfreeze.control.plans.replanning import (
    DriftMonitor,
    Group,
    described,
    drift_text,
    largest_move,
    moved_bounds,
)
from timelyfreeze.control.plans.solver_job import SolverJob, automatic_delay
from timelyfreeze.files import read_dataclass, to_plain
from timelyfreeze.planning import (
    FreezePlan,
    Solution,
    SolverChoices,
    solve_from_bounds,
    solve_from_times,
)
from timelyfreeze.runtime import Exchange, ObservedBatch, StepPart
from timelyfreeze.schedule import ActionKind, ScheduleOrder
from timelyfreeze.settings import AUTO, FreezeSettings, Phase, PhaseSchedule, Step, key
from timelyfreeze.timing import (
    DurationBounds,
    Samples,
    bounds_from_json,
    bounds_to_json,
)

logger = logging.getLogger(__name__)

# A plan that is solved again freezes as little as it can. It need not be the faster one: input
# gradients may be skipped by chance, unplanned. Less than this does not matter.
_LEAST_IMPROVEMENT = 1e-3

# Returns milliseconds by sending and receiving rank.
TransferMeter = Callable[[], Mapping[tuple[int, int], float]]


@dataclass(eq=False)
class Planner(StepPart):
    """What is known about times, and the plan that follows; nothing where nothing is measured."""

    order: ScheduleOrder  # the declared one
    settings: FreezeSettings  # the user's choices
    phases: PhaseSchedule  # where they lie; elsewhere than chosen once they have begun again
    exchange: Exchange  # talks to the other ranks
    n_processors: float | None = None  # ranks that compute at once; None if each has its own device
    on_solved: Callable[[FreezePlan, DurationBounds], None] = lambda plan, bounds: None
    measure_transfers: TransferMeter = dict
    name = "plan"

    def __post_init__(self) -> None:
        """Begin without times."""
        settings, n_processors = self.settings, self.n_processors
        # the plan that is followed, and the pipeline that it is for
        self.active_plan = ActivePlan(self.order, settings, n_processors, self.on_solved)
        self.measured = Measured()  # what this process has measured for the plan
        self.failure: str | None = None  # why there is no plan, if solving failed
        self._first_bounds: DurationBounds | None = None  # before anything moved
        # what plans are solved under
        self.choices = SolverChoices(
            max_freeze_ratio=settings.max_freeze_ratio,
            whole_stages=(0,) if settings.freezes_first_stage_whole else (),
            n_processors=n_processors,
            time_limit_s=settings.solver_time_limit_s,
            skips_grads=settings.skips_input_grads,
        )
        self._n_actions = len(self.active_plan.dag.actions)
        self.replanning = DriftMonitor(self.active_plan, self.exchange)
        self._call: SolverJob | None = None
        # Drift and due step of a plan that is being solved again.
        self._again: tuple[Mapping[Group, float], int] | None = None
        self._has_warned = False
        # States of all processes of another pipeline, whose times and plan are of no use here. They
        # are saved as they are until a step is taken: the run may only have been resumed here, to
        # go on there.
        self.elsewhere: Sequence[Mapping[str, Any]] | None = None

    def restart(self, phases: PhaseSchedule) -> None:
        """Run in ``phases``, with nothing measured yet."""
        self.phases = phases
        self.__post_init__()

    def leave_elsewhere(self, number: int) -> None:
        """Before step ``number``, leave the plan of another pipeline behind, and plan again."""
        if self.elsewhere is None:
            return
        self.elsewhere, phases = None, self.phases
        if number - 1 > phases.last_warmup_step:
            self.restart(phases.restarted(number - 1, phases.learning_steps(number - 1)))

    # -- the step ----------------------------------------------------------------------------------

    def read(self, observed: ObservedBatch) -> None:
        """Take note of a batch."""
        phase, record, is_cold = observed.phase, observed.record, observed.is_cold
        if observed.pattern is not None and self.active_plan.plan is None:
            self.measured.times.add(observed.pattern, record, is_cold=is_cold)
        if phase is Phase.WARMUP:
            self.measured.warmup.add(record, is_cold=is_cold)
        if phase is Phase.STABLE and self.active_plan.plan is not None:
            self.replanning.add(record, is_cold=is_cold, is_control=False)

    def begin_step(self, step: Step) -> None:
        """Begin again the solving that a checkpoint interrupted; say why nothing is frozen."""
        last, is_solving = self.phases.last_monitor_step, self._call is not None
        is_open = self.active_plan.plan is None and self.failure is None
        if not is_solving and self._again is not None:
            drift, due_step = self._again
            self._solve_again(drift, max(due_step, step.number))
        elif not is_solving and step.number > last and is_open and not self.measured.times.is_empty:
            self._solve_first(max(last + self._delay, step.number))
        if self.lacks_plan(step) and self.exchange.rank == 0 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Nothing is frozen: step %d is past %s (%d) and there is no plan (%s)",
                step.number,
                key("last_monitor_step"),
                last,
                self.unplanned(step),
            )

    def needs_times(self, step: Step) -> bool:
        """Return whether the end of ``step`` needs all batches that are recorded.

        Those under a plan that another one follows must not be taken for the other's.
        """
        is_last = self._call is not None and step.number >= self._call.due_step
        return is_last or step.phase.monitors or self._checks_drift(step.number)

    def end_step(self, step: Step) -> None:
        """Solve, take what was solved, or compare times; every rank must call this."""
        number = step.number
        if number == self.phases.last_monitor_step:
            self.measured.transfers_ms = self.measure_transfers()
            self._solve_first(number + self._delay)
        if self._call is not None:
            if number >= self._call.due_step:
                self._take(number)
        elif self._checks_drift(number):
            self._check_drift(number)

    def unplanned(self, step: Step) -> str | None:
        """Return why no plan freezes anything up to ``step``; None where one does, or none may."""
        if not self.phases.measures or self.active_plan.plan is not None:
            return self.active_plan.switched_off
        last = self.phases.last_monitor_step
        if step.number < last:
            name = key("last_monitor_step")
            return f"a plan is made after step {last} ({name}), and this is {step.number}"
        if self._call is not None:
            return "it is still being solved"
        return self.failure or "the run did not pass through the monitoring steps"

    def lacks_plan(self, step: Step) -> bool:
        """Return whether ``step`` should freeze by a plan but there is none, nor will be."""
        is_due = self.phases.measures and step.phase in (Phase.RAMP, Phase.STABLE)
        return is_due and self.active_plan.plan is None and self._call is None

    def close(self) -> None:
        """End what still runs in the background."""
        if self._call is not None:
            self._call.cancel()

    # -- solving -----------------------------------------------------------------------------------

    @property
    def _delay(self) -> int:
        """Steps from the beginning of solving to the plan."""
        phases, delay = self.phases, self.settings.solver_delay_steps
        if delay is not None:
            return delay
        n_ramp_steps = phases.last_ramp_step - phases.last_monitor_step
        return automatic_delay(self._n_actions, n_ramp_steps)

    def _solve_first(self, due_step: int) -> None:
        """Gather everyone's times; rank 0 solves."""
        ranks = self.exchange.gather(self.measured.rank_times())
        arguments = {"ranks": ranks, "declared": self.active_plan.order}
        self._begin(due_step, solve_from_times, arguments)

    def _solve_again(self, drift: Mapping[Group, float], due_step: int) -> None:
        now = self.active_plan
        assert now.bounds is not None  # only a plan that is in force is solved again
        self._again = (drift, due_step)
        arguments = {"order": now.order, "bounds": moved_bounds(now.dag, now.bounds, drift)}
        self._begin(due_step, solve_from_bounds, arguments)

    def _begin(
        self, due_step: int, solve: Callable[..., Solution], arguments: Mapping[str, Any]
    ) -> None:
        if self._delay > 0:
            logger.info("Solving meanwhile: the plan is due at the end of step %d", due_step)
        mine = {**arguments, "choices": self.choices} if self.exchange.rank == 0 else None
        patience_s = self.settings.solver_time_limit_s
        is_awaited = self._delay == 0
        self._call = SolverJob(self.exchange, due_step, is_awaited, solve, mine, patience_s)

    def _take(self, step: int) -> None:
        """Take the plan that was solved, or the reason why there is none, on all ranks."""
        assert self._call is not None  # the caller saw to it
        answer = self._call.take()
        self._call = None
        again, self._again = self._again, None
        # There is a plan, or there will be none.
        self.measured.times.clear()
        self.measured.warmup = Samples()
        if isinstance(answer, str):
            if again is None:
                self.failure = answer
            elif self.exchange.rank == 0:
                logger.warning(
                    "Times have moved, but solving again brought no plan (%s); the one in force "
                    "stays",
                    answer,
                )
            return
        if self.active_plan.plan is None or again is None:
            plan = self.active_plan.adopt(answer)
            logger.info("Freeze plan: %s; %s", described(plan), self.active_plan.certainty)
        else:
            self._first_bounds = self._first_bounds or self.active_plan.bounds
            former = self.active_plan.under(answer.bounds)
            stays = self._cost(former) < (1.0 - _LEAST_IMPROVEMENT) * self._cost(answer.plan)
            plan = self.active_plan.adopt(replace(answer, plan=former) if stays else answer)
            logger.info(
                "Times have moved (%s); the plan solved for them: %s; the former one with them: "
                "%s; %s; %s",
                drift_text(again[0]),
                described(answer.plan),
                described(former),
                self.active_plan.certainty,
                "the former one stays" if stays else "the new one takes its place",
            )
        self.replanning.recent = Samples()  # another plan is in force
        if plan.gain < self.settings.min_gain:
            gain = f"{100 * plan.gain:+.1f}%"
            least = f"{key('min_gain')} ({self.settings.min_gain:g})"
            self.active_plan.switch_off(step, f"the plan promises {gain}, under {least}")
        elif plan.time_to_loss is not None:
            self._weigh(step, plan, plan.time_to_loss)

    def _cost(self, plan: FreezePlan) -> float:
        """Return what plans with the same bounds are compared by."""
        if self.settings.max_freeze_ratio == AUTO and plan.time_to_loss is not None:
            return plan.time_to_loss
        return plan.batch_ms

    def _weigh(self, step: int, plan: FreezePlan, time_to_loss: float) -> None:
        """Say what a plan comes to; follow none that does not pay, unless the user set the cap."""
        text = (
            f"a loss is estimated to take {plan.steps_factor:.2f} times the steps and "
            f"{time_to_loss:.2f} times the time of no freezing, with {plan.outside_ms:.1f} ms "
            "beside each batch"
        )
        if time_to_loss * (1.0 + self.settings.min_gain) <= 1.0:
            logger.info("With this plan %s", text)
        elif self.settings.max_freeze_ratio == AUTO:
            self.active_plan.switch_off(step, f"with the best plan {text}")
        elif self.exchange.rank == 0:
            logger.warning(
                'Freezing does not pay: %s; set %s to "%s"', text, key("max_freeze_ratio"), AUTO
            )

    # -- the stable phase --------------------------------------------------------------------------

    def _checks_drift(self, step: int) -> bool:
        now = self.active_plan
        is_followed = now.plan is not None and now.switched_off is None
        n_stable, every = step - self.phases.last_ramp_step, self.settings.replan_every
        is_due = every > 0 and n_stable > 0 and n_stable % every == 0
        return is_followed and self._call is None and is_due

    def _check_drift(self, step: int) -> None:
        """Compare times with the plan's; solve again or switch off where they ask for it."""
        bounds = self._first_bounds or self.active_plan.bounds
        assert bounds is not None  # there is a plan, which was made from some
        found = self.replanning.measure(bounds)
        if found is None:
            return  # too few times, or such as cannot be, say nothing of the plan
        reason = self.replanning.why_not(found)
        if reason is not None:
            self.active_plan.switch_off(step, reason)
        elif largest_move(found.drift) > self.settings.replan_threshold:
            self._solve_again(found.drift, step + self._delay)
            if self._delay == 0:
                self._take(step)

    # -- checkpoint --------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """Return where phases began again, and times, plan and what became of solving.

        Those of another pipeline are returned as they are.
        """
        phases = self.phases
        again = {"restarted": [phases.last_warmup_step, phases.n_learned]}
        begun = again if phases.n_learned else {}
        if self.elsewhere is not None:
            return {**begun, "elsewhere": self.elsewhere}
        measured = self.measured.to_plain()
        measured["samples"][Phase.STABLE.value] = to_plain(self.replanning.recent)
        measured["samples"][Phase.CONTROL.value] = to_plain(self.replanning.controls)
        state: dict[str, Any] = {
            **measured,
            "failure": self.failure,
            "low_gains": self.replanning.n_low,
            "again": None,
            **self.active_plan.plain_state(),
        }
        if self._again is not None:
            drift, due_step = self._again
            plain = [[stage, kind.value, factor] for (stage, kind), factor in drift.items()]
            state["again"] = {"drift": plain, "due_step": due_step}
        if self._first_bounds is not None:
            state["measured"] = bounds_to_json(self.active_plan.dag, self._first_bounds)
        return {**begun, "planner": state}

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`plain_state` returned."""
        if "restarted" in state:
            self.restart(self.phases.restarted(*state["restarted"]))
        self.elsewhere = state.get("elsewhere")
        if self.elsewhere is not None:
            return
        state = state["planner"]
        self.close()
        self._call = None
        self.measured.load_plain(state)
        stable = state["samples"][Phase.STABLE.value]
        self.replanning.recent = read_dataclass(Samples, stable, "samples")
        # Checkpoints of older versions have none.
        controls = state["samples"].get(Phase.CONTROL.value, to_plain(Samples()))
        self.replanning.controls = read_dataclass(Samples, controls, "samples")
        self.replanning.n_low = state["low_gains"]
        self.failure = state["failure"]
        self._again = None
        if (again := state["again"]) is not None:
            drift = {(stage, ActionKind(kind)): f for stage, kind, f in again["drift"]}
            self._again = drift, again["due_step"]
        self.active_plan.load_plain_state(state)
        if "measured" in state:
            self._first_bounds = bounds_from_json(self.active_plan.dag, state["measured"])
