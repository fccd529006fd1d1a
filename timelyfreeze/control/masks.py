"""What a batch freezes in each backward: a pure function of step, batch, plan, decision and seed.

How much follows from the phase and the plan, which tensors from the policy or a draw. Replicas and
resumed runs come to the same masks without talking.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.control.plans.active_plan import ActivePlan
from timelyfreeze.control.policy_runner import PolicyRunner
from timelyfreeze.policies import (
    FreezeUnits,
    build_parameter_table,
    build_units,
    draw_whether,
    fit_to_ratio,
    fit_whole_stage,
    mask_rng,
)
from timelyfreeze.runtime import NOTHING_FROZEN, BatchEntry, FreezingStage, Masks
from timelyfreeze.schedule import Action
from timelyfreeze.settings import IDLE_PHASES, FreezeSettings, Step
from timelyfreeze.timing import Pattern, pattern_of


@dataclass(frozen=True)
class BatchMasks:
    """The masks of one batch on this rank."""

    settings: FreezeSettings  # the user's choices
    # parameters of this rank's stages, and which of them are frozen together
    units: Mapping[int, FreezeUnits]
    active: ActivePlan  # has the pipeline's actions
    plan: ActivePlan | None  # the same where it says how much to freeze; None for a policy alone
    # says which tensors; None to draw at random. One of the two is there
    checks: PolicyRunner | None
    step: Step  # the optimizer step
    batch_index: int  # number of the batch in its step, from 0

    @cached_property
    def pattern(self) -> Pattern | None:
        """What the batch freezes, if it is one of monitoring."""
        return pattern_of(self.step, self.batch_index, self._n_microbatches)

    @cached_property
    def frozen(self) -> Masks:
        """The masks by stage and microbatch; those that freeze nothing are left out."""
        return {stage: self._of_stage(stage) for stage in self.units}

    @cached_property
    def cut(self) -> Mapping[int, Collection[int]]:
        """Microbatches whose input gradient nobody needs, by stage."""
        return {stage: self._without_input_grads(stage) for stage in self.units}

    @property
    def _n_microbatches(self) -> int:
        return self.active.order.n_microbatches

    @property
    def _is_idle(self) -> bool:
        return self.step.phase in IDLE_PHASES

    def _of_stage(self, stage: int) -> Mapping[int, NDArray[np.bool_]]:
        if self._is_idle:
            return NOTHING_FROZEN
        backwards = (a for a in self.active.dag.actions if a.kind.freezable and a.stage == stage)
        masks = {action.microbatch: self._mask(action) for action in backwards}
        return {m: mask for m, mask in masks.items() if mask.any()} or NOTHING_FROZEN

    def _mask(self, action: Action) -> NDArray[np.bool_]:
        """Return what the current batch freezes in one backward, bool, shape [n]."""
        stage = action.stage
        units = self.units[stage]
        nothing = np.zeros(len(units.tensors.names), dtype=np.bool_)
        chosen = units.gather(nothing if self.checks is None else self.checks.frozen(stage))
        all_units = np.ones_like(chosen)
        if self.plan is None:
            return units.spread(chosen)
        if self.pattern is not None:
            return units.spread(all_units & self.pattern.freezes(action))
        ratio = self.plan.ratio(action, self.step)
        if ratio in (0.0, 1.0):
            return units.spread(all_units & (ratio == 1.0))
        if stage < self.plan.skip_depths(self.step).get(action.microbatch, 0):
            return units.spread(all_units & self._is_skipped(action.microbatch))
        rng = self._rng(stage, action.microbatch)
        if stage == 0 and self.settings.freezes_first_stage_whole:
            front = np.logical_and.accumulate(chosen)
            return units.spread(fit_whole_stage(units.table, front, ratio, rng))
        return units.spread(fit_to_ratio(units.table, chosen, ratio, rng))

    def _without_input_grads(self, stage: int) -> Collection[int]:
        """Return the microbatches for which no stage in front needs ``stage``'s input gradient.

        A policy alone decides for all microbatches and stages at once, so a frozen prefix is known
        to every rank. Under a plan they are those whose skip depth reaches beyond ``stage``. The
        first stage behind them would save a little too, but the plan's times are those of backwards
        that do compute the gradient, and this one is not idle.
        """
        if self._is_idle:
            return ()
        if self.plan is not None:
            depths = self.plan.skip_depths(self.step)
            return {m for m, depth in depths.items() if stage < depth and self._is_skipped(m)}
        assert self.checks is not None  # without a plan there is a policy
        return () if self.checks.first_live_stage < stage else range(self._n_microbatches)

    def _is_skipped(self, microbatch: int) -> bool:
        """Return whether the current batch freezes the skipped stages of ``microbatch``.

        It freezes all of them or none. Every rank draws the same, from what is the first stage's
        generator. In the stable phase they are always frozen.
        """
        assert self.plan is not None  # only a plan skips
        return draw_whether(self.step.ramp, self._rng(0, microbatch))

    def _rng(self, stage: int, microbatch: int) -> np.random.Generator:
        return mask_rng(self.settings.seed, self.step.number, self.batch_index, microbatch, stage)


class MaskedStages:
    """The stages of a rank, each of which a batch passes under its masks."""

    def __init__(self, stages: Sequence[FreezingStage], settings: FreezeSettings) -> None:
        self.stages, self.settings, self.units = tuple(stages), settings, units_of(stages)

    def masks(
        self, active: ActivePlan, checks: PolicyRunner | None, step: Step, batch_index: int
    ) -> BatchMasks:
        """Return the masks of a batch."""
        plan = active if self.settings.phases.measures else None
        return BatchMasks(self.settings, self.units, active, plan, checks, step, batch_index)

    @contextmanager
    def under(self, masks: BatchMasks, entry: BatchEntry | None) -> Iterator[None]:
        """Run a batch that begins at ``entry``, None for the model's front."""
        for stage in self.stages:
            index = stage.stage_index
            stage.freeze(masks.frozen[index], without_input_grads=masks.cut[index])
            if entry is not None:
                stage.enter(entry)
        try:
            yield
        finally:
            for stage in self.stages:
                stage.freeze_nothing()

    @property
    def applied(self) -> Mapping[int, Mapping[int, float]]:
        """What the last batch froze of each backward's elements, by stage and microbatch."""
        return {stage.stage_index: stage.applied_ratios for stage in self.stages}


def units_of(stages: Sequence[FreezingStage]) -> dict[int, FreezeUnits]:
    """Return the parameters of each stage, and which of them are frozen together."""
    units = {}
    for stage in stages:
        sizes = zip(stage.parameter_names, stage.parameter_sizes.tolist(), strict=True)
        tensors = build_parameter_table(sizes)
        units[stage.stage_index] = build_units(tensors, stage.frozen_together, stage.exact)
    return units
