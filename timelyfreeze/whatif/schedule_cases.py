"""The cases of one schedule and number of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning import LpError, SolverChoices, chosen_plan
from timelyfreeze.schedule import PipelineDag, ScheduleOrder
from timelyfreeze.settings import ALL_OR_NOTHING, skips_input_grads
from timelyfreeze.timing import DurationBounds, play_batch, with_messages
from timelyfreeze.whatif.bounds_file import BoundsFile
from timelyfreeze.whatif.grid import (
    BEST_SPLIT,
    DEFAULT_SPLIT,
    Case,
    Grid,
    Split,
    default_split,
    render_cap,
    render_split,
)
from timelyfreeze.whatif.layer_model import BlockTimes, LayerModel
from timelyfreeze.whatif.loads import (
    PARAMETERS,
    PARTITIONS,
    TIME,
    best_split,
    memory_load,
    parameter_load,
    time_load,
)
from timelyfreeze.whatif.partition import Load, fewest_layers, min_max_split
from timelyfreeze.whatif.times import Links, StageTimes, bounds_from_times


@dataclass(frozen=True)
class ScheduleCases:
    """The cases of one schedule and number of microbatches."""

    file: BoundsFile  # what was measured
    grid: Grid  # what is asked
    schedule: str  # name of the schedule
    n_microbatches: int  # microbatches of a batch
    order: ScheduleOrder  # its order
    dag: PipelineDag  # the graph of that
    stages: tuple[StageTimes, ...]  # times of the measured stages
    # Overheads at which layers move; None where they are not known.
    model: LayerModel | BlockTimes | None

    def cases(self) -> Iterator[Case | str]:
        """Yield cases, and notes on those that cannot be built or that noise has a hand in."""
        best_unfrozen, why_none = None, "layers cannot be moved"
        try:
            best_unfrozen = self.best_unfrozen()
        except ValueError as error:
            why_none = first_line(error)
        for name in self.grid.splits:
            title = name if isinstance(name, str) else render_split(name)
            try:
                if name == BEST_SPLIT and best_unfrozen is None:
                    raise ValueError(why_none)
                split = self.split_of(name, best_unfrozen)
                bounds = self._bounds(split)
            except ValueError as error:
                yield self.left_out(title, error)
                continue
            if split is not None and self.model is not None:
                for stage in self.model.pinned(split):
                    yield (
                        f"split {render_split(split)}: a backward of stage {stage} comes out no "
                        "faster frozen, which is noise of the measurements; it is left unfrozen"
                    )
            for cap in self.grid.caps:
                try:
                    yield self._case(title, split, bounds, cap, best_unfrozen)
                except (LpError, ValueError) as error:
                    yield self.left_out(f"{title}, r_max {render_cap(cap)}", error)

    def left_out(self, split: str, error: Exception) -> str:
        """Return the note on a case that cannot be."""
        where = f"{self.schedule}, {self.n_microbatches} microbatches, split {split}"
        return f"left out {where}: {first_line(error)}"

    def split_of(self, name: str | Split, best_unfrozen: Split | None) -> Split | None:
        """Return layers of each stage; None stands for the split as measured.

        Args:
            name: As in ``Grid.splits``.
            best_unfrozen: What ``best_unfrozen`` returned.

        Raises:
            ValueError: If the schedule cannot have that split.
        """
        if name == BEST_SPLIT:
            return best_unfrozen
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
        if isinstance(name, str):
            return min_max_split(
                self.model.n_layers,
                self.order.stage_to_rank,
                self._load(name, self.model),
                self.model.least_layers(self.dag.n_stages)
                if name == TIME
                else fewest_layers(self.dag.n_stages),
            )
        if len(name) != self.dag.n_stages:
            raise ValueError(f"it has {len(name)} stages, the schedule {self.dag.n_stages}")
        return name

    def _load(self, partition: str, model: LayerModel | BlockTimes) -> Load:
        """Return what a partition makes even."""
        assert partition in PARTITIONS  # the other names have been dealt with
        notes = self.file.notes
        if partition == TIME:
            return time_load(model, self.order.stage_to_rank)
        if partition == PARAMETERS and notes.parameters is not None:
            if (n := len(notes.parameters.layers)) != model.n_layers:
                raise ValueError(
                    f"{self.file.path.name} tells the parameters of {n} layers; the split that was "
                    f"measured has {model.n_layers}"
                )
            return parameter_load(notes.parameters, self.order.stage_to_rank)
        if partition != PARAMETERS and notes.memory is not None:
            return memory_load(notes.memory, self.order)
        what = "how many parameters" if partition == PARAMETERS else "how many bytes"
        raise ValueError(
            f"{self.file.path.name} does not tell {what} the parts of the model have; a file of "
            "`timelyfreeze profile CONFIG.toml` does"
        )

    def best_unfrozen(self) -> Split | None:
        """Return the split that is fastest with nothing frozen; None where layers are not known.

        Raises:
            ValueError: If there are too few layers for the stages.
        """
        if self.model is None:
            return None
        starts = [self.model.layers]
        with suppress(ValueError):
            default = default_split(self.model.n_layers, self.dag.n_stages)
            self.model.times(default)
            starts.append(default)
        also = [split for split in starts if len(split) == self.dag.n_stages]
        return best_split(self.model, self.dag, self.grid.n_processors, also, self.links)

    def _bounds(self, split: Split | None) -> DurationBounds:
        dag, file = self.dag, self.file
        measured = None if self.model is None else self.model.layers
        if self.order == file.order and split in (None, measured):
            # As the run plans: which backwards are frozen, and skipped, hangs on each microbatch.
            bounds = with_messages(dag, file.measured(dag), self.grid.p2p_overhead_ms)
        else:
            times = self.stages
            if split is not None and self.model is not None:
                times = self.model.times(split)
            bounds = self.links.added_to(dag, bounds_from_times(dag, times))
        outside_ms = self.grid.outside_ms / self.grid.batches
        return replace(
            bounds,
            outside_ms=outside_ms,
            captured=file.captured,
            captured_mean=file.captured_mean,
        )

    @property
    def links(self) -> Links:
        """What messages cost: as measured, and what the grid adds to their overhead."""
        measured = self.file.links
        # Where it cannot be told apart, the measured overhead stays in the times of stages.
        overhead_ms = 0.0 if self.file.keeps_overhead else measured.p2p_overhead_ms
        return replace(measured, p2p_overhead_ms=overhead_ms + self.grid.p2p_overhead_ms)

    def _case(
        self,
        title: str,
        split: Split | None,
        bounds: DurationBounds,
        cap: float | str,
        best_unfrozen: Split | None,
    ) -> Case:
        grid, dag = self.grid, self.dag
        choices = SolverChoices(
            max_freeze_ratio=cap,
            whole_stages=(0,) if grid.first_stage == ALL_OR_NOTHING else (),
            n_processors=grid.n_processors,
            time_limit_s=grid.time_limit_s,
            skips_grads=skips_input_grads(grid.first_stage, grid.skip_input_grads),
        )
        plan = chosen_plan(dag, bounds, choices)
        best_unfrozen_ms, tokens_per_second = None, None
        if best_unfrozen is not None:
            best = self._bounds(best_unfrozen)
            played = play_batch(dag, best.max_ms, grid.n_processors, best.delays_ms(dag))
            best_unfrozen_ms = grid.step_ms(played[1])
        frozen_step_ms = grid.step_ms(plan.batch_ms)
        tokens = self.file.notes.tokens_per_microbatch
        if tokens is not None:
            n_tokens = tokens * self.n_microbatches * grid.batches
            tokens_per_second = 1e3 * n_tokens / frozen_step_ms / grid.n_ranks
        return Case(
            schedule=self.schedule,
            n_microbatches=self.n_microbatches,
            batches=grid.batches,
            max_freeze_ratio=cap,
            split=title,
            layers=split,
            step_ms=grid.step_ms(plan.unfrozen_batch_ms),
            frozen_step_ms=frozen_step_ms,
            all_frozen_step_ms=grid.step_ms(plan.frozen_batch_ms),
            steps_factor=plan.steps_factor,
            mean_ratio=float(plan.ratios[dag.freezable].mean()),
            stage_ratios=tuple(plan.stage_mean_ratios().values()),
            bubble=self._bubble(bounds.max_ms, plan.unfrozen_batch_ms),
            frozen_bubble=self._bubble(plan.durations_ms, plan.batch_ms),
            best_unfrozen_layers=best_unfrozen,
            best_unfrozen_step_ms=best_unfrozen_ms,
            tokens_per_second=tokens_per_second,
        )

    def _bubble(self, durations_ms: NDArray[np.float64], batch_ms: float) -> float:
        """Return the fraction of a batch in which the ranks' processors have nothing to run."""
        n_ranks = self.grid.n_ranks
        n_processors = min(self.grid.n_processors or n_ranks, n_ranks)
        return 1.0 - float(durations_ms.sum()) / (n_processors * batch_ms)


def first_line(error: Exception) -> str:
    """Return the first line of an error; a schedule's is followed by the whole schedule."""
    return str(error).partition("\n")[0]
