"""What a running training can be rebuilt as, and what that follows from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torchtitan.freezing.config import JobConfig


@dataclass(frozen=True)
class Moment:
    """Where a run is.

    Attributes:
        n_frozen: Layers in front that are frozen.
        step: The step that was finished last.
        n_batches: Rows that were read until then, in steps of the start.
        seconds: What that step took on this rank; 0 if it was not in the present form.
    """

    n_frozen: int
    step: int
    n_batches: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Pace:
    """What a step is, over one of the start.

    Attributes:
        growth: Rows; the schedule of the learning rate goes on by as many steps.
        rate_factor: Learning rate.
    """

    growth: int = 1
    rate_factor: float = 1.0


class Form(Protocol):
    """One way for a run to go on; in words, how, such as "in a pipeline of 2 ranks"."""

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each stage."""

    def moved(self, config: JobConfig) -> JobConfig:
        """Return the configuration that a run goes on with that began with ``config``."""

    def pace(self, config: JobConfig) -> Pace:
        """Return what its steps are, of a run that began with ``config``."""


def ending_with(config: JobConfig, last_step: int) -> JobConfig:
    """Return a run that ends with another step; the schedule of its learning rate stays."""
    scheduler, n_steps = config.lr_scheduler, config.lr_scheduler.total_steps
    if n_steps is None:
        n_steps = config.training.steps
    return replace(
        config,
        training=replace(config.training, steps=last_step),
        lr_scheduler=replace(scheduler, total_steps=n_steps),
    )
