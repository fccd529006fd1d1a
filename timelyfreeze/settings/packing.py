"""What a user chooses about the memory that freezing sets free: larger batches, or fewer ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from timelyfreeze.settings.names import key

NONE = "none"
PERFORMANCE = "performance"
EFFICIENCY = "efficiency"
_MODES = (NONE, PERFORMANCE, EFFICIENCY)

LINEAR = "linear"
SQRT = "sqrt"
_RATES = (NONE, LINEAR, SQRT)


@dataclass(frozen=True)
class PackingSettings:
    """Whether batches grow, or ranks become fewer, as the front of the model freezes."""

    mode: str = NONE
    """"performance": use memory that the frozen front sets free for larger microbatches, so that a
    step takes fewer gradient accumulations. "efficiency": once the model fits on fewer ranks, go on
    with as many processes, from a checkpoint. "none": both stay. For methods that freeze the front
    and make no plan: see docs/how/packing.md."""

    max_global_batch: int = 0
    """Once a step is down to one batch, training.global_batch_size may grow up to this, in whole
    multiples; the run then takes fewer steps for the same rows. 0: it stays."""

    learning_rate: str = NONE
    """How the learning rate grows with the global batch: "none" (not at all), "linear" (as the
    batch does) or "sqrt" (as its square root)."""

    @property
    def is_on(self) -> bool:
        """Whether batches may grow, or ranks become fewer."""
        return self.mode != NONE

    @property
    def gives_back(self) -> bool:
        """Whether ranks may become fewer."""
        return self.mode == EFFICIENCY

    def rate_factor(self, growth: int) -> float:
        """Return what the learning rate is multiplied with where steps have more rows.

        Args:
            growth: Rows of a step, over those at the start.
        """
        if self.learning_rate == NONE:
            return 1.0
        return float(growth) if self.learning_rate == LINEAR else math.sqrt(growth)

    def errors(self) -> Iterator[str]:
        """Yield what is wrong with the settings: key, value and rule."""
        if self.mode not in _MODES:
            yield f"{key('packing.mode')} is {self.mode!r}; known: {', '.join(_MODES)}"
        if self.max_global_batch < 0:
            name = key("packing.max_global_batch")
            yield f"{name} is {self.max_global_batch}; it must be 0 or more"
        if self.learning_rate not in _RATES:
            yield (
                f"{key('packing.learning_rate')} is {self.learning_rate!r}; "
                f"known: {', '.join(_RATES)}"
            )
        if self.gives_back:
            for name, kept in (("max_global_batch", 0), ("learning_rate", NONE)):
                if (value := getattr(self, name)) != kept:
                    yield (
                        f"{key(f'packing.{name}')} is {value!r}; with packing.mode {EFFICIENCY!r} "
                        f"steps keep their rows, so it must be {kept!r}"
                    )
