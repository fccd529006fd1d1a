"""What if: the batch under other schedules, caps, numbers of microbatches and splits.

Everything follows from one bounds file, without a device: times of stages become times of the
actions of any schedule (``whatif_times``, ``whatif_layers``), and each case of the grid is solved
as a run would solve it. Beside every case stands its rival: the split that makes the batch shortest
without freezing anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.bounds import DurationBounds
from timelyfreeze.dag import PipelineDag, build_dag
from timelyfreeze.lp import LpError, solve_freeze_ratios
from timelyfreeze.messages import with_messages
from timelyfreeze.processors import play_batch
from timelyfreeze.settings import ALL_OR_NOTHING
from timelyfreeze.whatif_file import BoundsFile
from timelyfreeze.whatif_grid import BEST_SPLIT, DEFAULT_SPLIT, Answer, Case, Grid
from timelyfreeze.whatif_layers import (
    LayerModel,
    Split,
    best_split,
    default_split,
    layer_model,
    render_split,
)
from timelyfreeze.whatif_schedules import order_of, stages_in
from timelyfreeze.whatif_times import StageTimes, bounds_from_times


def answer(file: BoundsFile, grid: Grid, layers: Split | None = None) -> Answer:
    """Work out every case of a grid.

    Args:
        file: What was measured.
        grid: What to ask.
        layers: Layers of each measured stage, if the file does not say.

    Returns:
        Answer: Cases that cannot be built are left out, with a note each.

    Raises:
        ValueError: If no case can be built, or ``layers`` contradicts the file.
    """
    stages = file.stage_times()
    if layers is not None and len(layers) != len(stages):
        raise ValueError(
            f"--layers has {len(layers)} stages ({render_split(layers)}); times are those of "
            f"{len(stages)}"
        )
    if layers is not None and file.notes.layers not in (None, layers):
        raise ValueError(
            f"--layers is {render_split(layers)}; {file.path.name} says that stages have "
            f"{render_split(file.notes.layers or ())} layers"
        )
    model, notes = _model(file, stages, layers or file.notes.layers)
    notes = [*_basis(file), *notes]
    cases: list[Case] = []
    for schedule in grid.schedules:
        for n_microbatches in grid.microbatches:
            try:
                n_stages = stages_in(schedule, grid.n_ranks, len(stages))
                dag = build_dag(order_of(schedule, grid.n_ranks, n_stages, n_microbatches))
            except ValueError as error:
                notes.append(f"left out {schedule}, {n_microbatches} microbatches: {_line(error)}")
                continue
            table = _Table(file, grid, schedule, n_microbatches, dag, stages, model)
            for found in table.cases():
                if isinstance(found, Case):
                    cases.append(found)
                elif found not in notes:
                    notes.append(found)
    if not cases:
        raise ValueError("nothing can be planned:\n" + "\n".join(f"  - {n}" for n in notes))
    return Answer(tuple(cases), tuple(notes))


def _model(
    file: BoundsFile, stages: Sequence[StageTimes], layers: Split | None
) -> tuple[LayerModel | None, list[str]]:
    """Return the prices at which layers move, or None and why they are not known."""
    if layers is None:
        return None, [
            f"{file.path.name} does not say how many layers a stage has, so only the measured "
            "split is planned for; tell with --layers"
        ]
    try:
        return layer_model(stages, layers, file.notes.layer, file.notes.fixed), []
    except ValueError as error:
        return None, [f"only the measured split is planned for: {error}"]


def _basis(file: BoundsFile) -> Iterator[str]:
    """Say what was not measured."""
    if file.derived_kinds:
        yield (
            f"times of {file.derived_kinds} are derived from those of the other backward actions, "
            "taking I to last as long as B with everything frozen; a profile measures both"
        )
    if file.notes.layer is None:
        yield (
            "a layer's time is that of the stages in the middle over their layers; a profile "
            "measures it"
        )


@dataclass(frozen=True)
class _Table:
    """The cases of one schedule and number of microbatches."""

    file: BoundsFile
    grid: Grid
    schedule: str
    n_microbatches: int
    dag: PipelineDag
    stages: tuple[StageTimes, ...]
    model: LayerModel | None

    def cases(self) -> Iterator[Case | str]:
        """Yield cases, and notes on those that cannot be built or that noise has a hand in."""
        rival: Split | None = None
        why_none = "layers cannot be moved"
        try:
            rival = self._rival()
        except ValueError as error:
            why_none = _line(error)
        for name in self.grid.splits:
            title = name if isinstance(name, str) else render_split(name)
            try:
                if name == BEST_SPLIT and rival is None:
                    raise ValueError(why_none)
                split = self._split(name, rival)
                bounds = self._bounds(split)
            except ValueError as error:
                yield self._left_out(title, error)
                continue
            if split is not None and self.model is not None:
                for stage in self.model.pinned(split):
                    yield (
                        f"split {render_split(split)}: a backward of stage {stage} comes out no "
                        "faster frozen, which is noise of the measurements; it is left unfrozen"
                    )
            for cap in self.grid.caps:
                try:
                    yield self._case(title, split, bounds, cap, rival)
                except (LpError, ValueError) as error:
                    yield self._left_out(f"{title}, r_max {cap:g}", error)

    def _left_out(self, split: str, error: Exception) -> str:
        return (
            f"left out {self.schedule}, {self.n_microbatches} microbatches, split {split}: "
            f"{_line(error)}"
        )

    def _split(self, name: str | Split, rival: Split | None) -> Split | None:
        """Return layers of each stage; None stands for the split as measured."""
        if name == BEST_SPLIT:
            return rival
        if name == DEFAULT_SPLIT:
            if self.dag.n_stages == len(self.stages):
                return None if self.model is None else self.model.layers
            if self.model is None:
                raise ValueError(
                    f"it has {self.dag.n_stages} stages, {len(self.stages)} were measured"
                )
            return default_split(self.model.n_layers, self.dag.n_stages)
        if self.model is None:
            raise ValueError("layers cannot be moved")
        assert not isinstance(name, str)
        if len(name) != self.dag.n_stages:
            raise ValueError(f"it has {len(name)} stages, the schedule {self.dag.n_stages}")
        return name

    def _rival(self) -> Split | None:
        if self.model is None:
            return None
        also = []
        for start in (self.model.layers, _default_or_none(self.model, self.dag.n_stages)):
            if start is not None and len(start) == self.dag.n_stages:
                also.append(start)
        return best_split(self.model, self.dag, self.grid.n_processors, also)

    def _bounds(self, split: Split | None) -> DurationBounds:
        times = self.stages
        if split is not None and self.model is not None:
            times = self.model.times(split)
        bounds = bounds_from_times(self.dag, times)
        return with_messages(self.dag, bounds, self.grid.message_ms)

    def _case(
        self,
        title: str,
        split: Split | None,
        bounds: DurationBounds,
        cap: float,
        rival: Split | None,
    ) -> Case:
        grid, dag = self.grid, self.dag
        plan = solve_freeze_ratios(
            dag,
            bounds,
            max_freeze_ratio=cap,
            whole_stages=(0,) if grid.first_stage == ALL_OR_NOTHING else (),
            n_processors=grid.n_processors,
            time_limit_s=grid.time_limit_s,
        )
        rival_ms = None
        if rival is not None:
            longest_ms = self._bounds(rival).max_ms
            rival_ms = grid.step_ms(play_batch(dag, longest_ms, grid.n_processors)[1])
        frozen_step_ms = grid.step_ms(plan.batch_ms)
        tokens = self.file.notes.tokens_per_microbatch
        n_tokens = None if tokens is None else tokens * self.n_microbatches * grid.passes
        return Case(
            schedule=self.schedule,
            n_microbatches=self.n_microbatches,
            passes=grid.passes,
            max_freeze_ratio=cap,
            split_name=title,
            layers=split,
            step_ms=grid.step_ms(plan.unfrozen_batch_ms),
            frozen_step_ms=frozen_step_ms,
            limit_step_ms=grid.step_ms(plan.frozen_batch_ms),
            mean_ratio=float(plan.ratios[dag.freezable].mean()),
            stage_ratios=tuple(plan.stage_mean_ratios().values()),
            bubble=self._bubble(bounds.max_ms, plan.unfrozen_batch_ms),
            frozen_bubble=self._bubble(plan.durations_ms, plan.batch_ms),
            rival_layers=rival,
            rival_step_ms=rival_ms,
            tokens_per_second=None
            if n_tokens is None
            else 1e3 * n_tokens / frozen_step_ms / grid.n_ranks,
        )

    def _bubble(self, durations_ms: NDArray[np.float64], batch_ms: float) -> float:
        """Return the share of a batch in which the ranks' processors have nothing to run."""
        n_ranks = self.grid.n_ranks
        n_processors = min(self.grid.n_processors or n_ranks, n_ranks)
        return 1.0 - float(durations_ms.sum()) / (n_processors * batch_ms)


def _default_or_none(model: LayerModel, n_stages: int) -> Split | None:
    try:
        split = default_split(model.n_layers, n_stages)
        model.times(split)
    except ValueError:
        return None
    return split


def _line(error: Exception) -> str:
    """Return the first line of an error; a schedule's is followed by the whole schedule."""
    return str(error).partition("\n")[0]


@dataclass(frozen=True)
class Recall:
    """The measured pipeline as its bounds have it, and as times of stages have it.

    Attributes:
        measured_ms: Batch from the bounds, action by action, nothing frozen, milliseconds.
        from_stages_ms: Batch from the times of stages.
    """

    measured_ms: float
    from_stages_ms: float


def recall(file: BoundsFile, n_processors: float | None = None) -> Recall | None:
    """Compare what was measured with what times of stages make of it.

    Microbatches of a stage are taken to be alike, and stages to be those of ``stage_times``; this
    tells what that costs.

    Args:
        file: What was measured.
        n_processors: As for ``play_batch``.

    Returns:
        The two batch times without freezing, or None where the order is not beside the file.
    """
    if file.order is None:
        return None
    dag = build_dag(file.order)
    measured = np.array([file.bounds[action][1] for action in dag.actions])
    modelled = bounds_from_times(dag, file.stage_times()).max_ms
    return Recall(
        play_batch(dag, measured, n_processors)[1], play_batch(dag, modelled, n_processors)[1]
    )
