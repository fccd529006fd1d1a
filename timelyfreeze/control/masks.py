"""What a batch freezes in each backward: a pure function of step, batch, plan, decision and seed.

How much follows from the phase and the plan, which tensors from the policy or a draw. Replicas and
resumed runs come to the same masks without talking.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.control.plan_in_force import PlanInForce
from timelyfreeze.control.policy_checks import PolicyChecks
from timelyfreeze.masks import (
    FreezeUnits,
    draw_all_or_nothing,
    draw_uniform,
    draw_whether,
    fit_to_ratio,
    mask_rng,
)
from timelyfreeze.runtime import NOTHING_FROZEN
from timelyfreeze.runtime.sampling import TokenSample
from timelyfreeze.schedule import Action, ActionKind, PipelineDag
from timelyfreeze.settings import FreezeSettings, Phase, actual_freeze_ratio
from timelyfreeze.timing import pattern_of


class BatchMasks:
    """The masks of one batch on this rank.

    Args:
        settings: The user's choices.
        units: Parameters of this rank's stages, and which of them are frozen together.
        n_microbatches: Of a pipeline batch.
        plan: Says how much to freeze; None for a policy alone.
        checks: Say which tensors; None to draw at random. One of the two is there.
        step: Optimizer step, from 1.
        batch_index: Number of the batch in its step, from 0.

    Attributes:
        pattern: What the batch freezes, if it is one of monitoring.
    """

    def __init__(
        self,
        settings: FreezeSettings,
        units: Mapping[int, FreezeUnits],
        n_microbatches: int,
        plan: PlanInForce | None,
        checks: PolicyChecks | None,
        step: int,
        batch_index: int,
    ) -> None:
        self.pattern = pattern_of(settings.phases, step, batch_index, n_microbatches)
        self._settings = settings
        self._units = units
        self._microbatches = range(n_microbatches)
        self._plan = plan
        self._checks = checks
        self._step = step
        self._batch_index = batch_index
        is_off = plan is not None and plan.is_off(step)
        self._is_idle = is_off or settings.phases.phase(step) is Phase.WARMUP

    def of_stage(self, stage: int, dag: PipelineDag) -> Mapping[int, NDArray[np.bool_]]:
        """Return the masks of one stage by microbatch; those that freeze nothing are left out."""
        if self._is_idle or self._settings.samples_tokens:
            return NOTHING_FROZEN
        backwards = _backwards(dag, stage)
        masks = {action.microbatch: self._mask(action) for action in backwards}
        return {m: mask for m, mask in masks.items() if mask.any()} or NOTHING_FROZEN

    def samples_of_stage(
        self, stage: int, dag: PipelineDag, n_layers: int
    ) -> Mapping[int, TokenSample]:
        """Return how one stage's backwards are sampled, by microbatch; exact ones are left out.

        Args:
            stage: Index of the stage.
            dag: The pipeline's graph.
            n_layers: Layers of the stage that are sampled.
        """
        if self._is_idle or not self._settings.samples_tokens:
            return {}
        samples = {}
        for action in _backwards(dag, stage):
            ratio = input_ratio = self._token_ratio(action)
            if action.kind is ActionKind.WEIGHT_BACKWARD:
                half = Action(stage, ActionKind.INPUT_BACKWARD, action.microbatch)
                input_ratio = self._token_ratio(half)
            input_ratio *= self._settings.sample_input_gradients
            if ratio > 0.0 or input_ratio > 0.0:
                numbers = self._rng(stage, action.microbatch).random((n_layers, 2))
                samples[action.microbatch] = TokenSample(ratio, input_ratio, numbers)
        return samples

    def _token_ratio(self, action: Action) -> float:
        assert self._plan is not None  # only a plan says how much to sample
        if self.pattern is not None:
            return self._settings.measured_ratio if self.pattern.freezes(action) else 0.0
        return self._plan.ratio(action, self._step)

    def _mask(self, action: Action) -> NDArray[np.bool_]:
        """Return what the current batch freezes in one backward, bool, shape [n]."""
        stage = action.stage
        units = self._units[stage]
        n = len(units.tensors.names)
        chosen = None if self._checks is None else self._checks.frozen(stage)
        if self._plan is None:
            assert chosen is not None  # the constructor saw to it
            return units.spread(units.gather(chosen))
        if self.pattern is not None:
            return np.full(n, self.pattern.freezes(action))
        ratio = self._plan.ratio(action, self._step)
        if ratio in (0.0, 1.0):
            return np.full(n, ratio == 1.0)
        if stage < self._plan.skip_depths(self._step).get(action.microbatch, 0):
            return np.full(n, self._is_skipped(action.microbatch))
        rng = self._rng(stage, action.microbatch)
        if stage == 0 and self._settings.freezes_first_stage_whole:
            return draw_all_or_nothing(units.tensors, ratio, rng)
        if chosen is None:
            return units.spread(draw_uniform(units.table, ratio, rng))
        return units.spread(fit_to_ratio(units.table, units.gather(chosen), ratio, rng))

    def without_input_grads(self, stage: int) -> Collection[int]:
        """Return the microbatches for which no stage in front needs ``stage``'s input gradient.

        A policy alone decides for all microbatches and stages at once, so a frozen prefix is known
        to every rank. Under a plan they are those whose skip depth reaches beyond ``stage``. The
        first stage behind them would save a little too, but the plan's times are those of backwards
        that do compute the gradient, and this one is not idle.
        """
        if self._is_idle:
            return ()
        if self._plan is not None:
            depths = self._plan.skip_depths(self._step)
            return {m for m, depth in depths.items() if stage < depth and self._is_skipped(m)}
        assert self._checks is not None  # the constructor saw to it
        return () if self._checks.first_live_stage < stage else self._microbatches

    def _is_skipped(self, microbatch: int) -> bool:
        """Return whether the current batch freezes the skipped stages of ``microbatch``.

        It freezes all of them or none. Every rank draws the same, from what is the first stage's
        generator. In the stable phase they are always frozen.
        """
        assert self._plan is not None  # only a plan skips
        ratio = actual_freeze_ratio(1.0, self._step, self._settings.phases)
        return draw_whether(ratio, self._rng(0, microbatch))

    def _rng(self, stage: int, microbatch: int) -> np.random.Generator:
        return mask_rng(self._settings.seed, self._step, self._batch_index, microbatch, stage)


def _backwards(dag: PipelineDag, stage: int) -> list[Action]:
    return [a for a in dag.actions if a.kind.freezable and a.stage == stage]
