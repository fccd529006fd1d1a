"""What freezing leaves of the updates on a rank: counts of frozen tensors, energy let through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from timelyfreeze.policies import ParameterTable
from timelyfreeze.records.convergence import PassedEnergy, passed_energy
from timelyfreeze.records.tables import FrozenCount
from timelyfreeze.runtime.parts import Masks, StepPart
from timelyfreeze.runtime.shards import local_gradient, sum_over_shards
from timelyfreeze.settings import FREEZING_PHASES, Step


@dataclass(frozen=True, eq=False)
class Count:
    """Backwards of a stage and which tensors they left out."""

    backwards: int  # number of backwards that compute weight gradients
    # how many of them each of the n tensors was frozen in, int64, shape [n]
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


# Frozen elements of a rank, added up over backwards, and elements that these could have updated.
Elements = tuple[int, int]


@dataclass(frozen=True)
class RankUpdates:
    """What a rank tells the others where metrics are logged."""

    steps: dict[int, Elements]  # of each step since the last time, by its number
    total: Elements  # of all steps that have ended
    # gradient energy of its tensors and what is let through; None if not measured
    energy: PassedEnergy | None


class UpdateMeter(StepPart):
    """Follows the updates of a rank's tensors along the steps: counts and gradient energy.

    ``drawn_ratio`` gives the probability that the step's masks freeze a tensor of a stage, mean
    over its backwards; None where masks are not drawn evenly.
    """

    name = "updates"

    def __init__(
        self,
        tables: Mapping[int, ParameterTable],
        n_microbatches: int,
        energy: GradientEnergy | None = None,
        drawn_ratio: Callable[[int], float | None] = lambda stage: None,
    ) -> None:
        self._tables, self._n_microbatches, self._energy = tables, n_microbatches, energy
        self.drawn_ratio, self._step = drawn_ratio, Step()
        self._steps: dict[int, Elements] = {}
        self.total: Elements = (0, 0)  # of all steps that have ended
        self.step = self._nothing()  # counts of the current step, by stage
        # counts since the last :meth:`take_recent`, or since a later change of phase
        self.recent = self._nothing()
        # counts since freezing began, in the phases ``FREEZING_PHASES``
        self.since_freezing = self._nothing()

    def begin_step(self, step: Step) -> None:
        """Begin a step."""
        self._step, self.step = step, self._nothing()
        if step.is_first_of_phase:
            self.recent = self._nothing()

    def end_batch(self, number: int, masks: Masks) -> None:
        """Take note of a batch's masks."""
        for stage, of_stage in masks.items():
            frozen = np.zeros(len(self._tables[stage].names), dtype=np.int64)
            for mask in of_stage.values():
                frozen += mask
            count = Count(self._n_microbatches, frozen)
            self.step[stage] += count
            self.recent[stage] += count
            if self._step.lasting_phase in FREEZING_PHASES:
                self.since_freezing[stage] += count

    def end_step(self, step: Step) -> None:
        """Note what fraction of its elements the step froze."""
        frozen, elements = self._steps[step.number] = self._summed()
        self.total = (self.total[0] + frozen, self.total[1] + elements)

    @property
    def step_frequency(self) -> NDArray[np.float64]:
        """Fraction of the step's backwards that updated each of the rank's tensors."""
        return np.concatenate([count.update_frequency for count in self.step.values()])

    def take_recent(self) -> dict[int, Count]:
        """Return the counts of the current phase since the last call."""
        recent, self.recent = self.recent, self._nothing()
        return recent

    def take_steps(self) -> dict[int, Elements]:
        """Return the steps since the last call, the current one as far as it has come."""
        steps, self._steps = self._steps, {}
        number = self._step.number
        return {**steps, number: steps.get(number) or self._summed()}

    def collect(self, gradient_scale: float | None) -> dict[str, RankUpdates]:
        """Return the updates since the last call.

        Energies are those from before this step where there are any: what a step's masks have left
        of its gradients goes together with these masks.
        """
        updates = RankUpdates(self.take_steps(), self.total, None)
        recent = self.take_recent()
        if self._energy is None:
            return {"updates": updates}
        is_first = not self._energy.is_complete
        if gradient_scale is not None and is_first:
            self._energy.measure(self.step, gradient_scale)
        passed = PassedEnergy(0.0, 0.0)
        for stage, count in recent.items():
            ratio = self.drawn_ratio(stage)
            drawn = np.full(len(count.frozen), 1.0 - (ratio or 0.0))
            frequency = count.update_frequency if ratio is None else drawn
            passed += passed_energy(frequency, self._energy.energy[stage])
        if gradient_scale is not None and not is_first:
            self._energy.measure(self.step, gradient_scale)
        return {"updates": replace(updates, energy=passed)}

    def counts(self) -> dict[int, tuple[ParameterTable, Count]]:
        """Return how often each tensor was frozen since freezing began, by stage."""
        return {stage: (self._tables[stage], count) for stage, count in self.since_freezing.items()}

    def _summed(self) -> Elements:
        frozen, elements = 0, 0
        for stage, count in self.step.items():
            table = self._tables[stage]
            frozen += int(count.frozen @ table.sizes)
            elements += count.backwards * table.total
        return frozen, elements

    def _nothing(self) -> dict[int, Count]:
        return {
            stage: Count(0, np.zeros(len(table.names), dtype=np.int64))
            for stage, table in self._tables.items()
        }

    # -- checkpoint --------------------------------------------------------------------------------

    def plain_state(self) -> dict[str, Any]:
        """Return ``applied``, the sums of all steps, and by stage ``tally`` and ``energy``."""
        since = self.since_freezing.items()
        tally = {str(s): [count.backwards, count.frozen.tolist()] for s, count in since}
        state: dict[str, Any] = {"applied": list(self.total), "tally": tally}
        if self._energy is not None:
            state["energy"] = self._energy.plain_state()
        return state

    def load_plain_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`plain_state` returned; energies that were not saved begin again."""
        frozen, elements = state["applied"]
        self.total = (frozen, elements)
        for stage in self._tables:
            backwards, times_frozen = state["tally"][str(stage)]
            self.since_freezing[stage] = Count(backwards, np.array(times_frozen, dtype=np.int64))
        if self._energy is not None and "energy" in state:
            self._energy.load_plain_state(state["energy"])


def step_ratios(ranks: Sequence[Mapping[int, Elements]]) -> dict[int, float]:
    """Return the freeze ratio of each step: frozen elements over all elements of all ranks."""
    steps: dict[int, list[Elements]] = {}
    for rank in ranks:
        for number, of_rank in rank.items():
            steps.setdefault(number, []).append(of_rank)
    sums = {number: tuple(map(sum, zip(*steps[number], strict=True))) for number in sorted(steps)}
    return {number: frozen / elements for number, (frozen, elements) in sums.items() if elements}


def frozen_counts(
    ranks: Sequence[Mapping[int, tuple[ParameterTable, Count]]], stage_to_rank: Sequence[int]
) -> list[FrozenCount]:
    """Put the counts of all ranks together, by stage; replicas have the same."""
    by_stage = {stage: counted for rank in ranks for stage, counted in rank.items()}
    return [
        FrozenCount(stage_to_rank[stage], stage, name, size, count.backwards, frozen)
        for stage, (table, count) in sorted(by_stage.items())
        for name, size, frozen in zip(
            table.names, table.sizes.tolist(), count.frozen.tolist(), strict=True
        )
    ]


class GradientEnergy:
    """Keeps the squared gradient norm of each tensor of a rank."""

    def __init__(self, parameters: Mapping[int, Sequence[Tensor]]) -> None:
        self._parameters = parameters
        # by stage, float64, shape [n]; NaN until a tensor was first measured
        self.energy: dict[int, NDArray[np.float64]] = {
            stage: np.full(len(tensors), np.nan) for stage, tensors in parameters.items()
        }

    @property
    def is_complete(self) -> bool:
        """Whether every tensor was measured."""
        return not any(np.isnan(energy).any() for energy in self.energy.values())

    def measure(self, step: Mapping[int, Count], scale: float = 1.0) -> None:
        """Measure the gradients that there are; every rank must call this together.

        ``step`` says what was frozen while they were made, ``scale`` undoes clipping.
        """
        tensors = [p for stage in self._parameters.values() for p in stage]
        squares = iter(_squared_norms(tensors))
        for stage, of_stage in self._parameters.items():
            measured = np.array([next(squares) for _ in of_stage]) * scale**2
            reach = step[stage].update_frequency
            live = reach > 0.0
            measured[live] /= reach[live] ** 2
            before = self.energy[stage]
            fresh = np.where(np.isnan(before), measured, (before + measured) / 2)
            self.energy[stage] = np.where(live, fresh, before)

    def plain_state(self) -> dict[str, Any]:
        """Return the energies as plain data, by stage; None for what is not known."""
        return {
            str(stage): [None if np.isnan(e) else e for e in energy.tolist()]
            for stage, energy in self.energy.items()
        }

    def load_plain_state(self, plain: Mapping[str, Sequence[float | None]]) -> None:
        """Restore what :meth:`plain_state` returned."""
        for stage in self.energy:
            self.energy[stage] = np.array(plain[str(stage)], dtype=np.float64)  # NaN for None


def _squared_norms(parameters: Sequence[Tensor]) -> list[float]:
    """Return the squared norm of each whole tensor's gradient, 0 where there is none."""
    if not parameters:
        return []
    squares = torch.zeros(len(parameters), 1, device=parameters[0].device)
    rows = [i for i, p in enumerate(parameters) if p.grad is not None]
    if rows:
        gradients = [local_gradient(parameters[i]) for i in rows]
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        squares[rows] = torch.stack(norms).square().unsqueeze(1)
    sum_over_shards(parameters, squares)
    numbers: list[float] = squares.squeeze(1).double().cpu().tolist()
    return numbers
