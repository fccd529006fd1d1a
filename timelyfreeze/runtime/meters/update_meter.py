"""What freezing leaves of the updates on a rank: counts of frozen tensors, energy let through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from timelyfreeze.masks import ParameterTable
from timelyfreeze.records import FrozenCount, PassedEnergy, passed_energy
from timelyfreeze.runtime.meters.gradient_energy import GradientEnergy
from timelyfreeze.runtime.meters.tally import Count, FreezeTally, StepFreezing


@dataclass(frozen=True)
class RankUpdates:
    """What a rank tells the others where metrics are logged.

    Attributes:
        steps: What each step since the last time froze.
        total: Frozen elements, and elements, of all steps that have ended.
        energy: Gradient energy of its tensors and what is let through; None if not measured.
    """

    steps: list[StepFreezing]
    total: tuple[int, int]
    energy: PassedEnergy | None


@dataclass(frozen=True, eq=False)
class StageCount:
    """How often the tensors of one stage were frozen since freezing began."""

    table: ParameterTable
    count: Count


class UpdateMeter(FreezeTally):
    """Follows the updates of a rank's tensors along the steps: their counts, and gradient energy.

    Args:
        tables: Tensors of the rank's stages.
        n_microbatches: Of a batch.
        energy: Measures their gradients; None to do without p_eff.
    """

    def __init__(
        self,
        tables: Mapping[int, ParameterTable],
        n_microbatches: int,
        energy: GradientEnergy | None,
    ) -> None:
        super().__init__(tables, n_microbatches)
        self._energy = energy

    def take(
        self, gradient_scale: float | None, drawn_ratio: Callable[[int], float | None]
    ) -> RankUpdates:
        """Return what there is since the last call.

        Args:
            gradient_scale: What the gradients of the current step have to be multiplied with to
                undo clipping; None to measure none. The same on every rank.
            drawn_ratio: Gives the probability that the current step's masks freeze a tensor of a
                stage, mean over its backwards; None where masks are not drawn evenly.
        """
        return RankUpdates(self.take_steps(), self.total, self._passed(gradient_scale, drawn_ratio))

    def _passed(
        self, gradient_scale: float | None, drawn_ratio: Callable[[int], float | None]
    ) -> PassedEnergy | None:
        """Return the energy that there is and what is let through of it.

        Energies are those from before this step where there are any: what a step's masks have left
        of its gradients goes together with these masks.
        """
        recent = self.take_recent()
        if self._energy is None:
            return None
        is_first = not self._energy.is_complete
        if gradient_scale is not None and is_first:
            self._energy.measure(self.step, gradient_scale)
        passed = PassedEnergy(0.0, 0.0)
        for stage, count in recent.items():
            ratio = drawn_ratio(stage)
            drawn = np.full(len(count.frozen), 1.0 - (ratio or 0.0))
            frequency = count.update_frequency if ratio is None else drawn
            passed += passed_energy(frequency, self._energy.energy[stage])
        if gradient_scale is not None and not is_first:
            self._energy.measure(self.step, gradient_scale)
        return passed

    def counts(self) -> dict[int, StageCount]:
        """Return how often each tensor was frozen since freezing began, by stage."""
        since = self.since_freezing.items()
        return {stage: StageCount(self._tables[stage], count) for stage, count in since}

    # -- checkpoint --------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """Return ``{"tally": ..., "energy": ...}``, each with an entry for every stage."""
        state = {"tally": super().plain_state()}
        if self._energy is not None:
            state["energy"] = self._energy.plain_state()
        return state

    def load_plain_state(self, plain: Mapping[str, Any]) -> None:
        """Restore what :meth:`plain_state` returned.

        A run that measured no energy has saved none; measuring begins anew then.
        """
        super().load_plain_state(plain["tally"])
        if self._energy is not None and "energy" in plain:
            self._energy.load_plain_state(plain["energy"])


def frozen_counts(
    ranks: Sequence[Mapping[int, StageCount]], stage_to_rank: Sequence[int]
) -> list[FrozenCount]:
    """Put the counts of all ranks together, by stage; replicas have the same.

    Args:
        ranks: What each rank counted.
        stage_to_rank: Pipeline rank of each stage.
    """
    by_stage = {stage: counted for rank in ranks for stage, counted in rank.items()}
    return [
        FrozenCount(stage_to_rank[stage], stage, name, size, counted.count.backwards, frozen)
        for stage, counted in sorted(by_stage.items())
        for name, size, frozen in zip(
            counted.table.names,
            counted.table.sizes.tolist(),
            counted.count.frozen.tolist(),
            strict=True,
        )
    ]
