"""The frozen front of a run, step by step: ``front.csv`` and ``plasticity.csv``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from timelyfreeze.files import Count, Number, OneOf, Table
from timelyfreeze.settings import Phase


@dataclass(frozen=True)
class FrontRow:
    """The front in one optimizer step; None for what the run has nothing of.

    Attributes:
        step: Its number, from 1.
        phase: Name of its phase.
        frozen_layers: Blocks of the front; 0 where the policy's choice is not in force.
        batches: Batches of the step.
        read: Those of them that began behind the front, with what the activation cache had of it.
        frozen_modules: Modules of the front, of a policy that has modules.
        bootstrapping: 1 while such a policy does not look at modules yet, 0 afterwards.

    Raises:
        ValueError: If more batches were read than there were.
    """

    step: Number
    phase: Annotated[str, OneOf(*(phase.value for phase in Phase))]
    frozen_layers: Count
    batches: Number
    read: Count | None = None
    frozen_modules: Count | None = None
    bootstrapping: Count | None = None

    def __post_init__(self) -> None:
        """Refuse more than all."""
        if self.read is not None and self.read > self.batches:
            raise ValueError(f"read is {self.read}; it must not be above batches ({self.batches})")


@dataclass(frozen=True)
class PlasticityRow:
    """One evaluation of the frontmost live module.

    Attributes:
        step: Optimizer step whose batch went through the module and its reference.
        module: Number of the module, from the front.
        plasticity: How far their outputs lie apart.
        smoothed: Its moving mean.
    """

    step: Number
    module: Count
    plasticity: float
    smoothed: float


FRONT = Table("front.csv", FrontRow)
PLASTICITY = Table("plasticity.csv", PlasticityRow)
