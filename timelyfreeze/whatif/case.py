"""What comes of one combination of a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass

from timelyfreeze.whatif.splits import Split


@dataclass(frozen=True)
class Case:
    """One combination of the grid and what comes of it.

    Attributes:
        schedule: Name of the schedule.
        n_microbatches: Microbatches of a batch.
        batches: Batches of a step.
        max_freeze_ratio: The cap r_max.
        split_name: As asked for.
        layers: Layers of each stage; None where the file does not tell.
        step_ms: Step without freezing, milliseconds.
        frozen_step_ms: Step under the plan.
        all_frozen_step_ms: Step with everything frozen; no plan is faster.
        mean_ratio: Mean planned ratio over all backwards.
        stage_ratios: Mean planned ratio of each stage's backwards.
        bubble: Fraction of the batch in which the ranks' devices, or the processors that they fraction,
            have nothing to run, nothing frozen.
        frozen_bubble: The same under the plan.
        best_unfrozen_layers: Split that is fastest without freezing; None where layers are not known.
        best_unfrozen_step_ms: Step of the best_unfrozen.
        tokens_per_second: Under the plan, per device; None where the file does not tell the tokens
            of a microbatch.
    """

    schedule: str
    n_microbatches: int
    batches: int
    max_freeze_ratio: float
    split_name: str
    layers: Split | None
    step_ms: float
    frozen_step_ms: float
    all_frozen_step_ms: float
    mean_ratio: float
    stage_ratios: tuple[float, ...]
    bubble: float
    frozen_bubble: float
    best_unfrozen_layers: Split | None
    best_unfrozen_step_ms: float | None
    tokens_per_second: float | None

    @property
    def gain(self) -> float:
        """Throughput gained over no freezing, as a fraction."""
        return _gain(self.step_ms, self.frozen_step_ms)

    @property
    def upper_bound_gain(self) -> float:
        """Throughput gained if everything were frozen."""
        return _gain(self.step_ms, self.all_frozen_step_ms)

    @property
    def gain_over_best_unfrozen(self) -> float | None:
        """Throughput gained over the best split without freezing."""
        return (
            None
            if self.best_unfrozen_step_ms is None
            else _gain(self.best_unfrozen_step_ms, self.frozen_step_ms)
        )

    @property
    def microbatch_ms(self) -> float:
        """Time of a step under the plan over its microbatches, to compare numbers of those."""
        return self.frozen_step_ms / (self.batches * self.n_microbatches)

    @property
    def tokens_per_second_unfrozen(self) -> float | None:
        """The same without freezing."""
        if self.tokens_per_second is None:
            return None
        return self.tokens_per_second * self.frozen_step_ms / self.step_ms


@dataclass(frozen=True)
class Answer:
    """The cases of a grid.

    Attributes:
        cases: In the order of the grid.
        notes: What was left out and why, and what the metrics rest on.
    """

    cases: tuple[Case, ...]
    notes: tuple[str, ...]


def _gain(before_ms: float, after_ms: float) -> float:
    return before_ms / after_ms - 1.0 if after_ms > 0.0 else math.inf
