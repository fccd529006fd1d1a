"""What if: every case of a grid, computed from a bounds file without a device."""

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from timelyfreeze.planning import FreezePlan, LpError, SolverChoices, chosen_plan
from timelyfreeze.schedule import (
    SCHEDULES,
    PipelineDag,
    ScheduleOrder,
    build_dag,
    gpipe_order,
    one_f_one_b_order,
    stages_per_rank,
)
from timelyfreeze.settings import ALL_OR_NOTHING, skips_input_grads
from timelyfreeze.timing import DurationBounds, simulate_batch, with_messages
from timelyfreeze.whatif import partition
from timelyfreeze.whatif.bounds_file import ORDER_FILE, BoundsFile
from timelyfreeze.whatif.grid import (
    BEST_SPLIT,
    DEFAULT_SPLIT,
    Answer,
    Case,
    Grid,
    Split,
    T,
    default_split,
    render_cap,
    render_split,
)
from timelyfreeze.whatif.layer_model import BlockTimes, LayerModel
from timelyfreeze.whatif.times import Links, bounds_from_times

# Legend and columns of the two tables, and notes.
TOLD: Mapping[str, Any] = tomllib.loads(
    resources.files(__package__).joinpath("report.toml").read_text()
)
_NOTES: Mapping[str, str] = TOLD["notes"]


@dataclass(frozen=True)
class ScheduleCases:
    """The cases of a schedule and number of microbatches."""

    file: BoundsFile  # what was measured
    grid: Grid  # what is asked
    schedule: str  # name of the schedule
    order: ScheduleOrder  # its order
    dag: PipelineDag  # the graph of that
    # Overheads at which layers move; None where they are not known.
    model: LayerModel | BlockTimes | None

    def cases(self) -> Iterator[Case | str]:
        """Yield cases, and notes on impossible or noisy cases."""
        for name in self.grid.splits:
            title = name if isinstance(name, str) else render_split(name)
            try:
                split = self.split_of(name)
                bounds = self.bounds_of(split)
            except ValueError as error:
                yield self.left_out(title, error)
                continue
            if split is not None and isinstance(self.model, LayerModel):
                for stage in self.model.pinned(split):
                    yield _NOTES["pinned"].format(split=render_split(split), stage=stage)
            for cap in self.grid.caps:
                try:
                    yield self._case(title, split, bounds, cap)
                except (LpError, ValueError) as error:
                    yield self.left_out(f"{title}, r_max {render_cap(cap)}", error)

    def left_out(self, split: str, error: Exception) -> str:
        """Return the note on an impossible case."""
        where = f"{self.schedule}, {self.order.n_microbatches} microbatches, split {split}"
        return f"left out {where}: {first_line(error)}"

    def split_of(self, name: str | Split) -> Split | None:
        """Return the layers of stages; None stands for the measured split."""
        model, n_stages, n_measured = self.model, self.dag.n_stages, self.file.n_stages
        if name == BEST_SPLIT:
            return self.best_unfrozen
        if name == DEFAULT_SPLIT and n_stages == n_measured:
            return None if model is None else model.layers
        if model is None:
            raise ValueError(
                f"layers cannot be moved: it has {n_stages} stages, {n_measured} were measured"
            )
        if name == DEFAULT_SPLIT:
            return default_split(model.n_layers, n_stages)
        if isinstance(name, str):
            return partition.min_max_split(model.n_layers, self._load(name, model))
        if len(name) != n_stages:
            raise ValueError(f"it has {len(name)} stages, the schedule {n_stages}")
        return name

    def _load(self, name: str, model: LayerModel | BlockTimes) -> partition.Load:
        """Return the load balanced by a partition."""
        notes = self.file.metadata
        if name == partition.TIME:
            return partition.time_load(model, self.order.stage_to_rank)
        if name == partition.MEMORY and notes.memory is not None:
            return partition.memory_load(notes.memory, self.order)
        if name == partition.PARAMETERS and notes.parameters is not None:
            if (n := len(notes.parameters.layers)) != model.n_layers:
                raise ValueError(
                    f"{self.file.path.name} tells the parameters of {n} layers; the split that was "
                    f"measured has {model.n_layers}"
                )
            return partition.parameter_load(notes.parameters, self.order.stage_to_rank)
        what = "how many parameters" if name == partition.PARAMETERS else "how many bytes"
        raise ValueError(
            f"{self.file.path.name} does not tell {what} the parts of the model have; a file of "
            "`timelyfreeze profile CONFIG.toml` does"
        )

    @cached_property
    def best_unfrozen(self) -> Split:
        """The fastest split with nothing frozen; a ValueError if unknown."""
        if self.model is None:
            raise ValueError("layers cannot be moved")
        starts = [self.model.layers]
        with suppress(ValueError):
            default = default_split(self.model.n_layers, self.dag.n_stages)
            self.model.times(default)
            starts.append(default)
        also = [split for split in starts if len(split) == self.dag.n_stages]
        return partition.best_split(self.model, self.dag, self.grid.n_processors, also, self.links)

    @cached_property
    def best(self) -> tuple[Split | None, float | None]:
        """The fastest split and its step; None if unknown."""
        with suppress(ValueError):
            return self.best_unfrozen, self.unfrozen(self.best_unfrozen)[0]
        return None, None

    def unfrozen(self, split: Split | None) -> tuple[float, float]:
        """Return the step without freezing under a split, and its bubble."""
        bounds, n_processors = self.bounds_of(split), self.grid.n_processors
        delays_ms = bounds.delays_ms(self.dag)
        _, batch_ms = simulate_batch(self.dag, bounds.max_ms, n_processors, delays_ms)
        return self.grid.step_ms(batch_ms), self._bubble(bounds.max_ms, batch_ms)

    def bounds_of(self, split: Split | None) -> DurationBounds:
        """Return the bounds under a split; None stands for the measured one."""
        dag, file = self.dag, self.file
        measured = None if self.model is None else self.model.layers
        if self.order == file.order and split in (None, measured):
            # As the run plans: which backwards are frozen, and skipped, hangs on each microbatch.
            bounds = with_messages(dag, file.measured(dag), self.grid.p2p_overhead_ms)
        else:
            times = file.stage_times()
            if split is not None and self.model is not None:
                times = self.model.times(split)
            bounds = bounds_from_times(dag, times, self.links)
        kept = {name: getattr(file.table, name) for name in ("captured", "captured_mean")}
        return replace(bounds, outside_ms=self.grid.outside_ms / self.grid.batches, **kept)

    @property
    def links(self) -> Links:
        """Costs of messages: as measured, and the grid's additional overhead."""
        measured = self.file.links
        # Where it cannot be told apart, the measured overhead stays in the times of stages.
        overhead_ms = 0.0 if self.file.keeps_overhead else measured.p2p_overhead_ms
        return replace(measured, p2p_overhead_ms=overhead_ms + self.grid.p2p_overhead_ms)

    def plan_of(self, bounds: DurationBounds, cap: float | str) -> FreezePlan:
        """Solve a cap's plan."""
        grid = self.grid
        choices = SolverChoices(
            max_freeze_ratio=cap,
            whole_stages=(0,) if grid.first_stage == ALL_OR_NOTHING else (),
            n_processors=grid.n_processors,
            time_limit_s=grid.time_limit_s,
            skips_grads=skips_input_grads(grid.first_stage, grid.skip_input_grads),
        )
        return chosen_plan(self.dag, bounds, choices)

    def _case(
        self, title: str, split: Split | None, bounds: DurationBounds, cap: float | str
    ) -> Case:
        grid, dag = self.grid, self.dag
        plan = self.plan_of(bounds, cap)
        frozen_step_ms, n_microbatches = grid.step_ms(plan.batch_ms), self.order.n_microbatches
        tokens, tokens_per_second = self.file.metadata.tokens_per_microbatch, None
        if tokens is not None:
            n_tokens = tokens * n_microbatches * grid.batches
            tokens_per_second = 1e3 * n_tokens / frozen_step_ms / grid.n_ranks
        best_unfrozen, best_unfrozen_ms = self.best
        return Case(
            schedule=self.schedule,
            n_microbatches=n_microbatches,
            batches=grid.batches,
            max_freeze_ratio=cap,
            gradient_rank=self.file.metadata.gradient_rank,
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
        """Return the idle fraction of the ranks' processors in a batch."""
        n_ranks = self.grid.n_ranks
        n_processors = min(self.grid.n_processors or n_ranks, n_ranks)
        return 1.0 - float(durations_ms.sum()) / (n_processors * batch_ms)


def first_line(error: Exception) -> str:
    """Return the first line of an error; a schedule's is followed by the whole schedule."""
    return str(error).partition("\n")[0]


# The order of every other schedule is torch's, whose import takes longer than planning.
_OUR_OWN = {"gpipe": gpipe_order, "1f1b": one_f_one_b_order}


def answer(file: BoundsFile, grid: Grid, layers: Split | None = None) -> Answer[Case]:
    """Compute every case of a grid; ``layers`` are those of stages unknown to the file."""
    tables, notes = schedules_of(file, grid, layers)
    return sorted_out((one for table in tables for one in table.cases()), notes)


def sorted_out(found: Iterable[T | str], notes: list[str]) -> Answer[T]:
    """Return the cases in ``found``, and behind ``notes`` all others, without repeats."""
    cases: list[T] = []
    for one in found:
        if not isinstance(one, str):
            cases.append(one)
        elif one not in notes:
            notes.append(one)
    if not cases:
        raise ValueError("nothing can be planned:\n" + "\n".join(f"  - {note}" for note in notes))
    return Answer(tuple(cases), tuple(notes))


def measured_of(file: BoundsFile, grid: Grid, layers: Split | None) -> ScheduleCases | None:
    """Return the pipeline as it was measured, if its order is known and the grid has its ranks."""
    if file.order is None or file.order.n_ranks != grid.n_ranks:
        return None
    model, _ = _model(file, layers or file.metadata.layers)
    return ScheduleCases(file, grid, "as measured", file.order, build_dag(file.order), model)


def schedules_of(
    file: BoundsFile, grid: Grid, layers: Split | None
) -> tuple[list[ScheduleCases], list[str]]:
    """Return a grid's schedules by microbatches, and notes."""
    known = file.metadata.layers
    if layers is not None and len(layers) != file.n_stages:
        raise ValueError(
            f"--layers has {len(layers)} stages ({render_split(layers)}); times are those of "
            f"{file.n_stages}"
        )
    if layers is not None and known not in (None, layers):
        raise ValueError(
            f"--layers is {render_split(layers)}; {file.path.name} says that stages have "
            f"{render_split(known or ())} layers"
        )
    model, notes = _model(file, layers or known)
    notes = [*_premises(file, grid), *notes]
    tables: list[ScheduleCases] = []
    for schedule, n_microbatches in itertools.product(grid.schedules, grid.microbatches):
        try:
            order = order_of(schedule, grid.n_ranks, file.n_stages, n_microbatches)
            tables.append(ScheduleCases(file, grid, schedule, order, build_dag(order), model))
        except ValueError as error:
            notes.append(f"left out {schedule}, {n_microbatches} microbatches: {first_line(error)}")
    return tables, notes


def _model(
    file: BoundsFile, layers: Split | None
) -> tuple[LayerModel | BlockTimes | None, list[str]]:
    """Return the overheads of moved layers, or None and the reason."""
    if layers is None:
        return None, [_NOTES["no_layers"].format(file=file.path.name)]
    try:
        return file.model(layers, file.metadata.parameters), []
    except ValueError as error:
        return None, [f"only the measured split is planned for: {error}"]


def _premises(file: BoundsFile, grid: Grid) -> Iterator[str]:
    yield from file.notes
    if file.derived_kinds:
        yield _NOTES["derived"].format(kinds=file.derived_kinds)
    sizes = file.metadata.parameters
    if sizes is not None and not sizes.are_alike:
        yield _NOTES["unlike"]
    elif file.metadata.layer is None:
        yield _NOTES["middle"]
    overhead_ms, links = file.links.p2p_overhead_ms, file.links.p2p_latency_ms
    told_ms, times_ms = grid.p2p_overhead_ms, links.values()
    if not links and overhead_ms + told_ms == 0.0:
        yield _NOTES["free"]
        return
    added = _NOTES["added"].format(told_ms=told_ms) if told_ms else ""
    latency = _NOTES["untimed"]
    if links:
        latency = _NOTES["latency"].format(low=min(times_ms), high=max(times_ms))
    yield _NOTES["messages"].format(overhead_ms=overhead_ms, added=added, latency=latency)
    if file.keeps_overhead:
        yield _NOTES["kept"].format(order=ORDER_FILE, file=file.path.name)


def order_of(schedule: str, n_ranks: int, n_measured: int, n_microbatches: int) -> ScheduleOrder:
    """Return a schedule's order, with the measured number of stages if possible."""
    own = _OUR_OWN.get(schedule.lower())
    if own is not None:
        return own(n_ranks, n_microbatches)
    from timelyfreeze.runtime import named_order, places_stages_in_v

    named = [name for name in SCHEDULES if not name.startswith("PipelineSchedule")]
    if schedule.lower() not in (name.lower() for name in named):
        raise ValueError(f"{schedule!r} is no schedule; known: {', '.join(named)}")
    per_rank = stages_per_rank(schedule) or 1
    if not (places_stages_in_v(schedule) or n_measured % n_ranks or n_measured < 2 * n_ranks):
        per_rank = n_measured // n_ranks
    return named_order(schedule, n_ranks, n_microbatches, stages_per_rank=per_rank)
