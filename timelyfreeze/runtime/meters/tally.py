"""Counts how often each tensor of a rank was frozen: in a step, since a moment, since the ramp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.masks import ParameterTable
from timelyfreeze.settings import FREEZING_PHASES, Phase


@dataclass(frozen=True, eq=False)
class Count:
    """Backwards of a stage and which tensors they left out.

    Attributes:
        backwards: Number of backwards that compute weight gradients.
        frozen: How many of them each of the n tensors was frozen in, int64, shape [n].
    """

    backwards: int
    frozen: NDArray[np.int64]

    def __add__(self, other: Count) -> Count:
        """Return both together."""
        return Count(self.backwards + other.backwards, self.frozen + other.frozen)

    @property
    def update_frequency(self) -> NDArray[np.float64]:
        """Fraction of the backwards that updated each tensor, shape [n]; 1 where there was none."""
        if not self.backwards:
            return np.ones(len(self.frozen))
        return 1.0 - self.frozen / self.backwards


@dataclass(frozen=True)
class StepFreezing:
    """What a step froze on one rank.

    Attributes:
        step: Number of the step.
        frozen: Frozen elements, added up over its backwards.
        elements: Elements that they could have updated.
    """

    step: int
    frozen: int
    elements: int


class FreezeTally:
    """Counts along the steps, on one rank.

    Attributes:
        step: Counts of the current step, by stage.
        recent: Counts since the last :meth:`take_recent`, or since a later change of phase.
        since_freezing: Counts since freezing began, in the phases ``FREEZING_PHASES``.
        total: Frozen elements, and elements, of all steps that have ended.
    """

    def __init__(self, tables: Mapping[int, ParameterTable], n_microbatches: int) -> None:
        self._tables = tables
        self._n_microbatches = n_microbatches
        self._number = 0
        self._phase: Phase | None = None
        self._steps: list[StepFreezing] = []
        self.total: tuple[int, int] = (0, 0)
        self.step = self._nothing()
        self.recent = self._nothing()
        self.since_freezing = self._nothing()

    def begin_step(self, step: int, phase: Phase) -> None:
        """Begin a step."""
        self._number = step
        self.step = self._nothing()
        if phase is not self._phase:
            self.recent = self._nothing()
        self._phase = phase

    def add_batch(self, masks: Mapping[int, Mapping[int, NDArray[np.bool_]]]) -> None:
        """Take note of a batch.

        Args:
            masks: What it froze, by stage and microbatch; microbatches that are missing froze
                nothing.
        """
        for stage, of_stage in masks.items():
            frozen = np.zeros(len(self._tables[stage].names), dtype=np.int64)
            for mask in of_stage.values():
                frozen += mask
            count = Count(self._n_microbatches, frozen)
            self.step[stage] += count
            self.recent[stage] += count
            if self._phase in FREEZING_PHASES:
                self.since_freezing[stage] += count

    def end_step(self) -> None:
        """Note what fraction of its elements the step froze."""
        ended = self._summed()
        self._steps.append(ended)
        self.total = (self.total[0] + ended.frozen, self.total[1] + ended.elements)

    @property
    def step_frequency(self) -> NDArray[np.float64]:
        """Fraction of the step's backwards that updated each of the rank's tensors."""
        return np.concatenate([count.update_frequency for count in self.step.values()])

    def take_recent(self) -> dict[int, Count]:
        """Return the counts of the current phase since the last call."""
        recent, self.recent = self.recent, self._nothing()
        return recent

    def take_steps(self) -> list[StepFreezing]:
        """Return the steps since the last call, the current one as far as it has come."""
        steps, self._steps = self._steps, []
        if not steps or steps[-1].step != self._number:
            steps.append(self._summed())
        return steps

    def _summed(self) -> StepFreezing:
        frozen, elements = 0, 0
        for stage, count in self.step.items():
            table = self._tables[stage]
            frozen += int(count.frozen @ table.sizes)
            elements += count.backwards * table.total
        return StepFreezing(self._number, frozen, elements)

    def _nothing(self) -> dict[int, Count]:
        return {
            stage: Count(0, np.zeros(len(table.names), dtype=np.int64))
            for stage, table in self._tables.items()
        }

    # -- checkpoint --------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """Return the counts since freezing began as plain data, by stage."""
        return {
            str(stage): [count.backwards, count.frozen.tolist()]
            for stage, count in self.since_freezing.items()
        }

    def load_plain_state(self, plain: Mapping[str, Sequence[Any]]) -> None:
        """Restore what :meth:`plain_state` returned."""
        for stage in self._tables:
            backwards, frozen = plain[str(stage)]
            self.since_freezing[stage] = Count(backwards, np.array(frozen, dtype=np.int64))


def step_ratios(ranks: Sequence[Sequence[StepFreezing]]) -> dict[int, float]:
    """Return the freeze ratio of each step: frozen elements over all elements of all ranks.

    Args:
        ranks: What each rank noted; a step that a rank has noted twice counts as noted last.
    """
    frozen: dict[int, float] = {}
    elements: dict[int, int] = {}
    for steps in ranks:
        for number, step in {step.step: step for step in steps}.items():
            frozen[number] = frozen.get(number, 0) + step.frozen
            elements[number] = elements.get(number, 0) + step.elements
    return {n: frozen[n] / elements[n] for n in sorted(frozen) if elements[n]}
