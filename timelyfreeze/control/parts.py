"""Parts of a step that put clocks, subspaces and a front to work by the phases of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from timelyfreeze.control.collected import BatchLog, RankMetrics
from timelyfreeze.control.dimensions import choose_dimension
from timelyfreeze.control.plans.planner import Planner
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.front.caching import FrontCache
from timelyfreeze.records.convergence import UNFROZEN_PHASES
from timelyfreeze.runtime import (
    BatchEntry,
    Clock,
    Exchange,
    FrontRunAhead,
    Masks,
    ObservedBatch,
    OutsideClock,
    StepPart,
)
from timelyfreeze.runtime.low_rank import Subspaces
from timelyfreeze.runtime.meters import UpdateMeter
from timelyfreeze.settings import IDLE_PHASES, Phase, Step


@dataclass(eq=False)
class ControlSteps(StepPart):
    """Times of steps that freeze nothing among the steps that freeze."""

    planner: Planner
    name = "control steps"

    def read(self, observed: ObservedBatch) -> None:
        """Take note of a batch."""
        if observed.phase is Phase.CONTROL and self.planner.active_plan.plan is not None:
            self.planner.replanning.add(observed.record, is_cold=observed.is_cold, is_control=True)


@dataclass(eq=False)
class LowRank(StepPart):
    """Subspaces in which frozen weights learn, and measurements of them for the plan."""

    subspaces: Subspaces
    planner: Planner
    exchange: Exchange
    clock: Clock
    name, prefix = "subspaces", "subspace."
    _turning: tuple[Any, Any] | None = None  # marks of this step

    def begin_step(self, step: Step) -> None:
        """Enter a step."""
        self._turning = None
        self.subspaces.begin_step(step)

    def end_batch(self, number: int, masks: Masks) -> None:
        """Measure and turn subspaces by the first batch."""
        if number > 0:
            return
        subspaces, phase, began = self.subspaces, self.subspaces.step.phase, self.clock.mark()
        # It takes time, and so not while times are measured, unless there was no warm-up.
        is_late = phase is Phase.UPPER_BOUND and not subspaces.knows_energies
        if subspaces.prepares or is_late:
            self.planner.measured.energies = subspaces.energies()
        subspaces.end_batch(number)
        if subspaces.layers and phase in UNFROZEN_PHASES:
            self._turning = began, self.clock.mark()

    def end_step(self, step: Step) -> None:
        """Choose a dimension as the warm-up ends."""
        if step.after_warmup == 0:
            choose_dimension(self.subspaces, self.exchange)
            self.planner.measured.energies = self.subspaces.measured[self.subspaces.dimension]

    def turning_ms(self) -> float:
        """Return the time of the current step's turns, in phases that freeze nothing; waits."""
        if self._turning is None:
            return 0.0
        self.clock.wait(self._turning[1])
        return self.clock.elapsed_ms(*self._turning)

    def plain_state(self) -> Mapping[str, Any]:
        """Return the dimension, where there is a choice."""
        return {"rank": self.subspaces.dimension} if len(self.subspaces.dimensions) > 1 else {}

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Restore the dimension."""
        if (dimension := state.get("rank")) in self.subspaces.dimensions:
            self.subspaces.keep(dimension)

    def tensor_state(self) -> Mapping[str, Tensor]:
        """Return the subspaces, and what is known of gradients in them."""
        return self.subspaces.tensors()

    def load_tensor_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the subspaces."""
        self.subspaces.load(tensors)


@dataclass(eq=False)
class FrontAhead(StepPart):
    """A frozen front that works ahead, for a policy that decides alone."""

    ahead: FrontRunAhead
    checks: PolicyRunner
    name = "run-ahead"

    def begin_step(self, step: Step) -> None:
        """Enter a step with the stages that it freezes whole."""
        is_idle = step.phase in IDLE_PHASES
        self.ahead.begin_step(0 if is_idle else self.checks.first_live_stage)

    def entry(self, number: int) -> BatchEntry | None:
        """Return where a batch enters."""
        return self.ahead.entry(number)


class PartList(list[StepPart]):
    """All parts of a rank's step, in the order that ``StepPart`` makes a rule of.

    A policy and its cache, or a planner and its clocks, may be missing. ``turns`` and ``outside``
    measure for a plan.
    """

    ahead: FrontRunAhead | None = None  # which begins batches for a policy that decides alone

    def __init__(
        self,
        planner: Planner,
        checks: PolicyRunner | None,
        cache: FrontCache | None,
        turns: LowRank,
        outside: OutsideClock,
        log: BatchLog,
        updates: UpdateMeter,
    ) -> None:
        of_plans: list[StepPart] = [planner, ControlSteps(planner), turns, outside]
        parts = [*(of_plans if planner.phases.measures else []), checks, cache, log, updates]
        super().__init__(part for part in parts if part is not None)
        self._checks, self._exchange = checks, planner.exchange
        if checks is not None:
            checks.frequency = lambda: updates.step_frequency

    def run_ahead(self, front: FrontRunAhead) -> None:
        """Begin batches behind a front that works ahead, for a policy that decides alone."""
        assert self._checks is not None  # a plan has no front
        self.ahead = front
        self.insert(-1, FrontAhead(front, self._checks))
        check_same_parts(self, self._exchange)

    def begin_step(self, step: Step) -> None:
        """Enter a step."""
        for part in self:
            part.begin_step(step)

    def entry(self, number: int) -> BatchEntry | None:
        """Return where a batch enters by the first part that says so, once all are asked."""
        entries = [part.entry(number) for part in self]
        return next((entry for entry in entries if entry is not None), None)

    def end_batch(self, number: int, masks: Masks) -> None:
        """Leave a batch of the step."""
        for part in self:
            part.end_batch(number, masks)

    def read(self, batches: Sequence[ObservedBatch]) -> None:
        """Take note of batches whose times are there, one after the other."""
        for batch in batches:
            for part in self:
                part.read(batch)

    def end_step(self, step: Step, read: Callable[[], None]) -> None:
        """Leave the step in the opposite order, and ``read`` batches for parts that need them."""
        for part in reversed(self):
            if part.needs_times(step):
                read()
            part.end_step(step)

    def collect(self, gradient_scale: float | None) -> RankMetrics:
        """Return the rank's measurements since the last call."""
        found: dict[str, Any] = {}
        for part in self:
            found |= part.collect(gradient_scale)
        return RankMetrics(**found)

    def close(self) -> None:
        """End what still runs in the background."""
        for part in self:
            part.close()


def check_same_parts(parts: Sequence[StepPart], exchange: Exchange) -> None:
    """Refuse parts that are not those of all other ranks, with whom they talk in their order."""
    first, *others = exchange.all_gather([part.name for part in parts])
    for rank, names in enumerate(others, 1):
        if names != first:
            odd = sorted({*first} ^ {*names})
            raise ValueError(
                f"a step has the parts {', '.join(first)} on rank 0 and {', '.join(names)} on rank "
                f"{rank}, which differ in {', '.join(odd) or 'their order'}; every rank needs the "
                "same settings"
            )
